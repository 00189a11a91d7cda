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
    """PPO's bound of a ratio freed of its negative bias and of its step's noise scale (GRPO-Guard, arXiv:2510.22319),
    so that one clip range fits all steps; 1 / |dt| evens out the steps' gradients. Log-probs are Gaussian densities."""
    std = step.transition_std.flatten()
    bias = ((step.mean - rows.means) ** 2).flatten(1).mean(1) / (2 * std**2)
    log_ratio = (step.log_prob - rows.log_probs + bias) * std
    loss = losses.clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), advantages, train.clip_range)
    return Surrogate(loss / step.dt.flatten().abs(), log_ratio)


def dppo(step: SDEStep, rows: Minibatch, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """Flow-DPPO (arXiv:2606.11025): -advantage * ratio, without a gradient where the step's KL(new || old) is over the
    limit, in nats per latent element, and the ratio has moved the way the advantage pushes. The KL depends on both
    Gaussians, and not on where in them a sample lies."""
    log_ratio = step.log_prob - rows.log_probs
    ratio = torch.exp(log_ratio)
    beyond = losses.gaussian_kl(step.mean, rows.means, step.transition_std) > train.kl_limit
    stops = beyond & (advantages * (ratio - 1) > 0)
    loss = -advantages * ratio
    return Surrogate(torch.where(stops, loss.detach(), loss), log_ratio, beyond)


def nft(step: ForwardStep, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """DiffusionNFT's (arXiv:2509.16117, eq. 5, with self-normalised distances), with the factor 5 of its published
    code: a policy mixed of the old one and a share of the trained one is to predict good images, its mirror image bad
    ones."""
    reward_prob, beta = losses.nft_reward_prob(advantages, train.adv_clip_max), train.nft_beta
    positive = beta * step.velocity + (1 - beta) * step.old_velocity
    negative = (1 + beta) * step.old_velocity - beta * step.velocity
    images = step.x_t, step.x_0, step.sigma
    good, bad = (losses.own_flow_matching_loss(v, *images) for v in (positive, negative))
    return Surrogate(5 * ((reward_prob * good + (1 - reward_prob) * bad) / beta))


def awm(step: ForwardStep, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """PPO's bound of the ratio exp(old error - error): the negative flow matching error takes the log-prob's place
    (advantage-weighted matching, arXiv:2509.25050)."""
    error, old_error = (velocity_error(v, step.x_0, step.noise) for v in (step.velocity, step.old_velocity))
    advantages = advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    loss = losses.clipped_surrogate(-error, -old_error, advantages, train.clip_range)
    return Surrogate(loss, old_error - error)


def dgpo(step: ForwardStep, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """Groups as preferences (DGPO, arXiv:2510.08425, as in its published code), over the reference or, without one,
    over the old policy: sigmoid(s) A error with s = beta mean_group[A (error - reference error)], so that a group whose
    errors already say what its advantages say weighs little. The gradient is that of softplus(s) group_size / beta,
    without the rows whose ratio exp(old error - error) has left the clip range the way A pushes."""
    anchor = step.old_velocity if step.reference_velocity is None else step.reference_velocity
    velocities = step.velocity, step.old_velocity, anchor
    error, old_error, reference_error = (velocity_error(v, step.x_0, step.noise) for v in velocities)
    advantages = advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    gained = (advantages * (error - reference_error)).detach().view(-1, step.group_size)
    weight = torch.sigmoid(train.dgpo_beta * gained.mean(1)).repeat_interleave(step.group_size)
    stops = (torch.exp(old_error - error) - 1) * advantages.sign() > train.clip_range
    loss = weight * advantages * torch.where(stops, error.detach(), error)
    return Surrogate(loss, old_error - error)


def elbo(step: ForwardStep, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """Policy gradient of the ELBO of a final image (arXiv:2602.04663): rho (A - w log rho) distance with rho = exp(old
    distance - distance), both without a gradient. The gradient is that of w (rho log rho - rho) - A rho, whose minimum
    over rho is exp(A / w). w = 0 is its "EPG", above 0 its "PEPG". The distances are the negative ELBOs."""
    images = step.x_t, step.x_0, step.sigma
    distance, old_distance = (losses.own_flow_matching_loss(v, *images) for v in (step.velocity, step.old_velocity))
    advantages = advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    log_ratio = old_distance - distance
    detached = log_ratio.detach()
    loss = detached.exp() * (advantages - train.proximal_weight * detached) * distance
    return Surrogate(loss, log_ratio, beyond=torch.zeros_like(distance, dtype=torch.bool))
