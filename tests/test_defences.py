"""Defences against hacking: the gated pull to the reference, and the reference that moves when it is far away."""

from types import SimpleNamespace

import pytest
import torch
from brightness import brightness
from recorded import Run, assert_same, go_on
from small import lines_of, train
from test_ranks import HOW as RANKS
from test_ranks import assert_same as assert_about_the_same
from test_ranks import on_two_ranks

from flow_grpo import rewards
from flow_grpo.algorithms.disagreement import overrated, win_rates
from flow_grpo.monitoring.metrics import Meter
from flow_grpo.run import update

WINDOW = "shapes_qwenimage"
BRANCHES = "shapes_qwenimage_pr"
NFT = "shapes_qwenimage_nft"
REFL = "shapes_proxy_qwenimage_refl"
SCRIPTS = [WINDOW, NFT, REFL, pytest.param(BRANCHES, marks=pytest.mark.slow)]
ONE = dict(num_epochs=1, eval_freq=0, logger="none")
HELD = dict(train__beta=0.5, train__reference_guidance_scale=2.0)


def settings_of(name, shallow, opinion=""):
    """Settings of a short run on brightness, with another reward that is not trained on."""
    how = {key: value for key, value in shallow.items() if not key.startswith("reward_fn")}
    how |= dict(reward_fn={"brightness": 1.0}, eval__rewards=(opinion,) if opinion else ())
    if name == NFT:
        how |= dict(train__timestep_fraction=0.5)
    return how


@pytest.fixture
def opinions(shallow):
    """Rewards that rank images as the trained one does, and the other way round."""
    rewards.register("agreeing", lambda images, prompts, metadata: 2 * brightness(images, prompts, metadata))
    rewards.register("opposing", lambda images, prompts, metadata: -brightness(images, prompts, metadata))
    yield shallow
    for name in ("agreeing", "opposing"):
        del rewards.REGISTERED[name]


def test_a_win_rate_is_the_share_of_the_group_that_scores_lower_and_half_of_ties():
    nan = float("nan")
    scores = torch.tensor([1.0, 7.0, 3.0, 1.0, nan, 2.0, 9.0])
    groups = torch.tensor([4, 2, 4, 4, 4, 4, 5])
    expected = torch.tensor([1 / 6, 0, 1, 1 / 6, nan, 2 / 3, 0], dtype=torch.float64)
    torch.testing.assert_close(win_rates(scores, groups), expected, equal_nan=True)


def test_images_are_overrated_that_the_trained_reward_ranks_highest_above_the_mean_of_others():
    trained = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    groups = torch.zeros(5, dtype=torch.int64)
    # In quarters: ranks by the trained reward 0, 1, 2, 3, 4, means of the others' 2.5, 1.5, 0, 3.5, 2.5.
    first = torch.tensor([5.0, 2.0, 1.0, 4.0, 3.0])
    second = torch.tensor([2.0, 3.0, 1.0, 5.0, 4.0])
    for share, expected in ((1.0, [2, 4]), (0.5, [2, 4]), (0.2, [2])):
        found = overrated(trained, [first, second], groups, share)
        assert found.nonzero().flatten().tolist() == expected, share
    # By the first of them alone the excesses are -4, 0, 2, 0, 2 quarters: what ties with the last image counts, too.
    for share in (0.5, 0.2):
        assert overrated(trained, [first], groups, share).nonzero().flatten().tolist() == [2, 4]
    assert not overrated(trained, [trained, 3 * trained], groups, 1.0).any()
    unknown = torch.tensor([float("nan"), 1.0, 2.0, 3.0, 0.0])
    assert overrated(trained, [unknown], groups, 1.0).tolist() == [False, False, False, False, True]
    assert overrated(unknown, [trained], groups, 1.0).tolist() == [False, True, True, True, False]


def test_the_pull_is_beta_times_the_distances_that_the_gate_lets_through():
    run = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(beta=0.5, beta_gate=0.7)), meter=Meter())
    distance = torch.tensor([2.0, 4.0, 6.0], dtype=torch.float64)
    rows = SimpleNamespace(beta_gate=torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    assert update.pull(run, rows, distance).tolist() == [1.0, 0.0, 3.0]
    assert run.meter.mean("beta_gate_share") == 2 / 3
    run.config.train.beta_gate = 0.0
    assert update.pull(run, rows, distance).tolist() == [1.0, 2.0, 3.0]


def loss_of_the_pull(line):
    """Part of an update's loss that the reference adds; weights of rows are 1 here."""
    return line["loss"] - line["policy_loss"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_only_images_that_rewards_disagree_about_are_pulled_to_the_reference(name, opinions, tmp_path):
    lines = {}
    for opinion in ("agreeing", "opposing"):
        how = settings_of(name, opinions, opinion) | ONE | HELD | dict(train__beta_gate=0.25)
        how |= dict(sample__guidance_scale=1.5) if name == REFL else {}
        folder = train(name, tmp_path / opinion, **how)
        lines[opinion] = lines_of(folder, "update")
        if name != REFL:
            (epoch,) = lines_of(folder, "epoch")
            assert f"reward/{opinion}" in epoch
    for line in lines["agreeing"]:
        assert line["beta_gate_share"] == 0
        assert loss_of_the_pull(line) == pytest.approx(0, abs=1e-12)
    share = sum(line["beta_gate_share"] for line in lines["opposing"]) / len(lines["opposing"])
    assert 0.1 < share < 0.5
    assert any(loss_of_the_pull(line) > 1e-8 for line in lines["opposing"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_reference_moves_after_updates_that_were_too_far_from_it_and_a_resumed_run_goes_on_with_it(
    name, opinions, tmp_path
):
    how = settings_of(name, opinions, "opposing") | HELD
    how |= dict(num_epochs=2, eval_freq=0, save_freq=1, keep_checkpoints=9, logger="none", train__learning_rate=1e-2)
    how |= dict(train__reference_guidance_scale=0.0, train__reference_kl=1e-12, train__beta_gate=0.5)
    unbroken = Run(train(name, tmp_path / "unbroken", **how), name, how)
    lines = lines_of(unbroken.folder, "update")
    # The first update's rows, and those of the update after a move, are the reference's own.
    assert [line["reference_moves"] for line in lines] == [0, 1, 1, 2]
    key = "kl_reference" if name in (WINDOW, BRANCHES) else "reference_distance"
    assert lines[0][key] == lines[2][key] == 0 < lines[1][key]
    assert_same(unbroken.folder, go_on(unbroken, tmp_path / "resumed"), epoch=2)


@pytest.mark.parametrize("name", [NFT, *(pytest.param(name, marks=pytest.mark.slow) for name in (WINDOW, REFL))])
def test_two_ranks_defend_as_one(name, shallow, tmp_path):
    how = shallow | RANKS | HELD | dict(eval__rewards=("shapes",), logger="none")
    how |= dict(reward_fn__shapes_proxy=0.0) if name == REFL else {}
    # One rollout, whose images' ranks no rounding can change.
    how |= dict(num_epochs=1, eval_freq=0, train__updates_per_epoch=4, train__beta_gate=0.5)
    how |= dict(sample__batch_size=2) if name == REFL else {}
    how |= dict(train__reference_guidance_scale=0.0, train__reference_kl=1e-12)
    one = train(name, tmp_path / "one", **how)
    two = on_two_ranks(name, tmp_path / "two", **how)
    assert_about_the_same(one, two)
    for key in ("reference_moves", "beta_gate_share"):
        ours = [line[key] for line in lines_of(one, "update")]
        assert ours == [line[key] for line in lines_of(two, "update")]
        assert any(ours)
