"""DPO: what a pair shares, what the reference is, and what offline and online runs log."""

import functools
import json
import math
import shutil
import statistics

import pytest
import torch
import train_qwenimage_dpo as script
from small import config_of, lines_of, move, stored, train

from flow_grpo.base import rng
from flow_grpo.data import preferences
from flow_grpo.diffusers_patch import registry

NAME = "shapes_qwenimage_dpo"
ONLINE = "shapes_qwenimage_dpo,online"


@pytest.fixture(params=[4, 0], ids=["LoRA", "full weights"])
def started(request, pairs, tmp_path):
    """A run before its first epoch, where its pairs come from, and its first pairs."""
    run, source = script.begin(config_of(NAME, tmp_path, **pairs, lora__rank=request.param, eval__num_prompts=0))
    yield run, source, script.read_pairs(run, source.train, 0)
    run.board.finish()


def streams(pairs):
    return [rng.generator(0, "test", number) for number in pairs.numbers.tolist()]


def test_what_an_update_logs_is_of_the_pairs_that_count(started):
    run, source, pairs = started
    move(run.parameters)
    pairs.loss_weight = torch.arange(len(pairs.loss_weight), dtype=torch.float32)
    (minibatches,) = [*preferences.minibatches(preferences.concat([pairs]), 1, 8, 2)][1:]  # of the second inner epoch
    script.add_gradients(run, *minibatches, source.levels)
    logged = run.meter.pop(lambda sums, maxima: (sums, maxima))
    names = [rng.generator(run.config.seed, "forward noise", 0, 1, number) for number in pairs.numbers.tolist()]
    errors = script.velocity_errors(run, pairs, source.levels, names)
    for name, values in script.pair_metrics(errors, run.config.train.dpo_beta).items():
        expected = (pairs.loss_weight * values).sum() / pairs.loss_weight.sum()
        assert name == "loss" or logged[name] == pytest.approx(expected.item(), rel=1e-4)


def test_the_reference_is_the_first_policy_and_has_no_gradients(started):
    """And noise, level, prompt and weights are one for both sides of a pair."""
    run, source, pairs = started
    win, lose, ref_win, ref_lose = script.velocity_errors(run, pairs, source.levels, streams(pairs))
    assert torch.equal(win, ref_win)
    assert torch.equal(lose, ref_lose)
    assert win.requires_grad
    assert not ref_win.requires_grad
    assert win.std() > 0.01  # levels and noises differ from pair to pair
    move(run.parameters)
    pairs.losers = pairs.winners.clone()
    moved, twice, still, still_twice = script.velocity_errors(run, pairs, source.levels, streams(pairs))
    assert torch.equal(still, ref_win)
    assert (moved - win).abs().max() > 1e-3
    torch.testing.assert_close(moved, twice, rtol=1e-5, atol=0)
    torch.testing.assert_close(still, still_twice, rtol=1e-5, atol=0)


def test_an_epochs_pairs_follow_from_seed_epoch_and_place_and_take_neither_text_encoder_nor_vae(started):
    run, source, pairs = started
    again = script.read_pairs(run, source.train, 0)
    other = script.read_pairs(run, source.train, 1)
    assert torch.equal(again.winners, pairs.winners)
    assert not torch.equal(other.winners, pairs.winners)
    assert pairs.numbers.tolist() == list(range(8))
    assert run.pipeline.vae is run.pipeline.text_encoder is run.loaded_pool is None
    with pytest.raises(RuntimeError, match="makes no image"):
        _ = run.pool


def test_offline_its_first_update_knows_nothing_and_its_loss_falls(recorded):
    folder = recorded("dpo").folder
    updates = lines_of(folder, "update")
    held_out = lines_of(folder, "validation")
    for first, prefix in ((updates[0], ""), (held_out[0], "validation/")):
        assert first[f"{prefix}loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert first[f"{prefix}implicit_accuracy"] == first[f"{prefix}winner_error_gap"] == 0
    assert updates[0]["grad_norm"] > 0
    assert statistics.fmean(line["implicit_accuracy"] for line in updates[2:]) > 0.6
    assert [line["epoch"] for line in held_out] == [0, 1, 2, 3]
    assert held_out[-1]["validation/winner_error_gap"] != 0
    assert lines_of(folder, "eval")[-1]["eval/avg"] < 0
    said = (folder.parents[1] / "said").read_text()
    assert f"implicit_accuracy {updates[-1]['implicit_accuracy']:.4g}" in said.partition("epoch 3/3")[2]
    assert "no metrics under validation/" not in said


def test_a_run_on_pairs_reads_no_prompts_to_train_on(recorded):
    inputs = json.loads((recorded("dpo").folder / "inputs.json").read_text())
    assert [*inputs["dataset"]] == ["test_metadata.jsonl"]


def test_a_run_without_pairs_that_are_held_out_says_so(pairs, tmp_path, capsys):
    folder = shutil.copytree(pairs["preferences__path"], tmp_path / "pairs")
    for file in folder.glob("validation_*"):
        file.unlink()
    run, _ = script.begin(config_of(NAME, tmp_path, **pairs | dict(preferences__path=str(folder), eval__num_prompts=0)))
    assert "no metrics under validation/" in capsys.readouterr().out
    run.board.finish()


def test_held_out_pairs_are_judged_at_the_same_noises_after_every_epoch(started):
    run, source, _ = started
    move(run.parameters)
    run.ema.move(1.0)
    for epoch in (0, 6):
        script.validate(run, source, epoch)
        move(run.parameters)  # unlike the averages, which are judged
    first, last = lines_of(run.folder, "validation")
    assert first | dict(epoch=6) == last
    assert first["validation/winner_error_gap"] != 0


def test_online_the_reference_becomes_the_policy_every_few_updates(recorded):
    """Every 4: after the second epoch, before the third."""
    folder = recorded("online dpo").folder
    states = [stored(folder, epoch) for epoch in (1, 2, 3)]
    names = [name.removeprefix("reference/") for name in states[0] if name.startswith("reference/")]
    moved = [name for name in names if "lora_B" in name and "txt" not in name]

    def is_the_policy(state, name):
        return torch.equal(state[f"reference/{name}"], state[f"model/{name}"])

    assert moved
    for name in names:
        assert is_the_policy(states[1], name)  # 2 updates an epoch
        assert torch.equal(states[2][f"reference/{name}"], states[1][f"reference/{name}"])
    for state in (states[0], states[2]):
        assert not all(is_the_policy(state, name) for name in moved)
    updates = lines_of(folder, "update")
    assert [line["winner_error_gap"] == 0 for line in updates] == [i % 4 == 0 for i in range(6)]
    assert [row["images"] for row in lines_of(folder, "epoch")] == [32, 64, 96]


@pytest.mark.slow
def test_a_group_whose_images_score_alike_is_left_out_and_leaves_the_mean_to_the_others(recorded, tmp_path):
    """The group's pairs count nothing; without such a margin they do."""
    weights = []
    plain = script.add_gradients

    @functools.wraps(script.add_gradients)
    def noting(run, pairs, levels):
        weights.extend(pairs.loss_weight.tolist())
        plain(run, pairs, levels)

    config = config_of(ONLINE, tmp_path, num_epochs=1, eval_freq=0, run_name="some", preferences__min_margin=0.2)
    script.main(config, add_gradients=noting)
    assert min(weights) == 0
    assert sum(weights) == pytest.approx(len(weights))
    how = dict(num_epochs=1, eval_freq=0, train__reference_interval=0, preferences__min_margin=9.0)
    assert lines_of(train(ONLINE, tmp_path, **how), "update")[0]["grad_norm"] == 0
    assert lines_of(recorded("online dpo").folder, "update")[0]["grad_norm"] > 0


@pytest.mark.slow
def test_options_run(pairs, tmp_path):
    """bf16, a moving reference offline, inner epochs with guidance."""
    how = dict(precision="bf16", fsdp__activation_checkpointing=1.0, fsdp__offload="optimizer")
    how |= dict(train__reference_interval=1, train__updates_per_epoch=1, train__inner_epochs=2, num_epochs=1)
    how |= dict(sample__guidance_scale=4.0, eval__guidance_scale=4.0, eval_freq=1, eval__num_prompts=1)
    how |= dict(sample__num_prompts_per_epoch=2, sample__batch_size=2)
    updates = lines_of(train(NAME, tmp_path, **pairs, **how), "update")
    assert len(updates) == 2
    for line in updates:
        assert 0 < line["grad_norm"] < math.inf


def test_a_loaded_adapter_is_its_own_reference(recorded, tmp_path):
    first = recorded("dpo")
    how = first.how | dict(num_epochs=1, eval_freq=0, lora__path=str(first.folder))
    second = lines_of(train(NAME, tmp_path, **how), "update")
    assert second[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert second[0]["implicit_accuracy"] == 0


@pytest.mark.parametrize("name", ["flux", pytest.param("flux2_klein", marks=pytest.mark.slow)])
def test_policy_and_reference_are_trained_where_and_as_images_are_sampled(name, tmp_path):
    """FLUX.1's transformer takes the rollout's guidance as an input; FLUX.2-klein's shift is that of its steps."""
    heard = []

    @functools.wraps(script.add_gradients)
    def noting(run, pairs, levels):
        heard.append([levels.median().item()])
        hook = run.model.network.register_forward_pre_hook(lambda module, inputs: heard[-1].append(inputs[3]))
        plain(run, pairs, levels)
        hook.remove()

    plain = script.add_gradients
    scale = 3.5 if name == "flux" else 1.0
    how = dict(model=registry.tiny_folder(name), reward_fn={"jpeg_compressibility": 1.0}, num_epochs=1, eval_freq=0)
    config = config_of(ONLINE, tmp_path, sample__guidance_scale=scale, **how)
    script.main(config, add_gradients=noting)
    for median, *scales in heard:
        assert scales == [3.5 if name == "flux" else 0.0] * 2
        assert median > 400
