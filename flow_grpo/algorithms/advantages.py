"""Advantages: how much better each image scores than the other images of its group."""

from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.settings.sections import Train

# A spread below this fraction of a group's mean is rounding of float32 rewards.
FLAT = 1e-6


class GroupStats(NamedTuple):
    """Statistics of G groups of rewards."""

    mean: Tensor  # [G] or [G, K] float64, mean reward of each group
    std: Tensor  # same shape, population standard deviation; 0 in a group whose rewards differ by rounding alone
    group: Tensor  # [B] int64, row of the two tensors above that each image belongs to


def group_stats(rewards: Tensor, groups: Tensor) -> GroupStats:
    """Mean and population std of each group. rewards [B] or [B, K]; groups [B] int, any ids in any order."""
    # In float64: the spread of large rewards is small beside them.
    rewards = rewards.double()
    _, group = groups.unique(return_inverse=True)

    # [G], or [G, 1] beside rewards [B, K]
    count = torch.bincount(group).to(rewards).view(-1, *[1] * (rewards.ndim - 1))
    zeros = rewards.new_zeros(len(count), *rewards.shape[1:])
    mean = zeros.index_add(0, group, rewards) / count
    squares = (rewards - mean[group]) ** 2
    std = (zeros.index_add(0, group, squares) / count).sqrt()
    return GroupStats(mean, std.where(std > FLAT * mean.abs(), 0.0), group)


def sum_of(terms: list[Tensor]) -> Tensor:
    """Sum of tensors of one shape, in their order."""
    return sum(terms, torch.zeros_like(terms[0]))


def stats_of_sum(rewards: dict[str, Tensor], weights: dict[str, float], groups: Tensor) -> GroupStats:
    """Mean and std of the weighted sum in each group; std 0 where the sums differ by the terms' rounding alone.

    Terms that cancel leave their rounding, which is small beside each term but not beside their sum.
    """
    terms = [weight * rewards[name].double() for name, weight in weights.items()]
    stats = group_stats(sum_of(terms), groups)
    mean_size = group_stats(sum_of([term.abs() for term in terms]), groups).mean
    return stats._replace(std=stats.std.where(stats.std > FLAT * mean_size, 0.0))


def groups_with_signal(
    rewards: dict[str, Tensor], weights: dict[str, float], groups: Tensor, aggregation: str = "sum"
) -> Tensor:
    """Return in which groups there is something to learn, [G] bool: the weighted sums of their images differ by more
    than rounding or, with "gdpo", at least one of the rewards in `weights` does."""
    if aggregation == "sum":
        return stats_of_sum(rewards, weights, groups).std > 0
    has_spread = [group_stats(rewards[name], groups).std > 0 for name in weights]
    return torch.stack(has_spread).any(0)


def neighbours_with_signal(rewards: dict[str, Tensor], weights: dict[str, float], group_size: int) -> Tensor:
    """Return `groups_with_signal` of groups of neighbours, [G] bool. An image that lacks a reward (NaN) does not count.

    Args:
        rewards: name -> [G * group_size].
    """
    scored = torch.stack([rewards[name].isfinite() for name in weights]).all(0)
    groups = torch.arange(len(scored)) // group_size
    scored_rewards = {name: rewards[name][scored] for name in weights}
    scored_groups = groups[scored]

    # A group without any scored image has no row in the result of groups_with_signal.
    signal = torch.zeros(len(scored) // group_size, dtype=torch.bool)
    signal[scored_groups.unique()] = groups_with_signal(scored_rewards, weights, scored_groups)
    return signal


def combined_advantages(
    rewards: dict[str, Tensor], weights: dict[str, float], groups: Tensor, aggregation: str, global_std: bool = False
) -> Tensor:
    """Advantages of several rewards, [B], over ALL ranks.

    Args:
        rewards: name -> [B]; only those that `weights` names count.
        aggregation: "sum" compares weighted sums of rewards; "gdpo" compares each reward by itself, so that none is
            drowned by another's larger spread, then sums and standardises over all images (GDPO, arXiv:2601.05242).
    """
    if aggregation == "sum":
        weighted_sum = sum_of([weight * rewards[name].double() for name, weight in weights.items()])
        advantages = group_advantages(weighted_sum, groups, global_std)
        # group_advantages looks at the spread of the sum; terms that cancel need a look at each reward.
        return advantages.where(has_signal(rewards, weights, groups), 0.0).float()
    total = sum_of([weight * group_advantages(rewards[name], groups, global_std) for name, weight in weights.items()])
    return (total - total.mean()) / (total.std(unbiased=False) + 1e-4)


def best_and_worst_indices(scores: Tensor, num: int) -> Tensor:
    """Indices of the num / 2 highest and the num / 2 lowest scores of each group, [G, num] int64, in descending order
    of the scores. An odd `num` takes one more of the highest.

    Args:
        scores: [G, S]; NaN = not known, which counts as the median of its group.
    """
    medians = scores.nanmedian(1, keepdim=True).values
    order = scores.where(scores.isfinite(), medians).argsort(dim=1, descending=True, stable=True)
    num_lowest = num // 2
    highest = order[:, : num - num_lowest]
    lowest = order[:, scores.shape[1] - num_lowest :]
    return torch.cat([highest, lowest], 1)


def bounded(advantages: Tensor, train: Train) -> Tensor:
    """Return advantages within train.adv_clip_max of 0, by train.adv_bound. Same shape."""
    limit = train.adv_clip_max
    if train.adv_bound == "tanh":
        return limit * torch.tanh(advantages / limit)
    return advantages.clamp(-limit, limit)


def has_signal(
    rewards: dict[str, Tensor], weights: dict[str, float], groups: Tensor, aggregation: str = "sum"
) -> Tensor:
    """Return `groups_with_signal` for each image, [B] bool."""
    _, group = groups.unique(return_inverse=True)
    return groups_with_signal(rewards, weights, groups, aggregation)[group]


def group_advantages(rewards: Tensor, groups: Tensor, global_std: bool = False, eps: float = 1e-4) -> Tensor:
    """Return (reward - mean of its group) / (std + eps), Flow-GRPO (arXiv:2505.05470) eq. 4; 0 in a group whose rewards
    differ by rounding alone. Same shape and dtype as `rewards`.

    Args:
        rewards: [B], or [B, K] for K rewards that are normalised apart, over ALL ranks.
        groups: [B] int.
        global_std: divide by the std of all rewards instead of the group's own.
    """
    stats = group_stats(rewards, groups)
    group_std = stats.std[stats.group]
    std = group_std
    if global_std:
        std = rewards.double().std(dim=0, unbiased=False)
    advantages = (rewards.double() - stats.mean[stats.group]) / (std + eps)
    return advantages.where(group_std > 0, 0.0).to(rewards)
