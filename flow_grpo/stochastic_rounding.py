"""Rounding to one of a number's two neighbours, by chance, so that its mean is the number (arXiv:1502.02551).

Weights plus a change much smaller than a step between two numbers of their dtype lose that change to the nearest such
number, each in the same way. By chance some of them take it a whole step, and a product over many keeps it.
"""

from functools import lru_cache

import torch
from torch import Tensor

SEED = 7_340_033  # of its own, so that the noise is not that from which weights were drawn
EXPONENT = 0x7F800000  # its bits of a float32
TWO_EXPONENTS_OF_1 = 0x7F000000


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 x of any shape in `dtype`, whose range it does not leave. What `dtype` holds stays as it is; the same x
    has the same result on the same device."""
    generator = torch.Generator(x.device).manual_seed(SEED)
    noise = torch.rand(x.shape, device=x.device, generator=generator)
    return (_in_one_kernel() if x.is_cuda else rounded_by)(noise, x, dtype)


def rounded_by(noise: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `rounded`, by noise of x's shape, uniform in [0, 1). Steps below 2^-126 count as that."""
    limits = torch.finfo(dtype)
    power = (x.view(torch.int32) & EXPONENT).view(torch.float32)  # of two, at most |x|
    step = (power * limits.eps).clamp(min=max(limits.smallest_normal * limits.eps, 2.0**-126))
    steps = x * (TWO_EXPONENTS_OF_1 - step.view(torch.int32)).view(torch.float32)  # x / step, exactly on any device
    below = steps.floor()
    return ((below + (noise < steps - below)) * step).to(dtype)


@lru_cache
def _in_one_kernel():
    """Its dozen operations would read and write all weights a dozen times."""
    return torch.compile(rounded_by, dynamic=True)
