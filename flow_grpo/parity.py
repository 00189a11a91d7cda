"""How far the policy has moved from the one that sampled, and how far the two forwards disagree before it has."""

import torch
from torch import Tensor


@torch.no_grad()
def record(meter, log_prob: Tensor, old_log_prob: Tensor, clip_range: float, *, on_policy: bool) -> None:
    """Add the ratio's statistics to `meter`; all [rows].

    on_policy: no optimizer step since the rollout, so that log-probs should be equal: their difference is an error of
    computation (padding, kernels, dtypes), logged as parity/*.
    """
    difference = (log_prob - old_log_prob).double()
    ratio = difference.exp()
    meter.add_spread(ratio=ratio)
    meter.add(
        approx_kl=difference**2 / 2,
        clip_fraction_high=(ratio > 1 + clip_range).double(),
        clip_fraction_low=(ratio < 1 - clip_range).double(),
    )
    if on_policy:
        meter.add(
            **{
                "parity/log_prob_abs_diff_mean": difference.abs(),
                "parity/ratio_minus_one_e4": (ratio - 1).abs() * 1e4,
            }
        )
        meter.add_max(**{"parity/log_prob_abs_diff_max": difference.abs()})
