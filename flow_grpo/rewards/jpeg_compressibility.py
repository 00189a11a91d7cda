"""Compressibility of an image (DDPO, arXiv:2305.13301): minus its size in kB as a JPEG of quality 95, always below 0.

It needs no model and no prompt, which makes it a reward to try a pipeline with. A flat image is its optimum, and noise
with a weight below 0: DDPO's incompressibility.
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
    """Return the scorer, which encodes on the CPU. There is nothing to load."""
    return score


def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """Return minus the kB of images [B, 3, H, W] in [0, 1], [B] float32."""
    return torch.tensor([-kilobytes(picture) for picture in to_pictures(images)])


def kilobytes(picture: Image.Image) -> float:
    """Return the size of a picture as a JPEG."""
    buffer = BytesIO()
    picture.save(buffer, format="JPEG", quality=95)
    return buffer.tell() / 1000
