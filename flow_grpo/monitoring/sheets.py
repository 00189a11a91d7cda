"""Sheets of a run's images: the contact sheets of images/ and samples.png, drawn from its folder alone."""

import math
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flow_grpo.base import folders, pictures
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, quoted
from flow_grpo.base.pixels import film_strips, motion, to_pictures

INK = "#222222"
BLUE = "#2f6db5"
FONT = ImageFont.load_default(12)
# Pixels: between tiles and at the page's edge, of a line of text, and between a picture and its text.
GAP = 14
LINE_HEIGHT = 15
PICTURE_MARGIN = 4
# Sheets of images that compete, which epochs with an evaluation draw.
GROUP_SHEETS = ("branches", "groups")


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


def fit(picture: Image.Image) -> Image.Image:
    """Enlarge to 128 px or more by whole pixels, or shrink to 256 px or less; what is longer than twice its other side,
    such as a film strip, is measured by twice that side."""
    side = min(max(picture.size), 2 * min(picture.size))
    if side > 256:
        factor = 256 / side
        resampling = Image.Resampling.LANCZOS
    else:
        factor = math.ceil(128 / side)
        resampling = Image.Resampling.NEAREST
    size = (round(picture.width * factor), round(picture.height * factor))
    return picture.resize(size, resampling)


def contact_sheet(images: Tensor, captions: Sequence[str], scores: Iterable[float] | None = None) -> Sheet:
    """Draw images [N, 3, H, W] in [0, 1], or film strips of videos [N, f, 3, H, W], in about twice as many columns as
    rows, caption and score under each."""
    figures = [""] * len(captions)
    if scores is not None:
        figures = [f"{float(score):.3f}" for score in scores]
    strips = film_strips(images)
    tiles = []
    for image, caption, figure in zip(to_pictures(strips), captions, figures, strict=True):
        picture = fit(image)
        tiles.append(Tile(picture, wrap(caption, picture.width), figure))
    # A film strip takes the place of its frames.
    frames_per_tile = strips.shape[-1] // images.shape[-1]
    columns = math.ceil(math.sqrt(2 * len(tiles) / frames_per_tile))
    page, boxes = draw_tiles(tiles, columns)
    return Sheet(page, list(map(Cell, captions, figures, boxes)))


def write_animation(
    videos: Tensor, captions: Sequence[str], scores: Iterable[float] | None, file: Path, quality: int = 80
) -> None:
    """Write a contact sheet whose pictures move, of videos [N, f, 3, H, W] in [0, 1], as an animated WebP."""
    figures = None if scores is None else [float(score) for score in scores]
    pages = [contact_sheet(images, captions, figures).page for images in videos.unbind(1)]
    with folders.published(file) as scratch:
        pages[0].save(scratch, "webp", quality=quality, **motion(pages))


class GroupRow(NamedTuple):
    """Row of a sheet of images that compete."""

    title: list[str]  # lines of text in its first column
    pictures: list[Image.Image]
    scores: list[float]  # of each picture; NaN where a reward failed


def group_sheet(rows: Sequence[GroupRow]) -> Image.Image:
    """Draw a row for each group: its title, then its pictures with their scores, the best and the worst marked."""
    columns = 1 + max(len(row.pictures) for row in rows)
    tiles = []
    for row in rows:
        width = fit(row.pictures[0]).width
        title = []
        for text in row.title:
            title += wrap(text, width)
        tiles.append(Tile(None, title))
        for picture, score in zip(row.pictures, row.scores, strict=True):
            tiles.append(Tile(fit(picture), [], f"{score:.3f}{mark(score, row.scores)}"))
        # A row with fewer pictures than another one ends with empty tiles.
        num_missing = columns - 1 - len(row.pictures)
        tiles += [Tile(None, [])] * num_missing
    page, _ = draw_tiles(tiles, columns)
    return page


def mark(score: float, scores: Sequence[float]) -> str:
    """Return what is written after a score that is its group's best or worst."""
    finite_scores = [other for other in scores if math.isfinite(other)]
    if len(set(finite_scores)) < 2:
        return ""
    if score == max(finite_scores):
        return " best"
    if score == min(finite_scores):
        return " worst"
    return ""


def evaluations(run_dir: Path | str) -> dict[int, Path]:
    """Return the contact sheets of images/, by the number of epochs before their evaluation."""
    sheets = {}
    for epochs, sheet in _numbered(run_dir, "eval", ".png").items():
        if sheet.with_suffix(".json").exists():
            sheets[epochs] = sheet
    return sheets


def _numbered(run_dir: Path | str, name: str, ending: str) -> dict[int, Path]:
    """Return what images/ has of NAME_NUMBER and an ending, by the number, in order. A user may put other pictures
    beside."""
    numbered = {}
    for path in sorted(Path(run_dir, "images").glob(f"{name}_[0-9]*{ending}")):
        number = path.name.removeprefix(f"{name}_").removesuffix(ending)
        if number.isdecimal():
            numbered[int(number)] = path
    return numbered


def animation_of(sheet: Path) -> Path:
    """Return the place of the moving sheet beside a contact sheet, where an evaluation drew videos."""
    return sheet.with_suffix(".webp")


def saved_images(run_dir: Path | str) -> dict[int, Path]:
    """Return the folders of images/ that eval.save_images fills, by the number of epochs before their evaluation."""
    filled = {}
    for epochs, path in _numbered(run_dir, "eval", "").items():
        if path.is_dir():
            filled[epochs] = path
    return filled


def group_sheets(run_dir: Path | str, name: str) -> dict[int, Path]:
    """Return the sheets of images/ that have a name of GROUP_SHEETS, by the number of epochs before the one that they
    show."""
    return _numbered(run_dir, name, ".png")


def forget(run_dir: Path, epoch: int, keeps_evaluation: bool) -> None:
    """Remove the images of what a run that goes on after `epoch` epochs makes anew.

    Args:
        keeps_evaluation: whether the evaluation after these epochs stays.
    """
    first_evaluation = epoch + 1 if keeps_evaluation else epoch
    for epochs, sheet in evaluations(run_dir).items():
        if epochs >= first_evaluation:
            sheet.unlink()
            animation_of(sheet).unlink(missing_ok=True)
    for epochs, folder in saved_images(run_dir).items():
        if epochs >= first_evaluation:
            shutil.rmtree(folder)
    for name in GROUP_SHEETS:
        for epochs, sheet in group_sheets(run_dir, name).items():
            if epochs >= epoch:
                sheet.unlink()


def opened(sheet: Path) -> Image.Image:
    """Read a sheet. Raises UserError for a damaged one."""
    try:
        return pictures.upright(sheet)
    except pictures.Unreadable as error:
        raise UserError(f"{sheet} {error}") from error


def panel_pictures(sheet: Path) -> list[Panel]:
    """Return the pictures of a contact sheet. Raises UserError for a damaged sheet."""
    page = opened(sheet)
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
    titles = [Tile(None, [""])]
    for epoch in (first, last):
        titles.append(Tile(None, [f"after {counted(epoch, 'epochs')}"]))
    prompts_per_row = 1 if len(tiles) <= 3 * 4 else 2
    page, _ = draw_tiles(titles * prompts_per_row + tiles, columns=3 * prompts_per_row)
    with folders.published(file) as scratch:
        page.save(scratch, "png")


def wrap(text: str, width: int) -> list[str]:
    """Break a text into up to four lines that fit into `width` pixels."""
    letters_per_line = int(width / FONT.getlength("e"))
    return textwrap.wrap(str(text), letters_per_line, max_lines=4, placeholder=" ...")


def draw_tiles(tiles: Sequence[Tile], columns: int) -> tuple[Image.Image, list[list[int]]]:
    """Draw tiles row by row on a white page. Returns it, and left, top, right, bottom of each picture."""
    columns = min(columns, len(tiles))
    rows = [tiles[i : i + columns] for i in range(0, len(tiles), columns)]
    width = max((tile.picture.width for tile in tiles if tile.picture), default=128)
    heights = []
    for row in rows:
        heights.append(max(tile.height for tile in row))
    page_width = GAP + columns * (width + GAP)
    page_height = GAP + sum(heights) + GAP * len(rows)
    page = Image.new("RGB", (page_width, page_height), "white")
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
    """Draw a picture and the text under it. `left` and `top` are its corner on the page, in pixels."""
    if tile.picture:
        page.paste(tile.picture, (left, top))
        top += tile.picture.height + PICTURE_MARGIN
    draw = ImageDraw.Draw(page)
    for line in tile.lines:
        draw.text((left, top), line, INK, FONT)
        top += LINE_HEIGHT
    draw.text((left, top), tile.figure, BLUE, FONT)
