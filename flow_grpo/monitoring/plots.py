"""Pictures of a run, drawn from its folder alone: reward.png, samples.png and the contact sheets of images/."""

import io
import itertools
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.base import folders, pictures
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.base.pixels import to_pictures
from flow_grpo.settings.sections import Config

STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#777777"}
# A name from outside is no TeX.
STYLE |= {"text.parse_math": False}
BLUE = "#2f6db5"
ORANGE = "#e07b28"
INK = "#222222"
GREY = "#777777"
FONT = ImageFont.load_default(12)
# Pixels: between tiles and at the page's edge, of a line of text, and between a picture and its text.
GAP = 14
LINE_HEIGHT = 15
PICTURE_MARGIN = 4


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
# Kinds of figures of a reward, and their labels.
KINDS = {"reward": "training", "eval": "evaluation", "test": "test"}
# Names that are no reward's mean.
SPREADS = f"({'|'.join(rewards.GROUP_FIGURES)}|std_error)$"
# Texts in a line of metrics.jsonl: kind, time of writing (ISO 8601, UTC), and a sentence per alarm, a line each.
TEXTS = ("kind", "written_at", "alarms")


class Cell(NamedTuple):
    """Entry of the .json beside a contact sheet, about one of its pictures."""

    caption: str
    reward: str
    box: list[int]  # left, top, right, bottom


class Cells(NamedTuple):
    """The .json beside a contact sheet."""

    cells: list[dict]  # of each picture the fields of Cell


class Sheet(NamedTuple):
    """Contact sheet, not written yet."""

    page: Image.Image
    cells: list[Cell]


class Panel(NamedTuple):
    """Picture of a contact sheet."""

    picture: Image.Image
    caption: str
    reward: str


class Tile(NamedTuple):
    """Part of a page: a picture or none, with text under it."""

    picture: Image.Image | None
    lines: list[str]  # in black
    figure: str = ""  # one more line, in blue

    @property
    def height(self) -> int:
        """Height in pixels."""
        height = LINE_HEIGHT * len(self.lines)
        if self.figure:
            height += LINE_HEIGHT
        if self.picture:
            height += self.picture.height + PICTURE_MARGIN
        return height


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
    return list(filter(None, map(_record, lines)))


def _record(line: bytes) -> dict | None:
    """Return the record in a line; None if it is none that a run has written."""
    try:
        stored = json.loads(line.decode())
        record: dict[str, Any] = {name: _value(name, value) for name, value in stored.items()}
        return record if "kind" in record and 0 <= record["epoch"] <= MOST_EPOCHS else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _value(name: str, stored: Any) -> str | int | float:
    # A lone surrogate, which no file can hold, raises ValueError; a whole number that is too large, OverflowError.
    name.encode()
    if name in TEXTS:
        if not isinstance(stored, str):
            raise TypeError(f"{name} is no text")
        stored.encode()
        return stored
    number = float(stored)
    return stored if type(stored) is int else number


class Line(NamedTuple):
    """Curve of a panel."""

    label: str
    epochs: np.ndarray
    values: np.ndarray
    errors: np.ndarray  # standard errors; NaN where they are not known


def curve(records: Sequence[dict], name: str, label: str, best_by: str = "") -> Line | None:
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


def _drawn(value: float) -> float:
    """Return a value as a curve shows it: a gap, NaN, where it is too large for an axis."""
    return value if abs(value) <= LARGEST else math.nan


def plot_reward(records: Sequence[dict], config: Config, file: Path) -> bool:
    """Draw a PNG, SVG or PDF with a panel per reward over epochs; False, and no file, if there is no reward yet."""
    names = _reward_names(records, config)
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
            lines = [curve(records, f"{kind}/{name}", label, config.eval.best_by) for kind, label in KINDS.items()]
            draw_lines(axes, lines)
            axes.legend(frameon=False, fontsize=7, handlelength=3)
            # The axis' power of ten would stand in the title's way.
            axes.yaxis.get_offset_text().set(x=1, ha="right")
            axes.set_title(name, loc="left", fontweight="bold", color=INK)
        with folders.published(file) as scratch:
            figure.savefig(scratch, format=file.suffix.removeprefix("."))
    return True


def _reward_names(records: Sequence[dict], config: Config) -> list[str]:
    """Return the names of the logged rewards, without spreads and without a weighted sum of one reward."""
    names = set()
    for key in set().union(*records):
        kind, _, name = key.partition("/")
        is_mean = kind in ("reward", "eval") and name and not re.search(SPREADS, name)
        if is_mean and rewards.display_name(name, config.reward_fn) == name:
            names.add(name)
    return sorted(names)


def fit(picture: Image.Image) -> Image.Image:
    """Enlarge to 128 px or more by whole pixels, or shrink to 256 px or less."""
    side = max(picture.size)
    resampling = Image.Resampling.NEAREST
    factor: float = math.ceil(128 / side)
    if side > 256:
        resampling = Image.Resampling.LANCZOS
        factor = 256 / side
    return picture.resize((round(picture.width * factor), round(picture.height * factor)), resampling)


def contact_sheet(images: Tensor, captions: Sequence[str], scores: Iterable[float] | None = None) -> Sheet:
    """Draw images [N, 3, H, W] in [0, 1] in about twice as many columns as rows, caption and score under each."""
    figures = [""] * len(captions)
    if scores is not None:
        figures = [f"{float(score):.3f}" for score in scores]
    tiles = []
    for image, caption, figure in zip(to_pictures(images), captions, figures, strict=True):
        picture = fit(image)
        tiles.append(Tile(picture, wrap(caption, picture.width), figure))
    page, boxes = draw_tiles(tiles, columns=math.ceil(math.sqrt(2 * len(tiles))))
    return Sheet(page, list(map(Cell, captions, figures, boxes)))


def evaluations(run_dir: Path | str) -> dict[int, Path]:
    """Return the contact sheets of images/, by the number of epochs before their evaluation."""
    sheets = {}
    for sheet in sorted(Path(run_dir, "images").glob("eval_[0-9]*.png")):
        # A user may put other pictures beside them.
        if sheet.with_suffix(".json").exists():
            sheets[int(sheet.stem.removeprefix("eval_"))] = sheet
    return sheets


def panel_pictures(sheet: Path) -> list[Panel]:
    """Return the pictures of a contact sheet. Raises UserError for a damaged sheet."""
    try:
        page = pictures.upright(sheet)
    except pictures.Unreadable as error:
        raise UserError(f"{sheet} {error}") from error
    file = sheet.with_suffix(".json")
    panels = []
    for fields in folders.read_record(Cells, file).cells:
        cell = folders.record_of(Cell, fields, file)
        if not _is_in(page, cell.box):
            raise UserError(f"{file} is damaged: box is {quoted(cell.box)}, on a page of {page.width} x {page.height}")
        left, top, right, bottom = cell.box
        panels.append(Panel(page.crop((left, top, right, bottom)), cell.caption, cell.reward))
    return panels


def _is_in(page: Image.Image, box: list[int]) -> bool:
    if len(box) != 4:
        return False
    left, top, right, bottom = box
    return 0 <= left < right <= page.width and 0 <= top < bottom <= page.height


def plot_samples(run_dir: Path | str, since: int = 0) -> None:
    """Draw samples.png: each prompt's image at the first and at the last evaluation, once there is one.

    Evaluations before epoch `since` were made in another way: they are left out, and a picture of them alone goes.
    """
    file = Path(run_dir, "samples.png")
    sheets = {epochs: sheet for epochs, sheet in evaluations(run_dir).items() if epochs >= since}
    if not sheets:
        if since:
            file.unlink(missing_ok=True)
        return
    first = min(sheets)
    last = max(sheets)
    # Each prompt has three tiles: its text and two pictures.
    tiles = []
    for before, after in zip(panel_pictures(sheets[first]), panel_pictures(sheets[last])):
        if before.caption == after.caption:
            tiles.append(Tile(None, wrap(before.caption, before.picture.width)))
            tiles.append(Tile(before.picture, [], before.reward))
            tiles.append(Tile(after.picture, [], after.reward))
    titles = [Tile(None, [""]), Tile(None, [f"after {first} epochs"]), Tile(None, [f"after {last} epochs"])]
    prompts_per_row = 1 if len(tiles) <= 3 * 4 else 2
    page, _ = draw_tiles(titles * prompts_per_row + tiles, columns=3 * prompts_per_row)
    with folders.published(file) as scratch:
        page.save(scratch, "png")


def wrap(text: str, width: int) -> list[str]:
    """Break a text into up to four lines that fit into `width` pixels."""
    return textwrap.wrap(str(text), int(width / FONT.getlength("e")), max_lines=4, placeholder=" ...")


def draw_tiles(tiles: Sequence[Tile], columns: int) -> tuple[Image.Image, list[list[int]]]:
    """Draw tiles row by row on a white page. Returns it, and left, top, right, bottom of each picture."""
    columns = min(columns, len(tiles))
    rows = [tiles[i : i + columns] for i in range(0, len(tiles), columns)]
    width = max((tile.picture.width for tile in tiles if tile.picture), default=128)
    heights = []
    for row in rows:
        heights.append(max(tile.height for tile in row))
    page = Image.new("RGB", (GAP + columns * (width + GAP), GAP + sum(heights) + GAP * len(rows)), "white")
    boxes = []
    top = GAP
    for row, height in zip(rows, heights):
        for column, tile in enumerate(row):
            left = GAP + column * (width + GAP)
            if tile.picture:
                boxes.append([left, top, left + tile.picture.width, top + tile.picture.height])
            _draw_tile(page, tile, left, top)
        top += height + GAP
    return page, boxes


def _draw_tile(page: Image.Image, tile: Tile, left: int, top: int) -> None:
    if tile.picture:
        page.paste(tile.picture, (left, top))
        top += tile.picture.height + PICTURE_MARGIN
    draw = ImageDraw.Draw(page)
    for line in tile.lines:
        draw.text((left, top), line, INK, FONT)
        top += LINE_HEIGHT
    draw.text((left, top), tile.figure, BLUE, FONT)


def draw_lines(axes: Axes, lines: Sequence[Line | None], limit: float | None = None) -> None:
    """Draw curves over epochs, with bands of a standard error. None leaves out a style, so that a run keeps its own.

    Args:
        limit: a level that is drawn across.
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
    axes.set_xlabel("epoch", labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(color="#e8e8e8")
    axes.margins(x=0.04, y=0.12)


def svg_panel(lines: Sequence[Line | None], limit: float | None = None) -> str:
    """Return what `draw_lines` draws as an <svg> element whose text is text."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6, 2.2))
        # A layout engine would take half the page's time.
        axes = figure.add_axes((0.2, 0.17, 0.77, 0.72))
        draw_lines(axes, lines, limit)
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
    return np.array(list(map(np.mean, parts)))
