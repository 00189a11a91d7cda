"""The update sees each row of a rollout once. Each row's own numbers: test_golden_first_losses; any number of ranks:
test_ranks.py."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import train_qwenimage_pr
from small import few_prompts, lines_of, stored, train

from flow_grpo import rewards
from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.algorithms.rollout import TrainedRows, concat, from_trace, shuffled_updates
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.request import TracedStep
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep
from flow_grpo.monitoring.metrics import Meter
from flow_grpo.run import sampling
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
        assert [part.num_rows for part in update] == [sum(sizes)] * len(sizes)
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
    run = SimpleNamespace(meter=Meter(), plan=PLAN, trained_rows=[])
    for minibatches in list(shuffled_updates(rollout, PLAN, 0, 0, 0)):
        for rows in minibatches:
            backward(run, torch.zeros(len(rows.timesteps), requires_grad=True), rows)
        trained = torch.cat([rows.advantages for rows in minibatches])
        logged = run.meter.pop(lambda sums, maxima: (sums, maxima))
        assert logged["advantage_abs_mean"] == pytest.approx(trained.abs().mean().item())
        assert logged["advantage_positive_share"] == pytest.approx((trained > 0).float().mean().item())


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shapes_qwenimage,guard", "shapes_qwenimage_pr"])
def test_recomputed_log_probs_are_the_updates_own_whatever_the_rollout_noted(name, shallow, tmp_path, monkeypatch):
    """Wrong ones end a run (test_parity.py); recomputing them cures it, and says how wrong they were."""
    plain = sampling.from_trace

    def wrong(*args, **options):
        found = plain(*args, **options)
        found.log_probs += 1e-3
        found.means += 1e-3
        return found

    settings = shallow | dict(num_epochs=1, eval_freq=0, sample__num_prompts_per_epoch=1)
    right = lines_of(train(name, tmp_path / "right", train__old_log_prob="recompute", **settings))
    apart = dict(sample__guidance_scale=2.0, train__guidance_scale=1.0)  # of the guidance in the update alone
    guided = lines_of(train(name, tmp_path / "guided", train__old_log_prob="recompute", **settings, **apart))
    monkeypatch.setattr(sampling, "from_trace", wrong)
    cured = lines_of(train(name, tmp_path / "cured", train__old_log_prob="recompute", **settings))
    assert guided[-1]["parity/recomputed_abs_diff_max"] > 1e-3
    for lines, gap in ((right, 0.0), (cured, 1e-3), (guided, guided[-1]["parity/recomputed_abs_diff_max"])):
        first, *_, epoch = [line for line in lines if line["kind"] in ("update", "epoch")]
        assert first["parity/log_prob_abs_diff_max"] == first["ratio_std"] == 0
        assert epoch["parity/recomputed_abs_diff_max"] == pytest.approx(gap, rel=1e-2)
    assert losses_of(right) == losses_of(cured)


def losses_of(lines):
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_advantages_and_the_gradients_norm_count_up_to_their_bounds(shallow, tmp_path):
    """Both bounds are below all advantages, so that the gradient is in proportion to them."""
    how = shallow | dict(num_epochs=1, eval_freq=0, sample__num_prompts_per_epoch=2, train__updates_per_epoch=1)
    how |= dict(train__max_grad_norm=1e-5)
    one = train("shapes_qwenimage", tmp_path / "1", train__adv_clip_max=1e-3, **how)
    two = train("shapes_qwenimage", tmp_path / "2", train__adv_clip_max=2e-3, **how)
    norm = lines_of(one, "update")[0]["grad_norm"]
    assert lines_of(two, "update")[0]["grad_norm"] == pytest.approx(2 * norm, rel=1e-3)
    tensors = stored(two, 1)
    moments = [tensors[name].flatten() for name in tensors if name.endswith("/exp_avg")]
    assert torch.cat(moments).norm() == pytest.approx(0.1 * 1e-5, rel=1e-2)
    assert norm > 1e-5


def test_branches_compete_with_those_of_their_trunks_step_or_of_their_prompts_step():
    trunk = train_qwenimage_pr.groups_of(range(4, 8), PLAN, "group")
    prompt = train_qwenimage_pr.groups_of(range(4, 8), PLAN, "prompt")
    assert trunk[:, :, 0].tolist() == [[12, 13, 14], [15, 16, 17], [18, 19, 20], [21, 22, 23]]
    assert prompt[:, :, 0].tolist() == [[6, 7, 8]] * 2 + [[9, 10, 11]] * 2  # trunks 4 and 5 are of prompt 2
    assert torch.equal(trunk, trunk[:, :, :1].expand(4, STEPS, OUTCOMES))


@pytest.mark.slow
def test_with_one_baseline_for_all_groups_that_score_alike_are_compared_with_each_other(shallow, tmp_path, monkeypatch):
    def length(images, prompts, metadata):
        return torch.tensor([float(len(prompt)) for prompt in prompts])

    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("length", length)
    how = dict(model=shallow["model"], reward_fn={"length": 1.0}, num_epochs=1, eval_freq=0)
    for baseline, flat, size in (("group", 1, 0.0), ("all", 0, 1.0)):
        folder = train("shapes_qwenimage", tmp_path / baseline, sample__baseline=baseline, **how)
        assert [line["reward/zero_std_share"] for line in lines_of(folder, "epoch")] == [flat]
        found = [line["advantage_abs_mean"] for line in lines_of(folder, "update")]
        assert found == pytest.approx([size] * 2, abs=1e-3)  # two prompts: +1 and -1


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [dict(sde_window_size=0), dict(same_latent=True, noise_level=0.01)], ids=["own", "shared"]
)
def test_an_epoch_draws_noise_of_its_own(how, tmp_path):
    """The same prompt under the same weights: with noise in every step, or from one start with little after it."""
    how = {f"sample__{key}": value for key, value in how.items()}
    how |= dict(sample__num_prompts_per_epoch=1, train__learning_rate=0.0)
    how |= dict(num_epochs=2, eval_freq=0, reward_fn={"jpeg_compressibility": 1.0})
    how |= dict(dataset=few_prompts(tmp_path / "data", 1))
    first, second = lines_of(train("shapes_qwenimage", tmp_path / "runs", **how), "epoch")
    assert abs(first["reward/avg"] - second["reward/avg"]) > 0.05
