"""DiffusionNFT: which policy samples, which is trained, which stays, and how the first follows the second."""

import itertools
import re

import pytest
import torch
import train_qwenimage_nft as script
from small import ROOT, config_of, lines_of, move, stored, train

from flow_grpo.algorithms import losses, schedules
from flow_grpo.algorithms.advantages import group_advantages
from flow_grpo.command_line import checks
from flow_grpo.run import rewards, startup
from flow_grpo.settings import config_files, table

NAME = "shapes_qwenimage_nft"
PLAIN = dict(train__reference_guidance_scale=0.0, train__shared_noise=False)  # as published


@pytest.fixture
def start(tmp_path):
    """(name, settings) -> a run before its first epoch."""
    runs = []

    def start(name=NAME, extra_policies=(script.OLD,), **how):
        runs.append(startup.start(config_of(name, tmp_path, **how), checks.NFT, extra_policies=extra_policies))
        return runs[-1]

    yield start
    for run in runs:
        run.board.finish()


def rollout(run):
    """All images of the first epoch."""
    return script.rollout(run, 0)[0]


def velocity(run, rows):
    return run.velocity(rows.x_0, rows.timesteps, rows.condition)


def test_an_update_sees_no_more_text_than_its_longest_prompt_and_learns_the_same(tmp_path, monkeypatch):
    widths = []
    plain = script.frozen_velocities

    def noting(run, rows, x_t):
        widths.append(rows.condition.num_tokens)
        assert rows.condition.num_tokens == -(-int(rows.condition.mask.sum(1).max()) // 4) * 4
        return plain(run, rows, x_t)

    how = dict(lora__rank=4, num_epochs=1, eval_freq=0, sample__batch_size=2)
    padded = train(NAME, tmp_path / "padded", **how)
    monkeypatch.setattr(script, "frozen_velocities", noting)
    cut = train(NAME, tmp_path / "cut", **how, sample__text_multiple=4)
    assert min(widths) < max(widths) <= 20
    for ours, theirs in zip(lines_of(cut, "update"), lines_of(padded, "update"), strict=True):
        for name in ("policy_loss", "reference_distance", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full weights"])
def test_the_old_policy_samples_whatever_the_trained_one_has_become_and_only_that_has_gradients(rank, start):
    run = start(lora__rank=rank, **PLAIN)
    images = rollout(run)
    rows = images.take(torch.arange(4), 4)
    old, reference = script.frozen_velocities(run, rows, rows.x_0)
    assert torch.equal(old, reference)
    assert torch.equal(old, velocity(run, rows).detach())
    weights = [p.detach().clone() for p in run.parameters]
    move(run.parameters)
    assert torch.equal(rollout(run).x_0, images.x_0)
    run.extra_policies["old"].move(0.5)
    assert (rollout(run).x_0 - images.x_0).abs().max() > 0.01
    again, still = script.frozen_velocities(run, rows, rows.x_0)
    moved = velocity(run, rows)
    assert torch.equal(still, reference)
    assert (again - old).abs().max() > 1e-3
    assert (moved - again).abs().max() > 1e-3
    assert moved.requires_grad
    assert not again.requires_grad
    assert any(not torch.equal(p, w) for p, w in zip(run.parameters, weights))


def test_a_sampler_samples_and_the_old_policy_is_what_the_loss_compares_with(start):
    run = start(f"{NAME},crd", extra_policies=(script.OLD, script.SAMPLER))
    images = rollout(run)
    rows = images.take(torch.arange(4), 4)
    move(run.parameters)
    old, _ = script.frozen_velocities(run, rows, rows.x_0)
    run.extra_policies["old"].move(0.5)
    assert torch.equal(rollout(run).x_0, images.x_0)
    moved, _ = script.frozen_velocities(run, rows, rows.x_0)
    assert (moved - old).abs().max() > 1e-3
    run.extra_policies["sampler"].move(0.5)
    assert (rollout(run).x_0 - images.x_0).abs().max() > 0.01


@pytest.mark.slow
def test_a_loss_that_compares_with_no_older_policy_makes_no_forward_of_it(start):
    forwards = []
    for name in (f"{NAME},elbo", f"{NAME},ram"):
        run = start(name, run_name=name)
        images = rollout(run)
        images.advantages = images.loss_weight = torch.ones(len(images.image_numbers))
        before = run.num_forwards
        script.add_gradients(run, images.take(torch.arange(4), 4))
        forwards.append(run.num_forwards - before)
    guided_reference = 2 * 4
    assert forwards == [4 + guided_reference + 4, guided_reference + 4]


def test_an_adaptive_pull_to_the_reference_is_twice_beta_for_the_worst_image_and_none_for_the_best(start, monkeypatch):
    seen = []
    plain = script.reference_distance
    monkeypatch.setattr(script, "reference_distance", lambda *args: seen.append(plain(*args)) or seen[-1])
    run = start(train__adaptive_beta=True, train__beta=0.5, train__adv_clip_max=2.0)
    images = rollout(run)
    images.loss_weight = torch.ones(len(images.image_numbers))
    images.advantages = torch.tensor([-3.0, 0.0, 1.0, 2.0]).repeat(2)
    rows = images.take(torch.arange(4) * images.num_steps, 4)
    script.add_gradients(run, rows)
    logged = run.meter.pop(lambda sums, maxima: (sums, maxima))
    (distance,) = seen
    expected = 0.5 * (torch.tensor([2.0, 1.0, 0.5, 0.0]) * distance).mean().item()
    assert logged["loss"] - logged["policy_loss"] == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-3


def test_images_are_trained_at_levels_but_the_last_and_those_of_a_group_noised_alike_where_they_share_noise(
    start, monkeypatch
):
    seen = []
    plain = script.noised
    monkeypatch.setattr(script, "noised", lambda x, noise, t: seen.append(noise) or plain(x, noise, t))
    run = start(train__shared_noise=True)
    images = rollout(run)
    assert images.timesteps.shape == (len(images.image_numbers), run.plan.num_trained_steps)
    shares = run.scheduler.timesteps[:-1].tensor_split(run.plan.num_trained_steps)  # one level of each
    for drawn, share in zip(images.timesteps.T, shares, strict=True):
        assert torch.isin(drawn, share).all()
    groups = images.image_numbers // run.plan.group_size
    for group in groups.unique():
        assert len(images.timesteps[groups == group].unique(dim=0)) == 1
    images.advantages = images.loss_weight = torch.ones(len(images.image_numbers))
    for inner_epoch in (0, 1):  # 2 of one group, 4 of the next
        script.add_gradients(run, images.take(torch.arange(2, 8) * images.num_steps, 6, inner_epoch))
    noise, other = seen
    assert not (noise == other).any(), "each pass over a rollout has noise of its own"
    assert [torch.equal(noise[i], noise[i + 1]) for i in range(5)] == [True, False, True, True, True]


@pytest.mark.slow
def test_flow_matching_on_own_images_joins_any_loss_by_five_times_its_weight(start, monkeypatch):
    seen = []
    plain = losses.self_normalised_error
    logged = []
    monkeypatch.setattr(losses, "self_normalised_error", lambda *args: seen.append(plain(*args)) or seen[-1])
    run = start(f"{NAME},awm")
    rows = rollout(run)
    rows.advantages = rows.loss_weight = torch.ones(len(rows.image_numbers))
    for weight in (0.0, 0.5):
        run.config = table.with_values(run.config, {"train.flow_matching_weight": weight})
        script.add_gradients(run, rows.take(torch.arange(4), 4))
        logged.append(run.meter.pop(lambda sums, maxima: (sums, maxima))["loss"])
    (own,) = seen
    assert logged[1] - logged[0] == pytest.approx(2.5 * own.mean().item(), rel=1e-4)


@pytest.mark.slow
def test_the_relative_norm_is_the_policys_velocity_over_the_references_mean_over_images(start, monkeypatch):
    seen = []
    plain = script.frozen_velocities
    monkeypatch.setattr(script, "frozen_velocities", lambda run, rows, x_t: seen.append(x_t) or plain(run, rows, x_t))
    run = start(train__beta=0.1, **PLAIN)
    images = rollout(run)
    images.advantages = images.loss_weight = torch.ones(len(images.image_numbers))
    rows = images.take(torch.arange(4), 4)
    move(run.parameters)
    script.add_gradients(run, rows)
    logged = run.meter.pop(lambda sums, maxima: (sums, maxima))["relative_velocity_norm"]
    (x_t,) = seen
    _, reference = plain(run, rows, x_t)
    policy = run.velocity(x_t, rows.timesteps, rows.condition).detach()
    expected = (policy.flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)).mean().item()
    assert logged == pytest.approx(expected, rel=1e-4)
    assert abs(logged - 1) > 1e-2


def test_an_image_counts_by_its_distance_to_its_group_in_whatever_order_images_were_decoded(start):
    run = start(train__diversity_weight=0.7, vae_batch_size=4)
    images, submitted = script.rollout(run, 0)
    assert len(submitted) > 1
    all_scores = rewards.wait(run, 0, submitted[::-1])
    found, _ = rewards.advantages(run, all_scores)
    groups = images.image_numbers // run.plan.group_size
    distance = rewards.latent_signs(run.model.features(images.x_0, run.size), groups)[:, 1]
    expected = group_advantages(all_scores.scores["avg"] + 0.7 * distance, groups, global_std=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert (found - group_advantages(all_scores.scores["avg"], groups, global_std=True)).abs().max() > 0.1


@pytest.mark.parametrize("name", ["dgpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("awm", "elbo"))])
def test_ratios_to_an_old_policy_that_is_copied_begin_at_one_in_every_epoch_and_move(name, shallow, tmp_path):
    how = dict(train__old_decay_schedule=0.0, train__updates_per_epoch=1, train__inner_epochs=2)
    folder = train(f"{NAME},{name}", tmp_path, num_epochs=2, eval_freq=0, **how, **shallow)
    updates = lines_of(folder, "update")
    for first, second in zip(updates[::2], updates[1::2], strict=True):
        assert first["ratio_std"] == first["parity/log_prob_abs_diff_max"] == 0 < first["grad_norm"]
        assert second["ratio_std"] > 0


@pytest.mark.slow
def test_an_old_policy_that_lags_behind_is_no_disparity(shallow, tmp_path):
    how = dict(train__old_decay_schedule=0.5, num_epochs=2, eval_freq=0)
    updates = lines_of(train(f"{NAME},elbo", tmp_path, **how, **shallow), "update")
    assert updates[0]["ratio_std"] == 0 < updates[1]["ratio_std"]
    assert not any("parity" in name for line in updates for name in line)


def test_a_minibatch_of_dgpo_holds_whole_groups_at_one_step(tmp_path, monkeypatch):
    """Which share noise and level, as all images of a group do: above."""
    batches = []
    plain = script.backward
    monkeypatch.setattr(script, "backward", lambda *args: batches.append(args[2].row_ids) or plain(*args))
    how = dict(sample__batch_size=8, sample__num_steps=8, train__timestep_fraction=0.5, eval_freq=0, num_epochs=1)
    train(f"{NAME},dgpo", tmp_path, **how)
    groups = torch.stack(batches).view(4 * 2, 4, 2)  # [group, image in it, (image, step)]
    first = groups[:, :1]
    assert torch.equal(groups - first, torch.tensor([[0, 0], [1, 0], [2, 0], [3, 0]]).expand(8, 4, 2))
    assert not (first[..., 0] % 4).any()
    assert len(groups.flatten(0, 1).unique(dim=0)) == 32


def test_the_reference_is_guided_until_it_becomes_the_policy(recorded):
    """After three updates: the fourth begins with what it is held to."""
    updates = lines_of(recorded("nft").folder, "update")
    distances = [line["reference_distance"] for line in updates]
    assert [line["loss"] for line in updates] == pytest.approx(
        [line["policy_loss"] + 0.5 * line["reference_distance"] for line in updates], rel=1e-4
    )
    assert distances[0] > 0.01
    assert [distance == 0 for distance in distances] == [False] * 3 + [True] + [False] * 2


@pytest.mark.parametrize(("kind", "schedule"), [("nft", 1), ("nft, full weights", 0.25)])
def test_the_old_policy_follows_its_schedule(kind, schedule, recorded):
    states = [stored(recorded(kind).folder, epoch) for epoch in (1, 2, 3)]
    names = [name.removeprefix("old/") for name in states[0] if name.startswith("old/")]
    assert names
    for number, (before, after) in enumerate(itertools.pairwise(states), start=2):
        decay = schedules.old_policy_decay(2 * number, schedule)
        for name in names:
            expected = decay * before[f"old/{name}"] + (1 - decay) * after[f"model/{name}"]
            torch.testing.assert_close(after[f"old/{name}"], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_policies_follow_each_by_its_own_schedule(shallow, tmp_path):
    how = dict(train__old_decay_schedule=0.5, train__sampler_decay_schedule=0.75, train__learning_rate=1e-3)
    how |= dict(num_epochs=2, eval_freq=0, save_freq=1, keep_checkpoints=9)
    folder = train(f"{NAME},crd", tmp_path, **shallow | how)
    before, after = (stored(folder, epoch) for epoch in (1, 2))
    names = [name.removeprefix("old/") for name in before if name.startswith("old/")]
    assert names
    for policy, decay in (("old", 0.5), ("sampler", 0.75)):
        for name in names:
            expected = decay * before[f"{policy}/{name}"] + (1 - decay) * after[f"model/{name}"]
            torch.testing.assert_close(after[f"{policy}/{name}"], expected, rtol=0, atol=1e-6)
    assert any(not torch.equal(after[f"old/{name}"], after[f"sampler/{name}"]) for name in names)


def test_crds_old_policy_lags_from_the_first_epoch_on(shallow, tmp_path):
    """With a copy of the trained policy, every log-ratio would be 0 in the first update of each epoch."""
    folder = train(f"{NAME},crd", tmp_path, num_epochs=3, eval_freq=0, **shallow)
    updates = lines_of(folder, "update")
    assert [line["ratio_std"] > 0 for line in updates] == [False] + [True] * (len(updates) - 1)


def test_no_log_prob_is_in_its_metrics_and_an_average_image_moves_nothing(shallow, tmp_path, monkeypatch):
    how = shallow | PLAIN | dict(eval_freq=0, num_epochs=1)
    updates = lines_of(train(NAME, tmp_path / "plain", **how), "update")
    for line in updates:
        assert not re.search("ratio|parity", " ".join(line))
    assert updates[0]["old_distance"] == updates[0]["reference_distance"] == 0
    assert updates[1]["old_distance"] > 0
    monkeypatch.setattr(losses, "nft_reward_prob", lambda advantages, _: torch.full_like(advantages, 0.5))
    still = lines_of(train(NAME, tmp_path / "still", train__weight_decay=0.0, **how), "update")
    assert still[0]["grad_norm"] < 1e-4 * updates[0]["grad_norm"]


@pytest.mark.slow
def test_options_run(shallow, tmp_path):
    """A second order, inner epochs, a small beta, bf16."""
    how = dict(sample__flash_ratio=0.5, train__inner_epochs=2, train__timestep_fraction=1.0, train__nft_beta=0.1)
    how |= dict(train__reward_aggregation="gdpo", train__filter_groups=True, train__beta=0.0)
    how |= dict(precision="bf16", fsdp__activation_checkpointing=1.0, num_epochs=1, eval_freq=0)
    updates = lines_of(train(NAME, tmp_path, **shallow | PLAIN | how), "update")
    assert len(updates) == 2 * 2
    assert all(line["grad_norm"] > 0 for line in updates)


def test_a_published_model_has_a_reference_where_the_loss_compares_with_it_and_the_demo_is_held_to_one():
    beta_of = {}
    for name in ("pickscore_qwenimage_nft", "pickscore_qwenimage_nft,dgpo", NAME, f"{NAME},dgpo"):
        beta_of[name] = config_files.load(f"{ROOT}/config/nft.py:{name}").train.beta
    assert list(beta_of.values()) == [0.0, 1e-4, 0.5, 0.5]
