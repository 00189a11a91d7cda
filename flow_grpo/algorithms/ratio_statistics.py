"""How far the policy has moved from the one that sampled, and how far the two forwards disagree before it has.

Before an epoch's first optimizer step both forwards are of the same weights, so that every ratio is 1. Where one is
not, the cause is an error of computation (padding, kernels, dtypes, a stale adapter), and the gradient is not the
algorithm's: a run ends there. Log-ratios are the objective's own: what it clips.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.base.errors import RunFailed


class ParityError(RunFailed):
    """Rollout and update disagree before the first optimizer step of an epoch."""


class Disagreement(NamedTuple):
    """Of the rows of an epoch's first update, over all ranks, of the objective's log-ratios."""

    largest: float  # |log-ratio| in clip ranges
    mean: float  # |log-ratio| in clip ranges
    clipped: float  # share of rows
    step: int  # denoising step of the largest


# What of a Disagreement a run tolerates, as a fraction of config.train.parity_limit.
TOLERATED = (1.0, "clip ranges at most"), (0.1, "clip ranges on average"), (0.01, "of all rows clipped")


@torch.no_grad()
def record(
    meter, log_ratio: Tensor, gap: Tensor, clip_range: float, *, on_policy: bool, beyond: Tensor | None = None
) -> None:
    """Add the ratio's statistics to `meter`.

    Args:
        log_ratio: [rows], the objective's.
        gap: [rows], log-prob now less log-prob at the rollout.
        on_policy: no optimizer step since the rollout, so that `gap` should be 0; logged as parity/*.
        beyond: [rows] bool, outside of the objective's trust region; None = of clip_range.
    """
    ratio, gap = log_ratio.double().exp(), gap.double()
    beyond = (ratio - 1).abs() > clip_range if beyond is None else beyond
    meter.add_spread(ratio=ratio)
    meter.add(
        approx_kl=gap**2 / 2,
        clip_fraction_high=(beyond & (ratio > 1)).double(),
        clip_fraction_low=(beyond & (ratio < 1)).double(),
    )
    if on_policy:
        meter.add(**{"parity/log_prob_abs_diff_mean": gap.abs(), "parity/ratio_minus_one_e4": (ratio - 1).abs() * 1e4})
        meter.add_max(**{"parity/log_prob_abs_diff_max": gap.abs()})


class FirstRatios:
    """The log-ratios of an epoch's rows that were met before any update, which should be 0."""

    def __init__(self, num_steps: int, device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # rows, |log-ratio|, clipped
        self.maxima = torch.zeros(num_steps, dtype=torch.float64, device=device)  # |log-ratio|, of each denoising step

    @torch.no_grad()
    def add(self, steps: Tensor, log_ratio: Tensor, clip_range: float) -> None:
        """All [rows]; steps int64. No host sync."""
        log_ratio = log_ratio.double()
        clipped = (log_ratio.exp() - 1).abs() > clip_range
        self.sums += torch.stack([torch.ones_like(log_ratio), log_ratio.abs(), clipped.double()]).sum(1)
        self.maxima.scatter_reduce_(0, steps, log_ratio.abs(), "amax")

    def pop(self, reduce: Callable, clip_range: float) -> Disagreement | None:
        """What they amount to, and a new beginning; None without rows, or without a clip_range, its unit.
        `reduce`: (sums, maxima) -> the same over all ranks."""
        sums, maxima = (part.to("cpu", copy=True) for part in reduce(self.sums, self.maxima))
        self.sums.zero_()
        self.maxima.zero_()
        rows, log_ratio, clipped = sums.tolist()
        if not rows or not clip_range:
            return None
        largest, step = maxima.max(0)
        return Disagreement(largest.item() / clip_range, log_ratio / rows / clip_range, clipped / rows, step.item())


def exceeded(found: Disagreement, limit: float) -> list[str]:
    """What of it is beyond config.train.parity_limit, or its fixed fraction of that; 0 = no limit. A NaN is no
    disagreement: its row is named as not finite."""
    return [
        f"{value:.3g} {unit} (limit {limit * fraction:g})"
        for value, (fraction, unit) in zip(found, TOLERATED)
        if limit and value > limit * fraction
    ]
