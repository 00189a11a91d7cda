"""Formulas of the losses: pure functions of tensors, one float32 value per row, [B].

surrogates.py calls them on the rows of an update, and settings/objectives.py lists the surrogates by name. A log-prob
is a mean over the elements of the latents, not a sum: ratios stay near 1, and a clip range of 1e-4 acts.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.algorithms.schedules import old_policy_decay  # noqa: F401  its published address

# The published code of DiffusionNFT multiplies its loss by this.
NFT_FACTOR = 5
# Added to a covariance's root mean square where the covariance is divided by it, which may be 0.
RMS_FLOOR = 1e-5


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
    """GRPO-Guard's objective (arXiv:2510.22319), [B]: `guard_loss` of `guard_log_ratio`.

    Args:
        log_prob, old_log_prob, mean, old_mean, transition_std: as in `guard_log_ratio`.
        dt: [B, 1...].
        advantages: [B].
    """
    log_ratio = guard_log_ratio(log_prob, old_log_prob, mean, old_mean, transition_std)
    return guard_loss(log_ratio, dt, advantages, clip_range)


def guard_log_ratio(
    log_prob: Tensor, old_log_prob: Tensor, mean: Tensor, old_mean: Tensor, transition_std: Tensor
) -> Tensor:
    """Log-ratio without its negative bias and without the noise scale of its step, [B] (GRPO-Guard, arXiv:2510.22319).

    Args:
        log_prob, old_log_prob: [B]; must be Gaussian densities, means over elements.
        mean, old_mean: [B, ...], means of the step under the policy and under the one that sampled it.
        transition_std: [B, 1...].
    """
    std = transition_std.flatten()
    bias = ((mean - old_mean) ** 2).flatten(1).mean(1) / (2 * std**2)
    return (log_prob - old_log_prob + bias) * std


def guard_loss(log_ratio: Tensor, dt: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """PPO's bound of `guard_log_ratio` over |dt|, [B]. One clip range fits the log-ratios of all steps, and dividing by
    |dt| makes the gradients of all steps about equally large.

    Args:
        log_ratio, advantages: [B].
        dt: [B, 1...].
    """
    bound = clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), advantages, clip_range)
    return bound / dt.flatten().abs()


def dppo_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    mean: Tensor,
    old_mean: Tensor,
    transition_std: Tensor,
    advantages: Tensor,
    kl_limit: float,
) -> Tensor:
    """Flow-DPPO's objective (arXiv:2606.11025), [B]: `dppo_loss` of a step's log-ratio and KL. Arguments as in
    `guard_surrogate` and `dppo_loss`."""
    kl = gaussian_kl(mean, old_mean, transition_std)
    return dppo_loss(log_prob - old_log_prob, kl, advantages, kl_limit)


def rsm_loss(log_ratio: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Matching loss of reward score matching (RSM, arXiv:2604.17415), [B]: max(0, |A| c - A log_ratio), a hinge on the
    log-ratio [B]. A row pushes its log-ratio the way A points, until that is c."""
    return F.relu(clip_range * advantages.abs() - advantages * log_ratio)


def group_differences(x_0: Tensor, group_size: int) -> Tensor:
    """Images [B, ...] less the mean of their group of `group_size` neighbours."""
    groups = x_0.unflatten(0, (-1, group_size))
    return (groups - groups.mean(1, keepdim=True)).flatten(0, 1)


def fdfo_log_ratio(velocity_change: Tensor, direction: Tensor) -> Tensor:
    """Log-ratio of finite-difference flow optimisation (FDFO, arXiv:2603.12893), [B]: mean d^2 - mean (v - v*)^2, by
    how much the velocity v has come nearer to v* = v_old - d than v_old was.

    Args:
        velocity_change: v - v_old, [B, ...].
        direction: d, [B, ...].
    """
    # What is left of the two squares, which is exactly 0 where the velocity has not changed.
    return -(velocity_change * (velocity_change + 2 * direction)).flatten(1).mean(1)


def fdfo_loss(log_ratio: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """FDFO's objective (arXiv:2603.12893), [B]: -A rho + |A| (rho - 1)^2 / (2 c), which holds the ratio rho to its
    optimum, 1 + c for a better image and 1 - c for a worse one."""
    ratio = torch.exp(log_ratio)
    return -advantages * ratio + advantages.abs() * (ratio - 1) ** 2 / (2 * clip_range)


def reward_covariance(x_0: Tensor, advantages: Tensor, group_size: int) -> Tensor:
    """Covariance of advantage and image within each group, divided by its root mean square, [B, ...]: the direction in
    which images of the prompt get better (DiffusionART, arXiv:2610.12572). All images of a group have the same one; it
    is 0 where all advantages of the group are 0.

    Args:
        advantages: [B].
        x_0: [B, ...], groups of `group_size` neighbours.
    """
    by_row = advantages.view(-1, *[1] * (x_0.ndim - 1))
    products = (by_row * group_differences(x_0, group_size)).unflatten(0, (-1, group_size))
    covariance = products.sum(1) / (group_size - 1)
    rms = covariance.flatten(1).square().mean(1).sqrt()
    direction = covariance / (rms + RMS_FLOOR).view(-1, *[1] * (x_0.ndim - 1))
    return direction.repeat_interleave(group_size, 0)


def endpoint_loss(change: Tensor, direction: Tensor, magnitude: float) -> Tensor:
    """Squared distance to a change by `magnitude` against a direction, mean over elements, [B]. A velocity that falls
    by d / sigma moves the image that it leads to by d.

    Args:
        change: [B, ...], v - v_old, or sigma (v - v_old).
    """
    return (change + magnitude * direction).square().flatten(1).mean(1)


def dppo_loss(log_ratio: Tensor, kl: Tensor, advantages: Tensor, kl_limit: float) -> Tensor:
    """Return -advantage * ratio [B], without a gradient where the step's KL(new || old) is over `kl_limit` and the
    ratio has moved the way the advantage pushes.

    The KL depends on both Gaussians, and not on where in them a sample lies.

    Args:
        kl, kl_limit: in nats per latent element.
    """
    ratio = torch.exp(log_ratio)
    loss = -advantages * ratio
    stops = (kl > kl_limit) & (advantages * (ratio - 1) > 0)
    return torch.where(stops, loss.detach(), loss)


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """KL of two Gaussians of one std, averaged over the latent's elements. mean [B, ...], std [B, 1...]."""
    return ((mean - ref_mean) ** 2 / (2 * std**2)).flatten(1).mean(1)


def step_weights(transition_std: Tensor, mode: str) -> Tensor:
    """Loss weight of each denoising step, TempFlow-GRPO's noise-aware weighting (arXiv:2508.04324, section 3.3).

    Args:
        transition_std: [..., K] of an image's trained steps, in their order.
        mode: as train.step_weight.
    """
    if mode == "sqrt3":
        return math.sqrt(3) * transition_std
    if mode == "mean_one":
        return transition_std / transition_std.mean(-1, keepdim=True)
    assert mode in ("", "equal"), mode
    return torch.ones_like(transition_std)


def dpo_loss(win: Tensor, lose: Tensor, ref_win: Tensor, ref_lose: Tensor, beta: float) -> Tensor:
    """Diffusion-DPO's objective (arXiv:2311.12908, eq. 14) for flows (arXiv:2501.13918): how much better than the
    reference a policy fits the winner, against the loser. All [B], velocity errors; one noise and level per pair."""
    win_gap = win - ref_win
    lose_gap = lose - ref_lose
    return -F.logsigmoid(-beta / 2 * (win_gap - lose_gap))


def nft_reward_prob(advantages: Tensor, adv_clip_max: float) -> Tensor:
    """Probability that an image is good, [B] in [0, 1]; 1/2 at its group's mean (DiffusionNFT, arXiv:2509.16117)."""
    clipped = advantages.clamp(-adv_clip_max, adv_clip_max)
    return (clipped / (2 * adv_clip_max) + 0.5).clamp(0, 1)


def nft_loss(
    velocity: Tensor, old_velocity: Tensor, x_t: Tensor, x_0: Tensor, sigma: Tensor, reward_prob: Tensor, beta: float
) -> Tensor:
    """DiffusionNFT's objective, [B], before its factor 5 (arXiv:2509.16117, eq. 5, with self-normalised distances).

    A mixture of the old policy and `velocity` shall predict good images; the reflection of that mixture about the old
    policy shall predict bad ones.

    Args:
        velocity, old_velocity, x_t, x_0: [B, ...]; x_t is x_0 at noise level sigma.
        sigma, reward_prob: [B].
        beta: share of `velocity` in the mixture, above 0.
    """
    positive = beta * velocity + (1 - beta) * old_velocity
    negative = (1 + beta) * old_velocity - beta * velocity
    positive_error = self_normalised_error(positive, x_t, x_0, sigma)
    negative_error = self_normalised_error(negative, x_t, x_0, sigma)
    return (reward_prob * positive_error + (1 - reward_prob) * negative_error) / beta


def self_normalised_error(velocity: Tensor, x_t: Tensor, x_0: Tensor, sigma: Tensor) -> Tensor:
    """Squared error of the x_0 that a velocity predicts, over its mean absolute error without a gradient, [B].

    As a loss on the policy's own images, good and bad alike, it keeps NFT stable (train.flow_matching_weight). NFT
    moves the policy along advantage * (target - velocity) of each image. Where an x_t belongs mostly to bad images, the
    advantages do not cancel, and the policy moves away from what its own images say of that x_t, further in every
    epoch. This loss adds a constant to all advantages, which stops that. Arguments as in `nft_loss`.
    """
    sigma = sigma.view(-1, *[1] * (x_t.ndim - 1))
    return square_over_size(x_t - sigma * velocity - x_0)


def square_over_size(error: Tensor) -> Tensor:
    """Mean square of errors [B, ...] over their mean absolute value, which has no gradient, at least 1e-5; [B]."""
    error = error.flatten(1)
    scale = error.detach().abs().mean(1).clamp(min=1e-5)
    return (error**2).mean(1) / scale


def awm_loss(velocity: Tensor, old_velocity: Tensor, target: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Advantage-weighted matching (AWM, arXiv:2509.25050), [B]: `awm_loss_of_errors` of two velocities [B, ...] against
    their target, noise - x_0."""
    error = (velocity - target).square().flatten(1).mean(1)
    old_error = (old_velocity - target).square().flatten(1).mean(1)
    return awm_loss_of_errors(error, old_error, advantages, clip_range)


def awm_loss_of_errors(error: Tensor, old_error: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """PPO's bound of the ratio exp(old error - error), [B]: the negative flow matching error [B] takes the place of
    the log-prob (AWM, arXiv:2509.25050)."""
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
    with s = beta mean_group[A (error - reference error)].

    A group whose errors already agree with its advantages weighs little. The gradient is that of softplus(s) group_size
    / beta, without the rows whose ratio exp(old error - error) has left the clip range the way A pushes.

    Args:
        error, old_error, reference_error: [B], velocity errors of groups of `group_size` neighbours, which share noise
            and level.
    """
    gained = (advantages * (error - reference_error)).detach().view(-1, group_size)
    weight = torch.sigmoid(beta * gained.mean(1)).repeat_interleave(group_size)
    ratio = torch.exp(old_error - error)
    stops = (ratio - 1) * advantages.sign() > clip_range
    return weight * advantages * torch.where(stops, error.detach(), error)


def elbo_loss(distance: Tensor, old_distance: Tensor, advantages: Tensor, proximal_weight: float) -> Tensor:
    """Policy gradient of the ELBO of a final image (arXiv:2602.04663), [B]: rho (A - w log rho) distance, where rho =
    exp(old distance - distance) and log rho have no gradient.

    Its gradient is that of w (rho log rho - rho) - A rho, which is least at rho = exp(A / w). The paper calls w = 0
    "EPG", and w > 0 "PEPG".

    Args:
        distance, old_distance: [B], `self_normalised_error`, the negative ELBO, of the policy and of the one that
            sampled.
        proximal_weight: w.
    """
    log_ratio = (old_distance - distance).detach()
    return log_ratio.exp() * (advantages - proximal_weight * log_ratio) * distance


def ram_loss(error: Tensor, rewards: Tensor) -> Tensor:
    """Flow matching error [B] times a signed reward [B] (reinforce adjoint matching, RAM, arXiv:2605.10759, eq. 17).

    The published loss is |v - sg(v_ref + R (target - v))|^2, where sg stops gradients. It has the gradient of
    R |v - target|^2 + |v - v_ref|^2, whose first term is this one.
    """
    return rewards * error


def crd_loss(implicit_reward: Tensor, reward: Tensor, group_size: int, beta: float) -> Tensor:
    """Centred reward distillation (CRD, arXiv:2603.14128), [B]: (beta r - a, less its mean over the group)^2 / beta.

    The optimum of a reward with a KL of weight beta has a = beta r + a number for each prompt, where r is the log-ratio
    to the old policy. Within a group that number cancels.

    Args:
        implicit_reward: r, [B], of groups of `group_size` neighbours, which share noise and level.
        reward: a, [B].
    """
    gap = (beta * implicit_reward - reward).view(-1, group_size)
    centred = gap - gap.mean(1, keepdim=True)
    return centred.square().flatten() / beta


def reference_share(reward: Tensor) -> Tensor:
    """Weight of the pull to the reference, [B]: 2 (1 - a) of rewards a in [0, 1], whose mean over a group is 1/2. The
    worst images are pulled most, the best not at all (CRD, arXiv:2603.14128)."""
    return 2 * (1 - reward)
