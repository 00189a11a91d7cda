"""Numbers of branches by the spread of rewards: what is chosen, what it leaves as it is, and runs that choose so."""

import itertools
import json
import math

import pytest
import torch
import train_qwenimage
import train_qwenimage_pr
import warm
from hypothesis import given
from hypothesis import strategies as st
from small import ENV, command_of, config_of, lines_of, plan, stored, train
from test_ranks import on_two_ranks

from flow_grpo.algorithms.advantages import group_advantages, group_stats, spreads_of_steps
from flow_grpo.algorithms.batch_plan import numbers_of_branches
from flow_grpo.algorithms.losses import group_size_factors
from flow_grpo.algorithms.prompt_signal import signals_of_prompts
from flow_grpo.algorithms.rollout import is_copy, stack_steps, with_copies
from flow_grpo.algorithms.schedules import BranchSchedule
from flow_grpo.command_line import checks
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.plan import forwards
from flow_grpo.run import rewards, sampling, update
from flow_grpo.run.startup import start
from flow_grpo.settings import table

NAME = "shapes_qwenimage_pr"
# Sizes of files differ wherever images do, and most after the first steps.
HOW = dict(
    reward_fn__shapes=0.0,
    reward_fn__jpeg_compressibility=1.0,
    num_epochs=3,
    eval_freq=0,
    save_freq=1,
    sample__num_branches=4,
    sample__num_images_per_prompt=8,
    sample__num_steps=6,
    sample__batch_size=4,
    train__timestep_fraction=1.0,
)


@pytest.fixture(scope="module")
def settings(shallow):
    return {key: shallow[key] for key in ("model", "dataset", "eval__num_steps")} | HOW


@pytest.mark.parametrize(
    ("most", "numbers"), [(2, [2]), (3, [3]), (4, [2, 4]), (6, [2, 3, 6]), (7, [7]), (12, [2, 3, 4, 6, 12])]
)
def test_a_step_has_a_divisor_from_2_on(most, numbers):
    assert numbers_of_branches(most) == numbers


@pytest.mark.parametrize(
    ("spreads", "branches_at"),
    [
        ((), (6, 6, 6, 6, 6)),  # before the first epoch
        ((1.0, 1.0), (6, 6, 6, 6, 6)),  # of another number of steps
        ((0.0,) * 5, (6, 6, 6, 6, 6)),  # nothing to learn anywhere
        ((0.4, 0.31, 0.29, 0.16, 0.0), (6, 6, 3, 2, 2)),  # 6, 4.65, 4.35, 2.4, 0
        ((1.0, 0.75, 0.74), (6, 6, 3)),  # 6, 4.5, 4.44
        ((0.2, 0.4, 0.2, 0.17, 0.16), (3, 6, 3, 3, 2)),  # 3, 6, 3, 2.55, 2.4
    ],
)
def test_the_number_is_the_nearest_to_the_share_of_the_largest_spread(spreads, branches_at):
    assert BranchSchedule(6, spreads).branches_at(len(branches_at)) == branches_at


@given(st.integers(2, 24), st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_numbers_are_allowed_rise_with_the_spread_and_are_never_more_than_without_a_schedule(most, spreads):
    branches_at = BranchSchedule(most, tuple(spreads)).branches_at(len(spreads))
    assert set(branches_at) <= set(numbers_of_branches(most))
    assert branches_at[spreads.index(max(spreads))] == most
    for (spread, number), (other_spread, other) in itertools.pairwise(sorted(zip(spreads, branches_at, strict=True))):
        assert spread == other_spread or number <= other


def test_an_epoch_counts_half_as_much_as_the_one_after_it_and_only_when_it_is_over():
    schedule = BranchSchedule(6)
    schedule.latest = (0.4, 0.1)
    assert schedule.branches_at(2) == (6, 6)
    schedule.complete_epoch()
    assert schedule.spreads == (0.4, 0.1)
    schedule.latest = (0.2, 0.3)
    schedule.complete_epoch()
    assert schedule.spreads == pytest.approx((0.3, 0.2))
    # A step without two scored branches, and an epoch without scores, leave it as it is.
    schedule.latest = (0.2, math.nan)
    schedule.complete_epoch()
    schedule.complete_epoch()
    assert schedule.spreads == pytest.approx((0.3, 0.2))


REWARDS = torch.tensor([-1.0, 0.0, 2.0])


def draws(number):
    """All draws of some branches' rewards from REWARDS, which are equally likely, [3^number, number]."""
    return torch.tensor(list(itertools.product(REWARDS.tolist(), repeat=number)))


@pytest.mark.parametrize("number", [2, 3, 6])
def test_the_spread_is_that_of_the_rewards_whatever_the_number_of_branches(number):
    """The root of the mean of all draws' unbiased variances."""
    scores = torch.full((3**number, 1, 6), math.nan)
    scores[:, 0, :number] = draws(number)
    (spread,) = spreads_of_steps(scores)
    assert spread == pytest.approx(REWARDS.std(unbiased=False).item())
    biased = group_stats(draws(number).flatten(), torch.arange(3**number).repeat_interleave(number)).std
    assert biased.mean() < spread


def test_trunks_with_one_scored_branch_say_nothing_and_a_step_of_such_has_no_spread():
    nan = math.nan
    scores = torch.tensor([[[1.0, 3.0], [1.0, nan]], [[nan, 5.0], [nan, nan]]])
    first, second = spreads_of_steps(scores)
    assert first == pytest.approx(2**0.5)
    assert math.isnan(second)
    assert math.isnan(spreads_of_steps(torch.full((2, 1, 3), nan))[0])


@pytest.mark.parametrize(("number", "trunks"), [(2, 1), (3, 1), (6, 1), (2, 2), (3, 2)])
def test_with_fewer_branches_the_expected_gradient_is_that_of_all_branches(number, trunks):
    """A row's loss is the mean over its branches of advantage times score, where a branch's score may be any function
    of it; rewards are divided by a spread that does not depend on the group."""
    most = 6
    score = REWARDS**2 - REWARDS

    def expected(count):
        chosen = torch.cartesian_prod(*[torch.arange(3)] * (count * trunks)).view(-1, count * trunks)
        reward = REWARDS[chosen]
        advantages = reward - reward.mean(1, keepdim=True)
        return (advantages * score[chosen]).mean().item()

    factors = group_size_factors((most, number), trunks)
    assert factors[0] == 1
    whole = (1 - 1 / (most * trunks)) * ((REWARDS - REWARDS.mean()) * score).mean().item()
    assert factors[1] * expected(number) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(("number", "ratio"), [(2, 1.08), (3, 1.04)])
def test_divided_by_their_own_spread_normal_rewards_weigh_as_much_to_8_percent(number, ratio):
    """The expected mean of advantage times reward is the expected standard deviation of a group."""

    def expected(count):
        return math.sqrt(2 / count) * math.gamma(count / 2) / math.gamma((count - 1) / 2)

    (_, factor) = group_size_factors((6, number))
    assert factor * expected(number) / expected(6) == pytest.approx(ratio, abs=0.005)
    # The formula itself, of 200,000 draws.
    draws = torch.randn(200_000, number, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(len(draws)).repeat_interleave(number)
    advantages = group_advantages(draws.flatten(), groups).view_as(draws)
    assert (advantages * draws).mean().item() == pytest.approx(expected(number), rel=0.01)


def test_copies_give_each_step_the_advantages_and_the_mean_of_its_own_branches():
    branches_at = (6, 2, 3)
    values = torch.randn(4, sum(branches_at), generator=torch.Generator().manual_seed(0))
    repeated = with_copies(values.flatten(), branches_at).view(4, 3, 6)
    copies = is_copy(branches_at)
    assert copies.sum(1).tolist() == [0, 4, 3]
    groups = torch.arange(12).view(4, 3, 1).expand(4, 3, 6)
    advantages = group_advantages(repeated.flatten(), groups.flatten()).view(4, 3, 6)
    for k, of_step in enumerate(values.split(branches_at, 1)):
        assert torch.equal(repeated[:, k][:, ~copies[k]], of_step)
        torch.testing.assert_close(repeated[:, k].mean(1), of_step.mean(1))
        trunks = torch.arange(4)[:, None].expand(of_step.shape)
        own = group_advantages(of_step.flatten(), trunks.flatten()).view(of_step.shape)
        torch.testing.assert_close(advantages[:, k][:, ~copies[k]], own)
    assert torch.equal(stack_steps(list(values[:, :6].split(2, 1))), values[:, :6].view(4, 3, 2)), "of equal numbers"


def numbers_of(line):
    return [line[f"steps/branches/{step}"] for step in range(5)]


def test_a_run_draws_fewer_branches_where_rewards_spread_less_and_counts_what_it_saves(settings, tmp_path):
    # Completions one by one, as rows that fill a forward up are no part of what is saved.
    settings = settings | dict(sample__completion_batch_size=1, num_epochs=2)
    fixed = lines_of(train(NAME, tmp_path / "fixed", **settings))
    folder = train(f"{NAME},spread", tmp_path / "spread", **settings)
    lines = lines_of(folder)

    # Until the first epoch's rewards are known, it is the run without a schedule bit for bit.
    first = [line for line in lines if line["epoch"] == 0 and line["kind"] == "update"]
    assert first == [line for line in fixed if line["epoch"] == 0 and line["kind"] == "update"]
    config = config_of(f"{NAME},spread", **settings)
    typed = table.typed(config)
    family = model_classes.of_folder(typed.model)
    fixed_epoch = next(line for line in fixed if line["kind"] == "epoch")
    num_images = 0
    fewer = set()
    spreads = None
    for line in lines_of(folder, "epoch"):
        numbers = numbers_of(line)
        if spreads:
            assert tuple(numbers) == BranchSchedule(4, spreads).branches_at(5)
        latest = tuple(line[f"steps/branch_spread/{step}"] for step in range(5))
        means = latest if spreads is None else tuple((a + b) / 2 for a, b in zip(spreads, latest, strict=True))
        spreads = means
        num_images += 16 * sum(numbers)
        assert line["images"] == num_images
        assert line["forwards"] + line["forwards_saved"] == fixed_epoch["forwards"]
        fewer.update(numbers)
    assert fewer == {2, 4}, "a run of equal spreads shows nothing"
    planned = forwards.of_epoch(typed, plan(config), family)
    assert planned.rollout + planned.update == fixed_epoch["forwards"]
    for line in lines:
        if line["kind"] == "update" and "parity/log_prob_abs_diff_max" in line:
            assert line["parity/log_prob_abs_diff_max"] == 0

    stored_spreads = progress_of(folder, 2)["branch_spreads"]
    assert stored_spreads == pytest.approx(spreads)


def progress_of(folder, epoch):
    return json.loads((folder / f"checkpoints/epoch_{epoch:06d}/progress.json").read_text())


def test_a_resumed_run_chooses_what_the_unbroken_one_chooses_bit_for_bit(settings, tmp_path):
    name = f"{NAME},spread"
    unbroken = train(name, tmp_path / "unbroken", **settings)
    broken = train(name, tmp_path / "broken", **settings | dict(num_epochs=2))
    train(name, tmp_path / "broken", **settings, resume_from="latest")
    assert lines_of(broken) == lines_of(unbroken)
    assert progress_of(broken, 3) == progress_of(unbroken, 3)
    ours = stored(broken, 3)
    for name, tensor in stored(unbroken, 3).items():
        assert torch.equal(tensor, ours[name])
    assert min(numbers_of(lines_of(unbroken, "epoch")[-1])) == 2


@pytest.mark.slow
def test_a_signal_in_mid_epoch_saves_the_spreads_of_completed_epochs(settings, tmp_path):
    name = f"{NAME},spread"
    how = settings | dict(save_freq=0, train__updates_per_epoch=2)
    unbroken = train(name, tmp_path / "unbroken", **how)
    script, *flags = command_of(name, tmp_path / "broken", **how, signal_grace_s=0.0)
    stopped = warm.run(["tests/signalled.py", *flags], ENV)
    assert "stopped by SIGTERM after 1 epochs; epoch 2 is dropped" in stopped.stderr, stopped.stderr[-3000:]
    folder = tmp_path / "broken" / unbroken.name
    resumed = warm.run([script, *flags, "--config.resume_from=latest"], ENV)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert lines_of(folder) == lines_of(unbroken)


def test_two_ranks_choose_what_one_does(settings, tmp_path):
    """Weights stay as they are, so that the same images are scored, but for a few bytes of a file's size."""
    how = settings | dict(train__learning_rate=0.0)
    one = train(f"{NAME},spread", tmp_path / "one", **how)
    two = on_two_ranks(f"{NAME},spread", tmp_path / "two", ENV, **how)
    assert progress_of(two, 3)["branch_spreads"] == pytest.approx(progress_of(one, 3)["branch_spreads"], rel=1e-2)
    for ours, theirs in zip(lines_of(one, "epoch"), lines_of(two, "epoch"), strict=True):
        assert numbers_of(ours) == numbers_of(theirs)
        assert ours["images"] == theirs["images"]
    assert min(numbers_of(ours)) == 2


def test_a_branch_of_a_run_begins_with_all_branches(settings, tmp_path):
    parent = train(f"{NAME},spread", tmp_path, **settings | dict(num_epochs=1))
    checkpoint = str(parent / "checkpoints")
    branch = train(
        f"{NAME},spread", tmp_path, **settings | dict(num_epochs=2), resume_from=checkpoint, run_name="branch"
    )
    assert numbers_of(lines_of(branch, "epoch")[-1]) == [4] * 5


def test_the_weight_of_a_step_in_the_loss_makes_up_for_its_number_of_branches(settings, tmp_path):
    """All trunks of a prompt compete. Rows of the update have copies, whose first ratios are 1."""
    how = settings | dict(sample__baseline="prompt", train__updates_per_epoch=1)
    run = start(config_of(f"{NAME},spread", tmp_path, **how), checks.PR)
    run.branch_schedule.spreads = (1.0, 1.0, 0.2, 0.2, 0.2)
    rollout, submitted = train_qwenimage_pr.rollout(run, 0)
    assert run.plan.branches_at == (4, 4, 2, 2, 2)
    scores = rewards.wait(run, 0, submitted)
    assert torch.equal(scores.is_copy.view(16, 5, 4), is_copy(run.plan.branches_at).expand(16, 5, 4))
    assert scores.num_images == 16 * 14 == run.plan.num_images
    assert run.epoch_metrics["images"] == scores.num_images

    # Eight trunks of a prompt compete: by 32 branches, or by 16.
    factor = (1 - 1 / 32) / (1 - 1 / 16)
    factors = torch.tensor([1.0, 1.0, factor, factor, factor])
    for _, samples in sampling.sample_epoch(run, 0, lambda batch: range(5), 4):
        stds = torch.tensor([traced.step.transition_std.flatten()[0] for traced in samples.trace])
    torch.testing.assert_close(rollout.step_weights, (3**0.5 * stds * factors).expand(16, 5), rtol=1e-5, atol=0)

    rollout.advantages, rollout.loss_weight = rewards.advantages(run, scores)
    assert (rollout.loss_weight == 1).all()
    by_step = rollout.advantages.view(2, 8, 5, 4).sum((1, 3))
    torch.testing.assert_close(by_step, torch.zeros(2, 5), rtol=0, atol=1e-4)
    for outcomes in (rollout.next_latents, rollout.log_probs, rollout.advantages):
        assert torch.equal(outcomes[:, 2:, :2], outcomes[:, 2:, 2:])
        assert not torch.equal(outcomes[:, :2, :2], outcomes[:, :2, 2:])
    (minibatches,) = update.updates(run, rollout)
    for rows in minibatches:
        train_qwenimage.add_gradients(run, rows)
    update.optimizer_step(run)
    (line,) = lines_of(run.folder, "update")
    assert line["parity/log_prob_abs_diff_max"] == 0 < line["grad_norm"]


def test_what_is_learned_of_prompts_counts_no_branch_twice():
    distinct = torch.tensor([[[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]])
    groups = torch.tensor([[0] * 4, [1] * 4])
    copies = torch.tensor([[False, False, True, True], [False] * 4])
    scores = rewards.Rewards({"a": distinct.flatten()}, groups.flatten(), torch.Size([1, 2, 4]), None, copies.flatten())
    assert scores.num_images == 6
    means = signals_of_prompts(
        scores.distinct_scores, {"a": 1.0}, scores.groups, torch.zeros(8, dtype=torch.int64), 1.0
    )
    # Unbiased variances 1/2 of two branches and 1/4 of four, times 4.
    assert means == {0: pytest.approx(4 * (1 / 2 + 1 / 4) / 2)}
