"""Picture files from outside, opened upright, in RGB with 8 bits a channel, or refused in one sentence."""

import io
from functools import cache
from pathlib import Path
from typing import cast

from PIL import Image, ImageOps

from flow_grpo.base import folders
from flow_grpo.base.formatting import in_one_line

PictureSource = Path | bytes | Image.Image
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # Pillow's modes of grey
MOST_IN_16_BITS = 2**16 - 1
FLOATS = "F"  # Pillow's mode
ORIENTATION = 0x0112  # EXIF's tag
LYING = range(5, 9)  # values of ORIENTATION that turn a picture by 90 degrees
ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}  # in the last bytes of a whole file
TAIL_BYTES = 32


class Unreadable(ValueError):
    """Reason why a file, or some bytes, are no picture that can be read; the end of a sentence."""


def upright(source: PictureSource) -> Image.Image:
    """Return a picture as it is to be seen, in RGB. Raise Unreadable.

    It is turned as its EXIF data say. Only the first frame of an animation counts, and a transparent picture lies on
    white.
    """
    picture = _opened(source)
    try:
        return _as_rgb(ImageOps.exif_transpose(picture))
    except Unreadable:
        raise
    except Exception as error:  # each of Pillow's formats has errors of its own
        raise Unreadable(f"cannot be read: {in_one_line(error)}") from error


@cache
def upright_size(path: Path) -> tuple[int, int]:
    """Return width and height of a picture, upright. Raise Unreadable, also for a file that was cut short.

    Only the two ends of a whole file are read.
    """
    picture = _opened(path)
    try:
        is_lying = picture.getexif().get(ORIENTATION) in LYING
        # Something may be appended to a whole file. Decoding all of it tells.
        if not _has_its_end(path, picture.format):
            picture.load()
    except Exception as error:
        raise Unreadable(f"cannot be read: {in_one_line(error)}") from error
    width, height = picture.size
    if is_lying:
        return height, width
    return width, height


def _opened(source: PictureSource) -> Image.Image:
    """Open a picture without reading its pixels. Raise Unreadable."""
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, Path):
        problem = folders.file_problem(source)
        if problem:
            raise Unreadable(problem)
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except Image.UnidentifiedImageError as error:
        raise Unreadable("is no picture of a format that Pillow reads") from error
    except Exception as error:
        raise Unreadable(f"cannot be read: {in_one_line(error)}") from error


def _has_its_end(path: Path, kind: str | None) -> bool:
    """Return whether a file ends as whole files of its format do."""
    with path.open("rb") as file:
        num_bytes = file.seek(0, io.SEEK_END)
        file.seek(max(0, num_bytes - TAIL_BYTES))
        tail = file.read()
    return kind in ENDS and ENDS[kind] in tail


def _as_rgb(picture: Image.Image) -> Image.Image:
    """Return a picture in RGB. Raise Unreadable if nothing says which value is white."""
    if picture.mode == FLOATS:
        raise Unreadable("holds floats, and nothing says which of them is white; save it with 8 or 16 bits a channel")
    # Pillow would turn each value above 255 to white.
    if picture.mode in SIXTEEN_BITS:
        return _to_8_bits(picture).convert("RGB")
    if picture.has_transparency_data:
        over_white = Image.new("RGBA", picture.size, "white")
        over_white.alpha_composite(picture.convert("RGBA"))
        return over_white.convert("RGB")
    return picture.convert("RGB")


def _to_8_bits(picture: Image.Image) -> Image.Image:
    """Return a grey picture of 16 bits with 8 bits. Raise Unreadable for values of more bits."""
    grey = picture.convert("I")
    # Of one band it is a pair of numbers.
    lowest, highest = cast(tuple[int, int], grey.getextrema())
    if lowest < 0 or highest > MOST_IN_16_BITS:
        raise Unreadable(f"holds values from {lowest} to {highest}; save it with 8 or 16 bits a channel")
    # 65535 = 255 * 257.
    lookup_table = [round(value / 257) for value in range(MOST_IN_16_BITS + 1)]
    return grey.point(lookup_table, "L")
