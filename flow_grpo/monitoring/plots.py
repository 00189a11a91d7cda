"""Curves of a run, drawn from its metrics.jsonl: reward.png, and the panels of the report."""

import io
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from flow_grpo import rewards
from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.settings.sections import Config

STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    # A name from outside is no TeX.
    "text.parse_math": False,
}
BLUE = "#2f6db5"
ORANGE = "#e07b28"
INK = "#222222"
GREY = "#777777"


class LineStyle(NamedTuple):
    """Look of a curve, with which it can be told from others without colour, too."""

    colour: str
    dashes: Literal["-", "--", ":", "-."]
    marker: str


# Styles of the first, the second, ... run.
LINES = (
    LineStyle(BLUE, "-", "o"),
    LineStyle(ORANGE, "--", "s"),
    LineStyle("#2e8b57", ":", "^"),
    LineStyle("#8a4fbf", "-.", "D"),
    LineStyle(INK, "-", "x"),
    LineStyle("#b5302f", "--", "v"),
    LineStyle(GREY, ":", "P"),
    LineStyle("#0f8b8d", "-.", "*"),
)
# Largest epoch of a line that a run has written.
MOST_EPOCHS = 10**9
# Largest value that is drawn: matplotlib cannot lay out an axis of larger ones.
LARGEST = float(np.finfo(np.float32).max)
# Points of a line; more are averaged.
MOST_POINTS = 200
# Last epochs whose mean a curve over denoising steps shows.
STEP_EPOCHS = 10
# Kinds of figures of a reward, and their labels.
KINDS = {"reward": "training", "eval": "evaluation", "test": "test"}
# Names that are no reward's mean, or that of single frames of videos.
SPREADS = f"({'|'.join(rewards.GROUP_FIGURES)}|std_error|frame_[0-9]+)$"
# Texts in a line of metrics.jsonl: kind, time of writing (ISO 8601, UTC), and a sentence per alarm, a line each.
TEXTS = ("kind", "written_at", "alarms")


def read_metrics(run_dir: Path | str) -> list[dict]:
    """Return the whole lines of metrics.jsonl: TEXTS are strings, all else are numbers. Damaged lines are skipped."""
    path = Path(run_dir, "metrics.jsonl")
    try:
        # What follows the last newline is empty, or was cut short by a kill.
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    records = []
    for line in lines:
        record = _record(line)
        if record is not None:
            records.append(record)
    return records


def _record(line: bytes) -> dict | None:
    """Return the record in a line; None if it is none that a run has written."""
    try:
        stored = json.loads(line.decode())
        record: dict[str, Any] = {name: _value(name, value) for name, value in stored.items()}
        is_whole = "kind" in record and 0 <= record["epoch"] <= MOST_EPOCHS
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    return record if is_whole else None


def _value(name: str, stored: Any) -> str | int | float:
    """Return a value of a record: a text for a name of TEXTS, else a number. Raise ValueError, TypeError or
    OverflowError for anything else."""
    # A lone surrogate, which no file can hold, raises ValueError; a whole number that is too large, OverflowError.
    name.encode()
    if name in TEXTS:
        if not isinstance(stored, str):
            raise TypeError(f"{name} is no text")
        stored.encode()
        return stored
    # Of texts such as "nan", and to see that no whole number is too large for curves.
    number = float(stored)
    is_whole_number = type(stored) is int
    return stored if is_whole_number else number


class Line(NamedTuple):
    """Curve of a panel."""

    label: str
    epochs: np.ndarray
    values: np.ndarray
    errors: np.ndarray  # standard errors; NaN where they are not known


def curve(records: Sequence[dict], name: str, label: str, best_by: str) -> Line | None:
    """Return one metric over epochs, from all lines that have it; None if there is none.

    Args:
        best_by: config.eval.best_by, whose standard error evaluations and tests log.
    """
    kind, _, figure = name.partition("/")
    error_name = f"{kind}/std_error" if figure == best_by else ""
    lines = [line for line in records if name in line]
    if not lines:
        return None
    # The updates of an epoch are spread over it.
    num_lines = Counter(line["epoch"] for line in lines)
    seen: Counter[int] = Counter()
    points = []
    for line in lines:
        epoch = line["epoch"]
        position = epoch + seen[epoch] / num_lines[epoch]
        points.append((position, _drawn(line[name]), _drawn(line.get(error_name, math.nan))))
        seen[epoch] += 1
    epochs, values, errors = np.array(points).T
    return Line(label, epochs, values, errors)


def mean_curve(lines: Sequence[Line], label: str) -> Line | None:
    """Return the mean of curves with its standard error, at the epochs that all of them have; None if there is none."""
    common_epochs = set(lines[0].epochs)
    for line in lines[1:]:
        common_epochs &= set(line.epochs)
    epochs = sorted(common_epochs)
    if not epochs:
        return None
    columns = []
    for line in lines:
        value_at = dict(zip(line.epochs, line.values))
        columns.append([value_at[epoch] for epoch in epochs])
    values = np.array(columns)
    errors = values.std(axis=0, ddof=1) / math.sqrt(len(lines))
    return Line(label, np.array(epochs), values.mean(axis=0), errors)


def step_curve(records: Sequence[dict], figure: str, label: str) -> Line | None:
    """Return a figure over denoising steps, the mean of the last STEP_EPOCHS epochs that have it with its standard
    error; None if no epoch has it.

    Args:
        figure: such as "steps/reward", of the names steps/reward/STEP.
    """
    values_of = _last_values(records, f"{figure}/")
    if not values_of:
        return None
    steps = sorted(values_of)
    means = []
    errors = []
    for step in steps:
        values = np.array(values_of[step])
        means.append(values.mean())
        error = math.nan
        if len(values) > 1:
            error = values.std(ddof=1) / math.sqrt(len(values))
        errors.append(error)
    return Line(label, np.array(steps), np.array(means), np.array(errors))


def _last_values(records: Sequence[dict], prefix: str) -> dict[int, list[float]]:
    """Return the values of names PREFIX STEP by their step, of the last STEP_EPOCHS lines that have any."""
    values_of: dict[int, list[float]] = {}
    num_lines = 0
    for line in reversed(records):
        if num_lines == STEP_EPOCHS:
            break
        has_any = False
        for name, value in line.items():
            step = name.removeprefix(prefix)
            if name.startswith(prefix) and step.isdecimal():
                values_of.setdefault(int(step), []).append(_drawn(value))
                has_any = True
        if has_any:
            num_lines += 1
    return values_of


def _drawn(value: float) -> float:
    """Return a value as a curve shows it: a gap, NaN, where it is too large for an axis."""
    return value if abs(value) <= LARGEST else math.nan


def plot_reward(records: Sequence[dict], config: Config, file: Path) -> bool:
    """Draw a PNG, SVG or PDF with a panel per reward over epochs; False, and no file, if there is no reward yet."""
    names = reward_names(records, config.reward_fn)
    if not names:
        return False
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4 * columns, 3 * rows), dpi=160)
        for position, name in enumerate(names):
            row, column = divmod(position, columns)
            # Left, bottom, width, height. A layout engine would take half the time.
            place = ((column + 0.16) / columns, (rows - row - 0.86) / rows, 0.81 / columns, 0.76 / rows)
            axes = figure.add_axes(place)
            draw_lines(axes, reward_curves(records, name, config.eval.best_by))
            axes.legend(frameon=False, fontsize=7, handlelength=3)
            # The axis' power of ten would stand in the title's way.
            axes.yaxis.get_offset_text().set(x=1, ha="right")
            # Given the title's place, matplotlib need not lay out all ticks to find out what is in its way.
            axes.set_title(name, loc="left", y=1.0, fontweight="bold", color=INK)
        with folders.published(file) as scratch:
            figure.savefig(scratch, format=file.suffix.removeprefix("."))
    return True


def reward_curves(records: Sequence[dict], name: str, best_by: str) -> list[Line | None]:
    """Return a reward in training, evaluations and tests, in the order of KINDS; `best_by` as in `curve`."""
    return [curve(records, f"{kind}/{name}", label, best_by) for kind, label in KINDS.items()]


def reward_names(records: Sequence[dict], weights: Mapping[str, float]) -> list[str]:
    """Return the names of the logged rewards, without spreads and without a weighted sum of one reward."""
    names = set()
    for key in set().union(*records):
        kind, _, name = key.partition("/")
        is_mean = kind in ("reward", "eval") and name and not re.search(SPREADS, name)
        if is_mean and rewards.display_name(name, weights) == name:
            names.add(name)
    return sorted(names)


def draw_lines(axes: Axes, lines: Sequence[Line | None], limit: float | None = None, axis: str = "epoch") -> None:
    """Draw curves over epochs, with bands of a standard error. None leaves out a style, so that a run keeps its own.

    Args:
        limit: a level that is drawn across.
        axis: what the numbers of the horizontal axis count.
    """
    for line, style in zip(lines, itertools.cycle(LINES)):
        if line is None:
            continue
        epochs = thinned(line.epochs)
        values = thinned(line.values)
        errors = thinned(line.errors)
        axes.plot(
            epochs,
            values,
            style.dashes,
            label=line.label,
            color=style.colour,
            marker=style.marker,
            markersize=4,
            markevery=math.ceil(len(values) / 12),
        )
        axes.fill_between(epochs, values - errors, values + errors, color=style.colour, alpha=0.15, linewidth=0)
    if limit is not None:
        axes.axhline(limit, color=GREY, linewidth=0.8, linestyle=(0, (8, 4)))
    axes.set_xlabel(axis, labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(color="#e8e8e8")
    axes.margins(x=0.04, y=0.12)


def svg_panel(lines: Sequence[Line | None], limit: float | None = None, axis: str = "epoch") -> str:
    """Return what `draw_lines` draws as an <svg> element whose text is text."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6, 2.2))
        # A layout engine would take half the page's time.
        axes = figure.add_axes((0.2, 0.17, 0.77, 0.72))
        draw_lines(axes, lines, limit, axis)
        return _svg(figure)


def svg_key(number: int) -> str:
    """Return a sample of the line of the run of this number, for a key of the panels."""
    style = LINES[number % len(LINES)]
    line = Line2D(
        [0, 0.5, 1], [0.5] * 3, linestyle=style.dashes, marker=style.marker, markevery=[1], color=style.colour
    )
    figure = Figure(figsize=(0.5, 0.14))
    figure.add_artist(line)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    # Without a date and random ids, equal figures make equal text.
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "none", "svg.hashsalt": "flow_grpo"}):
        figure.savefig(stream, format="svg", metadata=no_metadata)
    text = stream.getvalue()
    return text[text.index("<svg") :]


def thinned(values: np.ndarray) -> np.ndarray:
    """Average neighbours, so that at most MOST_POINTS are left."""
    parts = np.array_split(values, min(len(values), MOST_POINTS))
    return np.array([part.mean() for part in parts])
