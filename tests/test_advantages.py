"""Advantages against golden numbers, and what they must not depend on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flow_grpo.algorithms.advantages import (
    best_and_worst,
    combined_advantages,
    group_advantages,
    group_stats,
    kept_rows,
)

FOLDER = Path(__file__).parent / "golden"
GOLDEN = np.load(FOLDER / "golden.npz")
REWARDS = torch.tensor(GOLDEN["adv/rewards"]).float()
GROUPS = torch.tensor([int(name[1:]) for name in json.loads((FOLDER / "prompts.json").read_text())["prompts"]])


@pytest.mark.parametrize(("key", "global_std"), [("group", False), ("global_std", True)])
def test_golden_advantages(key, global_std):
    expected = torch.tensor(GOLDEN[f"adv/{key}"]).float()
    torch.testing.assert_close(group_advantages(REWARDS, GROUPS, global_std), expected, rtol=1e-5, atol=1e-6)


def test_golden_share_of_groups_without_spread():
    share = (group_stats(REWARDS, GROUPS).std < 1e-6).float().mean()
    assert share.item() == pytest.approx(float(GOLDEN["adv/zero_std_ratio"]))


@pytest.mark.parametrize("global_std", [False, True])
def test_several_rewards_are_normalised_apart(global_std):
    both = torch.stack([REWARDS, REWARDS.flip(0) * 3 + 1], 1)
    columns = [group_advantages(column, GROUPS, global_std) for column in both.unbind(1)]
    torch.testing.assert_close(group_advantages(both, GROUPS, global_std), torch.stack(columns, 1))


def test_a_groups_level_scale_name_and_place_do_not_matter():
    rewards, groups = torch.tensor([1.0, 10, 2, 20, 3, 30]), torch.tensor([7, 1, 7, 1, 7, 1])
    advantages = group_advantages(rewards, groups, eps=0)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, -1, 0, 0, 1, 1]) * 1.5**0.5)


@pytest.mark.parametrize("value", [0.3, 8.3, 85.3, 612.7])
@pytest.mark.parametrize("rounding", [0.0, 1e-7])
def test_rewards_of_any_size_that_differ_by_rounding_alone_are_a_group_without_spread(value, rounding):
    rewards, groups = torch.full((24,), value), torch.zeros(24, dtype=torch.long)
    rewards[::2] *= 1 + rounding
    both = {"a": rewards, "b": 2 * rewards}
    cancelled = combined_advantages(both, {"a": 1.0, "b": -0.5}, groups, "sum")
    assert torch.equal(group_advantages(rewards, groups), torch.zeros(24))
    assert torch.equal(cancelled, torch.zeros(24))
    assert not kept_rows(both, {"a": 1.0, "b": 1.0}, groups).any()
    rewards[::3] *= 1.0001
    assert kept_rows({"a": rewards}, {"a": 1.0}, groups).all()


TWO = {"a": REWARDS, "b": REWARDS.flip(0) * 100}


@pytest.mark.parametrize("global_std", [False, True])
def test_a_sum_of_rewards_is_one_reward(global_std):
    found = combined_advantages(TWO | {"c": REWARDS}, {"a": 2.0, "b": 0.5}, GROUPS, "sum", global_std)
    torch.testing.assert_close(found, group_advantages(2 * TWO["a"] + 0.5 * TWO["b"], GROUPS, global_std))


def test_gdpo_gives_each_reward_its_weight_whatever_its_scale():
    found = combined_advantages(TWO, {"a": 2.0, "b": 1.0}, GROUPS, "gdpo")
    scaled = combined_advantages({"a": TWO["a"] * 50, "b": TWO["b"]}, {"a": 2.0, "b": 1.0}, GROUPS, "gdpo")
    by_hand = 2 * group_advantages(TWO["a"], GROUPS) + group_advantages(TWO["b"], GROUPS)
    torch.testing.assert_close(found, (by_hand - by_hand.mean()) / by_hand.std(unbiased=False), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found, scaled, rtol=0.02, atol=0.02)
    assert found.mean().abs() < 1e-6
    assert found.std(unbiased=False) == pytest.approx(1, abs=1e-3)


def test_the_best_and_the_worst_of_a_group_are_picked_and_an_unknown_score_is_neither():
    values = torch.tensor([[0.3, 0.9, torch.nan, 0.1, 0.5], [1.0, 1.0, 0.0, 1.0, 1.0]])
    assert best_and_worst(values, 2).tolist() == [[1, 3], [0, 2]]
    assert best_and_worst(values, 3).tolist() == [[1, 4, 3], [0, 1, 2]]
    assert best_and_worst(values, 5)[0].tolist() == [1, 4, 0, 2, 3]


def test_a_group_is_kept_if_any_reward_that_counts_differs_in_it():
    rewards = {"a": torch.tensor([1.0, 1, 2, 2]), "b": torch.tensor([5.0, 5, 5, 6]), "c": torch.tensor([1.0, 2, 3, 4])}
    groups = torch.tensor([0, 0, 1, 1])
    assert kept_rows(rewards, {"a": 1.0, "b": 1.0}, groups).tolist() == [False, False, True, True]
    assert kept_rows(rewards, {"a": 1.0}, groups).tolist() == [False] * 4
    assert kept_rows(rewards, {"c": 1.0}, groups).tolist() == [True] * 4
