"""What a run has come to, or what several have, on one page: report.html needs no server and no network.

    python -m flow_grpo.monitoring.report RUN [RUN ...] [--out report.html]
    python -m flow_grpo.monitoring.report RUN --out reward.pdf          the curves of its rewards alone; or .svg

Everything is read from the runs' folders. One run's page is written into its folder.
"""

import argparse
import base64
import io
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count, groupby
from pathlib import Path
from typing import NamedTuple

from flow_grpo import rewards
from flow_grpo.settings import command_line, older, table


def parser() -> argparse.ArgumentParser:
    """Of the command."""
    parser = command_line.parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, help="default: report.html in the folder of one run, or in this directory")
    return parser


if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    command_line.arguments(parser())

import jinja2
import torch
from ml_collections import ConfigDict
from tqdm import tqdm

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.metric_table import METRICS, NOT_DRAWN, Metric, explain
from flow_grpo.base.quoting import with_error
from flow_grpo.monitoring import health, plots

OWN = Metric("logged by a script of your own", "", group="Without a row in the table of metrics")
NOT_SHOWN = ("name", "run_name", "output_dir", "resume_from", "algorithm", "alert")  # they say nothing, or too much
FIGURES = (".pdf", ".svg")
BEST = 2  # among a run's scores
MOST_EVALUATIONS = 12  # whose images are on the page
NUM_PROMPTS = 5  # best ones, and worst ones, at most


@dataclass(frozen=True)
class Recorded:
    """A run as its folder tells it."""

    label: str
    folder: Path
    config: ConfigDict  # settings that are younger than the run have their defaults
    records: list[dict[str, float]]

    def lines(self, kind: str) -> list[dict[str, float]]:
        """The records of a kind."""
        return [record for record in self.records if record["kind"] == kind]


class Panel(NamedTuple):
    """A curve of every run."""

    name: str
    metric: Metric
    svg: str


class Score(NamedTuple):
    """An evaluation by the score that chooses."""

    value: float
    error: float | None
    epoch: int


class Table(NamedTuple):
    head: list[str]
    rows: list[list[str]]


def read(folder: Path, label: str) -> Recorded:
    """Raises UserError for what is no run's folder."""
    path = folder / "config.json"
    config = ConfigDict(older.with_defaults(folders.read_json(path), path))
    return Recorded(label, folder, config, plots.read_metrics(folder))


def panels(runs: Sequence[Recorded]) -> dict[str, list[Panel]]:
    """The curves of each group, and those of names that METRICS does not explain; not the constant ones."""
    logged = {name: None for run in runs for record in run.records for name in record if name not in plots.TEXTS}
    logged = sorted(logged.keys() - constants(runs).keys())
    records = [record for run in runs for record in run.records]
    chosen = {metric.group: [] for metric in (*METRICS.values(), OWN)}
    for name in plots.rewards_alone(records, logged):
        _, metric = explain(name) or (name, OWN)
        chosen[metric.group].append(name)
    del chosen[NOT_DRAWN]
    return {title: [panel(runs, name) for name in names] for title, names in chosen.items() if names}


def constants(runs: Sequence[Recorded]) -> dict[str, float]:
    """What was logged more than once and never changed, in any run."""
    values = defaultdict(list)
    for record in (record for run in runs for record in run.records):
        for name in record.keys() - {*plots.TEXTS, "epoch", "step"}:
            values[name].append(record[name])
    return {name: column[0] for name, column in sorted(values.items()) if len(column) > 1 and len(set(column)) == 1}


def panel(runs: Sequence[Recorded], name: str) -> Panel:
    """One figure of all runs, and what the table of metrics says of it."""
    key, metric = explain(name) or (name, OWN)
    lines = [plots.curve(run.records, name, run.label, run.config.eval.best_by) for run in runs]
    limit = runs[0].config.health.get(name.removeprefix("health/")) if key == "health/<limit>" else None
    expect = f"{metric.expect}, which is {limit:g} (- - -)" if limit else metric.expect
    return Panel(name, metric._replace(expect=expect), plots.svg_panel(lines, limit))


def summary(runs: Sequence[Recorded]) -> Table:
    """How far each run is, and the score that chooses, before training, last and of the best policy; the means of runs
    that differ in their seed alone."""
    head = ["run", "epochs", "time", "score", "evaluation: before", "last", "best", "test: before", "last", "best"]
    alike = defaultdict(list)
    for run in runs:
        alike[tuple(sorted(_settings(run) - {("seed", str(run.config.seed))}))].append(run)
    means = [_mean_row(group) for group in alike.values() if len(group) > 1]
    return Table([*head, "epochs with an alarm"], [*map(_summary_row, runs), *means])


def _settings(run: Recorded) -> set[tuple[str, str]]:
    """What a run's numbers follow from."""
    return {(key, str(value)) for key, value in table.flat(run.config).items() if key not in NOT_SHOWN}


def _summary_row(run: Recorded) -> list[str]:
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


def _score(run: Recorded) -> str:
    """The name of the one that chooses."""
    return rewards.called(run.config.eval.best_by, run.config.reward_fn)


def _mean_row(runs: Sequence[Recorded]) -> list[str]:
    """Means over seeds with their standard errors, of what all of them have."""
    cells = []
    for scores in zip(*map(_scores, runs)):
        column = torch.tensor([score.value if score else math.nan for score in scores], dtype=torch.float64)
        mean, error = column.mean().item(), column.std().item() / math.sqrt(len(runs))
        cells.append("" if math.isnan(mean) else with_error(mean, error))
    return ["mean of " + ", ".join(run.label for run in runs), "", "", _score(runs[0]), *cells, ""]


def _scores(run: Recorded) -> list[Score | None]:
    """The score that chooses: of the first, last and best evaluation, the first and last test, and the best weights'
    test."""
    evaluations, tests, of_best = (_scores_of(run, kind) for kind in ("eval", "test", "test_best"))
    best = max((score for score in evaluations if math.isfinite(score.value)), default=None)
    ends = [scores[i] if scores else None for scores in (evaluations, tests) for i in (0, -1)]
    return [*ends[:2], best, *ends[2:], of_best[-1] if of_best else None]


def _scores_of(run: Recorded, kind: str) -> list[Score]:
    name = f"{kind}/{run.config.eval.best_by}"
    lines = [line for line in run.records if name in line]
    return [Score(line[name], line.get(f"{kind}/std_error"), int(line["epoch"])) for line in lines]


def alarms(run: Recorded) -> list[str]:
    """One sentence per alarm and stretch of epochs, as it was at the end of the stretch."""
    exceeded = {record["epoch"] for record in run.records if record.get("health/limits_exceeded")}
    epochs, sentences, count = health.by_epoch(run.records, run.config), [], 0
    for is_alarmed, group in groupby(epochs, key=lambda epoch: epoch.number in exceeded):
        stretch = [epoch.number + 1 for epoch in group]
        count += len(stretch)
        if is_alarmed:
            when = f"epoch {stretch[0]}" if len(stretch) == 1 else f"epochs {stretch[0]} to {stretch[-1]}"
            verdict = health.judge(epochs[:count], run.config.health)
            sentences += [f"{run.label}, {when}: {alarm.sentence}" for alarm in verdict.alarms]
    return sentences


def moments(run: Recorded) -> dict[str, list[tuple[str, str, str]]]:
    """Picture, prompt and reward of the panel's images at evenly spread evaluations, the first and the last among them,
    by the title of each."""
    sheets = list(plots.evaluations(run.folder).items())
    count = min(len(sheets), MOST_EVALUATIONS)
    sheets = [sheets[round(i * (len(sheets) - 1) / max(count - 1, 1))] for i in range(count)]
    pictures = {}
    for epochs, sheet in sheets:
        with suppress(*plots.DAMAGED):
            cells = plots.panel_pictures(sheet)
            pictures[f"after {epochs} epochs"] = [(data_address(image), *rest) for image, *rest in cells]
    return pictures


def side_by_side(pages: Sequence[tuple[Recorded, dict[str, list[tuple[str, str, str]]]]]) -> dict[str, list[tuple]]:
    """Of prompts that several runs drew: each run's label and its last picture and reward."""
    rows = defaultdict(list)
    for run, evaluated in pages:
        for address, prompt, reward in list(evaluated.values())[-1] if evaluated else []:
            rows[prompt].append((run.label, address, reward))
    return {prompt: cells for prompt, cells in rows.items() if prompt and len(cells) > 1}


def data_address(picture: plots.Image.Image) -> str:
    """A picture as the address of itself."""
    stream = io.BytesIO()
    picture.save(stream, format="webp", quality=80)
    return "data:image/webp;base64," + base64.b64encode(stream.getvalue()).decode()


def _scores_on(sheet: Path) -> dict[str, float]:
    """Prompt -> its reward in an evaluation; none where the sheet's .json is damaged."""
    with suppress(*plots.DAMAGED):
        stored = json.loads(sheet.with_suffix(".json").read_text())
        return {prompt: float(value) for prompt, value in stored["scores"].items()}
    return {}


def prompts(run: Recorded) -> dict[str, Table]:
    """The best and the worst of the last evaluation's prompts, with their reward before training."""
    evaluated = [scores for sheet in plots.evaluations(run.folder).values() if (scores := _scores_on(sheet))]
    if not evaluated:
        return {}
    first, last = evaluated[0], evaluated[-1]
    order = sorted((prompt for prompt in last if math.isfinite(last[prompt])), key=last.get)
    count = min(NUM_PROMPTS, len(order) // 2)  # no prompt is in both
    chosen = {"Best prompts": order[::-1][:count], "Worst prompts": order[:count]}
    head = ["prompt", "before", "last"]
    return {
        title: Table(head, [[p, f"{first.get(p, math.nan):.3f}", f"{last[p]:.3f}"] for p in names])
        for title, names in chosen.items()
        if names
    }


def changed_settings(runs: Sequence[Recorded]) -> Table:
    """Settings in which a run differs from the defaults; no secret among them."""
    defaults = table.flat(ConfigDict(json.loads(json.dumps(table.default_config().to_dict()))))
    columns = defaults, *(table.flat(run.config) for run in runs)
    keys = sorted({key for column in columns for key in column})
    keys = [key for key in keys if key not in NOT_SHOWN and not key.endswith("token")]
    rows = [[key, *("" if (value := values.get(key)) is None else str(value) for values in columns)] for key in keys]
    rows = [row for row in rows if any(value != row[1] for value in row[2:])]
    return Table(["setting", "default", *(run.label for run in runs)], rows)


def page(runs: Sequence[Recorded]) -> str:
    """The whole page. Everything that comes from a run is escaped."""
    template = Path(__file__).parents[1] / "assets" / "report.html"
    pages = [(run, moments(run)) for run in runs]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(template.read_text()).render(
        title=" · ".join(run.label for run in runs),
        summary=summary(runs),
        key=[(plots.svg_key(number), run.label) for number, run in enumerate(runs)] if len(runs) > 1 else [],
        groups=panels(runs),
        alarms=[sentence for run in runs for sentence in alarms(run)],
        constants=constants(runs),
        by_prompt=side_by_side(pages),
        runs=[(run, evaluated, prompts(run)) for run, evaluated in pages],
        settings=changed_settings(runs),
    )


def write(runs: Sequence[Path], file: Path) -> None:
    """Draw the page of some runs by their names, or by their paths where two have the same; whoever looks at it
    meanwhile sees the old one, or the new one."""
    names = [folder.resolve().name for folder in runs]
    labels = [str(folder) if names.count(name) > 1 else name for folder, name in zip(runs, names)]
    folders.write_text(file, page(list(map(read, runs, labels))))


def _unused(file: Path) -> Path:
    """The file, or the first of report-2.html, report-3.html, ... that is not there yet."""
    names = (file.with_stem(f"{file.stem}-{number}") for number in count(2))
    return next(candidate for candidate in chain([file], names) if not candidate.exists())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    args = parser().parse_args(arguments)
    out = args.out or (args.runs[0] / "report.html" if len(args.runs) == 1 else _unused(Path("report.html")))
    if out.suffix in FIGURES and len(args.runs) > 1:
        raise UserError(f"{out}: a {out.suffix} is drawn of one run, and {len(args.runs)} are named")
    if out.suffix not in FIGURES:
        write(args.runs, out)
    elif not plots.plot_reward((run := read(args.runs[0], "")).records, run.config.eval.best_by, out):
        raise UserError(f"{args.runs[0]}: no reward was logged yet")
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    with command_line.sentences():
        main()
