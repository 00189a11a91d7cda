"""DiffusionNFT: which policy samples, which is trained, which stays, and how the first follows the second."""

import itertools

import pytest
import torch
import train_qwenimage_nft as script
from recorded import assert_same, go_on
from small import config_of, lines_of, move, stored, train

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.objectives import FORWARD_OBJECTIVES
from flow_grpo.algorithms.surrogates import ForwardStep
from flow_grpo.run import startup
from flow_grpo.settings import checks

NAME = "shapes_qwenimage_nft"
PLAIN = dict(train__reference_guidance_scale=0.0, train__shared_noise=False)  # as published


@pytest.fixture(params=[4, 0], ids=["LoRA", "full weights"])
def started(request, tmp_path):
    """A run before its first epoch."""
    config = config_of(NAME, tmp_path, lora__rank=request.param, **PLAIN)
    run = startup.start(config, checks.NFT, extra_policies=(script.OLD,))
    yield run
    run.board.finish()


def rollout(run):
    """All images of the first epoch."""
    return script.rollout(run, 0)[0]


def velocity(run, rows):
    return run.velocity(rows.x_0, rows.timesteps, rows.condition)


def test_the_old_policy_samples_whatever_the_trained_one_has_become(started):
    run = started
    first = rollout(run)
    move(run.parameters)
    again = rollout(run)
    assert torch.equal(again.x_0, first.x_0)
    run.extra_policies["old"].move(1.0)  # had the trained policy sampled, its images would have been these
    trained = rollout(run)
    assert (trained.x_0 - first.x_0).abs().max() > 0.01


def test_three_velocities_of_three_policies_and_only_one_has_gradients(started):
    run = started
    images = rollout(run)
    rows = images.take(torch.arange(4), 4)
    old, reference = script.frozen_velocities(run, rows, rows.x_0)
    assert torch.equal(old, reference)
    assert torch.equal(old, velocity(run, rows).detach())
    weights = [p.detach().clone() for p in run.parameters]
    move(run.parameters)
    run.extra_policies["old"].move(0.5)
    again, still = script.frozen_velocities(run, rows, rows.x_0)
    moved = velocity(run, rows)
    assert torch.equal(still, reference)
    assert (again - old).abs().max() > 1e-3
    assert (moved - again).abs().max() > 1e-3
    assert moved.requires_grad
    assert not again.requires_grad
    assert any(not torch.equal(p, w) for p, w in zip(run.parameters, weights))


def test_the_update_has_a_guidance_of_its_own_for_all_three_policies(tmp_path):
    config = config_of(NAME, tmp_path, train__guidance_scale=3.0, **PLAIN)
    run = startup.start(config, checks.NFT, extra_policies=(script.OLD,))
    rows = rollout(run).take(torch.arange(4), 4)
    guided = run.velocity(rows.x_0, rows.timesteps, rows.condition, 3.0)
    assert all(torch.equal(frozen, guided) for frozen in script.frozen_velocities(run, rows, rows.x_0))
    assert (velocity(run, rows) - guided).abs().max() > 1e-3, "the rollout's has none"
    rows.advantages = rows.loss_weight = torch.ones(4)
    script.update(run, rows)
    logged = run.meter.pop(lambda sums, maxima: (sums, maxima))
    assert logged["old_distance"] == logged["reference_distance"] == 0, "of the trained policy, too"
    run.board.finish()


def test_each_image_is_trained_at_timesteps_of_its_own_and_never_at_the_last(started):
    run = started
    images = rollout(run)
    assert images.timesteps.shape == (len(images.images), run.plan.num_trained_steps)
    assert set(images.timesteps.flatten().tolist()) <= set(run.scheduler.timesteps[:-1].tolist())
    assert all(len(set(row)) == len(row) for row in images.timesteps.tolist())


def test_with_shared_noise_the_images_of_a_group_are_noised_alike(tmp_path, monkeypatch):
    seen = []
    plain = script.noised
    monkeypatch.setattr(script, "noised", lambda x, noise, t: (seen.append((noise, t)), plain(x, noise, t))[1])
    config = config_of(NAME, tmp_path, train__shared_noise=True)
    run = startup.start(config, checks.NFT, extra_policies=(script.OLD,))
    images = rollout(run)
    groups = images.images // run.plan.group_size
    for group in groups.unique():
        assert len(images.timesteps[groups == group].unique(dim=0)) == 1
    images.advantages = images.loss_weight = torch.ones(len(images.images))
    script.update(run, images.take(torch.arange(2, 8) * images.num_steps, 6))  # 2 of one group, 4 of the next
    ((noise, _),) = seen
    assert [torch.equal(noise[i], noise[i + 1]) for i in range(5)] == [True, False, True, True, True]
    run.board.finish()


def test_flow_matching_on_own_images_joins_the_loss_by_its_weight():
    draw, settings = torch.Generator().manual_seed(0), config_of(NAME).train
    step = ForwardStep(*torch.randn(5, 6, 3, 4, generator=draw), torch.rand(6, generator=draw))
    loss = {}
    for weight in (0.0, 0.5):
        settings.flow_matching_weight = weight
        loss[weight] = FORWARD_OBJECTIVES["nft"].function(step, torch.zeros(6), settings).loss
    own = losses.own_flow_matching_loss(step.velocity, step.x_t, step.x_0, step.sigma)
    torch.testing.assert_close(loss[0.5] - loss[0.0], 5 * 0.5 * own)


def test_awms_ratios_begin_at_one_in_every_epoch_and_move(shallow, tmp_path):
    folder = train(f"{NAME},awm", tmp_path, num_epochs=2, eval_freq=0, train__updates_per_epoch=2, **shallow)
    updates = lines_of(folder, "update")
    for first, second in zip(updates[::2], updates[1::2], strict=True):
        assert first["ratio_std"] == first["parity/log_prob_abs_diff_max"] == 0 < first["grad_norm"]
        assert second["ratio_std"] > 0


def test_the_reference_is_guided_until_it_becomes_the_policy(shallow, tmp_path):
    how = shallow | dict(train__reference_interval=2, train__reference_guidance_scale=3.0, train__beta=1.0)
    folder = train(NAME, tmp_path, num_epochs=2, save_freq=1, keep_checkpoints=9, eval_freq=0, **how)
    first, _, later, _ = (line["reference_distance"] for line in lines_of(folder, "update"))
    assert first > 0.01  # the gain of guidance
    assert later == 0  # two updates later the policy is its own reference
    states = [stored(folder, epoch) for epoch in (1, 2)]
    names = [name.removeprefix("reference/") for name in states[0] if name.startswith("reference/")]
    assert names
    for state, name in itertools.product(states, names):
        assert torch.equal(state[f"reference/{name}"], state[f"model/{name}"])


@pytest.mark.parametrize(("schedule", "rank"), [(1, 4), (0.25, 0)], ids=str)
def test_the_old_policy_follows_its_schedule(schedule, rank, shallow, tmp_path):
    how = shallow | dict(lora__rank=rank, train__learning_rate=1e-3, save_freq=1, keep_checkpoints=9)
    how |= dict(train__old_decay_schedule=schedule)
    folder = train(NAME, tmp_path, num_epochs=3, eval_freq=0, **how, **PLAIN)
    states = [stored(folder, epoch) for epoch in (1, 2, 3)]
    names = [name.removeprefix("old/") for name in states[0] if name.startswith("old/")]
    assert names
    for number, (before, after) in enumerate(itertools.pairwise(states), start=2):
        decay = losses.old_policy_decay(2 * number, schedule)
        for name in names:
            expected = decay * before[f"old/{name}"] + (1 - decay) * after[f"model/{name}"]
            torch.testing.assert_close(after[f"old/{name}"], expected, rtol=0, atol=1e-5)


def test_no_log_prob_is_in_its_metrics_and_an_average_image_moves_nothing(shallow, tmp_path, monkeypatch):
    how = shallow | PLAIN | dict(eval_freq=0, num_epochs=1)
    updates = lines_of(train(NAME, tmp_path / "plain", **how), "update")
    assert not any("ratio" in key or "parity" in key for line in updates for key in line)
    assert updates[0]["old_distance"] == updates[0]["reference_distance"] == 0
    assert updates[1]["old_distance"] > 0
    monkeypatch.setattr(losses, "nft_reward_prob", lambda advantages, _: torch.full_like(advantages, 0.5))
    still = lines_of(train(NAME, tmp_path / "still", train__weight_decay=0.0, **how), "update")
    assert still[0]["grad_norm"] < 1e-4 * updates[0]["grad_norm"]


def test_a_resumed_run_with_a_moving_reference_is_the_unbroken_one(recorded, tmp_path):
    unbroken = recorded("nft")
    assert_same(unbroken.folder, go_on(unbroken, tmp_path))


@pytest.mark.parametrize(
    "how",
    [
        dict(sample__flash_ratio=0.5, train__inner_epochs=2, train__timestep_fraction=1.0, train__nft_beta=0.1)
        | dict(train__reward_aggregation="gdpo", train__filter_groups=True),
        dict(precision="bf16", fsdp__activation_checkpointing=1.0, train__beta=0.0) | PLAIN,
    ],
    ids=["second order, inner epochs, small beta", "bf16"],
)
def test_options_run(how, shallow, tmp_path):
    updates = lines_of(train(NAME, tmp_path, num_epochs=1, eval_freq=0, **shallow | how), "update")
    assert len(updates) == 2 * how.get("train__inner_epochs", 1)
    assert all(line["grad_norm"] > 0 for line in updates)
