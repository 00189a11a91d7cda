"""Estimates from scores [S, P] of S noises of each of P prompts: means, standard errors, best of k, per category.

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


class Comparison(NamedTuple):
    """One policy's scores less another's, prompt by prompt."""

    difference: Estimate
    num_higher: int  # prompts on which the first policy scores more
    num_lower: int
    num_equal: int


def mean(values: Tensor) -> Estimate:
    """Return the mean of all scores, those that failed (NaN) left out."""
    return over_prompts(values.double().nanmean(0))._replace(mean=values.nanmean().item())


def best_of(values: Tensor, k: int) -> Estimate:
    """Return the expected highest of k of a prompt's S scores, without bias: sum_i C(i - 1, k - 1) / C(S, k) x_(i),
    with x_(i) the i-th smallest. Of scores 0 and 1 this is pass@k (arXiv:2107.03374, eq. 1)."""
    num_noises = len(values)
    assert 1 <= k <= num_noises, (k, num_noises)
    weights = [math.comb(i, k - 1) / math.comb(num_noises, k) for i in range(num_noises)]
    return over_prompts(torch.tensor(weights, dtype=torch.float64) @ values.double().sort(0).values)


def paired(ours: Tensor, theirs: Tensor) -> Comparison:
    """Compare scores [S, P] prompt by prompt: what noises and prompts have in common cancels in the difference."""
    differences = (ours.double() - theirs.double()).nanmean(0)
    return Comparison(
        difference=over_prompts(differences),
        num_higher=int((differences > 0).sum()),
        num_lower=int((differences < 0).sum()),
        num_equal=int((differences == 0).sum()),
    )


def is_binary(values: Tensor) -> bool:
    """Return whether scores say right or wrong, no more; False where all of them failed."""
    known = values[~values.isnan()]
    if not len(known):
        return False
    return bool(((known == 0) | (known == 1)).all())


def by_category(values: Tensor, categories: list[str]) -> dict[str, Estimate]:
    """Return the mean of each category of prompts, in the order in which they come; P categories."""
    columns: dict[str, list[int]] = {}
    for number, category in enumerate(categories):
        columns.setdefault(category, []).append(number)
    return {category: mean(values[:, numbers]) for category, numbers in columns.items()}


def over_prompts(values: Tensor) -> Estimate:
    """Estimate the mean of one number per prompt, [P] float64; NaN is left out."""
    known = values[~values.isnan()]
    error = math.nan
    if len(known) > 1:
        error = known.std().item() / math.sqrt(len(known))
    return Estimate(known.mean().item(), error, len(known))
