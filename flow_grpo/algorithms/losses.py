"""What objectives are made of, as pure functions of tensors. B rows; each returns one float32 value per row, [B].

A log-prob is a mean over the elements of the latents, not a sum: ratios stay near 1, and a clip range of 1e-4 acts.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """PPO's pessimistic bound, negated so that smaller is better (Flow-GRPO, arXiv:2505.05470, eq. 5). All [B]."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """KL of two Gaussians of one std, averaged over the latent's elements. mean [B, ...], std [B, 1...]."""
    return ((mean - ref_mean) ** 2 / (2 * std**2)).flatten(1).mean(1)


def step_weights(transition_std: Tensor, mode: str) -> Tensor:
    """The loss weight of each denoising step, TempFlow-GRPO's noise-aware weighting (arXiv:2508.04324, section 3.3).
    transition_std [..., K] of an image's trained steps, in their order; `mode` as train.step_weight."""
    return {
        "equal": torch.ones_like(transition_std),
        "sqrt3": math.sqrt(3) * transition_std,
        "mean_one": transition_std / transition_std.mean(-1, keepdim=True),
    }[mode]


def dpo_loss(win: Tensor, lose: Tensor, ref_win: Tensor, ref_lose: Tensor, beta: float) -> Tensor:
    """Diffusion-DPO's objective (arXiv:2311.12908, eq. 14) for flows (arXiv:2501.13918): how much better than the
    reference a policy fits the winner, against the loser. All [B], velocity errors; one noise and level per pair."""
    return -F.logsigmoid(-beta / 2 * ((win - ref_win) - (lose - ref_lose)))


def nft_reward_prob(advantages: Tensor, adv_clip_max: float) -> Tensor:
    """How much of an image counts as good, [B] in [0, 1]; 1/2 at its group's mean (DiffusionNFT, arXiv:2509.16117)."""
    return (advantages.clamp(-adv_clip_max, adv_clip_max) / (2 * adv_clip_max) + 0.5).clamp(0, 1)


def own_flow_matching_loss(velocity: Tensor, x_t: Tensor, x_0: Tensor, sigma: Tensor) -> Tensor:
    """Flow matching on the policy's own images, good and bad alike, [B], with a self-normalised distance of images.

    NFT moves the policy along advantage * (target - velocity) of each image. Where an x_t belongs mostly to bad images,
    the advantages do not cancel, and the policy moves away from what its own images say of that x_t, further in every
    epoch. This loss adds a constant to all advantages: it stops that.

    Args:
        velocity, x_t, x_0: [B, ...]; x_t is x_0 at noise level sigma [B].
    """
    error = (x_t - sigma.view(-1, *[1] * (x_t.ndim - 1)) * velocity - x_0).flatten(1)
    return (error**2).mean(1) / error.detach().abs().mean(1).clamp(min=1e-5)


def learning_rate_share(step: int, num_updates: int, schedule: str, warmup_updates: int) -> float:
    """Share of the configured learning rate that update `step` (from 0) of `num_updates` takes, above 0.

    Args:
        schedule: "constant" = 1; "linear" and "cosine" fall from 1 before the first update to 0 after the last.
        warmup_updates: before so many, the share also grows by equal parts.
    """
    progress = min(step / num_updates, 1.0)
    shares = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return shares[schedule] * min((step + 1) / (warmup_updates + 1), 1.0)


def old_policy_decay(step: int, schedule: float) -> float:
    """How much of itself the old policy keeps after `step` optimizer steps (arXiv:2509.16117, section 4). `schedule`:
    below 1 = always this; 1 = slowly up to one half; 2 = none for 75 steps, then up to 0.999."""
    if schedule < 1:
        return schedule
    if schedule == 1:
        return min(0.001 * step, 0.5)
    return 0.0 if step < 75 else min(0.0075 * (step - 75), 0.999)
