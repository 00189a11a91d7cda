"""Parameters of sampling. The command line checks them before torch is imported."""

import math
from dataclasses import dataclass

from flow_grpo.base.errors import UserError
from flow_grpo.settings.sections import Config, Sample

# Largest eta of each SDE. Beyond it the step overflows, or the sine of cps, which it rotates by, falls again.
LARGEST_ETA = {"sde": 10.0, "dance": 10.0, "cps": 1.0, "cps_gaussian": 1.0}
SDE_TYPES = tuple(LARGEST_ETA)
# Smallest eta but 0: below, float32 rounds the noise away.
SMALLEST_ETA = 1e-3
SOLVERS = ("dpm", "extrapolate")  # of solvers.py


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, but for latents, size and noisy steps. An impossible value is a UserError."""

    num_steps: int  # from noise to image
    guidance_scale: float
    noise_level: float = 0.0  # eta of the noisy steps; nothing reads it where no step is noisy
    sde_type: str = "sde"  # of the noisy steps, see sde_step_with_logprob
    flash_ratio: float = 0.0  # above 0: what follows the noise takes this share of its forwards...
    flash_solver: str = "dpm"  # ...by one of SOLVERS

    @classmethod
    def of(cls, sample: Sample) -> "SamplingParams":
        """Return the parameters of a run's rollout, from config.sample."""
        return cls(
            num_steps=sample.num_steps,
            guidance_scale=sample.guidance_scale,
            noise_level=sample.noise_level,
            sde_type=sample.sde_type,
            flash_ratio=sample.flash_ratio,
            flash_solver=sample.flash_solver,
        )

    def __post_init__(self) -> None:
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise UserError(f"num_steps is {self.num_steps!r}; it must be an integer of at least 1")
        # NaN compares false, too.
        if not 0 <= self.guidance_scale < math.inf:
            raise UserError(f"guidance_scale is {self.guidance_scale}; it must be finite, at least 0")
        if not 0 <= self.flash_ratio <= 1:
            raise UserError(f"flash_ratio is {self.flash_ratio}; it must be from 0 to 1")
        for name, choices in (("sde_type", SDE_TYPES), ("flash_solver", SOLVERS)):
            value = getattr(self, name)
            if value not in choices:
                raise UserError(f"{name} is {value!r}; it may be {', '.join(map(repr, choices))}")
        check_noise_level(self.noise_level, self.sde_type)

    def check_noisy_steps(self, steps: range) -> None:
        """Raise UserError if one of the noisy `steps` has no noise to score: the last of cps keeps none."""
        includes_last = bool(steps) and steps.stop == self.num_steps
        if includes_last and self.noise_level and self.sde_type.startswith("cps"):
            raise UserError(
                f"the noisy steps are {steps} of {self.num_steps}, but the last step of {self.sde_type!r} adds no "
                "noise; leave it out"
            )


def check_noise_level(noise_level: float, sde_type: str, name: str = "noise_level") -> None:
    """Raise UserError for a noise whose steps are not finite, or that rounding takes away. 0 is the ODE."""
    largest = LARGEST_ETA[sde_type]
    if noise_level and not SMALLEST_ETA <= noise_level <= largest:
        raise UserError(
            f"{name} is {noise_level}; with sde_type {sde_type!r} it must be from {SMALLEST_ETA} to {largest}"
        )


@dataclass(frozen=True)
class Shortcuts:
    """How images are drawn whose velocities enter no log-prob; the defaults are the exact way."""

    weights: str = "exact"  # as sample.rollout_weights
    text_multiple: int = 0  # as sample.text_multiple
    flash_ratio: float = 0.0  # share of the forwards that is computed; 0 = all of them
    flash_solver: str = "dpm"  # as sample.flash_solver

    @property
    def solver(self) -> str:
        """Solver and its share of the forwards; "" = a forward for each step."""
        return f"{self.flash_solver} {self.flash_ratio:g}" if self.flash_ratio else ""


EXACT = Shortcuts()


def of_validation(config: Config) -> Shortcuts:
    """Return the shortcuts of a run's evaluations, which choose its best policy; those of its test are `EXACT`."""
    if config.eval.exact:
        return EXACT
    return Shortcuts(
        weights=config.sample.rollout_weights,
        text_multiple=config.sample.text_multiple,
        flash_ratio=config.eval.flash_ratio,
        flash_solver=config.sample.flash_solver,
    )
