"""Pairs of image files that someone has compared: pairs.jsonl with a folder of images, or Pick-a-Pic's parquet files.

A row is a dict with "prompt", "winner" and "loser" (bytes or path of an image), and "winner_score" and "loser_score"
where they are known, and "sources" (paths) where the images are edits.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from flow_grpo.base import folders, pictures
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.base.pixels import from_picture
from flow_grpo.data.parquet import open_parquet, read_columns
from flow_grpo.data.prompt_files import parse_line, read_lines
from flow_grpo.data.prompts import source_paths
from flow_grpo.diffusers_patch.size import Size

PICK_A_PIC = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")
SIDES, IMAGES, LABELS = ("winner", "loser"), ("jpg_0", "jpg_1"), ("label_0", "label_1")
BYTES, TEXT = ("binary", "large_binary"), ("string", "large_string")  # types of parquet's columns
NUMBERS = ("double", "float", "halffloat", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
NO_PREFERENCE = "no preference"  # the one reason to drop a pair that is no fault of its source
NUM_OPENED = 8  # pairs whose images are opened before anything is loaded
FORMS = "docs/algorithms/dpo.md says what they hold"


class Dropped(Exception):
    """A pair that cannot be used, and why."""


def open_rows(source: str):
    """The rows of a folder, with len() and slices. Raises UserError: there are none, pairs.jsonl is malformed, columns
    are not Pick-a-Pic's, no image can be read, or no pair has a preference; names the file, and its line or column."""
    folder = Path(source)
    _check_folder(folder, f"--source {quoted(source)}")
    listed = folder / "pairs.jsonl"
    if os.path.lexists(listed):
        rows = read_jsonl(listed)
        if not rows:
            raise UserError(f"{listed} has no line")
        _check_lines(rows, listed)
        return rows
    rows = PickAPic(sorted(folder.glob("*.parquet")))
    if not len(rows):
        raise UserError(f"--source {quoted(source)}: its *.parquet have no row")
    _check_rows(rows)
    return rows


def _check_folder(folder: Path, name: str) -> None:
    """Raises UserError for what is no folder, or one without a file of pairs."""
    try:
        inside = sorted(path.name for path in folder.iterdir())
        deeper = sorted({path.parent.name for path in folder.glob("*/*.parquet")})
    except OSError as error:
        raise UserError(
            f"{name} is no folder ({error.strerror}): it names one with pairs.jsonl or *.parquet; {FORMS}"
        ) from error
    if "pairs.jsonl" in inside or any(file.endswith(".parquet") for file in inside):
        return
    hint = f"; its folder {deeper[0]} has *.parquet" if deeper else ""
    raise UserError(f"{name} has neither pairs.jsonl nor *.parquet, but {quoted(inside)}{hint}; {FORMS}")


def read_jsonl(path: Path) -> list[dict]:
    """An object a line, whose "winner" and "loser" are paths beside `path`."""
    if problem := folders.file_problem(path):
        raise UserError(f"{path} {problem}")
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        row = parse_line(line, f"{path}, line {number}")
        try:
            scores = [row.get(f"{side}_score") for side in SIDES]
            if not all(score is None or isinstance(score, int | float) for score in scores):
                raise TypeError("a score is no number")
            if not isinstance(row["prompt"], str):
                raise TypeError("a prompt is no text")
            rows.append(row | {side: path.parent / row[side] for side in SIDES})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            needs = 'needs an object with texts for "prompt", "winner" and "loser", and numbers for scores'
            raise UserError(f"{path}, line {number}: {needs}, has {quoted(line)}") from error
        rows[-1]["sources"] = source_paths(row, f"{path}, line {number}", path.parent)
    return rows


def _check_lines(rows: list[dict], path: Path) -> None:
    """Raises UserError where no line has a higher score of the winner, or none of some can be used."""
    if not any(has_preference(row) for row in rows):
        scores = [rows[0][f"{side}_score"] for side in SIDES]
        raise UserError(
            f"{path}: in no line winner_score is above loser_score; the first has {quoted(scores[0])} and "
            f"{quoted(scores[1])}"
        )
    chosen = range(0, len(rows), -(-len(rows) // NUM_OPENED))
    _check_first([(f"{path}, line {number + 1}", rows[number]) for number in chosen], "prompt", SIDES)


class PickAPic:
    """Parquet files with PICK_A_PIC's columns; a slice reads the row groups that it meets."""

    def __init__(self, paths: list[Path]):
        self.groups = []  # (path, file, its row group, rows)
        for path in paths:
            file = open_parquet(path)
            check_columns(path, file.schema_arrow)
            groups = range(file.num_row_groups)
            self.groups += [(path, file, group, file.metadata.row_group(group).num_rows) for group in groups]

    def __len__(self) -> int:
        return sum(count for *_, count in self.groups)

    def __getitem__(self, rows: slice) -> list[dict]:
        return [by_label(row) for row in self.read(rows)]

    def read(self, rows: slice, columns: tuple[str, ...] = PICK_A_PIC) -> list[dict]:
        """Rows as they are stored, but for images, which are their bytes or a path."""
        read, first = [], 0
        for path, file, group, count in self.groups:
            inside = slice(max(rows.start - first, 0), min(rows.stop - first, count))
            if inside.start < inside.stop:
                stored = read_columns(path, file, list(columns), group)[inside].to_pylist()
                read += [_with_images(row, path.parent) for row in stored]
            first += count
        return read


def check_columns(path: Path, schema) -> None:
    """Raise UserError for a file without PICK_A_PIC's columns, or where one holds neither what Pick-a-Pic stores nor
    what `datasets` makes of it."""
    if missing := [name for name in PICK_A_PIC if schema.names.count(name) != 1]:
        raise UserError(
            f"{path} has no column {', '.join(missing)}, as Pick-a-Pic's files have, but {quoted(schema.names)}: "
            f"rename its columns, or write a pairs.jsonl; {FORMS}"
        )
    for name in PICK_A_PIC:
        kind = str(schema.field(name).type).removeprefix("dictionary<values=").partition(", indices=")[0]
        if name in IMAGES:
            has_image = kind.startswith("struct<") and ("bytes:" in kind or "path:" in kind)
            fits, wanted = kind in (*BYTES, *TEXT) or has_image, "images as bytes, as {bytes, path}, or as paths"
        elif name in LABELS:
            fits, wanted = kind in (*NUMBERS, *TEXT) or kind.startswith("decimal"), "numbers"
        else:
            fits, wanted = kind in TEXT, "text"
        if not fits and kind != "null":
            raise UserError(f"{path}, column {name!r} holds {in_one_line(kind, 100)}, not {wanted}")


def _check_rows(rows: PickAPic) -> None:
    """Raises UserError where no row has a higher label, or none of the first can be used."""
    path, _, _, count = next(group for group in rows.groups if group[-1])
    if not any(labels[0] > labels[1] or labels[1] > labels[0] for labels in _labels(rows)):
        (first,) = rows.read(slice(0, 1), LABELS)
        labels = [quoted(first[name]) for name in LABELS]
        raise UserError(
            f"{path}, columns 'label_0' and 'label_1': in no row one is a higher number; the first has "
            f"{labels[0]} and {labels[1]}"
        )
    first = rows.read(slice(0, min(NUM_OPENED, count)))
    _check_first([(f"{path}, row {number}", row) for number, row in enumerate(first)], "caption", IMAGES)


def _labels(rows: PickAPic) -> Iterator[list[float]]:
    """Both labels of each row, read a row group at a time."""
    first = 0
    for *_, count in rows.groups:
        for row in rows.read(slice(first, first + count), LABELS):
            yield [label_of(row[name]) for name in LABELS]
        first += count


def _check_first(rows: list[tuple[str, dict]], prompt: str, images: tuple[str, str]) -> None:
    """Raises UserError where none of some rows can be used.

    Args:
        rows: each with its file and line, for messages.
        prompt, images: names of their columns.
    """
    problems = []
    for place, row in rows:
        found = {name: image_problem(row[name]) for name in images}
        found[prompt] = "" if (row[prompt] or "").strip() else "the prompt is empty"
        if not any(found.values()):
            return
        problems += [f"{place}, {name!r}: {problem}" for name, problem in found.items() if problem]
    raise UserError(f"{problems[0]}; none of {len(rows)} pairs that were opened can be used")


def image_problem(image: bytes | Path | None) -> str:
    """Why an image cannot be read, "" where it can."""
    if not image:
        return "there is no image"
    try:
        pictures.upright(image)
    except pictures.Unreadable as error:
        return f"the file {quoted(str(image))} {error}" if isinstance(image, Path) else f"the image {error}"
    return ""


def _with_images(row: dict, folder: Path) -> dict:
    """A row whose images are bytes, paths, or None; `datasets` stores {bytes, path}."""
    images = {}
    for name in IMAGES:
        image = row.get(name)
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        images[name] = folder / image if isinstance(image, str) and image else image or None
    return row | images


def label_of(value) -> float:
    """Return a label as a number; NaN, which is higher than nothing, for text that is none, such as "tie"."""
    try:
        return float(value or 0.0)
    except ValueError:
        return float("nan")


def by_label(row: dict) -> dict:
    """The image with the higher label wins."""
    labels = [label_of(row[name]) for name in LABELS]
    better = int(labels[1] > labels[0])
    images = dict(winner=row[IMAGES[better]], loser=row[IMAGES[1 - better]])
    return dict(prompt=row["caption"] or "", **images, winner_score=labels[better], loser_score=labels[1 - better])


def has_preference(row: dict) -> bool:
    """Whether the winner is the better one, as far as scores are known."""
    scores = [row.get(f"{side}_score") for side in SIDES]
    return None in scores or scores[0] > scores[1]


def load_pair(row: dict, size: Size) -> tuple[Tensor, Tensor]:
    """Winner and loser, [3, height, width] float32 in [0, 1] each. Raises Dropped."""
    if not row["prompt"].strip():
        raise Dropped("empty prompt")
    if not has_preference(row):
        raise Dropped(NO_PREFERENCE)
    pair = load_image(row["winner"], size), load_image(row["loser"], size)
    if torch.equal(*pair):
        raise Dropped("winner and loser are one image")
    return pair


def load_image(stored: bytes | Path | None, size: Size) -> Tensor:
    """Upright, resized, and cropped at the centre to the size's aspect. Raises Dropped."""
    if not stored:
        raise Dropped("unreadable image")
    try:
        picture = pictures.upright(stored)
    except pictures.Unreadable as error:
        raise Dropped("unreadable image") from error
    picture = ImageOps.fit(picture, (size.width, size.height), Image.Resampling.LANCZOS)
    return from_picture(picture)
