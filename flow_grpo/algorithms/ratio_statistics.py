"""How far the policy has moved from the one that sampled, and how far the two forwards disagree before it has.

Before an epoch's first optimizer step both forwards are of the same weights, so that every ratio is 1. Where one is
not, the cause is an error of computation (padding, kernels, dtypes, a stale adapter), and the gradient is not the
algorithm's: a run ends there. Log-ratios are the objective's own: what it clips.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.base import distributed
from flow_grpo.base.errors import RunFailed


class ParityError(RunFailed):
    """Rollout and update disagree before the first optimizer step of an epoch."""


class FirstRatios(NamedTuple):
    """Of a minibatch that was met before any update of its epoch."""

    log_ratios: Tensor  # [R * J], which should be 0
    row_ids: Tensor  # [R, 2] int64 on the CPU, as in Minibatch
    timesteps: Tensor  # [R] f32


# What a run tolerates of first log-ratios, as a fraction of config.train.parity_limit.
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


@torch.no_grad()
def exceeded(log_ratios: Tensor, clip_range: float, limit: float) -> list[str]:
    """What of all ranks' first log-ratios [rows] is beyond config.train.parity_limit, or its fixed fraction of that; 0
    = no limit, as with a clip_range of 0, its unit. A NaN is no disagreement: its row is named as not finite."""
    if not (limit and clip_range):
        return []
    sizes, clipped = log_ratios.double().abs(), (log_ratios.double().exp() - 1).abs() > clip_range
    sums = torch.stack([torch.ones_like(sizes), sizes, clipped.double()]).sum(1)
    sums, largest = distributed.over_ranks(sums, sizes.max()[None])
    num_rows, total, num_clipped = sums.tolist()
    found = largest.item() / clip_range, total / num_rows / clip_range, num_clipped / num_rows
    return [
        f"{value:.3g} {unit} (limit {limit * fraction:g})"
        for value, (fraction, unit) in zip(found, TOLERATED)
        if value > limit * fraction
    ]
