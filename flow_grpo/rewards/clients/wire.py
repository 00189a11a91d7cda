"""Wire format of images and scores between a run and a reward server. Nothing here can run code that was sent.

A request is multipart: a part "request" with {"prompts": [...], "metadata": [...]}, and for each image a part "images",
an .npy file of [3, H, W] float32 in [0, 1], or for each video one of [f, 3, H, W] if the server's GET /health answers
with {"takes": "videos"}: others are sent some frames of a video as images. If prompts edit images, "request" also has
{"sources": [[0], [0], [1]]}: the numbers of the parts "sources", .npy files too, that each prompt edits. The answer is
JSON, {"scores": {"score": [...], name: [...]}}, with null for an image that has no score, and "error" may say why.
"""

import io
import json
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flow_grpo.base.formatting import quoted
from flow_grpo.base.pixels import to_uint8
from flow_grpo.rewards.clients.client import ServerError, excerpt

MAX_SIDE = 2**15  # pixels; a JPEG has at most 65,500


def pack_image(image: Tensor, form: str) -> bytes:
    """Return [3, H, W] in [0, 1] as a file, or [f, 3, H, W] as "npy"; that keeps every bit, "png" and "jpeg" round to 8
    bits."""
    buffer = io.BytesIO()
    if form == "npy":
        np.save(buffer, image.float().cpu().numpy(), allow_pickle=False)
    else:
        Image.fromarray(to_uint8(image)).save(buffer, form, compress_level=1)
    return buffer.getvalue()


def unpack_image(data: bytes, videos: bool = False) -> Tensor:
    """Return an .npy file as [3, H, W] float32 in [0, 1], or as [f, 3, H, W] where it may hold a video.

    No torch operation is used: those of a decoding thread would take the torch threads of the one that scores. Raise
    ValueError for another file, another array, or values outside [0, 1].
    """
    buffer = io.BytesIO(data)
    version = np.lib.format.read_magic(buffer)
    if version != (1, 0):
        raise ValueError(f"an .npy file of version {version}; only 1.0 is read")
    try:
        shape, in_columns, dtype = np.lib.format.read_array_header_1_0(buffer)
    # numpy parses the header as Python, which can raise anything.
    except Exception as error:
        raise ValueError(f"an .npy file without a header: {type(error).__name__}") from error
    values = data[buffer.tell() :]
    is_float32 = dtype == np.float32 and not in_columns
    is_image = len(shape) == 3 or (videos and len(shape) == 4)
    if not is_float32 or not is_image or shape[-3] != 3 or len(values) != 4 * math.prod(shape):
        allowed = "(3, H, W) or (f, 3, H, W)" if videos else "(3, H, W)"
        raise ValueError(f"an array {shape} of {dtype} in {len(values)} bytes; it must be {allowed} of float32")
    if max(shape[-2:]) > MAX_SIDE:
        raise ValueError(f"an image of {shape[-2]} x {shape[-1]} pixels; a side has at most {MAX_SIDE}")
    # A bytearray can be written to, as torch asks for.
    image = np.frombuffer(bytearray(values), dtype=np.float32).reshape(shape)
    # NaN fails every comparison.
    if not 0 <= image.min() <= image.max() <= 1:
        raise ValueError("an image with values outside [0, 1]")
    return torch.from_numpy(image)


class Answer(NamedTuple):
    """Answer of a server, unchecked."""

    scores: dict[str, list]  # by name
    error: Any  # why an image has no score; None where the server does not say


def parse_answer(body: bytes) -> Answer:
    """Return a JSON answer with scores. Raise ServerError for another answer."""
    try:
        fields = json.loads(body)
        return Answer(fields["scores"], fields.get("error"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ServerError(f'no JSON with "scores" but {quoted(excerpt(body))}') from error
