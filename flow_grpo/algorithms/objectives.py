"""What an update minimises, as records: a loss of stored noisy steps, or of finished images on the forward process.

To add one: a function in surrogates.py, an entry here, and a config that names it. The command line reads this module
before torch is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.base.errors import UserError


def fits(config: ConfigDict) -> None:
    """Any config will do."""


@dataclass(frozen=True)
class Objective:
    """A loss that train.objective (of noisy steps) or train.forward_objective (of finished images) names."""

    # Of (SDEStep, Minibatch, advantages, config.train), or of finished images (ForwardStep, advantages, config.train)
    # -> Surrogate; or MODULE:FUNCTION, which is imported when it is needed.
    loss: Callable[..., Any] | str
    card: str  # the method and its paper
    reads: tuple[str, ...] = ()  # settings of config.train that not every objective reads
    check: Callable[[ConfigDict], None] = fits  # of config; raises UserError for what it cannot be trained with

    @property
    def function(self) -> Callable[..., Any]:
        if not isinstance(self.loss, str):
            return self.loss
        module, _, name = self.loss.partition(":")
        return getattr(import_module(module), name)


def needs_gaussian(config: ConfigDict) -> None:
    """Raises UserError unless log-probs are those of a Gaussian."""
    if config.sample.sde_type == "cps":
        raise UserError(
            f"config.train.objective {config.train.objective!r} takes Gaussian log-probs, which sample.sde_type 'cps' "
            "does not have; 'cps_gaussian' is the same step with them"
        )


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


OURS = "flow_grpo.algorithms.surrogates:"
OBJECTIVES = {
    "clip": Objective(OURS + "clip", "Flow-GRPO (arXiv:2505.05470)", reads=("clip_range",)),
    "guard": Objective(OURS + "guard", "GRPO-Guard (arXiv:2510.22319)", reads=("clip_range",), check=needs_gaussian),
    "dppo": Objective(OURS + "dppo", "Flow-DPPO (arXiv:2606.11025)", reads=("kl_limit",), check=needs_gaussian),
}
FORWARD_OBJECTIVES = {
    "nft": Objective(OURS + "nft", "DiffusionNFT (arXiv:2509.16117)", reads=("nft_beta", "flow_matching_weight")),
    "awm": Objective(
        OURS + "awm",
        "advantage-weighted matching (AWM, arXiv:2509.25050)",
        reads=("clip_range",),
        check=needs_sampler,
    ),
}
