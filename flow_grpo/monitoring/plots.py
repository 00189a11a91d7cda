"""Pictures of a run, drawn from its folder alone: reward.png, samples.png and the contact sheets of images/."""

import io
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from ml_collections import ConfigDict
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.base import folders, pictures
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.base.pixels import to_pictures

STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#777777"}
STYLE |= {"text.parse_math": False}  # a name from outside is no TeX
BLUE, ORANGE, INK, GREY = "#2f6db5", "#e07b28", "#222222", "#777777"
FONT = ImageFont.load_default(12)
LINES = (  # colour, dashes and marker of the first, the second, ... run: told apart without colour, too
    *((BLUE, "-", "o"), (ORANGE, "--", "s"), ("#2e8b57", ":", "^"), ("#8a4fbf", "-.", "D")),
    *((INK, "-", "x"), ("#b5302f", "--", "v"), (GREY, ":", "P"), ("#0f8b8d", "-.", "*")),
)
MOST_EPOCHS = 10**9  # of a line that a run has written
LARGEST = float(np.finfo(np.float32).max)  # value that is drawn: matplotlib cannot lay out an axis of larger ones
MOST_POINTS = 200  # of a line; more are averaged
SPREADS = f"({'|'.join(rewards.GROUP_FIGURES)}|std_error)$"  # names that are no reward's mean
# Of a line of metrics.jsonl: what it is of, when it was written (ISO 8601, UTC), and a sentence per alarm, a line each.
TEXTS = ("kind", "written_at", "alarms")


class Cell(NamedTuple):
    """What the .json beside a contact sheet says of one of its pictures."""

    caption: str
    reward: str
    box: list[int]  # left, top, right, bottom


class Cells(NamedTuple):
    """The .json beside a contact sheet."""

    cells: list[dict]  # of each picture the fields of Cell


class Sheet(NamedTuple):
    page: Image.Image
    cells: list[dict]  # of each picture its caption, its reward and its box


def read_metrics(run_dir) -> list[dict]:
    """The whole lines of metrics.jsonl: TEXTS are strings, everything else a number. Damaged lines are passed over."""
    path = Path(run_dir, "metrics.jsonl")
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # the last one was cut by a kill, or is empty
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return [record for record in map(_record, lines) if record is not None]


def _record(line: bytes) -> dict | None:
    try:
        stored = json.loads(line.decode())
        record = {name: _value(name, value) for name, value in stored.items()}
        return record if "kind" in record and 0 <= record["epoch"] <= MOST_EPOCHS else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _value(name: str, stored: Any) -> str | int | float:
    name.encode()  # a lone surrogate, which no file can hold, is a ValueError
    if name in TEXTS:
        if not isinstance(stored, str):
            raise TypeError(f"{name} is no text")
        stored.encode()
        return stored
    number = float(stored)  # of a whole number that is too large an OverflowError
    return stored if type(stored) is int else number


class Line(NamedTuple):
    """One curve of a panel."""

    label: str
    epochs: np.ndarray
    values: np.ndarray
    errors: np.ndarray  # standard errors; NaN where they are not known


def curve(records: list[dict], name: str, label: str, best_by: str = "") -> Line | None:
    """One metric over epochs, of all lines that have it; those of one epoch's updates lie side by side. `best_by` is
    config.eval.best_by, whose standard error evaluations and tests log."""
    kind, _, figure = name.partition("/")
    error_name = f"{kind}/std_error" if figure == best_by else ""
    points = [
        (line["epoch"], _drawn(line[name]), _drawn(line.get(error_name, math.nan))) for line in records if name in line
    ]
    count, seen, epochs = Counter(epoch for epoch, *_ in points), Counter(), []
    for epoch, *_ in points:
        epochs.append(epoch + seen[epoch] / count[epoch])
        seen[epoch] += 1
    return Line(label, np.array(epochs), *np.array([rest for _, *rest in points]).T) if points else None


def _drawn(value: float) -> float:
    """What a curve shows of a value: a gap, NaN, where it is too large for an axis."""
    return value if abs(value) <= LARGEST else math.nan


def plot_reward(records: list[dict], config: ConfigDict, file: Path) -> bool:
    """Draw a PNG, SVG or PDF with a panel per reward over epochs; False, and no file, if there is no reward yet."""
    logged = {name for record in records for name in record if name.startswith(("reward/", "eval/"))}
    names = {name.partition("/")[2] for name in logged if not re.search(SPREADS, name)}
    names = sorted(name for name in names if rewards.display_name(name, config.reward_fn) == name)
    if not names:
        return False
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4 * columns, 3 * rows), dpi=160)
        for position, name in enumerate(names):
            row, column = divmod(position, columns)
            place = (column + 0.16) / columns, (rows - row - 0.86) / rows, 0.81 / columns, 0.76 / rows
            axes = figure.add_axes(place)  # a layout engine takes half the time
            kinds, chosen = {"reward": "training", "eval": "evaluation", "test": "test"}, config.eval.best_by
            draw_lines(axes, [curve(records, f"{kind}/{name}", label, chosen) for kind, label in kinds.items()])
            axes.legend(frameon=False, fontsize=7, handlelength=3)
            axes.yaxis.get_offset_text().set(x=1, ha="right")  # out of the title's way
            axes.set_title(name, loc="left", fontweight="bold", color=INK)
        with folders.published(file) as scratch:
            figure.savefig(scratch, format=file.suffix.removeprefix("."))
    return True


def fit(picture: Image.Image) -> Image.Image:
    """Enlarge to 128 px or more by whole pixels, or shrink to 256 px or less."""
    side = max(picture.size)
    factor = math.ceil(128 / side) if side < 128 else min(1, 256 / side)
    resampling = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS
    return picture.resize([round(length * factor) for length in picture.size], resampling)


def contact_sheet(images: Tensor, captions: list[str], rewards: Iterable[float] | None = None) -> Sheet:
    """Images [N, 3, H, W] in [0, 1] in about twice as many columns as rows, caption and reward under each."""
    figures = [""] * len(captions) if rewards is None else [f"{float(reward):.3f}" for reward in rewards]
    pictures = [fit(picture) for picture in to_pictures(images)]
    cells = [(p, wrap(c, p.width), figure) for p, c, figure in zip(pictures, captions, figures, strict=True)]
    columns = math.ceil(math.sqrt(2 * len(cells)))
    page, boxes = draw_cells([cells[i : i + columns] for i in range(0, len(cells), columns)])
    return Sheet(page, [dict(caption=c, reward=f, box=box) for c, f, box in zip(captions, figures, boxes)])


def evaluations(run_dir) -> dict[int, Path]:
    """The sheets of images/, by the number of epochs before their evaluation, not what a user puts beside them."""
    sheets = sorted(Path(run_dir, "images").glob("eval_[0-9]*.png"))
    return {int(sheet.stem.removeprefix("eval_")): sheet for sheet in sheets if sheet.with_suffix(".json").exists()}


def panel_pictures(sheet: Path) -> list[tuple[Image.Image, str, str]]:
    """The pictures of a contact sheet with their captions and figures. Raises UserError for a damaged sheet."""
    try:
        page = pictures.upright(sheet)
    except pictures.Unreadable as error:
        raise UserError(f"{sheet} {error}") from error
    file = sheet.with_suffix(".json")
    parts = []
    for fields in folders.read_record(Cells, file).cells:
        cell = folders.record_of(Cell, fields, file)
        if not _is_in(page, cell.box):
            raise UserError(f"{file} is damaged: box is {quoted(cell.box)}, on a page of {page.width} x {page.height}")
        parts.append((page.crop(cell.box), cell.caption, cell.reward))
    return parts


def _is_in(page: Image.Image, box: list[int]) -> bool:
    if len(box) != 4:
        return False
    left, top, right, bottom = box
    return 0 <= left < right <= page.width and 0 <= top < bottom <= page.height


def plot_samples(run_dir, since: int = 0) -> None:
    """Draw samples.png: each prompt's image at the first and at the last evaluation, once there is one. Evaluations
    before epoch `since` were made in another way: they are left out, and a picture of them alone is removed."""
    file = Path(run_dir, "samples.png")
    sheets = {epochs: sheet for epochs, sheet in evaluations(run_dir).items() if epochs >= since}
    if not sheets:
        if since:
            file.unlink(missing_ok=True)
        return
    ends = min(sheets), max(sheets)
    pairs = zip(*(panel_pictures(sheets[epochs]) for epochs in ends))
    pairs = [pair for pair in pairs if pair[0][1] == pair[1][1]]
    prompts_per_row = 1 if len(pairs) <= 4 else 2
    titles = ["", *(f"after {epochs} epochs" for epochs in ends)]
    rows = [[(None, [title], "") for title in titles * prompts_per_row]]
    for i, pair in enumerate(pairs):
        rows += [[]] if i % prompts_per_row == 0 else []
        picture, caption, _ = pair[0]
        rows[-1] += [(None, wrap(caption, picture.width), ""), *((image, [], figure) for image, _, figure in pair)]
    page, _ = draw_cells(rows)
    with folders.published(file) as scratch:
        page.save(scratch, "png")


def wrap(text: str, width: int) -> list[str]:
    """Up to four lines that fit into `width` pixels."""
    return textwrap.wrap(str(text), int(width / FONT.getlength("e")), max_lines=4, placeholder=" ...")


def draw_cells(rows: list[list[tuple]]) -> tuple[Image.Image, list[tuple[int, int, int, int]]]:
    """Rows of (picture or None, lines of ink under it, one more line in blue) on a white page, and where pictures are:
    left, top, right, bottom of each."""
    gap, line = 14, 15
    width = max((picture.width for row in rows for picture, _, _ in row if picture), default=128)
    cell_heights = [[(p.height + 4 if p else 0) + line * (len(t) + bool(figure)) for p, t, figure in r] for r in rows]
    heights = [max(row) for row in cell_heights]
    size = gap + max(map(len, rows)) * (width + gap), gap + sum(heights) + gap * len(rows)
    page = Image.new("RGB", size, "white")
    draw, top, boxes = ImageDraw.Draw(page), gap, []
    for row, height in zip(rows, heights):
        for column, (picture, lines, figure) in enumerate(row):
            left, y = gap + column * (width + gap), top
            if picture:
                page.paste(picture, (left, top))
                boxes.append((left, top, left + picture.width, top + picture.height))
                y += picture.height + 4
            for text, colour in [*((text, INK) for text in lines), (figure, BLUE)]:
                draw.text((left, y), text, colour, FONT)
                y += line
        top += height + gap
    return page, boxes


def draw_lines(axes, lines: list[Line | None], limit: float | None = None) -> None:
    """Draw curves over epochs, with bands of a standard error. None keeps the next line's style its own.

    Args:
        limit: a level that is drawn across.
    """
    for line, (colour, dashes, marker) in zip(lines, LINES * len(lines)):
        if line is not None:
            epochs, values = thinned(line.epochs), thinned(line.values)
            style = dict(color=colour, marker=marker, markersize=4, markevery=-(-len(values) // 12))
            axes.plot(epochs, values, dashes, label=line.label, **style)
            errors = thinned(line.errors)
            axes.fill_between(epochs, values - errors, values + errors, color=colour, alpha=0.15, linewidth=0)
    if limit is not None:
        axes.axhline(limit, color=GREY, linewidth=0.8, linestyle=(0, (8, 4)))
    axes.set_xlabel("epoch", labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(color="#e8e8e8")
    axes.margins(x=0.04, y=0.12)


def svg_panel(lines: list[Line | None], limit: float | None = None) -> str:
    """The same as an <svg> element whose text is text."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6, 2.2))
        draw_lines(figure.add_axes((0.2, 0.17, 0.77, 0.72)), lines, limit)  # a layout engine takes half the page's time
        return _svg(figure)


def svg_key(number: int) -> str:
    """The line of the run of this number, for a key of the panels."""
    colour, dashes, marker = LINES[number % len(LINES)]
    figure = Figure(figsize=(0.5, 0.14))
    figure.add_artist(Line2D([0, 0.5, 1], [0.5] * 3, linestyle=dashes, marker=marker, markevery=[1], color=colour))
    return _svg(figure)


def _svg(figure: Figure) -> str:
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "none", "svg.hashsalt": "flow_grpo"}):
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return stream.getvalue()[stream.getvalue().index("<svg") :]


def thinned(values: np.ndarray) -> np.ndarray:
    """At most MOST_POINTS means of neighbours."""
    parts = np.array_split(values, min(len(values), MOST_POINTS))
    return np.array([part.mean() for part in parts])
