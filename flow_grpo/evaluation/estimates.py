"""What scores [S, P] of S noises of each of P prompts say: means, standard errors, best of k, per category.

The noises of one prompt are not independent draws of the score, so standard errors are those of the prompts' means.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """A mean over prompts."""

    mean: float
    error: float  # its standard error; NaN for a single prompt
    num_prompts: int


def mean(values: Tensor) -> Estimate:
    """The mean of all scores, those that failed (NaN) left out."""
    return over_prompts(values.double().nanmean(0))._replace(mean=values.nanmean().item())


def best_of(values: Tensor, k: int) -> Estimate:
    """The expected highest of k of a prompt's S scores, without bias: sum_i C(i - 1, k - 1) / C(S, k) x_(i), with x_(i)
    the i-th smallest. Of scores 0 and 1 this is pass@k (arXiv:2107.03374, eq. 1)."""
    num = len(values)
    assert 1 <= k <= num, (k, num)
    weights = [math.comb(i, k - 1) / math.comb(num, k) for i in range(num)]
    return over_prompts(torch.tensor(weights, dtype=torch.float64) @ values.double().sort(0).values)


def paired(ours: Tensor, theirs: Tensor) -> tuple[Estimate, int, int, int]:
    """Compare scores [S, P] prompt by prompt: what noises and prompts have in common cancels in the difference. The
    difference, and on how many prompts ours are better, worse and equal."""
    differences = (ours.double() - theirs.double()).nanmean(0)
    return over_prompts(differences), *(int((differences.sign() == sign).sum()) for sign in (1, -1, 0))


def is_binary(values: Tensor) -> bool:
    """Whether scores say right or wrong, no more; False where all of them failed."""
    values = values[~values.isnan()]
    return bool(len(values)) and bool(((values == 0) | (values == 1)).all())


def by_category(values: Tensor, categories: list[str]) -> dict[str, Estimate]:
    """The mean of each category of prompts, in the order in which they come; P categories."""
    columns = {name: [i for i, other in enumerate(categories) if other == name] for name in dict.fromkeys(categories)}
    return {name: mean(values[:, rows]) for name, rows in columns.items()}


def over_prompts(values: Tensor) -> Estimate:
    """Of one number per prompt, [P] float64; NaN: left out."""
    values = values[~values.isnan()]
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(values.mean().item(), error, len(values))
