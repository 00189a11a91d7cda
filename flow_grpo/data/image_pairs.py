"""Pairs of image files that someone has compared: pairs.jsonl with a folder of images, or Pick-a-Pic's parquet files.

A row of either is a dict with "prompt", "winner" and "loser" (bytes or path of an image), with "winner_score" and
"loser_score" where they are known, and with "sources" (paths) where the images are edits.
"""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flow_grpo.base import folders, pictures
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, in_one_line, quoted
from flow_grpo.base.pixels import from_picture
from flow_grpo.base.prompt import is_blank
from flow_grpo.data.parquet import RowGroup, open_parquet, read_columns, row_groups
from flow_grpo.data.prompt_files import parse_line, read_lines
from flow_grpo.data.prompts import source_paths
from flow_grpo.diffusers_patch.size import Size

# macOS lays a hidden ._NAME beside each file on another system's disk.
PARQUET = "[!.]*.parquet"
PICK_A_PIC = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")
SIDES = ("winner", "loser")
IMAGES = ("jpg_0", "jpg_1")
LABELS = ("label_0", "label_1")
# Types of parquet's columns.
BYTES = ("binary", "large_binary")
TEXT = ("string", "large_string")
NUMBERS = ("double", "float", "halffloat", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
NO_PREFERENCE = "no preference"  # the one reason to drop a pair that is no fault of its source
NUM_OPENED = 8  # pairs whose images are opened before anything is loaded
FORMS = "docs/algorithms/dpo.md says what they hold"


class Dropped(Exception):
    """A pair that cannot be used, and why."""


def open_rows(source: str) -> "list[dict[str, Any]] | PickAPic":
    """Open the pairs of a folder, which have len() and slices. Raises UserError: there are none, pairs.jsonl is
    malformed, columns are not Pick-a-Pic's, no image can be read, or no pair has a preference; names the file, and its
    line or column."""
    folder = Path(source)
    _check_folder(folder, f"--source {quoted(source)}")
    # A link whose file is gone is refused by its name, not passed over.
    jsonl = folder / "pairs.jsonl"
    if os.path.lexists(jsonl):
        rows = read_jsonl(jsonl)
        if not rows:
            raise UserError(f"{jsonl} has no line")
        _check_jsonl_rows(rows, jsonl)
        return rows
    pick_a_pic = PickAPic(sorted(folder.glob(PARQUET)))
    if not len(pick_a_pic):
        raise UserError(f"--source {quoted(source)}: its *.parquet have no row")
    _check_pick_a_pic(pick_a_pic)
    return pick_a_pic


def _check_folder(folder: Path, name: str) -> None:
    """Raise UserError for what is no folder, or one without a file of pairs."""
    try:
        files = sorted(path.name for path in folder.iterdir())
        has_parquet = any(folder.glob(PARQUET))
        folders_below = sorted({path.parent.name for path in folder.glob(f"*/{PARQUET}")})
    except OSError as error:
        raise UserError(
            f"{name} is no folder ({error.strerror}): it names one with pairs.jsonl or *.parquet; {FORMS}"
        ) from error
    if "pairs.jsonl" in files or has_parquet:
        return
    hint = f"; its folder {folders_below[0]} has *.parquet" if folders_below else ""
    raise UserError(f"{name} has neither pairs.jsonl nor *.parquet, but {quoted(files)}{hint}; {FORMS}")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read an object from each line, whose "winner" and "loser" are paths relative to the file's folder."""
    folders.check_file(path)
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        place = f"{path}, line {number}"
        row = parse_line(line, place)
        try:
            row = _with_paths(row, path.parent)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            needs = 'needs an object with texts for "prompt", "winner" and "loser", and numbers for scores'
            raise UserError(f"{place}: {needs}, has {quoted(line)}") from error
        row["sources"] = source_paths(row, place, path.parent)
        rows.append(row)
    return rows


def _with_paths(stored: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a line's object with paths of its images. Raises AttributeError, KeyError or TypeError for anything but
    what a line needs."""
    row = dict(stored)
    for side in SIDES:
        if not isinstance(stored.get(f"{side}_score"), int | float | None):
            raise TypeError("a score is no number")
        row[side] = folder / stored[side]
    if not isinstance(stored["prompt"], str):
        raise TypeError("a prompt is no text")
    return row


def _check_jsonl_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Raise UserError where no line has a higher score of the winner, or none of those that are opened is usable."""
    if not any(has_preference(row) for row in rows):
        first = rows[0]
        raise UserError(
            f"{path}: in no line winner_score is above loser_score; the first has {quoted(first['winner_score'])} and "
            f"{quoted(first['loser_score'])}"
        )
    # NUM_OPENED of them at equal distances: lines are often sorted by where they come from.
    step = -(-len(rows) // NUM_OPENED)
    opened = {}
    for number in range(0, len(rows), step):
        opened[f"{path}, line {number + 1}"] = rows[number]
    _check_usable(opened, "prompt", SIDES)


class PickAPic:
    """Parquet files with PICK_A_PIC's columns; a slice reads the row groups that it meets."""

    def __init__(self, paths: list[Path]):
        self.row_groups: list[RowGroup] = []
        for path in paths:
            file = open_parquet(path)
            check_columns(path, file.schema_arrow)
            self.row_groups += [group for group in row_groups(path, file) if group.num_rows]

    def __len__(self) -> int:
        return sum(group.num_rows for group in self.row_groups)

    def __getitem__(self, rows: slice) -> list[dict[str, Any]]:
        return [by_label(row) for row in self.read_stored(rows)]

    def read_stored(self, rows: slice, columns: tuple[str, ...] = PICK_A_PIC) -> list[dict[str, Any]]:
        """Read rows as they are stored, but for images, which are their bytes or a path."""
        stored = []
        first = 0
        for group in self.row_groups:
            start = max(rows.start - first, 0)
            stop = min(rows.stop - first, group.num_rows)
            if start < stop:
                table = read_columns(group.path, group.file, list(columns), group.number)
                for row in table[start:stop].to_pylist():
                    stored.append(_with_images(row, group.path.parent))
            first += group.num_rows
        return stored

    def has_labels_apart(self) -> bool:
        """Return whether a row's labels differ. Reads a row group at a time, up to the first such row."""
        first = 0
        for group in self.row_groups:
            for row in self.read_stored(slice(first, first + group.num_rows), LABELS):
                first_label, second_label = labels_of(row)
                # NaN, a label that is no number, is neither above nor below the other one.
                if first_label > second_label or second_label > first_label:
                    return True
            first += group.num_rows
        return False


def check_columns(path: Path, schema: pa.Schema) -> None:
    """Raise UserError for a file without PICK_A_PIC's columns, or where one holds neither what Pick-a-Pic stores nor
    what `datasets` makes of it."""
    missing = [name for name in PICK_A_PIC if schema.names.count(name) != 1]
    if missing:
        raise UserError(
            f"{path} has no column {', '.join(missing)}, as Pick-a-Pic's files have, but {quoted(schema.names)}: "
            f"rename its columns, or write a pairs.jsonl; {FORMS}"
        )
    for name in PICK_A_PIC:
        kind = str(schema.field(name).type).removeprefix("dictionary<values=").partition(", indices=")[0]
        if name in IMAGES:
            has_image = kind.startswith("struct<") and ("bytes:" in kind or "path:" in kind)
            fits = kind in (*BYTES, *TEXT) or has_image
            wanted = "images as bytes, as {bytes, path}, or as paths"
        elif name in LABELS:
            fits = kind in (*NUMBERS, *TEXT) or kind.startswith("decimal")
            wanted = "numbers"
        else:
            fits = kind in TEXT
            wanted = "text"
        # A column without a value in any row has the type null; its rows are dropped one by one.
        if not fits and kind != "null":
            raise UserError(f"{path}, column {name!r} holds {in_one_line(kind, 100)}, not {wanted}")


def _check_pick_a_pic(rows: PickAPic) -> None:
    """Raise UserError where no row has a higher label, or none of the first ones is usable."""
    group = rows.row_groups[0]
    if not rows.has_labels_apart():
        (first,) = rows.read_stored(slice(0, 1), LABELS)
        raise UserError(
            f"{group.path}, columns 'label_0' and 'label_1': in no row one is a higher number; the first has "
            f"{quoted(first['label_0'])} and {quoted(first['label_1'])}"
        )
    stored = rows.read_stored(slice(0, min(NUM_OPENED, group.num_rows)))
    opened = {}
    for number, row in enumerate(stored):
        opened[f"{group.path}, row {number}"] = row
    _check_usable(opened, "caption", IMAGES)


def _check_usable(rows: dict[str, dict[str, Any]], prompt: str, images: tuple[str, str]) -> None:
    """Raise UserError where none of these rows can be used.

    Args:
        rows: by file and line, for messages.
        prompt, images: names of their columns.
    """
    first_problem = ""
    for place, row in rows.items():
        problem = _problem_of_row(row, prompt, images)
        if not problem:
            return
        first_problem = first_problem or f"{place}, {problem}"
    raise UserError(f"{first_problem}; none of {counted(len(rows), 'pairs')} that were opened can be used")


def _problem_of_row(row: dict[str, Any], prompt: str, images: tuple[str, str]) -> str:
    """Return the column of a row that cannot be used, and why, "" for none."""
    for name in images:
        problem = image_problem(row[name])
        if problem:
            return f"{name!r}: {problem}"
    first, second = (pictures.upright(row[name]) for name in images)
    if first == second:
        return f"{images[0]!r} and {images[1]!r} are one image"
    if is_blank(row[prompt] or ""):
        return f"{prompt!r}: the prompt is empty"
    return ""


def image_problem(image: bytes | Path | None) -> str:
    """Return why an image cannot be read, "" where it can."""
    if not image:
        return "there is no image"
    try:
        pictures.upright(image)
    except pictures.Unreadable as error:
        name = f"file {quoted(str(image))}" if isinstance(image, Path) else "image"
        return f"the {name} {error}"
    return ""


def _with_images(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row whose images are bytes, paths, or None."""
    row = dict(row)
    for name in IMAGES:
        image = row.get(name)
        # `datasets` stores {bytes, path}.
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        if isinstance(image, str) and image:
            image = folder / image
        row[name] = image or None
    return row


def label_of(value: Any) -> float:
    """Return a label as a number; NaN, which is higher than nothing, for text that is none, such as "tie"."""
    try:
        return float(value or 0.0)
    except ValueError:
        return float("nan")


def labels_of(row: dict[str, Any]) -> tuple[float, float]:
    """Return both labels of a stored row."""
    return label_of(row["label_0"]), label_of(row["label_1"])


def by_label(row: dict[str, Any]) -> dict[str, Any]:
    """Return a pair whose winner is the image with the higher label."""
    labels = labels_of(row)
    # Equal labels, and one that is no number, leave the order as it is; `has_preference` drops such a pair.
    winner = int(labels[1] > labels[0])
    loser = 1 - winner
    return {
        "prompt": row["caption"] or "",
        "winner": row[IMAGES[winner]],
        "loser": row[IMAGES[loser]],
        "winner_score": labels[winner],
        "loser_score": labels[loser],
    }


def has_preference(row: dict[str, Any]) -> bool:
    """Return whether the winner is the better one, as far as scores are known."""
    winner_score = row.get("winner_score")
    loser_score = row.get("loser_score")
    return winner_score is None or loser_score is None or winner_score > loser_score


def load_pair(row: dict[str, Any], size: Size) -> tuple[Tensor, Tensor]:
    """Return winner and loser, [3, height, width] float32 in [0, 1] each. Raises Dropped."""
    if is_blank(row["prompt"]):
        raise Dropped("empty prompt")
    if not has_preference(row):
        raise Dropped(NO_PREFERENCE)
    winner = load_image(row["winner"], size)
    loser = load_image(row["loser"], size)
    if torch.equal(winner, loser):
        raise Dropped("winner and loser are one image")
    return winner, loser


def load_image(stored: bytes | Path | None, size: Size) -> Tensor:
    """Load an image upright, resized, and cropped at the centre to the size's aspect. Raises Dropped."""
    if not stored:
        raise Dropped("unreadable image")
    try:
        picture = pictures.upright(stored)
    except pictures.Unreadable as error:
        raise Dropped("unreadable image") from error
    picture = ImageOps.fit(picture, (size.width, size.height), Image.Resampling.LANCZOS)
    return from_picture(picture)
