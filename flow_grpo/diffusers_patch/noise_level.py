"""Which kinds of noisy steps there are, and how noisy they may be. The command line asks before torch is imported."""

from flow_grpo.base.errors import UserError

LARGEST_ETA = {"sde": 10.0, "dance": 10.0, "cps": 1.0, "cps_gaussian": 1.0}  # beyond: overflow, or a sine that falls
SDE_TYPES = tuple(LARGEST_ETA)
SMALLEST_ETA = 1e-3  # but for 0; below, float32 rounds the noise away


def check_noise_level(noise_level: float, sde_type: str, name: str = "noise_level") -> None:
    """Raises UserError for a noise whose steps are not finite, or that rounding takes away; 0 has none."""
    least, most = SMALLEST_ETA, LARGEST_ETA[sde_type]
    if noise_level and not least <= noise_level <= most:
        raise UserError(f"{name} is {noise_level}; with sde_type {sde_type!r} it must be from {least} to {most}")
