"""How different the images of one prompt are, which training on a reward may lose while every score rises.

S images of each of P prompts.
"""

import math

import torch
from torch import Tensor

from flow_grpo.base import distributed
from flow_grpo.evaluation.estimates import Estimate, over_prompts


class Distances:
    """Distances between the images of each prompt, summed up over a rank's images, a batch at a time."""

    def __init__(self, num_prompts: int):
        self.num_prompts = num_prompts
        # [P, F + 1]: the sum of a prompt's features, and of their mean square; None before the first batch.
        self.sums: Tensor | None = None

    def add(self, features: Tensor, prompts: list[int]) -> None:
        """Add the images of b prompts, numbers below P, or of none.

        Args:
            features: [b, ...] latents unpacked, still normalised.
        """
        flat = features[: len(prompts)].flatten(1).double()
        if self.sums is None:
            self.sums = flat.new_zeros(self.num_prompts, flat.shape[1] + 1)
        rows = torch.cat([flat, flat.square().mean(1, keepdim=True)], 1)
        self.sums.index_add_(0, torch.tensor(prompts, dtype=torch.int64, device=flat.device), rows)

    def estimate(self, num_noises: int) -> Estimate:
        """Return the root mean square distance between two of a prompt's images, per element, mean over prompts of all
        ranks' images."""
        assert self.sums is not None, "no batch was added"
        # Each rank has the sums of its own images; the average of ranks times their number is the sum of all.
        means = distributed.average(self.sums.clone()) * distributed.world_size() / num_noises
        variance = (means[:, -1] - means[:, :-1].square().mean(1)).clamp(min=0)
        # Two independent draws differ by twice the variance, which S draws underestimate by (S - 1) / S.
        return over_prompts((2 * num_noises / (num_noises - 1) * variance).sqrt().cpu())


def entropy_bits(labels: Tensor) -> float:
    """Return the collision entropy of labels [S, P] of a prompt's images, -1 = none: -log2 of how often two of a
    prompt's images have the same label. Unlike Shannon's, its estimate does not grow with the number of images. 0 = all
    are alike, NaN = no prompt has two labels."""
    num_same = 0
    num_pairs = 0
    for column in labels.T:
        counts = torch.bincount(column[column >= 0])
        num_same += (counts * (counts - 1)).sum().item()
        num_pairs += int(counts.sum() * (counts.sum() - 1))
    if not num_pairs:
        return math.nan
    # No two alike: the estimate is what one pair would give.
    return math.log2(num_pairs / max(num_same, 1))
