"""Surrogates: each objective of settings/objectives.py, for the rows of an update, by the formulas of losses.py."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.advantages import bounded
from flow_grpo.algorithms.flow_matching import velocity_error
from flow_grpo.algorithms.rollout import StepRows
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep, velocity_slope
from flow_grpo.settings.sections import Train


@dataclass(frozen=True)
class Surrogate:
    """Loss of R * J outcomes, and what is logged of it."""

    loss: Tensor  # [R * J], before the weights of steps and images
    log_ratio: Tensor | None = None  # [R * J], log of the ratio that the loss clips; None = the loss has no ratio
    beyond: Tensor | None = None  # [R * J] bool, outside of its trust region; None = where train.clip_range clips
    metrics: dict[str, Tensor] = field(default_factory=dict)  # of its own, [R * J] each


class ForwardStep(NamedTuple):
    """R finished images that are noised, and the velocities of the policies there. [R, ...] float32 but for sigma."""

    velocity: Tensor  # of the trained policy, with gradients
    old_velocity: Tensor  # of the policy that sampled; `velocity` without gradients if the objective does not read it
    x_t: Tensor
    x_0: Tensor
    noise: Tensor
    sigma: Tensor  # [R]
    reference_velocity: Tensor | None = None  # None where train.beta is 0
    group_size: int = 1  # rows that share noise and level and are neighbours; 1 = they lie anywhere


# Objectives of stored noisy steps: (step, rows, advantages, train). `step` is the rows' step under the present policy,
# and advantages [R * J] are within train.adv_clip_max.


def clip(step: SDEStep, rows: StepRows, advantages: Tensor, train: Train) -> Surrogate:
    """PPO's clipped ratio (Flow-GRPO, arXiv:2505.05470, eq. 5)."""
    loss = losses.clipped_surrogate(step.log_prob, rows.log_probs, advantages, train.clip_range)
    return Surrogate(loss, step.log_prob - rows.log_probs)


def guard(step: SDEStep, rows: StepRows, advantages: Tensor, train: Train) -> Surrogate:
    """Clipped ratio without its bias and its step's noise scale (GRPO-Guard, arXiv:2510.22319)."""
    log_ratio = losses.guard_log_ratio(
        step.log_prob, rows.log_probs, step.prev_sample_mean, rows.means, step.transition_std
    )
    loss = losses.guard_loss(log_ratio, step.dt, advantages, train.clip_range)
    return Surrogate(loss, log_ratio)


def dppo(step: SDEStep, rows: StepRows, advantages: Tensor, train: Train) -> Surrogate:
    """Ratio within a bound of the step's KL, in place of a bound of the ratio (Flow-DPPO, arXiv:2606.11025)."""
    log_ratio = step.log_prob - rows.log_probs
    kl = losses.gaussian_kl(step.prev_sample_mean, rows.means, step.transition_std)
    loss = losses.dppo_loss(log_ratio, kl, advantages, train.kl_limit)
    return Surrogate(loss, log_ratio, beyond=kl > train.kl_limit)


def rsm(step: SDEStep, rows: StepRows, advantages: Tensor, train: Train) -> Surrogate:
    """Hinge on the log-ratio times a power of the step's std, divided by that power (reward score matching,
    arXiv:2604.17415)."""
    scale = step.transition_std.flatten() ** train.clip_std_exponent
    log_ratio = (step.log_prob - rows.log_probs) * scale
    loss = losses.rsm_loss(log_ratio, advantages, train.clip_range) / scale
    return Surrogate(loss, log_ratio)


def fdfo(step: SDEStep, rows: StepRows, advantages: Tensor, train: Train) -> Surrogate:
    """Velocities nearer to better images than their group, farther from worse ones (FDFO, arXiv:2603.12893)."""
    assert rows.x_0 is not None, "its record asks for final images"
    difference = losses.group_differences(rows.x_0, rows.group_size)
    mean_square = difference.square().flatten(1).mean(1).view_as(step.dt)
    direction = difference / (mean_square + 1e-6)
    log_ratio = losses.fdfo_log_ratio(velocity_change(step, rows), direction)
    return Surrogate(losses.fdfo_loss(log_ratio, advantages, train.clip_range), log_ratio)


def endpoint(step: SDEStep, rows: StepRows, advantages: Tensor, train: Train) -> Surrogate:
    """Regression on velocities that lead where images of the group get better (after arXiv:2610.12572)."""
    assert rows.x_0 is not None, "its record asks for final images"
    direction = losses.reward_covariance(rows.x_0, advantages, rows.group_size)
    change = velocity_change(step, rows)
    metrics = {"velocity_change": change.detach().square().flatten(1).mean(1).sqrt()}
    if train.endpoint_space == "x_0":
        sigma = rows.timesteps / 1000
        change = sigma.view_as(step.dt) * change
    loss = losses.endpoint_loss(change, direction, train.endpoint_magnitude)

    # It clips nothing: no row lies beyond a trust region.
    beyond = torch.zeros_like(loss, dtype=torch.bool)
    return Surrogate(loss, beyond=beyond, metrics=metrics)


def velocity_change(step: SDEStep, rows: StepRows) -> Tensor:
    """Velocities under the present policy less those of the rollout, [R, ...], by the means of their steps; 0 to the
    last bit where the policy has not changed."""
    slope = velocity_slope(step, rows.timesteps / 1000)
    return (step.prev_sample_mean - rows.means) / slope


# Objectives of finished images on the forward process: (step, advantages, train). Each bounds its advantages [R].


def nft(step: ForwardStep, advantages: Tensor, train: Train) -> Surrogate:
    """DiffusionNFT's loss (arXiv:2509.16117, eq. 5), with the factor of its published code."""
    advantages = bounded(advantages, train)
    reward_prob = losses.nft_reward_prob(advantages, train.adv_clip_max)
    loss = losses.nft_loss(
        step.velocity, step.old_velocity, step.x_t, step.x_0, step.sigma, reward_prob, train.nft_beta
    )
    return Surrogate(losses.NFT_FACTOR * loss)


def awm(step: ForwardStep, advantages: Tensor, train: Train) -> Surrogate:
    """PPO's clip of flow matching errors (AWM, arXiv:2509.25050)."""
    error = velocity_error(step.velocity, step.x_0, step.noise)
    old_error = velocity_error(step.old_velocity, step.x_0, step.noise)
    advantages = bounded(advantages, train)
    loss = losses.awm_loss_of_errors(error, old_error, advantages, train.clip_range)
    return Surrogate(loss, old_error - error)


def dgpo(step: ForwardStep, advantages: Tensor, train: Train) -> Surrogate:
    """Groups as preferences (DGPO, arXiv:2510.08425), over the reference or, without one, over the old policy."""
    error = velocity_error(step.velocity, step.x_0, step.noise)
    old_error = velocity_error(step.old_velocity, step.x_0, step.noise)
    reference_error = old_error
    if step.reference_velocity is not None:
        reference_error = velocity_error(step.reference_velocity, step.x_0, step.noise)
    advantages = bounded(advantages, train)
    loss = losses.dgpo_loss(
        error, old_error, reference_error, advantages, step.group_size, train.dgpo_beta, train.clip_range
    )
    return Surrogate(loss, old_error - error)


def elbo(step: ForwardStep, advantages: Tensor, train: Train) -> Surrogate:
    """Policy gradient of the ELBO, with a proximal term (arXiv:2602.04663, "PEPG")."""
    distance = losses.self_normalised_error(step.velocity, step.x_t, step.x_0, step.sigma)
    old_distance = losses.self_normalised_error(step.old_velocity, step.x_t, step.x_0, step.sigma)
    advantages = bounded(advantages, train)
    loss = losses.elbo_loss(distance, old_distance, advantages, train.proximal_weight)

    # It clips nothing: no row lies beyond a trust region.
    beyond = torch.zeros_like(distance, dtype=torch.bool)
    return Surrogate(loss, old_distance - distance, beyond)


def ram(step: ForwardStep, advantages: Tensor, train: Train) -> Surrogate:
    """Flow matching weighted by signed rewards (RAM, arXiv:2605.10759, eq. 17), for policies that train.beta holds to
    the reference."""
    error = velocity_error(step.velocity, step.x_0, step.noise)
    advantages = bounded(advantages, train)
    return Surrogate(losses.ram_loss(error, train.reward_multiplier * advantages))


def crd(step: ForwardStep, advantages: Tensor, train: Train) -> Surrogate:
    """Regression of the log-ratio to an old policy on rewards, within groups (CRD, arXiv:2603.14128)."""
    target = step.noise - step.x_0
    distance = losses.square_over_size(step.velocity - target)
    old_distance = losses.square_over_size(step.old_velocity - target)
    advantages = bounded(advantages, train)
    reward = losses.nft_reward_prob(advantages, train.adv_clip_max)
    loss = losses.crd_loss(old_distance - distance, reward, step.group_size, train.crd_beta)

    # It clips nothing: no row lies beyond a trust region.
    beyond = torch.zeros_like(distance, dtype=torch.bool)
    return Surrogate(loss, old_distance - distance, beyond)
