"""How different the images of one prompt are, which training on a reward may lose while every score rises.

S images of each of P prompts.
"""

import math

import torch
from torch import Tensor

from flow_grpo.base import distributed
from flow_grpo.evaluation.estimates import Estimate, over_prompts


class Distances:
    """Sums over a rank's images, a batch at a time."""

    def __init__(self, num_prompts: int):
        self.num_prompts, self.sums = num_prompts, None

    def add(self, features: Tensor, prompts: list[int]) -> None:
        """features [b, ...] as the VAE sees images but for its normalisation; prompts: b numbers below P, or none."""
        flat = features[: len(prompts)].flatten(1).double()
        if self.sums is None:
            self.sums = flat.new_zeros(self.num_prompts, flat.shape[1] + 1)
        rows = torch.cat([flat, flat.square().mean(1, keepdim=True)], 1)
        self.sums.index_add_(0, torch.tensor(prompts, dtype=torch.int64, device=flat.device), rows)

    def estimate(self, num: int) -> Estimate:
        """The root mean square distance between two of a prompt's `num` images, per element, mean over prompts of all
        ranks' images."""
        means = distributed.average(self.sums.clone()) * distributed.world_size() / num
        variance = (means[:, -1] - means[:, :-1].square().mean(1)).clamp(min=0)
        return over_prompts((2 * num / (num - 1) * variance).sqrt().cpu())


def entropy_bits(labels: Tensor) -> float:
    """Collision entropy of labels [S, P] of a prompt's images, -1 = none: -log2 of how often two of a prompt's images
    have the same label. Unlike Shannon's, its estimate does not grow with the number of images. 0 = all are alike, NaN
    = no prompt has two labels."""
    same = pairs = 0
    for column in labels.T:
        counts = torch.bincount(column[column >= 0])
        same += (counts * (counts - 1)).sum().item()
        pairs += int(counts.sum() * (counts.sum() - 1))
    return math.log2(pairs / max(same, 1)) if pairs else math.nan
