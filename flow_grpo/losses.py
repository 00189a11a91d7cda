"""The objectives, as pure functions of tensors. B rows; each returns one float32 value per row, [B]."""

import math

import torch
from torch import Tensor

STEP_WEIGHTS = ("none", "sqrt3", "mean_one")


def clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """PPO's pessimistic bound, negated so that smaller is better (Flow-GRPO, arXiv:2505.05470, eq. 5). All [B]."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def guard_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    mean: Tensor,
    old_mean: Tensor,
    transition_std: Tensor,
    dt: Tensor,
    advantages: Tensor,
    clip_range: float,
) -> Tensor:
    """GRPO-Guard's objective (arXiv:2510.22319): the log-ratio is freed of its negative bias and of its step's noise
    scale, so that one clip range fits all steps, and 1 / |dt| evens out the steps' gradients.

    Args:
        log_prob, old_log_prob, advantages: [B]; log-probs must be Gaussian densities, means over elements.
        mean, old_mean: [B, ...], means of the step under the policy and under the one that drew it.
        transition_std, dt: [B, 1...].
    """
    std, dt = transition_std.flatten(), dt.flatten()
    bias = ((mean - old_mean) ** 2).flatten(1).mean(1) / (2 * std**2)
    log_ratio = (log_prob - old_log_prob + bias) * std
    return clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), advantages, clip_range) / dt.abs()


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """KL of two Gaussians of one std, averaged over the latent's elements. mean [B, ...], std [B, 1...]."""
    return ((mean - ref_mean) ** 2 / (2 * std**2)).flatten(1).mean(1)


def step_weights(transition_std: Tensor, mode: str) -> Tensor:
    """The loss weight of each denoising step, TempFlow-GRPO's noise-aware weighting (arXiv:2508.04324, section 3.3).

    Args:
        transition_std: [K] of the trained steps, in their order.
        mode: "none" = 1; "sqrt3" = sqrt(3) * transition_std; "mean_one" = transition_std over its mean.

    Raises:
        ValueError: unknown mode.
    """
    if mode == "none":
        return torch.ones_like(transition_std)
    if mode == "sqrt3":
        return math.sqrt(3) * transition_std
    if mode == "mean_one":
        return transition_std / transition_std.mean()
    raise ValueError(f"train.step_weight is {mode!r}; there are: {', '.join(STEP_WEIGHTS)}")
