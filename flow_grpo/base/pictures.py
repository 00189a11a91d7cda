"""Picture files of other people: upright, RGB, 8 bits a channel, or one sentence that says why not."""

import io
from functools import cache
from pathlib import Path

from PIL import Image, ImageOps

from flow_grpo.base import folders
from flow_grpo.base.formatting import in_one_line

Source = Path | bytes | Image.Image
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # Pillow's modes of grey
MOST_IN_16_BITS = 2**16 - 1
FLOATS = "F"
ORIENTATION = 0x0112  # EXIF's tag
TURNED = range(5, 9)  # its values of pictures that lie on a side
ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}  # in the last bytes of a whole file
TAIL_BYTES = 32


class Unreadable(ValueError):
    """Why a file, or some bytes, are no picture that can be read; one sentence's end."""


def upright(source: Source) -> Image.Image:
    """Return a picture as it is to be seen, in RGB: turned as its EXIF data say, its first frame where it moves, over
    white where it is transparent. Raises Unreadable."""
    picture = _opened(source)
    try:
        return _as_rgb(ImageOps.exif_transpose(picture))
    except Unreadable:
        raise
    except Exception as error:  # each of Pillow's formats has errors of its own
        raise Unreadable(f"cannot be read: {in_one_line(error)}") from error


@cache
def size_of(path: Path) -> tuple[int, int]:
    """Return width and height of a picture, upright. Raises Unreadable, also for a file that was cut short. Reads no
    more than the two ends of a file that has both."""
    picture = _opened(path)
    try:
        turned = picture.getexif().get(ORIENTATION) in TURNED
        if not _has_its_end(path, picture.format):
            picture.load()
    except Exception as error:
        raise Unreadable(f"cannot be read: {in_one_line(error)}") from error
    return picture.size[::-1] if turned else picture.size


def _opened(source: Source) -> Image.Image:
    """Open a picture, whose pixels are not read yet. Raises Unreadable."""
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, Path) and (problem := folders.file_problem(source)):
        raise Unreadable(problem)
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except Image.UnidentifiedImageError as error:
        raise Unreadable("is no picture of a format that Pillow reads") from error
    except Exception as error:
        raise Unreadable(f"cannot be read: {in_one_line(error)}") from error


def _has_its_end(path: Path, kind: str | None) -> bool:
    """Whether a file ends as whole files of its format do. Where it does not, something may be appended."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return kind in ENDS and ENDS[kind] in file.read()


def _as_rgb(picture: Image.Image) -> Image.Image:
    """Return a picture in RGB. Raises Unreadable where nobody can say which value is white."""
    if picture.mode == FLOATS:
        raise Unreadable("holds floats, whose white nobody knows; save it with 8 or 16 bits a channel")
    if picture.mode in SIXTEEN_BITS:  # Pillow would cut each value above 255 to white
        return _of_16_bits(picture).convert("RGB")
    if picture.has_transparency_data:
        over_white = Image.new("RGBA", picture.size, "white")
        over_white.alpha_composite(picture.convert("RGBA"))
        return over_white.convert("RGB")
    return picture.convert("RGB")


def _of_16_bits(picture: Image.Image) -> Image.Image:
    """Return a grey picture with 8 bits instead of 16. Raises Unreadable for values of more bits."""
    grey = picture.convert("I")
    lowest, highest = grey.getextrema()
    if lowest < 0 or highest > MOST_IN_16_BITS:
        raise Unreadable(f"holds values from {lowest} to {highest}; save it with 8 or 16 bits a channel")
    return grey.point([round(value / 257) for value in range(MOST_IN_16_BITS + 1)], "L")
