"""How few bytes an image needs as a JPEG (DDPO, arXiv:2305.13301): minus its size in kB at quality 95, always below 0.

It needs no model and no prompt, which makes it a reward to try a pipeline with. A flat image is its optimum.
"""

import math
from collections.abc import Callable
from io import BytesIO

import torch
from PIL import Image
from torch import Tensor

from flow_grpo.base.pixels import to_pictures

RANGE = (-math.inf, 0.0)


def load(device: torch.device) -> Callable[..., Tensor]:
    """Nothing to load; encodes on the CPU."""

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return torch.tensor([-_jpeg_bytes(picture) / 1000 for picture in to_pictures(images)])

    return score


def _jpeg_bytes(picture: Image.Image) -> int:
    buffer = BytesIO()
    picture.save(buffer, format="JPEG", quality=95)
    return buffer.tell()
