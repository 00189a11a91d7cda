"""Objectives: the table of losses that train.objective and train.forward_objective name, and what each of them needs;
and the paths of reward gradients that train.gradient_path names.

To add a loss: a function in algorithms/surrogates.py, an entry here, and a config that names it. The command line reads
this module before torch is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from flow_grpo.base.errors import UserError

if TYPE_CHECKING:
    # sections.py offers these records as choices.
    from flow_grpo.settings.sections import Config, Sample


@dataclass(frozen=True)
class Objective:
    """A loss that train.objective (of noisy steps) or train.forward_objective (of finished images) names."""

    # (SDEStep, StepRows, advantages, config.train) -> Surrogate, or for finished images (ForwardStep, advantages,
    # config.train) -> Surrogate; or MODULE:FUNCTION, which is imported when it is needed.
    loss: Callable[..., Any] | str
    card: str  # the method and its paper
    reads: tuple[str, ...] = ()  # settings of config.train that not every objective reads
    check: "Callable[[Config], None] | None" = None  # of config; raises UserError for what it cannot be trained with
    old_policy: bool = True  # whether a loss of finished images reads the velocity of the policy that sampled
    whole_groups: bool = False  # whether a minibatch holds whole groups, each at one level
    final_images: bool = False  # whether a loss of noisy steps also reads x_0 of the images that they led to
    caution: str = ""  # what a run says at its start, a sentence without its name

    @property
    def function(self) -> Callable[..., Any]:
        """Loss as a function, imported if it is only named."""
        if not isinstance(self.loss, str):
            return self.loss
        module, _, name = self.loss.partition(":")
        return getattr(import_module(module), name)


class GradientPath(NamedTuple):
    """Way of a reward's gradient through the velocities of a walk; formulas in algorithms/reward_gradients.py."""

    card: str  # the method and its paper


def needs_gaussian(config: "Config") -> None:
    """Raise UserError unless log-probs are those of a Gaussian."""
    if config.sample.sde_type == "cps":
        raise UserError(
            f"config.train.objective {config.train.objective!r} needs Gaussian log-probs, which sample.sde_type 'cps' "
            "does not have; 'cps_gaussian' is the same step with them"
        )


def needs_older_policy(config: "Config") -> None:
    """Raise UserError if the old policy equals the trained one in every update."""
    train = config.train
    if not train.old_decay_schedule and train.updates_per_epoch * train.inner_epochs < 2:
        raise UserError(
            f"config.train.forward_objective {train.forward_objective!r} compares the policy with an older one, but "
            "with config.train.old_decay_schedule 0 and one update of an epoch there is none: set updates_per_epoch 2"
        )


def needs_moving_ratio(config: "Config") -> None:
    """Raise UserError unless an epoch's ratios start at 1, as the old policy is a copy of the trained one, and then
    move."""
    needs_older_policy(config)
    if config.train.old_decay_schedule:
        raise UserError(
            f"config.train.forward_objective {config.train.forward_objective!r} needs old_decay_schedule 0, but it is "
            f"{config.train.old_decay_schedule}: the ratio must be 1 when an epoch's update begins"
        )


def needs_present_policy(config: "Config") -> None:
    """Raise UserError unless the policy that samples is a copy of the trained one, which is held to a reference."""
    train = config.train
    name = f"config.train.forward_objective {train.forward_objective!r}"
    if train.old_decay_schedule:
        raise UserError(
            f"{name} needs old_decay_schedule 0, but it is {train.old_decay_schedule}: this loss learns from images of "
            "the present policy"
        )
    if not train.beta:
        raise UserError(f"{name} needs config.train.beta above 0: without a pull to the reference it has no optimum")


def needs_lagging_policy(config: "Config") -> None:
    """Raise UserError if the old policy is a copy of the trained one, at first or for ever, or a forward may hold
    parts of groups."""
    train = config.train
    if train.old_decay_schedule in (0, 2):
        raise UserError(
            f"config.train.forward_objective {train.forward_objective!r} learns the log-ratio to an older policy, but "
            f"old_decay_schedule {train.old_decay_schedule} makes that a copy of the trained one (2: for 75 updates): "
            "set 3, or a fixed decay"
        )
    needs_whole_groups(config)


def needs_compared_groups(config: "Config") -> None:
    """Raise UserError unless the old policy is another than the trained one and each forward holds whole groups, with
    one noise and one baseline per group."""
    needs_older_policy(config)
    if config.sample.baseline == "all":
        raise UserError(
            f"config.train.forward_objective {config.train.forward_objective!r} needs config.sample.baseline 'group', "
            "but it is 'all': the loss compares the errors of a group, which takes advantages that add up to 0 in each"
        )
    needs_whole_groups(config)


def needs_whole_groups(config: "Config") -> None:
    """Raise UserError unless each forward holds whole groups, with one noise per group."""
    sample = config.sample
    name = f"config.train.forward_objective {config.train.forward_objective!r}"
    if not config.train.shared_noise:
        raise UserError(f"{name} needs config.train.shared_noise True: it compares a group's errors at one noise")
    _check_groups_of_a_batch(name, sample)


def needs_endpoints(config: "Config") -> None:
    """Raise UserError unless each forward holds whole groups of images, and steps tell the velocity."""
    sample = config.sample
    name = f"config.train.objective {config.train.objective!r}"
    if sample.num_branches > 1:
        raise UserError(f"{name} compares images of one prompt at all of their steps, not branches: use train_*.py")
    if sample.sde_type not in ("sde", "dance"):
        raise UserError(f"{name} needs config.sample.sde_type 'sde' or 'dance', but it is {sample.sde_type!r}")
    _check_groups_of_a_batch(name, sample)


def needs_a_common_noise(config: "Config") -> None:
    """Raise UserError as `needs_endpoints` does, and unless the images of a group start from one noise."""
    if not config.sample.same_latent:
        raise UserError(
            f"config.train.objective {config.train.objective!r} needs config.sample.same_latent True: it compares "
            "images that start from one noise"
        )
    needs_endpoints(config)


def _check_groups_of_a_batch(name: str, sample: "Sample") -> None:
    if sample.batch_size % sample.num_images_per_prompt:
        raise UserError(
            f"{name} needs whole groups in a forward, but config.sample.batch_size {sample.batch_size} is no multiple "
            f"of num_images_per_prompt {sample.num_images_per_prompt}"
        )


# Module of the functions that are named below.
SURROGATES = "flow_grpo.algorithms.surrogates:"
OBJECTIVES = {
    "clip": Objective(SURROGATES + "clip", "Flow-GRPO (arXiv:2505.05470)", reads=("clip_range",)),
    "guard": Objective(
        SURROGATES + "guard", "GRPO-Guard (arXiv:2510.22319)", reads=("clip_range",), check=needs_gaussian
    ),
    "dppo": Objective(SURROGATES + "dppo", "Flow-DPPO (arXiv:2606.11025)", reads=("kl_limit",), check=needs_gaussian),
    "rsm": Objective(
        SURROGATES + "rsm",
        "reward score matching (arXiv:2604.17415)",
        reads=("clip_range", "clip_std_exponent"),
        check=needs_gaussian,
    ),
    "fdfo": Objective(
        SURROGATES + "fdfo",
        "finite-difference flow optimisation (arXiv:2603.12893)",
        reads=("clip_range",),
        check=needs_a_common_noise,
        caution="is stable with a pull to the reference alone: on the tiny model four of four runs with train.beta 0.1 "
        "or 0.3 rose to their end, and three of three without fell back; see docs/algorithms/endpoint.md",
        whole_groups=True,
        final_images=True,
    ),
    "endpoint": Objective(
        SURROGATES + "endpoint",
        "endpoint regression (after arXiv:2610.12572)",
        reads=("endpoint_magnitude", "endpoint_space"),
        check=needs_endpoints,
        caution="is stable with a pull to the reference alone: on the tiny model a run with train.beta 0.1 rose to its "
        "end, and three of three without fell after 12 epochs, as latents grew; see docs/algorithms/endpoint.md",
        whole_groups=True,
        final_images=True,
    ),
}
FORWARD_OBJECTIVES = {
    "nft": Objective(SURROGATES + "nft", "DiffusionNFT (arXiv:2509.16117)", reads=("nft_beta",)),
    "awm": Objective(
        SURROGATES + "awm",
        "advantage-weighted matching (arXiv:2509.25050)",
        reads=("clip_range",),
        check=needs_moving_ratio,
        caution="is stable with a strong pull to the reference alone: on the tiny model three of three runs with "
        "train.beta 2 held for 720 updates, and all with 0.5 ended with an infinite or NaN gradient; see "
        "docs/algorithms/awm.md",
    ),
    "dgpo": Objective(
        SURROGATES + "dgpo",
        "direct group preference optimisation (arXiv:2510.08425)",
        reads=("clip_range", "dgpo_beta"),
        check=needs_compared_groups,
        whole_groups=True,
    ),
    "elbo": Objective(
        SURROGATES + "elbo",
        "policy gradient of the ELBO (arXiv:2602.04663)",
        reads=("proximal_weight",),
        check=needs_older_policy,
    ),
    "ram": Objective(
        SURROGATES + "ram",
        "reinforce adjoint matching (arXiv:2605.10759)",
        reads=("reward_multiplier",),
        check=needs_present_policy,
        old_policy=False,
        caution="has no bound where train.reward_multiplier is large: on the tiny model three of three runs with 2 "
        "fell after 59 to 75 epochs, and one with 1 after 275; set health.action, and see docs/algorithms/ram.md",
    ),
    "crd": Objective(
        SURROGATES + "crd",
        "centred reward distillation (arXiv:2603.14128)",
        reads=("crd_beta", "sampler_decay_schedule"),
        check=needs_lagging_policy,
        whole_groups=True,
    ),
}
GRADIENT_PATHS = {
    "refl": GradientPath("ReFL (arXiv:2304.05977)"),
    "draft": GradientPath("DRaFT (arXiv:2309.17400)"),
    "leap": GradientPath("LeapAlign (arXiv:2604.15311)"),
    "sparse": GradientPath("FlowBP (arXiv:2606.11075)"),
}
