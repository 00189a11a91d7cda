"""Advantages against golden numbers, and what they must not depend on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flow_grpo.advantages import group_advantages, group_stats

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


def test_a_group_without_spread_teaches_nothing():
    advantages = group_advantages(torch.tensor([0.5, 0.5, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    assert torch.equal(advantages[:2], torch.zeros(2))
