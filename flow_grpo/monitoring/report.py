"""Report of one run or several on one page: report.html needs no server and no network.

    python -m flow_grpo.monitoring.report RUN                           writes report.html into the run's folder
    python -m flow_grpo.monitoring.report RUN RUN ... --out all.html
    python -m flow_grpo.monitoring.report RUN --out reward.pdf          the curves of its rewards alone; or .svg

Everything is read from the runs' folders.
"""

import argparse
import base64
import io
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted
from flow_grpo.command_line import command_line

# Endings of --out by which the curves of the rewards are drawn alone.
FIGURES = (".pdf", ".svg")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_line.parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, help="default: report.html in the folder of a single run")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UserError for several runs without a page of their own, and for a page that would be written over a
    folder."""
    if len(args.runs) > 1 and (args.out is None or args.out.suffix in FIGURES):
        raise UserError("several runs need a page, such as --out report.html; .pdf and .svg are drawn of one run")
    if args.out is not None and args.out.is_dir():
        raise UserError(f"--out: {args.out} is a folder; name a file in it, such as {args.out / 'report.html'}")


if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    command_line.arguments(parser(), check_arguments)

import jinja2
import numpy as np
from PIL import Image

from flow_grpo.base import folders, locations
from flow_grpo.base.metric_table import METRICS, NOT_DRAWN, Metric, explain
from flow_grpo.monitoring import health, plots, sheets
from flow_grpo.monitoring.run_history import (
    RunHistory,
    changed_settings,
    group_label,
    grouped_by_seed,
    read_run,
    summary,
)

# Row of the table of metrics for a name that has none.
UNKNOWN = Metric("logged by a script of your own", "", group="Without a row in the table of metrics")
# Names of figures by denoising step.
OF_STEPS = re.compile(r"steps/[^/]+/[0-9]+")
# Pixels of a sheet of branches, at most: WebP holds 16,383.
LONGEST_SIDE = 8192
# Evaluations whose images are on the page.
MOST_EVALUATIONS = 12


class Panel(NamedTuple):
    """Curves of a metric."""

    name: str
    metric: Metric
    svg: str
    axis: str = "epochs"


class Overview(NamedTuple):
    """Curves of the rewards, the first thing that a reader asks for."""

    key: list[tuple[str, str]]  # a sample of each line, as <svg>, and its name
    panels: list[tuple[str, str]]  # a reward and its curves, as <svg>


class Picture(NamedTuple):
    """Picture of an evaluation."""

    address: str  # as in `data_address`
    prompt: str
    reward: str


def overview(runs: Sequence[RunHistory]) -> Overview:
    """Return every reward of a run in training, evaluations and tests, or the evaluations of several runs, where those
    that differ in their seed alone are one line: their mean, with its standard error."""
    lines_of: Callable[[str], list[plots.Line | None]]
    if len(runs) == 1:
        run = runs[0]
        labels = list(plots.KINDS.values())
        lines_of = partial(plots.reward_curves, run.records, best_by=run.config.eval.best_by)
    else:
        groups = grouped_by_seed(runs)
        labels = [group_label(group) for group in groups]
        lines_of = partial(_evaluations, groups)
    names = set()
    for run in runs:
        names.update(plots.reward_names(run.records, run.config.reward_fn))
    drawn = []
    for name in sorted(names):
        lines = lines_of(name)
        if any(line is not None and len(line.epochs) > 1 for line in lines):
            drawn.append((name, plots.svg_panel(lines)))
    key = [(plots.svg_key(number), label) for number, label in enumerate(labels)]
    return Overview(key, drawn)


def _evaluations(groups: Sequence[Sequence[RunHistory]], name: str) -> list[plots.Line | None]:
    """Return the evaluations of a reward, a line for each group of runs."""
    return [_line_of_group(group, name) for group in groups]


def _line_of_group(group: Sequence[RunHistory], name: str) -> plots.Line | None:
    """Return the evaluations of a reward by one run, or the mean of several runs; None if none has any."""
    lines = []
    for run in group:
        line = plots.curve(run.records, f"eval/{name}", run.label, run.config.eval.best_by)
        if line is not None:
            lines.append(line)
    if not lines:
        return None
    if len(lines) == 1:
        return lines[0]
    return plots.mean_curve(lines, group_label(group))


def panels(runs: Sequence[RunHistory]) -> dict[str, list[Panel]]:
    """Return the curves of each group of metrics by its title, without those that never change."""
    left_out = set(plots.TEXTS) | constants(runs).keys()
    names = set().union(*_records(runs)) - left_out
    # In the order of the table of metrics.
    groups: dict[str, list[Panel]] = {metric.group: [] for metric in (*METRICS.values(), UNKNOWN)}
    step_figures = set()
    for name in sorted(names):
        if OF_STEPS.fullmatch(name):
            step_figures.add(name.rpartition("/")[0])
            continue
        metric = described(runs, name)
        if metric.group != NOT_DRAWN:
            groups[metric.group].append(panel(runs, name, metric))
    for figure in sorted(step_figures):
        metric = described(runs, f"{figure}/0")
        groups[metric.group].append(step_panel(runs, figure, metric))
    return {title: group for title, group in groups.items() if group}


def step_panel(runs: Sequence[RunHistory], figure: str, metric: Metric) -> Panel:
    """Draw a figure of every run over denoising steps, the mean of its last epochs."""
    lines = [plots.step_curve(run.records, figure, run.label) for run in runs]
    metric = metric._replace(meaning=f"{metric.meaning}; mean of the last {plots.STEP_EPOCHS} epochs")
    return Panel(figure, metric, plots.svg_panel(lines, axis="denoising step"), "denoising steps")


def _records(runs: Sequence[RunHistory]) -> Iterator[dict]:
    """Yield the records of all runs."""
    for run in runs:
        yield from run.records


def described(runs: Sequence[RunHistory], name: str) -> Metric:
    """Return the row of the table of metrics for a name, given the rewards that the runs measured."""
    rewards: set[str] = set()
    for run in runs:
        rewards |= {*run.config.reward_fn, *run.config.eval.rewards}
    return explain(name, rewards) or UNKNOWN


def constants(runs: Sequence[RunHistory]) -> dict[str, float]:
    """Return what was logged once, or never changed, in all runs together."""
    values = defaultdict(list)
    for record in _records(runs):
        for name in record.keys() - {*plots.TEXTS, "epoch", "step"}:
            if not OF_STEPS.fullmatch(name):
                values[name].append(record[name])
    unchanged = {}
    for name, column in sorted(values.items()):
        if len(set(column)) == 1:
            unchanged[name] = column[0]
    return unchanged


def panel(runs: Sequence[RunHistory], name: str, metric: Metric) -> Panel:
    """Draw a metric's curve of every run; its limit of config.health is drawn across and added to the text."""
    lines = [plots.curve(run.records, name, run.label, run.config.eval.best_by) for run in runs]
    limit = None
    if name.startswith("health/"):
        limit = health.limit_of(runs[0].config.health, name.removeprefix("health/"))
    if limit:
        metric = metric._replace(expect=f"{metric.expect}, which is {limit:g} (- - -)")
    return Panel(name, metric, plots.svg_panel(lines, limit))


def alarms(run: RunHistory) -> list[str]:
    """Return a sentence per alarm and stretch of epochs, as the run itself said it at the end of the stretch."""
    sentences = []
    for is_alarmed, group in groupby(run.lines("epoch"), key=lambda line: line.get("health/limits_exceeded", 0) > 0):
        if not is_alarmed:
            continue
        stretch = list(group)
        first = int(stretch[0]["epoch"]) + 1
        last = int(stretch[-1]["epoch"]) + 1
        when = f"epoch {first}" if first == last else f"epochs {first} to {last}"
        for sentence in _alarms_of(stretch[-1], run):
            sentences.append(f"{run.label}, {when}: {sentence}")
    return sentences


def _alarms_of(line: dict, run: RunHistory) -> list[str]:
    """Return the sentences of an epoch's line; an older version's line has none, so that its figures are compared with
    the limits. Nothing is judged anew: the line does not say which earlier figures the run compared."""
    if "alarms" in line:
        return line["alarms"].splitlines()
    sentences = []
    for name in health.SIGNS:
        value = line.get(f"health/{name}", 0.0)
        limit = health.limit_of(run.config.health, name)
        if health.is_beyond(value, limit):
            sentences.append(f"{name} is {value:.3g} (limit {limit:g}, config.health.{name})")
    return sentences or ["a limit of config.health was exceeded, or a figure was no finite number"]


def moments(run: RunHistory) -> dict[str, list[Picture]]:
    """Return the pictures of evenly spread evaluations, the first and the last among them, by their titles."""
    evaluations = list(sheets.evaluations(run.folder).items())
    numbers = np.linspace(0, len(evaluations) - 1, min(len(evaluations), MOST_EVALUATIONS)).round().astype(int)
    evaluated = {}
    for number in numbers:
        epochs, sheet = evaluations[number]
        shown = []
        for picture, caption, reward in sheets.panel_pictures(sheet):
            shown.append(Picture(data_address(picture), caption, reward))
        evaluated[f"after {counted(epochs, 'epochs')}"] = shown
    return evaluated


def before_and_after(evaluated: dict[str, list[Picture]]) -> list[tuple[str, Picture, Picture]]:
    """Return the pictures of a run's first and last evaluation, by the prompts that both drew; [] of a single one."""
    titles = list(evaluated)
    if len(titles) < 2:
        return []
    last_of = {picture.prompt: picture for picture in evaluated[titles[-1]]}
    pairs = []
    for picture in evaluated[titles[0]]:
        if picture.prompt and picture.prompt in last_of:
            pairs.append((picture.prompt, picture, last_of[picture.prompt]))
    return pairs


def side_by_side(
    pages: Sequence[tuple[RunHistory, dict[str, list[Picture]]]],
) -> dict[str, list[tuple[str, str, str]]]:
    """Return label, picture and reward of each run's last evaluation, by the prompts that several runs drew."""
    rows = defaultdict(list)
    for run, evaluated in pages:
        if not evaluated:
            continue
        *_, last_pictures = evaluated.values()
        for picture in last_pictures:
            rows[picture.prompt].append((run.label, picture.address, picture.reward))
    return {prompt: cells for prompt, cells in rows.items() if prompt and len(cells) > 1}


def data_address(picture: Image.Image) -> str:
    """Return a picture as a data: URL, encoded as WebP of quality 80."""
    stream = io.BytesIO()
    picture.save(stream, format="webp", quality=80)
    return webp_address(stream.getvalue())


def webp_address(content: bytes) -> str:
    """Return the bytes of a WebP, still or animated, as a data: URL."""
    encoded = base64.b64encode(content).decode()
    return f"data:image/webp;base64,{encoded}"


def moving_sheet(run: RunHistory) -> str:
    """Return the last evaluation's videos, a contact sheet that moves, as `webp_address`; "" of images."""
    evaluated = list(sheets.evaluations(run.folder).values())
    if not evaluated:
        return ""
    animation = sheets.animation_of(evaluated[-1])
    return webp_address(animation.read_bytes()) if animation.exists() else ""


def newest_sheets(run: RunHistory) -> dict[str, str]:
    """Return the last sheets of branches and of groups, as `data_address`, by their titles."""
    addresses = {}
    for name in sheets.GROUP_SHEETS:
        drawn = sheets.group_sheets(run.folder, name)
        if drawn:
            epoch = max(drawn)
            page = sheets.opened(drawn[epoch])
            page.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            addresses[f"{name} of epoch {epoch + 1}"] = data_address(page)
    return addresses


def page(runs: Sequence[RunHistory]) -> str:
    """Return the whole page. Everything that comes from a run is escaped."""
    template = Path(__file__).parents[1] / "assets" / "report.html"
    pages = [(run, moments(run)) for run in runs]
    sentences = []
    for run in runs:
        sentences += alarms(run)
    # A page of one run needs no key.
    key = []
    if len(runs) > 1:
        key = [(plots.svg_key(number), run.label) for number, run in enumerate(runs)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(template.read_text()).render(
        title=" · ".join(run.label for run in runs),
        summary=summary(runs),
        key=key,
        overview=overview(runs),
        groups=panels(runs),
        alarms=sentences,
        constants=constants(runs),
        by_prompt=side_by_side(pages),
        pairs=before_and_after(pages[0][1]) if len(runs) == 1 else [],
        runs=pages,
        film_strips=any(run.config.frames > 1 for run in runs),
        is_shipped=locations.is_shipped,
        moving_sheet=moving_sheet,
        newest_sheets=newest_sheets,
        settings=changed_settings(runs),
    )


def write_page(runs: Sequence[Path], file: Path) -> None:
    """Write the page of some runs, which are called by their names, or by their paths where two have the same name.

    Who looks at the page meanwhile sees the old one or the new one.
    """
    names = [folder.resolve().name for folder in runs]
    histories = []
    for folder, name in zip(runs, names):
        label = str(folder) if names.count(name) > 1 else name
        histories.append(read_run(folder, label))
    folders.write_text(file, page(histories))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = parser().parse_args(arguments)
    check_arguments(args)
    out = args.runs[0] / "report.html"
    if args.out is not None:
        out = args.out
        folders.ensure_folder(out.parent, "--out")
    if out.suffix in FIGURES:
        run = read_run(args.runs[0], "")
        if not plots.plot_reward(run.records, run.config, out):
            raise UserError(f"{args.runs[0]}: no reward was logged yet")
    else:
        write_page(args.runs, out)
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    with command_line.sentences():
        main()
