"""Stochastic rounding to one of a number's two neighbours, at random, with the number as mean (arXiv:1502.02551).

Rounding weights to the nearest number drops a change that is much smaller than the step between two numbers. Rounding
at random moves a few of the weights by a whole step, and a product over many of them keeps the change.
"""

import torch
from torch import Tensor

from flow_grpo.kernels.one_kernel import one_kernel

# A seed of its own, so that the noise is not that from which weights were drawn.
SEED = 7_340_033
# Bits of a float32's exponent.
EXPONENT = 0x7F800000
TWO_EXPONENTS_OF_1 = 0x7F000000


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round finite float32 x of any shape to `dtype`, whose range it does not leave. What `dtype` holds stays, but for
    numbers below 2^-119. The noise is the same each time, so the same x has the same result on the same device."""
    return _rounded_by(noise_like(x), x, dtype)


def noise_like(x: Tensor) -> Tensor:
    """Draw the noise of `rounded`, float32 of x's shape, uniform in [0, 1)."""
    generator = torch.Generator(x.device).manual_seed(SEED)
    return torch.rand(x.shape, device=x.device, generator=generator)


def rounded_by(noise: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round as `rounded` does, by noise of x's shape, uniform in [0, 1)."""
    # The step between neighbours of `dtype` at x is a power of two: x with its exponent alone, times eps.
    limits = torch.finfo(dtype)
    power = (x.view(torch.int32) & EXPONENT).view(torch.float32)
    smallest_step = max(limits.smallest_normal * limits.eps, 2.0**-126)
    step = (power * limits.eps).clamp(min=smallest_step)

    # x / step, exactly on any device: the bits of 1 / step are those of 1, twice, without those of step.
    inverse_step = (TWO_EXPONENTS_OF_1 - step.view(torch.int32)).view(torch.float32)
    steps = x * inverse_step
    below = steps.floor()
    goes_up = noise < steps - below
    return ((below + goes_up) * step).to(dtype)


_rounded_by = one_kernel(rounded_by)
