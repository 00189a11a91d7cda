"""Histories of runs, read from their folders, and tables of several: how far they are, how their settings differ."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, with_error
from flow_grpo.checkpoints import best, checkpoints
from flow_grpo.monitoring import plots
from flow_grpo.settings import stored_config, table
from flow_grpo.settings.sections import Config

# Settings that tables leave out: they say nothing, or too much.
NOT_SHOWN = ("name", "run_name", "output_dir", "resume_from", "algorithm", "alert")


@dataclass(frozen=True)
class RunHistory:
    """Settings and logged records of a run, read from its folder."""

    label: str
    folder: Path
    config: Config  # settings that are younger than the run have their defaults
    settings: dict[str, Any]  # of config.json by dotted key, with those that are none any more
    records: list[dict[str, Any]]  # "kind", and numbers
    evaluations_since: int = 0  # epochs completed; earlier evaluations were made in another way

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind."""
        return [record for record in self.records if record["kind"] == kind]

    def seconds(self) -> float:
        """Return the duration of all epochs."""
        return sum(line.get("time/epoch_s", 0.0) for line in self.lines("epoch"))


class Score(NamedTuple):
    """Evaluation by config.eval.best_by."""

    value: float
    error: float | None
    epoch: int


class Scores(NamedTuple):
    """Evaluations and tests of a run by config.eval.best_by, in the order of the columns of `summary`."""

    first: Score | None
    last: Score | None
    best: Score | None
    first_test: Score | None
    last_test: Score | None
    test_of_best: Score | None


class Table(NamedTuple):
    """Head and rows of a table."""

    head: list[str]
    rows: list[list[str]]


def read_run(folder: Path, label: str) -> RunHistory:
    """Read the history of a run. Raises UserError for what is no run's folder."""
    stored = stored_config.read(folder / "config.json")
    return RunHistory(
        label=label,
        folder=folder,
        config=table.of_stored(stored),
        settings=table.flat(stored),
        records=plots.read_metrics(folder),
        evaluations_since=_evaluations_since(folder),
    )


def _evaluations_since(folder: Path) -> int:
    """Return the epochs completed at the first evaluation that can be compared with later ones, from the newest
    checkpoint or from best/; a run may have only one of them."""
    # A damaged record is passed over here: whatever needs it names it.
    since = 0
    with suppress(UserError):
        evaluation = best.read_best(folder)
        if evaluation:
            since = evaluation.since
    with suppress(UserError):
        newest = checkpoints.find_newest(folder / "checkpoints")
        if newest:
            since = max(since, checkpoints.read_progress(newest).evaluations_since)
    return since


def summary(runs: Sequence[RunHistory]) -> Table:
    """Return how far each run is and its scores, and the mean scores of runs that differ in their seed alone."""
    evaluations = ["evaluation: before", "last", "best"]
    tests = ["test: before", "last", "best"]
    head = ["run", "epochs", "time", "score", *evaluations, *tests, "epochs with an alarm"]
    rows = [_summary_row(run) for run in runs]
    for group in grouped_by_seed(runs):
        if len(group) > 1:
            rows.append(_mean_row(group))
    return Table(head, rows)


def grouped_by_seed(runs: Sequence[RunHistory]) -> list[list[RunHistory]]:
    """Return the runs in groups that differ in the seed alone. A second run of one seed, such as a copy or a repeat, is
    a group of its own: it tells nothing of the spread over seeds."""
    groups = defaultdict(list)
    repeats = []
    for run in runs:
        settings = []
        for key, value in sorted(run.settings.items()):
            if key not in (*NOT_SHOWN, "seed"):
                settings.append((key, str(value)))
        group = groups[tuple(settings)]
        if run.config.seed in [other.config.seed for other in group]:
            repeats.append([run])
        else:
            group.append(run)
    return [*groups.values(), *repeats]


def group_label(runs: Sequence[RunHistory]) -> str:
    """Return the name of a run, or of the mean of several."""
    labels = ", ".join(run.label for run in runs)
    return f"mean of {labels}" if len(runs) > 1 else labels


def _summary_row(run: RunHistory) -> list[str]:
    """Return a run's name, progress, time, scores and number of epochs with an alarm, in words."""
    epochs = run.lines("epoch")
    alarmed = [record for record in epochs if record.get("health/limits_exceeded", 0) > 0]
    progress = f"{len(epochs)} of {run.config.num_epochs}"
    time = tqdm.format_interval(run.seconds())
    return [run.label, progress, time, _score_name(run), *_score_cells(scores(run)), str(len(alarmed))]


def _score_cells(of_run: Scores) -> list[str]:
    """Return scores in words, "" for each that is not there; of the best also when it was reached."""
    cells = []
    for name, score in of_run._asdict().items():
        if score is None:
            cells.append("")
            continue
        cell = with_error(score.value, score.error)
        if name == "best":
            cell += f" (after {counted(score.epoch, 'epochs')})"
        cells.append(cell)
    return cells


def _score_name(run: RunHistory) -> str:
    """Return the display name of the score that chooses."""
    return rewards.display_name(run.config.eval.best_by, run.config.reward_fn)


def _mean_row(runs: Sequence[RunHistory]) -> list[str]:
    """Return means over seeds with their standard errors, where all runs have a score."""
    cells = []
    for column in zip(*map(scores, runs)):
        if None in column:
            cells.append("")
            continue
        values = torch.tensor([score.value for score in column], dtype=torch.float64)
        mean = values.mean().item()
        # Evaluations of the base under shared noises are equal, whatever the seed: they have no error to be shown.
        error = None
        if len(values.unique()) > 1:
            error = values.std().item() / math.sqrt(len(runs))
        cells.append("" if math.isnan(mean) else with_error(mean, error))
    return [group_label(runs), "", "", _score_name(runs[0]), *cells, ""]


def scores(run: RunHistory) -> Scores:
    """Return the evaluations and tests of a run by the score that chooses its best policy."""
    evaluations = _scores_of(run, "eval")
    tests = _scores_of(run, "test")
    varied = _scores_of(run, "eval", run.config.eval.min_variety)
    finite = [score for score in varied if math.isfinite(score.value)]
    return Scores(
        first=_at(evaluations, 0),
        last=_at(evaluations, -1),
        # The first of equals, which best/ keeps.
        best=max(finite, key=lambda score: score.value, default=None),
        first_test=_at(tests, 0),
        last_test=_at(tests, -1),
        test_of_best=_at(_scores_of(run, "test_best"), -1),
    )


def _at(history: list[Score], index: int) -> Score | None:
    """Return the first or the last score; None if there is none."""
    return history[index] if history else None


def _scores_of(run: RunHistory, kind: str, min_variety: float = 0.0) -> list[Score]:
    """Return the comparable evaluations of a kind with this variety, as config.eval.min_variety; the oldest first."""
    name = f"{kind}/{run.config.eval.best_by}"
    history = []
    for line in run.records:
        if name not in line or line["epoch"] < run.evaluations_since:
            continue
        if best.is_varied(line.get(f"{kind}/{best.VARIETY}"), min_variety):
            history.append(Score(line[name], line.get(f"{kind}/std_error"), int(line["epoch"])))
    return history


def changed_settings(runs: Sequence[RunHistory]) -> Table:
    """Return the settings in which a run differs from the defaults, but no secret."""
    # Defaults as config.json stores them, where a tuple is a list.
    defaults = table.flat(json.loads(json.dumps(Config().to_dict())))
    columns = [defaults, *(run.settings for run in runs)]
    rows = []
    for key in sorted(set().union(*columns)):
        cells = ["" if column.get(key) is None else str(column[key]) for column in columns]
        is_shown = key not in NOT_SHOWN and not key.endswith("token")
        if is_shown and len(set(cells)) > 1:
            rows.append([key, *cells])
    return Table(["setting", "default", *(run.label for run in runs)], rows)
