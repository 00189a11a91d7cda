"""The objectives against golden numbers and torch's own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flow_grpo.losses import clipped_surrogate, gaussian_kl, step_weights
from flow_grpo.settings import CHOICES

GOLDEN = np.load(Path(__file__).parent / "golden" / "golden.npz")


def golden(key, dtype=torch.float32):
    return torch.tensor(GOLDEN[key]).to(dtype)


def test_golden_surrogate():
    numbers = [golden(f"ppo/{name}", torch.float64) for name in ("log_prob", "log_prob_old", "advantages")]
    loss = clipped_surrogate(*numbers, float(GOLDEN["ppo/clip_range"]))
    torch.testing.assert_close(loss.mean(), golden("ppo/loss", torch.float64).mean(), rtol=1e-6, atol=0)
    weighted = (loss * golden("ppo/weight", torch.float64)).mean()
    torch.testing.assert_close(weighted, golden("ppo/weighted_loss", torch.float64).mean(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("advantage", "log_ratio", "moves"), [(1, 0.5, 0), (1, -0.5, 1), (-1, -0.5, 0), (-1, 0.5, 1)])
def test_surrogate_stops_only_where_it_has_gone_far_enough_the_right_way(advantage, log_ratio, moves):
    log_prob = torch.tensor([log_ratio], requires_grad=True)
    clipped_surrogate(log_prob, torch.zeros(1), torch.tensor([float(advantage)]), 0.1).sum().backward()
    assert bool(log_prob.grad != 0) == bool(moves)


def test_golden_kl_which_is_torchs():
    mean, ref = golden("kl/mean", torch.float64), golden("kl/mean_ref", torch.float64)
    std = golden("kl/noise_scale", torch.float64).expand(len(mean), 1, 1)
    kl = gaussian_kl(mean, ref, std)
    torch.testing.assert_close(kl, golden("kl/gaussian", torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(kl, kl_divergence(Normal(mean, std), Normal(ref, std)).flatten(1).mean(1))


@pytest.mark.parametrize("key", [key for key in GOLDEN.files if key.startswith("step_weight/")])
def test_golden_step_weights(key):
    _, schedule, eta, mode = key.split("/")
    sigma = golden(f"sigmas/{schedule}", torch.float64)
    below_one = torch.where(sigma == 1, sigma[1], sigma)
    std = float(eta) * torch.sqrt(sigma / (1 - below_one))[:-1] * torch.sqrt(-sigma.diff())
    weights = step_weights(std[:9].float(), mode)
    torch.testing.assert_close(weights, golden(key), rtol=1e-6, atol=0)


def test_every_mode_of_the_settings_exists_and_no_other():
    for mode in CHOICES["train.step_weight"]:
        assert step_weights(torch.ones(3), mode).shape == (3,)
    with pytest.raises(ValueError, match=r"sqrt2.*none, sqrt3, mean_one"):
        step_weights(torch.ones(3), "sqrt2")
