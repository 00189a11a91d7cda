"""The forward process: its line, its noise levels, its velocity."""

import math

import pytest
import torch

from flow_grpo.algorithms.flow_matching import logit_normal_timesteps, noised, velocity_error
from flow_grpo.base import rng


def test_the_line_goes_from_the_image_to_the_noise():
    x_0, noise = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).unbind()
    ends = noised(x_0, noise, torch.tensor([0.0, 1000.0, 0.0]))
    assert torch.equal(ends, torch.stack([x_0[0], noise[1], x_0[2]]))
    quarter = noised(x_0, noise, torch.full((3,), 250.0))
    torch.testing.assert_close(quarter, 0.75 * x_0 + 0.25 * noise)


def test_the_lines_own_velocity_has_no_error():
    x_0, noise = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).unbind()
    assert torch.equal(velocity_error(noise - x_0, x_0, noise), torch.zeros(3))
    assert torch.allclose(velocity_error(noise - x_0 + 2, x_0, noise), torch.full((3,), 4.0))


def test_noise_levels_are_logit_normal_over_the_schedule():
    levels = torch.linspace(1000, 1, 1000)
    found = logit_normal_timesteps(levels, [rng.generator(0, "t", i) for i in range(4000)])
    for quantile in (0.1, 0.25, 0.5, 0.75, 0.9):
        z = math.sqrt(2) * torch.erfinv(torch.tensor(2 * quantile - 1)).item()
        expected = 1000 * (1 - 1 / (1 + math.exp(-z)))  # levels fall with their place
        assert found.quantile(1 - quantile).item() == pytest.approx(expected, abs=25)
    assert set(found.tolist()) <= set(levels.tolist())
    again = logit_normal_timesteps(levels, [rng.generator(0, "t", i) for i in (7, 8)])
    assert torch.equal(again, found[7:9])
