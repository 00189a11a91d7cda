"""How images are sampled. The command line asks before torch is imported."""

import math
from dataclasses import dataclass, fields

from ml_collections import ConfigDict

from flow_grpo.base.errors import UserError

LARGEST_ETA = {"sde": 10.0, "dance": 10.0, "cps": 1.0, "cps_gaussian": 1.0}  # beyond: overflow, or a sine that falls
SDE_TYPES = tuple(LARGEST_ETA)
SMALLEST_ETA = 1e-3  # but for 0; below, float32 rounds the noise away
SOLVERS = ("dpm", "extrapolate")  # of solvers.py


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, but for latents, size and noisy steps. A value that nothing can be sampled with is a UserError."""

    num_steps: int  # from noise to image
    guidance_scale: float
    noise_level: float = 0.0  # eta of the noisy steps; nothing reads it where no step is noisy
    sde_type: str = "sde"  # of the noisy steps, see sde_step_with_logprob
    flash_ratio: float = 0.0  # above 0: what follows the noise takes this share of its forwards...
    flash_solver: str = "dpm"  # ...by one of SOLVERS

    @classmethod
    def of(cls, sample: ConfigDict) -> "SamplingParams":
        """Of a run's rollout: those that config.sample says."""
        return cls(**{field.name: sample[field.name] for field in fields(cls)})

    def __post_init__(self):
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise UserError(f"num_steps is {self.num_steps!r}; it must be an integer of at least 1")
        if not 0 <= self.guidance_scale < math.inf:  # NaN compares false too
            raise UserError(f"guidance_scale is {self.guidance_scale}; it must be finite, at least 0")
        if not 0 <= self.flash_ratio <= 1:
            raise UserError(f"flash_ratio is {self.flash_ratio}; it must be from 0 to 1")
        for name, choices in (("sde_type", SDE_TYPES), ("flash_solver", SOLVERS)):
            if getattr(self, name) not in choices:
                raise UserError(f"{name} is {getattr(self, name)!r}; it may be {', '.join(map(repr, choices))}")
        check_noise_level(self.noise_level, self.sde_type)

    def check_noisy(self, steps: range) -> None:
        """Raises UserError if one of the noisy `steps` has no noise to score: the last of cps keeps none."""
        if steps and steps.stop == self.num_steps and self.noise_level and self.sde_type.startswith("cps"):
            raise UserError(
                f"the noisy steps are {steps} of {self.num_steps}, but the last step of {self.sde_type!r} adds no "
                "noise; leave it out"
            )


def check_noise_level(noise_level: float, sde_type: str, name: str = "noise_level") -> None:
    """Raises UserError for a noise whose steps are not finite, or that rounding takes away; 0 has none."""
    least, most = SMALLEST_ETA, LARGEST_ETA[sde_type]
    if noise_level and not least <= noise_level <= most:
        raise UserError(f"{name} is {noise_level}; with sde_type {sde_type!r} it must be from {least} to {most}")
