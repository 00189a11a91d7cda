"""The update sees each row of a rollout once. Each row's own numbers: test_golden_first_losses; any number of ranks:
test_ranks.py."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import train_qwenimage_pr

from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.algorithms.rollout import TrainedRows, concat, from_trace, shuffled_updates
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.request import TracedStep
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep
from flow_grpo.monitoring.metrics import Meter
from flow_grpo.run.update import backward

BATCH = 4
STEPS = 3
OUTCOMES = 2
BATCHES = 4
UPDATES = 2
IMAGES = dict(num_groups=8, group_size=2, batch_size=BATCH, batches_per_epoch=BATCHES)
PLAN = BatchPlan(**IMAGES, num_trained_steps=STEPS, num_branches=OUTCOMES, updates_per_epoch=UPDATES)


def sampled(images, num_steps=STEPS):
    """A batch whose rows have numbers and no content."""
    outcomes = torch.zeros(len(images) * OUTCOMES, 1, 1)
    noisy = SDEStep(outcomes, outcomes.flatten(), *[outcomes] * (len(SDEStep._fields) - 2))
    trace = [TracedStep(torch.zeros(len(images)), torch.zeros(len(images), 1, 1), noisy)] * (STEPS + 1)
    condition = Condition(torch.zeros(len(images), 5, 7))
    return from_trace(trace, condition, list(images), num_trained_steps=num_steps, step_weight="equal")


def updates(rollout, epoch, inner):
    """The rows (image, step) of each optimizer step, in order."""
    return [rows_of(minibatches) for minibatches in shuffled_updates(rollout, PLAN, 0, epoch, inner)]


def rows_of(minibatches):
    row_ids = torch.cat([minibatch.row_ids for minibatch in minibatches])
    return list(map(tuple, row_ids.tolist()))


def test_epochs_inner_epochs_and_batches_are_shuffled_apart():
    rollout = concat([sampled(range(BATCH * n, BATCH * (n + 1))) for n in range(BATCHES)])
    shuffled = updates(rollout, 0, 0)
    assert updates(rollout, 0, 0) == shuffled
    sets = list(map(set, shuffled))
    for other in ((0, 1), (1, 0)):
        assert list(map(set, updates(rollout, *other))) != sets
    shares = [set() for _ in range(BATCHES)]
    for image, step in shuffled[0]:
        shares[image // BATCH].add((image % BATCH, step))
    assert any(share != shares[0] for share in shares[1:])


@pytest.mark.parametrize(("num_steps", "sizes"), [(STEPS, [4, 2]), (1, [2])], ids=["whole", "window cut off"])
def test_minibatches_are_as_large_as_a_batch_but_for_an_updates_last(num_steps, sizes):
    updates = list(shuffled_updates(sampled(range(BATCH), num_steps=num_steps), PLAN, 0, 0, 0))
    assert len(updates) == UPDATES
    rows = []
    for update in updates:
        assert [len(part.timesteps) for part in update] == sizes
        assert [part.num_update_rows for part in update] == [sum(sizes)] * len(sizes)
        rows += rows_of(update)
    assert sorted(rows) == list(itertools.product(range(BATCH), range(num_steps)))


def test_an_images_advantage_counts_at_each_of_its_steps_and_its_outcomes_share_a_mean():
    rollout = concat([sampled(range(BATCH))])
    assert rollout.means.shape == rollout.latents.shape
    rollout.log_probs, rollout.next_latents = rollout.log_probs[:, :, :1], rollout.next_latents[:, :, :1]  # a window
    rollout.advantages = torch.arange(float(BATCH))
    rollout.loss_weight = rollout.advantages / 2
    for update in shuffled_updates(rollout, PLAN, 0, 0, 0):
        for part in update:
            assert torch.equal(part.advantages, part.row_ids[:, 0].float())
            assert torch.equal(part.loss_weight, part.advantages / 2)


def test_advantages_are_logged_with_the_update_that_trains_them_also_where_all_are_listed_first():
    rollout = concat([sampled(range(BATCH))])
    rollout.log_probs, rollout.next_latents = rollout.log_probs[:, :, :1], rollout.next_latents[:, :, :1]
    rollout.advantages = torch.arange(float(BATCH)) - 1
    rollout.loss_weight = torch.ones(BATCH)
    run = SimpleNamespace(meter=Meter(), trained_rows=[])
    for minibatches in list(shuffled_updates(rollout, PLAN, 0, 0, 0)):
        for rows in minibatches:
            backward(run, torch.zeros(len(rows.timesteps), requires_grad=True), rows)
        trained = torch.cat([rows.advantages for rows in minibatches])
        logged = run.meter.pop(lambda sums, maxima: (sums, maxima))
        assert logged["advantage_abs_mean"] == pytest.approx(trained.abs().mean().item())
        assert logged["advantage_positive_share"] == pytest.approx((trained > 0).float().mean().item())


@pytest.mark.parametrize("num_outcomes", [1, OUTCOMES])
def test_the_minibatches_of_an_update_add_up_to_the_mean_over_its_rows_and_their_outcomes(num_outcomes):
    """By the rows alone, so that an epoch may have images in a window and branches."""
    rollout = concat([sampled(range(BATCH))])
    rollout.log_probs = rollout.log_probs[:, :, :num_outcomes]
    rollout.next_latents = rollout.next_latents[:, :, :num_outcomes]
    rollout.advantages = torch.ones_like(rollout.log_probs)
    rollout.loss_weight = torch.ones_like(rollout.log_probs)
    run = SimpleNamespace(meter=Meter(), trained_rows=[])
    for minibatches in shuffled_updates(rollout, PLAN, 0, 0, 0):
        weight = torch.ones((), requires_grad=True)
        for rows in minibatches:
            backward(run, weight.expand(len(rows.advantages)), rows)
        assert weight.grad.item() == pytest.approx(1)


def test_a_rollout_without_rewards_gives_no_loss_that_could_be_trained():
    """Whoever forgets its advantages is told by the error of a loss that is not finite."""
    rollout = concat([sampled(range(BATCH)), sampled(range(BATCH, 2 * BATCH))])
    rows = rollout.take(torch.arange(6), 6)
    assert rows.advantages.shape == rows.loss_weight.shape == (6,)
    assert not rows.advantages.isfinite().any()
    assert not rows.loss_weight.isfinite().any()


def test_an_error_names_the_row_of_an_outcome():
    rows = TrainedRows(torch.zeros(3 * OUTCOMES), torch.tensor([[4, 0], [7, 2], [5, 1]]))
    assert [rows.row_id(torch.tensor(outcome)) for outcome in (1, 2, 5)] == [(4, 0), (7, 2), (5, 1)]


def test_branches_compete_with_those_of_their_trunks_step_or_of_their_prompts_step():
    trunk = train_qwenimage_pr.groups_of(range(4, 8), PLAN, "group")
    prompt = train_qwenimage_pr.groups_of(range(4, 8), PLAN, "prompt")
    assert trunk[:, :, 0].tolist() == [[12, 13, 14], [15, 16, 17], [18, 19, 20], [21, 22, 23]]
    assert prompt[:, :, 0].tolist() == [[6, 7, 8]] * 2 + [[9, 10, 11]] * 2  # trunks 4 and 5 are of prompt 2
    assert torch.equal(trunk, trunk[:, :, :1].expand(4, STEPS, OUTCOMES))
