"""The objectives, as pure functions of tensors. B rows; each returns one float32 value per row, [B].

A log-prob is a mean over the elements of the latents, not a sum: ratios stay near 1, and a clip range of 1e-4 acts.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.base.errors import UserError


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
    """GRPO-Guard's objective (arXiv:2510.22319): PPO's bound of `guard_log_ratio`, whose one clip range fits all steps;
    1 / |dt| evens out the steps' gradients. advantages [B], dt [B, 1...]; the others as in `guard_log_ratio`."""
    log_ratio = guard_log_ratio(log_prob, old_log_prob, mean, old_mean, transition_std)
    return clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), advantages, clip_range) / dt.flatten().abs()


def guard_log_ratio(
    log_prob: Tensor, old_log_prob: Tensor, mean: Tensor, old_mean: Tensor, transition_std: Tensor
) -> Tensor:
    """The log-ratio freed of its negative bias and of its step's noise scale, [B] (GRPO-Guard, arXiv:2510.22319).

    Args:
        log_prob, old_log_prob: [B]; must be Gaussian densities, means over elements.
        mean, old_mean: [B, ...], means of the step under the policy and under the one that sampled it.
        transition_std: [B, 1...].
    """
    std = transition_std.flatten()
    bias = ((mean - old_mean) ** 2).flatten(1).mean(1) / (2 * std**2)
    return (log_prob - old_log_prob + bias) * std


def dppo_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    mean: Tensor,
    old_mean: Tensor,
    transition_std: Tensor,
    advantages: Tensor,
    kl_limit: float,
) -> Tensor:
    """Flow-DPPO (arXiv:2606.11025), [B]: -advantage * ratio, without a gradient where the step's KL(new || old) is over
    `kl_limit`, in nats per latent element, and the ratio has moved the way the advantage pushes: it depends on both
    Gaussians, and not on where in them a sample lies. Arguments as in `guard_surrogate`."""
    ratio = torch.exp(log_prob - old_log_prob)
    loss = -advantages * ratio
    stops = (gaussian_kl(mean, old_mean, transition_std) > kl_limit) & (advantages * (ratio - 1) > 0)
    return torch.where(stops, loss.detach(), loss)


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """KL of two Gaussians of one std, averaged over the latent's elements. mean [B, ...], std [B, 1...]."""
    return ((mean - ref_mean) ** 2 / (2 * std**2)).flatten(1).mean(1)


def step_weights(transition_std: Tensor, mode: str) -> Tensor:
    """The loss weight of each denoising step, TempFlow-GRPO's noise-aware weighting (arXiv:2508.04324, section 3.3).
    transition_std [..., K] of an image's trained steps, in their order; `mode` as train.step_weight."""
    return {
        "": torch.ones_like(transition_std),
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


def nft_loss(
    velocity: Tensor, old_velocity: Tensor, x_t: Tensor, x_0: Tensor, sigma: Tensor, reward_prob: Tensor, beta: float
) -> Tensor:
    """DiffusionNFT's objective, [B], before its factor 5 (arXiv:2509.16117, eq. 5, with self-normalised distances).

    A policy mixed of the old one and `velocity` is to predict good images, its mirror image bad ones.

    Args:
        velocity, old_velocity, x_t, x_0: [B, ...]; x_t is x_0 at noise level sigma.
        sigma, reward_prob: [B].
        beta: share of `velocity` in the mixture, above 0.
    """
    positive = beta * velocity + (1 - beta) * old_velocity
    negative = (1 + beta) * old_velocity - beta * velocity
    good, bad = (own_flow_matching_loss(v, x_t, x_0, sigma) for v in (positive, negative))
    return (reward_prob * good + (1 - reward_prob) * bad) / beta


def own_flow_matching_loss(velocity: Tensor, x_t: Tensor, x_0: Tensor, sigma: Tensor) -> Tensor:
    """Flow matching on the policy's own images, good and bad alike, [B], with nft_loss's self-normalised distance.

    NFT moves the policy along advantage * (target - velocity) of each image. Where an x_t belongs mostly to bad images,
    the advantages do not cancel, and the policy moves away from what its own images say of that x_t, further in every
    epoch. This loss adds a constant to all advantages: it stops that. Arguments as in `nft_loss`."""
    sigma = sigma.view(-1, *[1] * (x_t.ndim - 1))
    error = (x_t - sigma * velocity - x_0).flatten(1)
    return (error**2).mean(1) / error.detach().abs().mean(1).clamp(min=1e-5)


def awm_loss(velocity: Tensor, old_velocity: Tensor, target: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Advantage-weighted matching (AWM, arXiv:2509.25050), [B]: PPO's bound of the ratio exp(old error - error). The
    negative flow matching error takes the log-prob's place. Velocities [B, ...]; target = noise - x_0."""
    error, old_error = ((v - target).square().flatten(1).mean(1) for v in (velocity, old_velocity))
    return clipped_surrogate(-error, -old_error, advantages, clip_range)


def dgpo_loss(
    error: Tensor,
    old_error: Tensor,
    reference_error: Tensor,
    advantages: Tensor,
    group_size: int,
    beta: float,
    clip_range: float,
) -> Tensor:
    """Direct group preference optimisation (DGPO, arXiv:2510.08425, as in its published code), [B]: sigmoid(s) A error
    with s = beta mean_group[A (error - reference error)], so that a group whose errors already say what its advantages
    say weighs little. The gradient is that of softplus(s) group_size / beta, without the rows whose ratio exp(old error
    - error) has left the clip range the way A pushes.

    Args:
        error, old_error, reference_error: [B], velocity errors of groups of `group_size` neighbours, which share noise
            and level.
    """
    gained = (advantages * (error - reference_error)).detach().view(-1, group_size)
    weight = torch.sigmoid(beta * gained.mean(1)).repeat_interleave(group_size)
    stops = (torch.exp(old_error - error) - 1) * advantages.sign() > clip_range
    return weight * advantages * torch.where(stops, error.detach(), error)


def elbo_loss(distance: Tensor, old_distance: Tensor, advantages: Tensor, proximal_weight: float) -> Tensor:
    """Policy gradient of the ELBO of a final image (arXiv:2602.04663), [B]: rho (A - w log rho) distance with rho =
    exp(old distance - distance), both without a gradient. The gradient is that of w (rho log rho - rho) - A rho, whose
    minimum over rho is exp(A / w). w = 0 is its "EPG", above 0 its "PEPG". The distances are own_flow_matching_loss's,
    the negative ELBOs of the policy and of the one that sampled."""
    log_ratio = (old_distance - distance).detach()
    return log_ratio.exp() * (advantages - proximal_weight * log_ratio) * distance


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
    below 1 = always this; 1 = slowly up to one half; 2 = none for 75 steps, then up to 0.999; others are refused."""
    if 0 <= schedule < 1:
        return schedule
    if schedule == 1:
        return min(0.001 * step, 0.5)
    if schedule == 2:
        return 0.0 if step < 75 else min(0.0075 * (step - 75), 0.999)
    raise UserError(f"train.old_decay_schedule is {schedule}; it may be 1, 2, or a fixed decay from 0 to below 1")
