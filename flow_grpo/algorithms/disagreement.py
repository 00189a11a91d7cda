"""Disagreement of rewards: images that the trained reward ranks higher than others do (GARDO, arXiv:2512.24138)."""

import torch
from torch import Tensor


def overrated(trained: Tensor, watched: list[Tensor], groups: Tensor, share: float) -> Tensor:
    """Return which images the trained reward overrates most, [B] bool.

    An image is overrated by its rank under the trained reward less its mean rank under `watched`. Chosen are the
    `share` of all images for which this difference is largest, and those that tie with the last of these, but only
    where it is above 0. An image without a trained score, or without any watched score, is never chosen.

    Args:
        trained: [B], over ALL ranks; NaN = no score.
        watched: rewards that are not trained on, [B] each, at least one.
        groups: [B] int, images that are ranked together.
        share: in (0, 1].
    """
    watched_rank = torch.stack([win_rates(scores, groups) for scores in watched]).nanmean(0)
    overrating = (win_rates(trained, groups) - watched_rank).nan_to_num(0.0)
    num_chosen = max(1, round(share * len(overrating)))
    least_chosen = overrating.topk(num_chosen).values[-1]
    return (overrating > 0) & (overrating >= least_chosen)


def win_rates(scores: Tensor, groups: Tensor) -> Tensor:
    """Return the rank of each image in its group, [B] float64: the share of the others that score lower, and half of
    those that score alike. NaN where the score is NaN; such images are no rivals.

    Args:
        scores: [B].
        groups: [B] int.
    """
    rates = torch.full_like(scores, torch.nan, dtype=torch.float64)
    scored = scores.isfinite().nonzero().flatten()
    groups_of_scored = groups[scored]
    _, group_sizes = groups_of_scored.unique(return_counts=True)
    sorted_by_group = scored[groups_of_scored.argsort(stable=True)]
    for members in sorted_by_group.split(group_sizes.tolist()):
        values = scores[members].contiguous()
        ordered = values.sort().values
        num_lower = torch.searchsorted(ordered, values)
        num_not_higher = torch.searchsorted(ordered, values, right=True) - 1  # without the image itself
        num_others = max(len(members) - 1, 1)
        rates[members] = (num_lower + num_not_higher).double() / (2 * num_others)
    return rates
