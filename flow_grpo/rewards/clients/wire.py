"""Images and scores on their way between a run and a reward server. Nothing here can run code that was sent.

A request is multipart: a part "request" with {"prompts": [...], "metadata": [...]}, and per image a part "images", PNG
or a lossless .npy of [3, H, W] float32 in [0, 1]. The answer is JSON, {"scores": {"score": [...], name: [...]}}.
"""

import io
import json
import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flow_grpo.base.pixels import to_uint8
from flow_grpo.base.quoting import in_one_line

LARGEST = torch.finfo(torch.float32).max  # of a score; beyond it a finite number in JSON would become infinite


class BadAnswer(RuntimeError):
    """What a server answered is no score per image."""


def pack_image(image: Tensor, form: str) -> bytes:
    """[3, H, W] in [0, 1] as a file; "npy" keeps every bit, "png" rounds to 8 of them."""
    buffer = io.BytesIO()
    if form == "npy":
        np.save(buffer, image.float().cpu().numpy(), allow_pickle=False)
    else:
        Image.fromarray(to_uint8(image)).save(buffer, "png", compress_level=1)
    return buffer.getvalue()


def image_size(data: bytes, max_side: int) -> tuple[int, int]:
    """Height and width of a file, of which only the header is read.

    Raises:
        ValueError: no image, or too large a side.
    """
    if data.startswith(b"\x93NUMPY"):
        return _array_shape(io.BytesIO(data), max_side)[1:]
    return _picture(data, max_side).size[::-1]


def unpack_image(data: bytes, max_side: int) -> Tensor:
    """A file, whatever its name, as [3, H, W] float32 in [0, 1]. No torch operation is used: the server's other threads
    have more torch threads than one that decodes.

    Raises:
        ValueError: no image, too large a side, or values outside [0, 1].
    """
    if data.startswith(b"\x93NUMPY"):
        return _unpack_array(data, max_side)
    try:
        pixels = np.array(_picture(data, max_side).convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"no image: {error}") from error
    return torch.from_numpy(pixels / np.float32(255)).permute(2, 0, 1)


def _picture(data: bytes, max_side: int) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no image: {error}") from error
    if max(picture.size) > max_side:
        raise ValueError(f"an image of {picture.size} pixels; at most {max_side} a side")
    return picture


def _array_shape(buffer: io.BytesIO, max_side: int) -> tuple[int, int, int]:
    version = np.lib.format.read_magic(buffer)
    if version != (1, 0):
        raise ValueError(f"an .npy file of version {version}; only 1.0 is read")
    shape, in_columns, dtype = np.lib.format.read_array_header_1_0(buffer)
    is_image = len(shape) == 3 and shape[0] == 3 and 0 < min(shape) <= max(shape) <= max_side
    if dtype != np.float32 or in_columns or not is_image:
        raise ValueError(f"an array {shape} of {dtype}; it must be (3, H, W) of float32, at most {max_side} a side")
    return shape


def _unpack_array(data: bytes, max_side: int) -> Tensor:
    buffer = io.BytesIO(data)
    shape = _array_shape(buffer, max_side)
    values = data[buffer.tell() :]
    if len(values) != 4 * math.prod(shape):
        raise ValueError(f"an array {shape} with {len(values)} bytes")
    image = np.frombuffer(bytearray(values), dtype=np.float32).reshape(shape)
    if not 0 <= image.min() <= image.max() <= 1:  # NaN is in no order
        raise ValueError("an image with values outside [0, 1]")
    return torch.from_numpy(image)


def read_scores(body: bytes, count: int, bounds: tuple[float, float] = (-math.inf, math.inf)) -> dict[str, Tensor]:
    """The JSON {"scores": {...}} as name -> [count] float32.

    Raises:
        BadAnswer: not one finite number within `bounds` ("score" alone has some) for each of `count` images.
    """
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise BadAnswer(f"no JSON but {body[:80]!r}") from error
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, dict) or "score" not in scores:
        raise BadAnswer(f'no {{"scores": {{"score": [...]}}}} but {str(answer)[:80]!r}')
    return {
        name: check_numbers(name, values, count, bounds if name == "score" else None) for name, values in scores.items()
    }


def check_numbers(name: str, values: Any, count: int, bounds: tuple[float, float] | None = None) -> Tensor:
    """A list of `count` finite numbers within `bounds` as a float32 tensor. Raises BadAnswer."""
    name = in_one_line(name, 80)
    if not isinstance(values, list) or len(values) != count:
        received = f"{len(values)} values" if isinstance(values, list) else str(values)[:80]
        raise BadAnswer(f"{name}: {received} for {count} images")
    low, high = bounds or (-math.inf, math.inf)
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
        if not number or not low <= value <= high:
            raise BadAnswer(f"{name}: {str(value)[:80]!r}, not a finite number in [{low}, {high}]")
    return torch.tensor(values, dtype=torch.float32)
