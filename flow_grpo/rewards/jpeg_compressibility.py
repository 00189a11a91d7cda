"""How few bytes an image needs as a JPEG (DDPO, arXiv:2305.13301): minus its size in kB at quality 95, always below 0.

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
    """Nothing to load; encodes on the CPU."""

    def kilobytes(picture: Image.Image) -> float:
        buffer = BytesIO()
        picture.save(buffer, format="JPEG", quality=95)
        return buffer.tell() / 1000

    return lambda images, prompts, metadata: torch.tensor([-kilobytes(p) for p in to_pictures(images)])
