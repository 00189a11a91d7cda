"""How many bytes an image needs as a JPEG (DDPO, arXiv:2305.13301): its size in kB at quality 95, always above 0.

Minus `jpeg_compressibility`. It needs no model and no prompt; noise is its optimum.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.rewards.jpeg_compressibility import load as load_compressibility

RANGE = (0.0, math.inf)


def load(device: torch.device | str) -> Callable[..., Tensor]:
    """Nothing to load; encodes on the CPU."""
    compressibility = load_compressibility(device)
    return lambda images, prompts, metadata: -compressibility(images, prompts, metadata)
