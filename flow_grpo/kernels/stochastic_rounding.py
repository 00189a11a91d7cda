"""Stochastic rounding: to one of a number's two neighbours, at random, with the number as mean (arXiv:1502.02551).

Rounding weights to the nearest number drops a change that is much smaller than the step between two numbers. Rounding
at random moves a few of the weights by a whole step, and a product over many of them keeps the change.
"""

import torch
from torch import Tensor

SEED = 7_340_033  # of its own, so that the noise is not that from which weights were drawn
EXPONENT = 0x7F800000  # its bits of a float32
TWO_EXPONENTS_OF_1 = 0x7F000000


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite float32 x of any shape in `dtype`, whose range it does not leave. What `dtype` holds stays, but for
    numbers below 2^-119. The noise is the same each time, so the same x has the same result on the same device."""
    generator = torch.Generator(x.device).manual_seed(SEED)
    noise = torch.rand(x.shape, device=x.device, generator=generator)
    return (_on_gpus if x.is_cuda else rounded_by)(noise, x, dtype)


def rounded_by(noise: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `rounded`, by noise of x's shape, uniform in [0, 1)."""
    limits = torch.finfo(dtype)
    power = (x.view(torch.int32) & EXPONENT).view(torch.float32)  # of two, at most |x|
    step = (power * limits.eps).clamp(min=max(limits.smallest_normal * limits.eps, 2.0**-126))
    steps = x * (TWO_EXPONENTS_OF_1 - step.view(torch.int32)).view(torch.float32)  # x / step, exactly on any device
    below = steps.floor()
    return ((below + (noise < steps - below)) * step).to(dtype)


def compile_for_gpus() -> None:
    """From now on, take one kernel for it on GPUs: a dozen operations read and write all weights a dozen times."""
    global _on_gpus
    _on_gpus = torch.compile(rounded_by, dynamic=True)


_on_gpus = rounded_by
