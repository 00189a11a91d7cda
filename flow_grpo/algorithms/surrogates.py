"""The functions of the records in objectives.py: what a loss makes of stored noisy steps, or of finished images."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.flow_matching import velocity_error
from flow_grpo.algorithms.rollout import Minibatch
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep


@dataclass(frozen=True)
class Surrogate:
    """What an objective makes of R * J outcomes."""

    loss: Tensor  # [R * J], before the weights of steps and images
    log_ratio: Tensor | None = None  # [R * J], what it clips the exponential of; 0 on policy; None = it has no ratio
    beyond: Tensor | None = None  # [R * J] bool, outside of its trust region; None = of train.clip_range
    metrics: dict[str, Tensor] = field(default_factory=dict)  # of its own, [R * J] each


class ForwardStep(NamedTuple):
    """R finished images, noised, and what the policies say of them. [R, ...] float32 but for sigma."""

    velocity: Tensor  # of the trained policy, with gradients
    old_velocity: Tensor  # of the policy that sampled
    x_t: Tensor
    x_0: Tensor
    noise: Tensor
    sigma: Tensor  # [R]
    reference_velocity: Tensor | None = None  # None where train.beta is 0
    group_size: int = 1  # rows that share noise and level and are neighbours; 1 = they lie anywhere


def clip(step: SDEStep, rows: Minibatch, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """PPO's clipped ratio (Flow-GRPO, arXiv:2505.05470, eq. 5)."""
    loss = losses.clipped_surrogate(step.log_prob, rows.log_probs, advantages, train.clip_range)
    return Surrogate(loss, step.log_prob - rows.log_probs)


def guard(step: SDEStep, rows: Minibatch, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """The ratio freed of bias and of its step's noise scale (GRPO-Guard, arXiv:2510.22319)."""
    densities = step.log_prob, rows.log_probs, step.prev_sample_mean, rows.means, step.transition_std
    loss = losses.guard_surrogate(*densities, step.dt, advantages, train.clip_range)
    return Surrogate(loss, losses.guard_log_ratio(*densities))


def dppo(step: SDEStep, rows: Minibatch, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """The ratio within a bound of the step's KL in place of the ratio's (Flow-DPPO, arXiv:2606.11025)."""
    means = step.prev_sample_mean, rows.means, step.transition_std
    loss = losses.dppo_surrogate(step.log_prob, rows.log_probs, *means, advantages, train.kl_limit)
    beyond = losses.gaussian_kl(*means) > train.kl_limit
    return Surrogate(loss, step.log_prob - rows.log_probs, beyond)


def nft(step: ForwardStep, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """DiffusionNFT's (arXiv:2509.16117, eq. 5), with the factor 5 of its published code."""
    good, images = losses.nft_reward_prob(advantages, train.adv_clip_max), (step.x_t, step.x_0, step.sigma)
    return Surrogate(5 * losses.nft_loss(step.velocity, step.old_velocity, *images, good, train.nft_beta))


def awm(step: ForwardStep, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """PPO's clip of flow matching errors (AWM, arXiv:2509.25050)."""
    advantages = advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    target = step.noise - step.x_0
    loss = losses.awm_loss(step.velocity, step.old_velocity, target, advantages, train.clip_range)
    error, old_error = (velocity_error(v, step.x_0, step.noise) for v in (step.velocity, step.old_velocity))
    return Surrogate(loss, old_error - error)


def dgpo(step: ForwardStep, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """Groups as preferences (DGPO, arXiv:2510.08425), over the reference or, without one, over the old policy."""
    anchor = step.old_velocity if step.reference_velocity is None else step.reference_velocity
    errors = [velocity_error(v, step.x_0, step.noise) for v in (step.velocity, step.old_velocity, anchor)]
    advantages = advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    loss = losses.dgpo_loss(*errors, advantages, step.group_size, train.dgpo_beta, train.clip_range)
    return Surrogate(loss, errors[1] - errors[0])


def elbo(step: ForwardStep, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """The policy gradient of the ELBO, with a proximal term (arXiv:2602.04663, "PEPG")."""
    images = step.x_t, step.x_0, step.sigma
    distance, old_distance = (losses.own_flow_matching_loss(v, *images) for v in (step.velocity, step.old_velocity))
    advantages = advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    loss = losses.elbo_loss(distance, old_distance, advantages, train.proximal_weight)
    return Surrogate(loss, old_distance - distance, beyond=torch.zeros_like(distance, dtype=torch.bool))
