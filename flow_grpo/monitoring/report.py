"""What a run has come to, or what several have, on one page: report.html needs no server and no network.

    python -m flow_grpo.monitoring.report RUN                           writes report.html into the run's folder
    python -m flow_grpo.monitoring.report RUN RUN ... --out all.html
    python -m flow_grpo.monitoring.report RUN --out reward.pdf          the curves of its rewards alone; or .svg

Everything is read from the runs' folders.
"""

import argparse
import base64
import io
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from flow_grpo.base.errors import UserError
from flow_grpo.command_line import command_line

FIGURES = (".pdf", ".svg")


def parser() -> argparse.ArgumentParser:
    """Of the command."""
    parser = command_line.parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, help="default: report.html in the folder of a single run")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises UserError for several runs without a page of their own."""
    if len(args.runs) > 1 and (args.out is None or args.out.suffix in FIGURES):
        raise UserError("several runs need a page, such as --out report.html; .pdf and .svg are drawn of one run")


if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    command_line.arguments(parser(), check)

import jinja2
import numpy as np

from flow_grpo.base import folders
from flow_grpo.base.metric_table import METRICS, NOT_DRAWN, Metric, explain
from flow_grpo.monitoring import health, plots
from flow_grpo.monitoring.run_history import RunHistory, changed_settings, read_run, summary

OWN = Metric("logged by a script of your own", "", group="Without a row in the table of metrics")
MOST_EVALUATIONS = 12  # whose images are on the page


def panels(runs: Sequence[RunHistory]) -> dict[str, list[tuple[str, Metric, str]]]:
    """The curves of each group, and those of names that METRICS does not explain; not the constant ones."""
    logged = {name: None for run in runs for record in run.records for name in record if name not in plots.TEXTS}
    logged = sorted(logged.keys() - constants(runs).keys())
    chosen = {metric.group: [] for metric in (*METRICS.values(), OWN)}
    for name in logged:
        chosen[described(runs, name).group].append(name)
    del chosen[NOT_DRAWN]
    return {title: [panel(runs, name) for name in names] for title, names in chosen.items() if names}


def described(runs: Sequence[RunHistory], name: str) -> Metric:
    """What the table of metrics says of a name, given the rewards that the runs measured."""
    rewards = [reward for run in runs for reward in (*run.config.reward_fn, *run.config.eval.rewards)]
    return explain(name, rewards) or OWN


def constants(runs: Sequence[RunHistory]) -> dict[str, float]:
    """What was logged more than once and never changed, in any run."""
    values = defaultdict(list)
    for record in (record for run in runs for record in run.records):
        for name in record.keys() - {*plots.TEXTS, "epoch", "step"}:
            values[name].append(record[name])
    return {name: column[0] for name, column in sorted(values.items()) if len(column) > 1 and len(set(column)) == 1}


def panel(runs: Sequence[RunHistory], name: str) -> tuple[str, Metric, str]:
    """A metric's name, what the table of metrics says of it, and its curve of every run."""
    metric = described(runs, name)
    lines = [plots.curve(run.records, name, run.label, run.config.eval.best_by) for run in runs]
    limit = runs[0].config.health.get(name.removeprefix("health/")) if name.startswith("health/") else None
    expect = f"{metric.expect}, which is {limit:g} (- - -)" if limit else metric.expect
    return name, metric._replace(expect=expect), plots.svg_panel(lines, limit)


def alarms(run: RunHistory) -> list[str]:
    """One sentence per alarm and stretch of epochs, as the run itself said it at the end of the stretch."""
    sentences = []
    for is_alarmed, group in groupby(run.lines("epoch"), key=lambda line: line.get("health/limits_exceeded", 0) > 0):
        if is_alarmed:
            stretch = list(group)
            first, last = int(stretch[0]["epoch"]) + 1, int(stretch[-1]["epoch"]) + 1
            when = f"epoch {first}" if first == last else f"epochs {first} to {last}"
            sentences += [f"{run.label}, {when}: {sentence}" for sentence in _alarms_of(stretch[-1], run)]
    return sentences


def _alarms_of(line: dict, run: RunHistory) -> list[str]:
    """The sentences of an epoch's line; of one that is older than the sentences, its figures. Nothing is judged anew:
    the line does not say which earlier figures the run compared."""
    if "alarms" in line:
        return line["alarms"].splitlines()
    sentences = []
    for name in health.SIGNS:
        value, limit = line.get(f"health/{name}", 0.0), run.config.health[name]
        if health.is_beyond(value, limit):
            sentences.append(f"{name} is {value:.3g} (limit {limit:g}, config.health.{name})")
    return sentences or ["a limit of config.health was exceeded, or a figure was no finite number"]


def moments(run: RunHistory) -> dict[str, list[tuple[str, str, str]]]:
    """Picture, prompt and reward of the panel's images at evenly spread evaluations, the first and the last among them,
    by the title of each."""
    sheets, pictures = list(plots.evaluations(run.folder).items()), {}
    for number in np.linspace(0, len(sheets) - 1, min(len(sheets), MOST_EVALUATIONS)).round().astype(int):
        epochs, sheet = sheets[number]
        cells = plots.panel_pictures(sheet)
        pictures[f"after {epochs} epochs"] = [(data_address(image), *rest) for image, *rest in cells]
    return pictures


def side_by_side(pages: Sequence[tuple[RunHistory, dict[str, list[tuple[str, str, str]]]]]) -> dict[str, list[tuple]]:
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


def page(runs: Sequence[RunHistory]) -> str:
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
        runs=pages,
        settings=changed_settings(runs),
    )


def write(runs: Sequence[Path], file: Path) -> None:
    """Draw the page of some runs by their names, or by their paths where two have the same; whoever looks at it
    meanwhile sees the old one, or the new one."""
    names = [folder.resolve().name for folder in runs]
    labels = [str(folder) if names.count(name) > 1 else name for folder, name in zip(runs, names)]
    folders.write_text(file, page(list(map(read_run, runs, labels))))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    args = parser().parse_args(arguments)
    check(args)
    out = args.out or args.runs[0] / "report.html"
    if out.suffix not in FIGURES:
        write(args.runs, out)
    elif not plots.plot_reward((run := read_run(args.runs[0], "")).records, run.config, out):
        raise UserError(f"{args.runs[0]}: no reward was logged yet")
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    with command_line.sentences():
        main()
