"""Disagreement of rewards: images that the trained reward ranks higher than others do (GARDO, arXiv:2512.24138)."""

import torch
from torch import Tensor


def overrated(trained: Tensor, watched: list[Tensor], groups: Tensor, share: float) -> Tensor:
    """Return the images that the trained reward overrates most, [B] bool: `share` of all and those that tie with them,
    but only such whose rank by it is higher than their mean rank by `watched`. One that lacks a score is none of them.

    Args:
        trained: [B], over ALL ranks; NaN = no score.
        watched: rewards that are not trained on, [B] each, at least one.
        groups: [B] int, images that are ranked together.
        share: in (0, 1].
    """
    mean_rate = torch.stack([win_rates(scores, groups) for scores in watched]).nanmean(0)
    excess = (win_rates(trained, groups) - mean_rate).nan_to_num(0.0)
    count = max(1, round(share * len(excess)))
    least = excess.topk(count).values[-1]
    return (excess > 0) & (excess >= least)


def win_rates(scores: Tensor, groups: Tensor) -> Tensor:
    """Return the rank of each image in its group, [B] float64: the share of the others that score lower, and half of
    those that score alike. NaN where the score is NaN; such images are no rivals.

    Args:
        scores: [B].
        groups: [B] int.
    """
    rates = torch.full_like(scores, torch.nan, dtype=torch.float64)
    scored = scores.isfinite().nonzero().flatten()
    _, counts = groups[scored].unique(return_counts=True)
    by_group = scored[groups[scored].argsort(stable=True)]
    for members in by_group.split(counts.tolist()):
        values = scores[members].contiguous()
        ordered = values.sort().values
        num_lower = torch.searchsorted(ordered, values)
        num_not_higher = torch.searchsorted(ordered, values, right=True) - 1  # without the image itself
        num_others = max(len(members) - 1, 1)
        rates[members] = (num_lower + num_not_higher).double() / (2 * num_others)
    return rates
