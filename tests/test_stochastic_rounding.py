"""Rounding at random: which numbers come out, and what their mean is. What is left of a small change:
test_quantised_linear.py."""

import pytest
import torch

from flow_grpo.kernels.stochastic_rounding import rounded, rounded_by

DTYPES = [torch.bfloat16, torch.float8_e4m3fn]


def spread(dtype):
    """float32 numbers of every size that dtype holds, and 0."""
    limits = torch.finfo(dtype)
    low, high = torch.tensor(limits.smallest_normal * limits.eps).log2(), torch.tensor(limits.max).log2()
    signs = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).sign()
    x = signs * torch.exp2(torch.linspace(low.clamp(min=-120), high - 1, 64 * 32).view(64, 32))
    x[0] = 0
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_becomes_one_of_its_two_neighbours_and_their_mean_is_the_number(dtype):
    x, limits = spread(dtype).double(), torch.finfo(dtype)
    noises = (torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) for seed in range(400))
    found = torch.stack([rounded_by(noise, x.float(), dtype).double() for noise in noises])
    step = (x.abs() * limits.eps).clamp(min=limits.smallest_normal * limits.eps)
    low, high = found.amin(0), found.amax(0)
    assert ((found == low) | (found == high)).all()
    assert (((low <= x) & (x <= high)) | (low == high)).all()
    assert (high - low <= step).all()
    assert ((found.mean(0) - x).abs() < 0.2 * step).all()  # 8 standard errors
    assert (high > low).double().mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_dtype_holds_stays_whatever_the_noise(dtype):
    limits = torch.finfo(dtype)
    held = spread(dtype).to(dtype).float()
    held[1, :3] = torch.tensor([limits.max, limits.min, limits.smallest_normal])
    for noise in (0.0, 0.5, 1 - 2**-24):
        assert torch.equal(rounded_by(torch.full_like(held, noise), held, dtype).float(), held)
    assert torch.equal(rounded(held, dtype).float(), held)
