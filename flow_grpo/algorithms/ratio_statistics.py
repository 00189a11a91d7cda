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


class StepGaps:
    """The same disagreement by denoising step, over an epoch's rows that were met before any update."""

    def __init__(self, num_steps: int, device):
        # Sums of: rows, |gap|, |ratio - 1|, clipped, |log-ratio|. Maxima of: |gap|, |log-ratio|.
        self.sums = torch.zeros(num_steps, 5, dtype=torch.float64, device=device)
        self.maxima = torch.zeros(num_steps, 2, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, steps: Tensor, log_ratio: Tensor, gap: Tensor, clip_range: float) -> None:
        """All [rows]; steps int64. No host sync."""
        log_ratio, gap = log_ratio.double(), gap.double().abs()
        off = (log_ratio.exp() - 1).abs()
        columns = torch.ones_like(gap), gap, off, (off > clip_range).double(), log_ratio.abs()
        self.sums.index_add_(0, steps, torch.stack(columns, 1))
        largest = torch.stack([gap, log_ratio.abs()], 1)
        self.maxima.scatter_reduce_(0, steps[:, None].expand_as(largest), largest, "amax")

    def pop(self, reduce: Callable, clip_range: float) -> tuple[dict[str, float], Disagreement | None]:
        """Metrics of each step that has rows and what they amount to (None without rows, or without a clip_range, its
        unit), and a new beginning. `reduce`: (sums, maxima) -> the same over all ranks."""
        sums, maxima = (part.to("cpu", copy=True) for part in reduce(self.sums, self.maxima))
        self.sums.zero_()
        self.maxima.zero_()
        metrics = {}
        for step, ((rows, gap, off, clipped, _), (largest, _)) in enumerate(zip(sums.tolist(), maxima.tolist())):
            if rows:
                of_step = dict(log_prob_abs_diff_mean=gap / rows, log_prob_abs_diff_max=largest)
                of_step |= dict(ratio_minus_one_e4=1e4 * off / rows, clip_fraction=clipped / rows)
                metrics |= {f"parity/step_{step}_{name}": value for name, value in of_step.items()}
        if not metrics or not clip_range:
            return metrics, None
        rows, _, _, clipped, log_ratio = sums.sum(0).tolist()
        largest, step = maxima[:, 1].max(0)
        mean = log_ratio / rows / clip_range
        return metrics, Disagreement(largest.item() / clip_range, mean, clipped / rows, step.item())


def exceeded(found: Disagreement, limit: float) -> list[str]:
    """What of it is beyond config.train.parity_limit, or its fixed fraction of that; 0 = no limit. A NaN is no
    disagreement: its row is named as not finite."""
    return [
        f"{value:.3g} {unit} (limit {limit * fraction:g})"
        for value, (fraction, unit) in zip(found, TOLERATED)
        if limit and value > limit * fraction
    ]
