"""What an update minimises, as records: a loss of stored noisy steps, or of finished images on the forward process.

A record says which settings it reads, what it asks of a config, and what settings.md and model cards say of it, so
that nothing else compares its name. To add one: a formula in losses.py, a function and an entry here, a config that
names it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.flow_matching import velocity_error
from flow_grpo.algorithms.rollout import Minibatch
from flow_grpo.base.errors import UserError
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep


@dataclass(frozen=True)
class Surrogate:
    """What an objective makes of R * J outcomes."""

    loss: Tensor  # [R * J], before the weights of steps and images
    log_ratio: Tensor | None = None  # [R * J], what it clips the exponential of; 0 on policy; None = it has no ratio
    beyond: Tensor | None = None  # [R * J] bool, outside of its trust region; None = of train.clip_range
    metrics: dict[str, Tensor] = field(default_factory=dict)  # of its own, [R * J] each


def fits(config: ConfigDict) -> None:
    """Any config will do."""


@dataclass(frozen=True)
class Objective:
    """A loss of noisy steps; train.objective names it."""

    function: Callable[[SDEStep, Minibatch, Tensor, ConfigDict], Surrogate]  # of step, rows, advantages, config.train
    card: str  # the method and its paper
    reads: tuple[str, ...] = ()  # settings of config.train that not every objective reads
    check: Callable[[ConfigDict], None] = fits  # of config; raises UserError for what it cannot be trained with


class ForwardStep(NamedTuple):
    """R finished images, noised, and what the policies say of them. [R, ...] float32 but for sigma."""

    velocity: Tensor  # of the trained policy, with gradients
    old_velocity: Tensor  # of the policy that sampled
    x_t: Tensor
    x_0: Tensor
    noise: Tensor
    sigma: Tensor  # [R]


@dataclass(frozen=True)
class ForwardObjective:
    """A loss of finished images on the forward process; train.forward_objective names it."""

    function: Callable[[ForwardStep, Tensor, ConfigDict], Surrogate]  # of step, advantages [R], config.train
    card: str
    reads: tuple[str, ...] = ()
    check: Callable[[ConfigDict], None] = fits


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


def needs_gaussian(config: ConfigDict) -> None:
    """Raises UserError unless log-probs are those of a Gaussian."""
    if config.sample.sde_type == "cps":
        raise UserError(
            f"config.train.objective {config.train.objective!r} takes Gaussian log-probs, which sample.sde_type 'cps' "
            "does not have; 'cps_gaussian' is the same step with them"
        )


def nft(step: ForwardStep, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """DiffusionNFT's (arXiv:2509.16117, eq. 5), with the factor 5 of its published code."""
    good, images = losses.nft_reward_prob(advantages, train.adv_clip_max), (step.x_t, step.x_0, step.sigma)
    loss = losses.nft_loss(step.velocity, step.old_velocity, *images, good, train.nft_beta)
    if train.flow_matching_weight:
        loss = loss + train.flow_matching_weight * losses.own_flow_matching_loss(step.velocity, *images)
    return Surrogate(5 * loss)


def awm(step: ForwardStep, advantages: Tensor, train: ConfigDict) -> Surrogate:
    """PPO's clip of flow matching errors (AWM, arXiv:2509.25050)."""
    advantages = advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    target = step.noise - step.x_0
    loss = losses.awm_loss(step.velocity, step.old_velocity, target, advantages, train.clip_range)
    error, old_error = (velocity_error(v, step.x_0, step.noise) for v in (step.velocity, step.old_velocity))
    return Surrogate(loss, old_error - error)


def needs_sampler(config: ConfigDict) -> None:
    """Raises UserError unless an epoch's ratios start at 1 and then move: the old policy is the trained one, copied."""
    train, name = config.train, f"config.train.forward_objective {config.train.forward_objective!r}"
    if train.old_decay_schedule:
        raise UserError(
            f"{name} takes config.train.old_decay_schedule 0, which is {train.old_decay_schedule}: its ratio is 1 when "
            "an epoch's update begins"
        )
    if train.updates_per_epoch * train.inner_epochs < 2:
        raise UserError(
            f"{name} takes at least 2 updates of an epoch, but config.train.updates_per_epoch and inner_epochs are 1: "
            "in the first update every ratio is 1, so clip_range would be ignored"
        )


OBJECTIVES = {
    "clip": Objective(clip, "Flow-GRPO (arXiv:2505.05470)", reads=("clip_range",)),
    "guard": Objective(guard, "GRPO-Guard (arXiv:2510.22319)", reads=("clip_range",), check=needs_gaussian),
    "dppo": Objective(dppo, "Flow-DPPO (arXiv:2606.11025)", reads=("kl_limit",), check=needs_gaussian),
}
FORWARD_OBJECTIVES = {
    "nft": ForwardObjective(nft, "DiffusionNFT (arXiv:2509.16117)", reads=("nft_beta", "flow_matching_weight")),
    "awm": ForwardObjective(
        awm, "advantage-weighted matching (AWM, arXiv:2509.25050)", reads=("clip_range",), check=needs_sampler
    ),
}
