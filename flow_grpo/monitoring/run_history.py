"""Histories of runs, read from their folders, and tables of several: how far they are, how their settings differ."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from ml_collections import ConfigDict
from tqdm import tqdm

from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import with_error
from flow_grpo.checkpoints import best, checkpoints
from flow_grpo.monitoring import plots
from flow_grpo.settings import stored_config, table

NOT_SHOWN = ("name", "run_name", "output_dir", "resume_from", "algorithm", "alert")  # they say nothing, or too much
BEST = 2  # among a run's scores


@dataclass(frozen=True)
class RunHistory:
    """Settings and logged records of a run, read from its folder."""

    label: str
    folder: Path
    config: ConfigDict  # settings that are younger than the run have their defaults
    records: list[dict[str, float]]
    evaluations_since: int = 0  # epochs completed; earlier evaluations were made in another way

    def lines(self, kind: str) -> list[dict[str, float]]:
        """The records of a kind."""
        return [record for record in self.records if record["kind"] == kind]


class Score(NamedTuple):
    """An evaluation by the score that chooses."""

    value: float
    error: float | None
    epoch: int


class Table(NamedTuple):
    head: list[str]
    rows: list[list[str]]


def read_run(folder: Path, label: str) -> RunHistory:
    """Read the history of a run. Raises UserError for what is no run's folder."""
    config = ConfigDict(stored_config.read(folder / "config.json"))
    return RunHistory(label, folder, config, plots.read_metrics(folder), _evaluations_since(folder))


def _evaluations_since(folder: Path) -> int:
    """Epochs completed at the first evaluation that can be compared with later ones: what the newest checkpoint says,
    or best/, of which a run may have only one."""
    since = [0]
    with suppress(UserError):  # what needs a damaged record names it
        if chosen := best.read_best(folder):
            since.append(chosen.since)
    with suppress(UserError):
        if newest := checkpoints.find_newest(folder / "checkpoints"):
            since.append(checkpoints.read_progress(newest).evaluations_since)
    return max(since)


def summary(runs: Sequence[RunHistory]) -> Table:
    """How far each run is, and the score that chooses, before training, last and of the best policy; the means of runs
    that differ in their seed alone."""
    head = ["run", "epochs", "time", "score", "evaluation: before", "last", "best", "test: before", "last", "best"]
    return Table([*head, "epochs with an alarm"], [*map(_summary_row, runs), *map(_mean_row, differing_in_seed(runs))])


def differing_in_seed(runs: Sequence[RunHistory]) -> list[list[RunHistory]]:
    """Groups of two runs or more whose numbers follow from the same settings but for the seed."""
    groups = defaultdict(list)
    for run in runs:
        settings = {key: str(value) for key, value in table.flat(run.config).items() if key not in (*NOT_SHOWN, "seed")}
        groups[tuple(sorted(settings.items()))].append(run)
    return [group for group in groups.values() if len(group) > 1]


def _summary_row(run: RunHistory) -> list[str]:
    epochs = run.lines("epoch")
    duration = tqdm.format_interval(sum(record.get("time/epoch_s", 0.0) for record in epochs))
    alarmed = sum(record.get("health/limits_exceeded", 0) > 0 for record in epochs)
    scores = _scores(run)
    cells = [with_error(score.value, score.error) if score else "" for score in scores]
    if scores[BEST]:
        cells[BEST] += f" (after {scores[BEST].epoch} epochs)"
    return [
        run.label,
        f"{len(epochs)} of {run.config.num_epochs}",
        duration,
        _score(run),
        *cells,
        str(alarmed),
    ]


def _score(run: RunHistory) -> str:
    """The name of the one that chooses."""
    return rewards.display_name(run.config.eval.best_by, run.config.reward_fn)


def _mean_row(runs: Sequence[RunHistory]) -> list[str]:
    """Means over seeds with their standard errors, of what all of them have."""
    cells = []
    for scores in zip(*map(_scores, runs)):
        column = torch.tensor([score.value if score else math.nan for score in scores], dtype=torch.float64)
        mean, error = column.mean().item(), column.std().item() / math.sqrt(len(runs))
        cells.append("" if math.isnan(mean) else with_error(mean, error))
    return ["mean of " + ", ".join(run.label for run in runs), "", "", _score(runs[0]), *cells, ""]


def _scores(run: RunHistory) -> list[Score | None]:
    """The score that chooses: of the first, last and best evaluation, the first and last test, and the best weights'
    test."""
    evaluations, tests, of_best = (_scores_of(run, kind) for kind in ("eval", "test", "test_best"))
    highest = max((score for score in evaluations if math.isfinite(score.value)), default=None)
    ends = [scores[i] if scores else None for scores in (evaluations, tests) for i in (0, -1)]
    return [*ends[:2], highest, *ends[2:], of_best[-1] if of_best else None]


def _scores_of(run: RunHistory, kind: str) -> list[Score]:
    name = f"{kind}/{run.config.eval.best_by}"
    lines = [line for line in run.records if name in line and line["epoch"] >= run.evaluations_since]
    return [Score(line[name], line.get(f"{kind}/std_error"), int(line["epoch"])) for line in lines]


def changed_settings(runs: Sequence[RunHistory]) -> Table:
    """Settings in which a run differs from the defaults; no secret among them."""
    defaults = table.flat(ConfigDict(json.loads(json.dumps(table.default_config().to_dict()))))
    columns = defaults, *(table.flat(run.config) for run in runs)
    keys = sorted({key for column in columns for key in column})
    keys = [key for key in keys if key not in NOT_SHOWN and not key.endswith("token")]
    rows = [[key, *("" if (value := values.get(key)) is None else str(value) for values in columns)] for key in keys]
    rows = [row for row in rows if any(value != row[1] for value in row[2:])]
    return Table(["setting", "default", *(run.label for run in runs)], rows)
