"""Statistics of ratios: how far the policy has moved since it sampled, and whether rollout and update agree before.

Before an epoch's first optimizer step both forwards use the same weights, so every ratio must be 1. A ratio that is not
1 there is an error of computation (padding, kernels, dtypes, a stale adapter). The gradient is then not the
algorithm's, so the run ends. The log-ratios are those that the objective clips.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.base import distributed
from flow_grpo.base.errors import RunFailed


class ParityError(RunFailed):
    """Rollout and update disagree before the first optimizer step of an epoch."""


class FirstRatios(NamedTuple):
    """Log-ratios of a minibatch that is met before the first optimizer step of its epoch."""

    log_ratios: Tensor  # [R * J], which should be 0
    row_ids: Tensor  # [R * J, 2] int64 on the CPU, of each outcome's row, as in Minibatch
    timesteps: Tensor  # [R * J] f32, likewise


@torch.no_grad()
def add_to_meter(
    meter, log_ratio: Tensor, gap: Tensor, clip_range: float, *, on_policy: bool, beyond: Tensor | None = None
) -> dict[str, Tensor]:
    """Add the statistics of a minibatch's ratios to `meter`; return those of each row, [rows] float64 by name.

    Args:
        meter: a monitoring.metrics.Meter, which this package may not import.
        log_ratio: [rows], log of the ratio that the objective clips; GRPO-Guard's differs from `gap`.
        gap: [rows], present log-prob minus the rollout's, in nats per element, for the estimate of the KL. An objective
            without log-probs passes its log_ratio.
        clip_range: a ratio further than this from 1 counts as clipped, unless `beyond` is given.
        on_policy: whether no optimizer step was taken since the rollout. Both should then be 0, and what is left is
            logged as parity/*.
        beyond: [rows] bool, outside of a trust region that is not `clip_range`.
    """
    ratio = log_ratio.double().exp()
    gap = gap.double()
    if beyond is None:
        beyond = (ratio - 1).abs() > clip_range
    values = {
        "approx_kl": gap**2 / 2,
        "clip_fraction_high": (beyond & (ratio > 1)).double(),
        "clip_fraction_low": (beyond & (ratio < 1)).double(),
    }
    meter.add_spread(ratio=ratio)
    meter.add(**values)
    if on_policy:
        meter.add(**{"parity/log_prob_abs_diff_mean": gap.abs(), "parity/ratio_minus_one_e4": (ratio - 1).abs() * 1e4})
        meter.add_max(**{"parity/log_prob_abs_diff_max": gap.abs()})
    return values | {"ratio": ratio}


@torch.no_grad()
def parity_problems(log_ratios: Tensor, clip_range: float, parity_limit: float) -> list[str]:
    """Statistics of all ranks' first log-ratios that exceed their limits, as parts of a sentence.

    A NaN exceeds no limit here: the error about its loss or gradient names its row.

    Args:
        log_ratios: [rows] of this rank.
        clip_range: unit of the log-ratios; 0 = no limit.
        parity_limit: as train.parity_limit; 0 = no limit.
    """
    if parity_limit == 0 or clip_range == 0:
        return []
    sizes = log_ratios.double().abs()
    clipped = (log_ratios.double().exp() - 1).abs() > clip_range
    sums = torch.stack([torch.ones_like(sizes), sizes, clipped.double()]).sum(1)
    sums, largest = distributed.over_ranks(sums, sizes.max()[None])
    num_rows, total_size, num_clipped = sums.tolist()

    # The largest may reach the limit, the mean a tenth of it, and the share of clipped rows a hundredth.
    checks = (
        (largest.item() / clip_range, parity_limit, "clip ranges at most"),
        (total_size / num_rows / clip_range, 0.1 * parity_limit, "clip ranges on average"),
        (num_clipped / num_rows, 0.01 * parity_limit, "of all rows clipped"),
    )
    return [f"{value:.3g} {unit} (limit {limit:g})" for value, limit, unit in checks if value > limit]
