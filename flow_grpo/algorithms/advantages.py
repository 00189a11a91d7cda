"""Advantages: each image against the other images of its own group."""

from typing import NamedTuple

import torch
from torch import Tensor

FLAT = 1e-6  # of a group's mean: a smaller spread is rounding of float32 rewards


class GroupStats(NamedTuple):
    mean: Tensor  # [G] or [G, K] float64, mean reward of each group
    std: Tensor  # same shape, population standard deviation; 0 in a group whose rewards differ by rounding alone
    group: Tensor  # [B] int64, row of the two tensors above that each image belongs to


def group_stats(rewards: Tensor, groups: Tensor) -> GroupStats:
    """Mean and population std of each group. rewards [B] or [B, K]; groups [B] int, any ids in any order."""
    rewards = rewards.double()
    _, group = groups.unique(return_inverse=True)
    count = torch.bincount(group).to(rewards).view(-1, *[1] * (rewards.ndim - 1))
    zeros = rewards.new_zeros(len(count), *rewards.shape[1:])
    mean = zeros.index_add(0, group, rewards) / count
    std = (zeros.index_add(0, group, (rewards - mean[group]) ** 2) / count).sqrt()
    return GroupStats(mean, std.where(std > FLAT * mean.abs(), 0.0), group)


def stats_of_sum(rewards: dict[str, Tensor], weights: dict[str, float], groups: Tensor) -> GroupStats:
    """Mean and std of the weighted sum in each group; std 0 where the sums differ by the terms' rounding alone.

    Terms that cancel leave their rounding, which is small beside each of them, but not beside their sum.
    """
    terms = [weight * rewards[name].double() for name, weight in weights.items()]
    stats = group_stats(sum(terms), groups)
    sizes = group_stats(sum(term.abs() for term in terms), groups).mean
    return stats._replace(std=stats.std.where(stats.std > FLAT * sizes, 0.0))


def groups_with_signal(
    rewards: dict[str, Tensor], weights: dict[str, float], groups: Tensor, aggregation: str = "sum"
) -> Tensor:
    """Return in which groups there is something to learn, [G] bool: their weighted sums differ by more than rounding,
    with "gdpo" at least one of the rewards that count."""
    if aggregation == "sum":
        return stats_of_sum(rewards, weights, groups).std > 0
    return torch.stack([group_stats(rewards[name], groups).std > 0 for name in weights]).any(0)


def neighbours_with_signal(rewards: dict[str, Tensor], weights: dict[str, float], group_size: int) -> Tensor:
    """Return `groups_with_signal` of groups of neighbours, [G] bool. An image that lacks a reward (NaN) does not count.

    Args:
        rewards: name -> [G * group_size].
    """
    scored = torch.stack([rewards[name].isfinite() for name in weights]).all(0)
    groups = torch.arange(len(scored)) // group_size
    differs = torch.zeros(len(scored) // group_size, dtype=torch.bool)
    scored_rewards = {name: rewards[name][scored] for name in weights}
    differs[groups[scored].unique()] = groups_with_signal(scored_rewards, weights, groups[scored])
    return differs


def combined_advantages(
    rewards: dict[str, Tensor], weights: dict[str, float], groups: Tensor, aggregation: str, global_std: bool = False
) -> Tensor:
    """Advantages of several rewards, [B], over ALL ranks.

    Args:
        rewards: name -> [B]; those that `weights` names count.
        aggregation: "sum" compares weighted sums of rewards; "gdpo" compares each reward by itself, so that none is
            drowned by another's larger spread, then sums and standardises over all images (GDPO, arXiv:2601.05242).
    """
    if aggregation == "sum":
        total = sum(weight * rewards[name].double() for name, weight in weights.items())
        differs = has_signal(rewards, weights, groups)
        return group_advantages(total, groups, global_std).where(differs, 0.0).float()
    total = sum(w * group_advantages(rewards[name], groups, global_std) for name, w in weights.items())
    return (total - total.mean()) / (total.std(unbiased=False) + 1e-4)


def best_and_worst(values: Tensor, num: int) -> Tensor:
    """Which of S scores of each group are its num / 2 highest and num / 2 lowest (one more of the former where num is
    odd), [G, num] int64 in descending order; values [G, S], NaN = not known, which lies in the middle."""
    known = values.where(values.isfinite(), values.nanmedian(1, keepdim=True).values)
    order = known.argsort(dim=1, descending=True, stable=True)
    return torch.cat([order[:, : num - num // 2], order[:, values.shape[1] - num // 2 :]], 1)


def has_signal(
    rewards: dict[str, Tensor], weights: dict[str, float], groups: Tensor, aggregation: str = "sum"
) -> Tensor:
    """Return `groups_with_signal` for each image, [B] bool."""
    _, group = groups.unique(return_inverse=True)
    return groups_with_signal(rewards, weights, groups, aggregation)[group]


def group_advantages(rewards: Tensor, groups: Tensor, global_std: bool = False, eps: float = 1e-4) -> Tensor:
    """(reward - mean of its group) / (std + eps), Flow-GRPO (arXiv:2505.05470) eq. 4; 0 in a group whose rewards differ
    by rounding alone. Same shape and dtype as `rewards`.

    Args:
        rewards: [B], or [B, K] for K rewards that are normalised apart, over ALL ranks; groups: [B] int.
        global_std: divide by the std of all rewards instead of the group's own.
    """
    stats = group_stats(rewards, groups)
    own_std = stats.std[stats.group]
    std = rewards.double().std(dim=0, unbiased=False) if global_std else own_std
    advantages = (rewards.double() - stats.mean[stats.group]) / (std + eps)
    return advantages.where(own_std > 0, 0.0).to(rewards)
