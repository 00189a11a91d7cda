"""Pictures of a run, drawn from its folder alone: reward.png, samples.png and the contact sheets of images/."""

import io
import json
import math
import textwrap
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from flow_grpo.base.errors import UserError

STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#777777"}
BLUE, ORANGE, INK, GREY = "#2f6db5", "#e07b28", "#222222", "#777777"
FONT = ImageFont.load_default(12)


class Sheet(NamedTuple):
    """Pictures on a page."""

    page: Image.Image
    boxes: list[tuple[int, int, int, int]]  # left, top, right, bottom of each picture


def read_metrics(run_dir) -> list[dict]:
    """The whole lines of metrics.jsonl: `kind` a string, everything else a number. Damaged lines are passed over."""
    return [record for record in map(_record, _lines(run_dir)) if record is not None]


def damaged_lines(run_dir) -> list[int]:
    """Numbers of the whole lines of metrics.jsonl that no run has written."""
    return [number for number, line in enumerate(_lines(run_dir), start=1) if _record(line) is None]


def _lines(run_dir) -> list[bytes]:
    path = Path(run_dir, "metrics.jsonl")
    try:
        return path.read_bytes().split(b"\n")[:-1]  # the last one was cut by a kill, or is empty
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _record(line: bytes) -> dict | None:
    try:
        stored = json.loads(line.decode())
        record = {name: value if name == "kind" else float(value) for name, value in stored.items()}
        whole = {name: value for name, value in stored.items() if type(value) is int}
        return record | whole if isinstance(record["kind"], str) and math.isfinite(record["epoch"]) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def plot_reward(run_dir) -> Path | None:
    """Draw reward.png from metrics.jsonl, a panel per reward over epochs. None if there is no reward yet."""
    records = read_metrics(run_dir)
    training = {name[7:] for record in records for name in record if name.startswith("reward/")}
    training = {name for name in training if not name.endswith(("group_std", "zero_std_share"))}
    evaluated = {name[5:] for record in records for name in record if name.startswith("eval/")} - {"std_error"}
    names = sorted(training | evaluated)
    epochs = [record for record in records if "reward/avg" in record]
    if any(all(r["reward/avg"] == r.get(f"reward/{name}") for r in epochs) for name in training - {"avg"}):
        names.remove("avg")  # it says what the only reward says
    if not names:
        return None
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    with matplotlib.rc_context(STYLE):
        width, height = 0.4 + 4 * columns, 3.3 * rows
        figure = Figure(figsize=(width, height), dpi=160)
        margins = dict(left=0.65 / width, right=1 - 0.5 / width, bottom=0.55 / height, top=1 - 0.75 / height)
        figure.subplots_adjust(**margins, wspace=0.3, hspace=0.55)  # a layout engine would draw all of it twice
        first = None
        for position, name in enumerate(names, start=1):
            axes = figure.add_subplot(rows, columns, position, sharex=first)
            draw_reward(axes, records, name)
            first = first or axes
        figure.savefig(Path(run_dir, "reward.png"))
    return Path(run_dir, "reward.png")


def draw_reward(axes, records: list[dict], name: str) -> None:
    """One reward's panel: each epoch faint, their moving average, evaluations, tests; images so far on the top axis."""
    epochs, values = curve(records, "epoch", f"reward/{name}")
    if len(epochs):
        width = 2 * (len(values) // 30) + 1
        window, present = np.ones(width), np.ones(len(values))
        smooth = np.convolve(values, window, "same") / np.convolve(present, window, "same")
        axes.plot(epochs, values, color=BLUE, alpha=0.3, linewidth=0.8)
        axes.plot(epochs, smooth, color=BLUE, linewidth=1.8, label="training")
    epochs, values = curve(records, "eval", f"eval/{name}")
    if len(epochs):
        axes.plot(epochs, values, color=ORANGE, linewidth=1.8, marker="o", markersize=4, label="evaluation")
        axes.annotate(f"{values[-1]:.3g}", (epochs[-1], values[-1]), (4, 5), textcoords="offset points", color=ORANGE)
    epochs, values = curve(records, "test", f"test/{name}")
    if len(epochs):
        axes.plot(epochs, values, color=INK, linestyle="none", marker="x", markersize=5, label="test")
    axes.set_title(name, loc="left", fontweight="bold", color=INK, y=1.0, pad=32)  # room for the upper axis
    axes.set(xlabel="epoch", ylabel="mean reward")
    axes.xaxis.set_label_coords(0.5, -0.14)  # else all tick labels are laid out once more to see where there is room
    axes.yaxis.set_label_coords(-0.155, 0.5)
    axes.margins(x=0.08, y=0.1)
    axes.locator_params(nbins=5)
    axes.grid(color="#e8e8e8")
    axes.legend(frameon=False, labelcolor=INK)
    epochs, images = curve(records, "epoch", "images")
    if len(epochs):
        per_epoch = images[-1] / (epochs[-1] + 1) / 1000
        above = axes.secondary_xaxis("top", functions=(lambda x: x * per_epoch, lambda x: x / per_epoch))
        above.set_xlabel("thousand images", color=GREY)
        above.xaxis.set_label_coords(0.5, 1.13, transform=axes.transAxes)
        above.locator_params(axis="x", nbins=5)
        above.tick_params(colors=GREY, length=2)
        above.spines["top"].set_visible(False)


def curve(records: list[dict], kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Epochs and values of one metric in the lines of one kind."""
    points = [(record["epoch"], record[name]) for record in records if record["kind"] == kind and name in record]
    return tuple(np.array(points, dtype=float).reshape(-1, 2).T)


def fit(picture: Image.Image) -> Image.Image:
    """Enlarge to 128 px or more by whole pixels, or shrink to 256 px or less."""
    side = max(picture.size)
    factor = math.ceil(128 / side) if side < 128 else min(1, 256 / side)
    resampling = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS
    return picture.resize([round(length * factor) for length in picture.size], resampling)


def contact_sheet(pictures: list[Image.Image], captions: list[str], figures: list[str]) -> Sheet:
    """The pictures in about twice as many columns as rows, caption and figure under each."""
    cells = [(p, wrap(c, p.width), figure) for p, c, figure in zip(pictures, captions, figures, strict=True)]
    columns = math.ceil(math.sqrt(2 * len(cells)))
    return draw_cells([cells[i : i + columns] for i in range(0, len(cells), columns)])


def keep_panel(run_dir, pictures: list[Image.Image], captions, rewards, epoch: int) -> None:
    """Keep an evaluation's pictures as images/last.npz, and as images/first.npz unless an earlier one is there."""
    folder = Path(run_dir, "images")
    panel = dict(pixels=np.stack(pictures), captions=np.array(captions), rewards=np.array(rewards), epoch=epoch)
    first = read_panel(folder / "first.npz")
    earlier = first is not None and first["epoch"] < epoch
    for name in ["last"] if earlier else ["last", "first"]:
        np.savez_compressed(folder / "scratch.npz", **panel)
        (folder / "scratch.npz").replace(folder / f"{name}.npz")  # a kill must not leave half a panel


def read_panel(path: Path) -> dict[str, np.ndarray] | None:
    """What `keep_panel` kept; None if it is not there, or damaged."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in ("pixels", "captions", "rewards", "epoch")}
    except (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return None


def plot_samples(run_dir) -> Path | None:
    """Draw samples.png: each prompt's image at the first and at the last evaluation. None before there is one."""
    panels = [read_panel(Path(run_dir, "images", f"{name}.npz")) for name in ("first", "last")]
    if None in panels:
        return None
    same = [i for i, (a, b) in enumerate(zip(panels[0]["captions"], panels[1]["captions"])) if a == b]
    prompts_per_row = 1 if len(same) <= 4 else 2
    titles = ["", *(f"after {panel['epoch']} epochs" for panel in panels)]
    rows = [[(None, [title], "") for title in titles * prompts_per_row]]
    for i, index in enumerate(same):
        pair = [(Image.fromarray(p["pixels"][index]), [], f"{p['rewards'][index]:.3f}") for p in panels]
        rows += [[]] if i % prompts_per_row == 0 else []
        rows[-1] += [(None, wrap(panels[0]["captions"][index], pair[0][0].width), ""), *pair]
    draw_cells(rows).page.save(Path(run_dir, "samples.png"))
    return Path(run_dir, "samples.png")


def wrap(text: str, width: int) -> list[str]:
    """Up to four lines that fit into `width` pixels."""
    return textwrap.wrap(str(text), int(width / FONT.getlength("e")), max_lines=4, placeholder=" ...")


def draw_cells(rows: list[list[tuple]]) -> Sheet:
    """Draw rows of (picture or None, lines of ink under it, one more line in blue) on a white page."""
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
    return Sheet(page, boxes)


class Line(NamedTuple):
    """One run's curve of a panel."""

    label: str
    epochs: np.ndarray
    values: np.ndarray


LINES = (  # colour, dashes and marker of the first, the second, ... run: told apart without colour, too
    *((BLUE, "-", "o"), (ORANGE, "--", "s"), ("#2e8b57", ":", "^"), ("#8a4fbf", "-.", "D")),
    *((INK, "-", "x"), ("#b5302f", "--", "v"), (GREY, ":", "P"), ("#0f8b8d", "-.", "*")),
)
MOST_POINTS = 200  # of a line; more are averaged


def svg_panel(lines: list[Line | None], limit: float | None = None) -> str:
    """Curves over epochs as an <svg> element whose text is text. None keeps the next line's style its own.

    Args:
        limit: a level that is drawn across.
    """
    settings = STYLE | {"svg.fonttype": "none", "svg.hashsalt": "flow_grpo"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(3.6, 2.2))
        axes = figure.add_axes((0.15, 0.17, 0.82, 0.78))
        for line, (colour, dashes, marker) in zip(lines, LINES * len(lines)):
            if line is not None:
                epochs, values = thinned(line.epochs), thinned(line.values)
                every = -(-len(values) // 12)
                axes.plot(
                    epochs, values, dashes, color=colour, marker=marker, markersize=4, markevery=every, label=line.label
                )
        if limit is not None:
            axes.axhline(limit, color=GREY, linewidth=0.8, linestyle=(0, (8, 4)))
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=7, handlelength=3)
        axes.set_xlabel("epoch", labelpad=1)
        axes.grid(color="#e8e8e8")
        axes.margins(x=0.04, y=0.12)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return stream.getvalue()[stream.getvalue().index("<svg") :]


def thinned(values: np.ndarray) -> np.ndarray:
    """At most MOST_POINTS means of neighbours."""
    parts = np.array_split(values, min(len(values), MOST_POINTS))
    return np.array([part.mean() for part in parts])


def panel_pictures(sheet: Path) -> list[tuple[Image.Image, str, str]]:
    """The pictures of a contact sheet with their captions and figures; of older runs the sheet itself."""
    page, notes = Image.open(sheet).convert("RGB"), sheet.with_suffix(".json")
    if not notes.exists():
        return [(page, "", "")]
    cells = json.loads(notes.read_text())["cells"]
    return [(page.crop(cell["box"]), cell["caption"], cell["reward"]) for cell in cells]
