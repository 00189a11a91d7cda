"""Pairs of image files that someone has compared: pairs.jsonl with a folder of images, or Pick-a-Pic's parquet files.

A row is a dict with "prompt", "winner" and "loser" (bytes or path of an image), and "winner_score" and "loser_score"
where they are known, and "sources" (paths) where the images are edits.
"""

from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from flow_grpo.base import pictures
from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import from_picture
from flow_grpo.base.quoting import quoted
from flow_grpo.data.preferences import open_parquet, read_columns
from flow_grpo.data.prompt_files import parse_line, read_lines
from flow_grpo.data.prompts import source_paths
from flow_grpo.diffusers_patch.size import Size

PICK_A_PIC = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")
BYTES, TEXT = ("binary", "large_binary"), ("string", "large_string")  # types of parquet's columns
NUMBERS = ("double", "float", "halffloat", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
NO_PREFERENCE = "no preference"  # the one reason to drop a pair that is no fault of its source


class Dropped(Exception):
    """A pair that cannot be used, and why."""


def open_rows(folder: str):
    """The rows of `folder`, with len() and slices. Raises UserError: there are none, or pairs.jsonl is malformed; names
    file and line, or the missing columns."""
    listed, files = Path(folder, "pairs.jsonl"), sorted(Path(folder).glob("*.parquet"))
    rows = read_jsonl(listed) if listed.is_file() else PickAPic(files)
    if not len(rows):
        raise UserError(f"--source {quoted(folder)}: no row in a pairs.jsonl or *.parquet there")
    return rows


def read_jsonl(path: Path) -> list[dict]:
    """An object a line, whose "winner" and "loser" are paths beside `path`."""
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        row = parse_line(line, f"{path}, line {number}")
        try:
            scores = [row.get(f"{side}_score") for side in ("winner", "loser")]
            if not all(score is None or isinstance(score, int | float) for score in scores):
                raise TypeError("a score is no number")
            sides = {side: path.parent / row[side] for side in ("winner", "loser")}
            rows.append(row | sides | {"prompt": str(row["prompt"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            needs = 'needs an object with "prompt", "winner" and "loser", and numbers for scores'
            raise UserError(f"{path}, line {number}: {needs}, has {quoted(line)}") from error
        rows[-1]["sources"] = source_paths(row, f"{path}, line {number}", path.parent)
    return rows


class PickAPic:
    """Parquet files with PICK_A_PIC's columns; a slice reads the row groups that it meets."""

    def __init__(self, paths: list[Path]):
        self.groups = []  # (path, file, its row group, rows)
        for path in paths:
            file = open_parquet(path)
            if missing := set(PICK_A_PIC) - set(file.schema_arrow.names):
                raise UserError(f"{path} has no columns {sorted(missing)}, as Pick-a-Pic's files have")
            check_types(path, file.schema_arrow)
            groups = range(file.num_row_groups)
            self.groups += [(path, file, group, file.metadata.row_group(group).num_rows) for group in groups]

    def __len__(self) -> int:
        return sum(count for *_, count in self.groups)

    def __getitem__(self, rows: slice) -> list[dict]:
        labelled, first = [], 0
        for path, file, group, count in self.groups:
            inside = slice(max(rows.start - first, 0), min(rows.stop - first, count))
            if inside.start < inside.stop:
                table = read_columns(path, file, list(PICK_A_PIC), group)
                labelled += [by_label(row) for row in table[inside].to_pylist()]
            first += count
        return labelled


def check_types(path: Path, schema) -> None:
    """Raise UserError for a column of PICK_A_PIC that holds neither what Pick-a-Pic stores nor what `datasets` makes
    of it: images as bytes or as {bytes, path}, labels as numbers or as text."""
    for name in PICK_A_PIC:
        kind = str(schema.field(name).type)
        if name.startswith("jpg"):
            has_bytes = kind.startswith("struct<") and "bytes:" in kind
            fits, wanted = kind in BYTES or has_bytes, "images as bytes, or as {bytes, path}"
        elif name.startswith("label"):
            fits, wanted = kind in (*NUMBERS, *TEXT), "numbers"
        else:
            fits, wanted = kind in TEXT, "text"
        if not fits and kind != "null":
            raise UserError(f"{path}, column {name!r} holds {kind}, not {wanted}")


def label_of(value) -> float:
    """Return a label as a number; NaN, which is higher than nothing, for text that is none, such as "tie"."""
    try:
        return float(value or 0.0)
    except ValueError:
        return float("nan")


def by_label(row: dict) -> dict:
    """The image with the higher label wins."""
    labels = [label_of(row[f"label_{side}"]) for side in (0, 1)]
    winner = int(labels[1] > labels[0])
    images = dict(winner=row[f"jpg_{winner}"], loser=row[f"jpg_{1 - winner}"])
    return dict(prompt=row["caption"] or "", **images, winner_score=labels[winner], loser_score=labels[1 - winner])


def load_pair(row: dict, size: Size) -> tuple[Tensor, Tensor]:
    """Winner and loser, [3, height, width] float32 in [0, 1] each. Raises Dropped."""
    if not row["prompt"].strip():
        raise Dropped("empty prompt")
    scores = row.get("winner_score"), row.get("loser_score")
    if None not in scores and not scores[0] > scores[1]:
        raise Dropped(NO_PREFERENCE)
    pair = load_image(row["winner"], size), load_image(row["loser"], size)
    if torch.equal(*pair):
        raise Dropped("winner and loser are one image")
    return pair


def load_image(stored: bytes | Path | dict | None, size: Size) -> Tensor:
    """Upright, resized, and cropped at the centre to the size's aspect; a dict is an image as `datasets` stores it.
    Raises Dropped."""
    if isinstance(stored, dict):
        stored = stored.get("bytes")
    if not stored:
        raise Dropped("unreadable image")
    try:
        picture = pictures.upright(stored)
    except pictures.Unreadable as error:
        raise Dropped("unreadable image") from error
    picture = ImageOps.fit(picture, (size.width, size.height), Image.Resampling.LANCZOS)
    return from_picture(picture)
