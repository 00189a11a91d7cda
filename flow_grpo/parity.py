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


class StepGaps:
    """The same disagreement by denoising step, over an epoch's rows that were met before any update."""

    def __init__(self, num_steps: int, device):
        self.sums = torch.zeros(num_steps, 4, dtype=torch.float64, device=device)  # rows, gap, |ratio - 1|, clipped
        self.maxima = torch.zeros(num_steps, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, steps: Tensor, log_prob: Tensor, old_log_prob: Tensor, clip_range: float) -> None:
        """All [rows]; steps int64. No host sync."""
        gap = (log_prob - old_log_prob).double()
        off = (gap.exp() - 1).abs()
        columns = torch.ones_like(gap), gap.abs(), off, (off > clip_range).double()
        self.sums.index_add_(0, steps, torch.stack(columns, 1))
        self.maxima.scatter_reduce_(0, steps, gap.abs(), "amax")

    def pop(self, reduce) -> dict[str, float]:
        """Figures of each step that has rows, and a new beginning.

        reduce: (sums, maxima) -> the same over all ranks.
        """
        sums, maxima = (part.tolist() for part in reduce(self.sums, self.maxima))
        self.sums.zero_()
        self.maxima.zero_()
        figures = {}
        for step, ((rows, gap, off, clipped), largest) in enumerate(zip(sums, maxima)):
            if rows:
                step_figures = dict(log_prob_abs_diff_mean=gap / rows, log_prob_abs_diff_max=largest)
                step_figures |= dict(ratio_minus_one_e4=1e4 * off / rows, clip_fraction=clipped / rows)
                figures |= {f"parity/step_{step}_{name}": value for name, value in step_figures.items()}
        return figures
