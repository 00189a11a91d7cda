"""The training scripts, end to end on the shipped tiny model."""

import json
import math
import os
import re
from functools import partial
from pathlib import Path

import minimal_grpo
import numpy as np
import pytest
import torch
import train_qwenimage
import train_qwenimage_distill
import warm
from PIL import Image
from recorded import EPOCHS, redness
from refused import assert_refused
from small import ENV, FEW, ROOT, SCRIPTS, command_of, config_of, lines_of, train

from flow_grpo.base.pixels import from_picture
from flow_grpo.data import prompts
from flow_grpo.diffusers_patch.sample_with_logprob import pipeline_with_logprob
from flow_grpo.evaluation.evaluation import spread
from flow_grpo.monitoring import sheets

WINDOW = "shapes_qwenimage"
BRANCHES = "shapes_qwenimage_pr"
NFT = "shapes_qwenimage_nft"
DPO = "shapes_qwenimage_dpo,online"


def test_the_users_command_takes_a_reward_of_their_own(tmp_path):
    """The run's folder: test_ranks.py."""
    (tmp_path / "mine").mkdir()
    for name, score in {"brightness": "gain * images.mean((1, 2, 3))", "broken": "{}['missing']"}.items():
        reward = f"def load(device, gain=1.0):\n    return lambda images, prompts, metadata: {score}\n"
        (tmp_path / "mine" / f"{name}.py").write_text(reward)
    how = dict(reward_fn__brightness=1.0, reward__args__brightness__gain=0.5, num_epochs=1, eval_freq=0)
    command = command_of(BRANCHES, tmp_path, **how)
    env = ENV | {"FLOW_GRPO_REWARDS": os.path.relpath(tmp_path / "mine", ROOT), "WANDB_MODE": "disabled"}
    done = warm.run(command, env)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = lines_of(tmp_path / f"{BRANCHES}_smoke", "epoch")
    assert 0 < line["reward/brightness"] < 0.5
    assert line["reward/avg"] == pytest.approx(line["reward/brightness"] + line["reward/shapes"])
    broken = warm.run([*command, "--config.reward_fn.broken=1.0"], env)
    assert f"KeyError: 'missing' ({tmp_path}/mine/broken.py, line 2)" in broken.stderr
    assert "brightness" in warm.run(command, ENV).stderr


OPTIONS = {
    "dance, inner epochs, full weights, guidance": dict(sample__sde_type="dance", sample__noise_level=0.3)
    | dict(sample__sde_window_size=0, train__timestep_fraction=0.5, train__inner_epochs=2, train__updates_per_epoch=4)
    | dict(lora__rank=0, sample__guidance_scale=4.0),
    "cps, last minibatch filled up, saving memory, bf16": dict(sample__sde_type="cps", sample__global_std=True)
    | dict(train__step_weight="mean_one", sample__num_prompts_per_epoch=1, sample__rollout_weights="merged")
    | dict(fsdp__activation_checkpointing=1.0, fsdp__offload="optimizer", precision="bf16"),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", [WINDOW, pytest.param(BRANCHES, marks=pytest.mark.slow)])
def test_options_run_with_the_rollouts_log_probs_finite_numbers_and_a_growing_kl(name, options, shallow, tmp_path):
    only = "fraction" if name == WINDOW else "window"  # of the other script
    how = {key: value for key, value in OPTIONS[options].items() if only not in key}
    how["train__beta"] = 0.1
    updates = lines_of(train(name, tmp_path, num_epochs=1, eval_freq=0, **shallow | how), "update")
    assert len(updates) == how.get("train__inner_epochs", 1) * how.get("train__updates_per_epoch", 2)
    gap = "parity/log_prob_abs_diff_max"
    assert updates[0][gap] == 0
    assert not any(gap in row for row in updates[1:])
    assert updates[0]["kl_reference"] == 0 < updates[1]["kl_reference"]
    for row in updates:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        expected = row["policy_loss"] + 0.1 * row["kl_reference"]
        assert row["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", [WINDOW, BRANCHES])
def test_advantages_are_logged_for_what_is_trained(name, shallow, tmp_path):
    size = 3 if name == BRANCHES else 4

    def advantages(run, rewards):  # one image of four, or one branch of three, is good
        values = torch.full(rewards.shape, -0.5)
        values.view(-1, size)[:, 0] = 1.0
        return values, torch.ones_like(values)

    config = config_of(name, tmp_path, num_epochs=1, eval_freq=0, **shallow)
    SCRIPTS.get(name.split("_")[-1], train_qwenimage).main(config, advantages=advantages)
    updates = lines_of(tmp_path / config.name, "update")
    for key, expected in {"positive_share": 1 / size, "abs_mean": 0.5 + 0.5 / size}.items():
        assert np.mean([line[f"advantage_{key}"] for line in updates]) == pytest.approx(expected)


@pytest.mark.parametrize(("bound", "expected"), [("clip", 2.0), ("tanh", 2 * math.tanh(1.5))])
def test_advantages_of_noisy_steps_are_bounded_by_a_clip_or_by_a_tanh(bound, expected, shallow, tmp_path):
    def advantages(run, rewards):
        return torch.full(rewards.shape, 3.0), torch.ones(rewards.shape)

    how = dict(train__adv_bound=bound, train__adv_clip_max=2.0, num_epochs=1, eval_freq=0)
    config = config_of(WINDOW, tmp_path, **shallow | how)
    train_qwenimage.main(config, advantages=advantages)
    first = lines_of(tmp_path / config.name, "update")[0]
    assert first["policy_loss"] == pytest.approx(-expected, rel=1e-6)


@pytest.mark.parametrize(("name", "limit", "share"), [(WINDOW, 0.0, 1.0), (BRANCHES, 1e6, 0.0)])
def test_dppos_rows_are_beyond_its_limit_once_the_policy_has_moved(name, limit, share, shallow, tmp_path):
    how = shallow | dict(num_epochs=1, eval_freq=0, train__kl_limit=limit)
    first, second = lines_of(train(f"{name},dppo", tmp_path, **how), "update")
    assert first["clip_fraction_high"] == first["clip_fraction_low"] == first["ratio_std"] == 0 < first["grad_norm"]
    assert second["ratio_std"] > 0
    assert second["clip_fraction_high"] + second["clip_fraction_low"] == share


def test_teachers_are_looked_at_before_a_run_has_a_folder_and_weights(tmp_path):
    rows = []
    for teachers, words in (((), "is ()"), (("nowhere",), "nowhere/pytorch_lora_weights.safetensors")):
        config = config_of(f"{WINDOW},distill", tmp_path / "runs", train__teachers=teachers)
        rows.append((words, partial(train_qwenimage_distill.main, config), ["config.train.teachers", words]))
    assert_refused(rows)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_student_comes_near_to_its_teacher_and_of_several_learns_the_mean(shallow, tmp_path):
    alike = dict(reward_fn__shapes=1.0, reward_fn__brightness=0.0)  # no shapes are drawn: 0 for all images

    def losses(**how):
        how = shallow | dict(eval_freq=0, run_name="student", train__learning_rate=3e-3) | alike | how
        train_qwenimage_distill.main(config_of(f"{WINDOW},distill", tmp_path, **how))
        return [line["policy_loss"] for line in lines_of(tmp_path / how["run_name"], "update")]

    taught = dict(run_name="teacher", num_epochs=1, eval_freq=0, train__learning_rate=1e-2)
    teacher = str(train(WINDOW, tmp_path, **shallow | taught))
    found = losses(num_epochs=4, train__teachers=(teacher,))
    assert max(found[-4:]) < 0.5 * min(found[:2])
    epochs = lines_of(tmp_path / "student", "epoch")
    assert {(line["reward/zero_std_share"], line["health/limits_exceeded"]) for line in epochs} == {(1, 0)}
    other = str(tmp_path / "student")
    how = dict(num_epochs=1, lora__path=teacher)
    (to_other, *_) = losses(run_name="of_one", train__teachers=(other,), **how)
    (to_both, *_) = losses(run_name="of_two", train__teachers=(other, teacher), **how)
    assert to_both == to_other / 2 > 0, "a student that begins as a teacher has nothing to learn from that one"


@pytest.mark.parametrize(
    ("name", "how", "per_epoch"),
    [
        (WINDOW, dict(sample__guidance_scale=1.0, num_epochs=2, eval_freq=2), 8 * 4 + 16),
        (WINDOW, dict(train__beta=0.1, train__reference_guidance_scale=3.0), 8 * 4 + 16 + 2 * 16),
        (WINDOW, dict(train__inner_epochs=2, sample__guidance_scale=4.0), 2 * (8 * 4 + 2 * 16)),
        (WINDOW + ",fast", dict(sample__sde_window_range=(1, 3)), 4 + 8 * 3 + 16),  # a forward has 4 rows
        (NFT, dict(train__beta=0.5, train__reference_guidance_scale=3.0), 8 * 2 + 8 * (1 + 2 + 1)),
        (NFT, dict(train__guidance_scale=3.0, train__reference_guidance_scale=1.0), 8 * 2 + 8 * (2 + 1 + 2)),
        (DPO, dict(sample__flash_ratio=0.7, sample__flash_solver="extrapolate"), 8 * 3 + 2 * 2 * 2),  # "dpm": 8 * 2
        (DPO, dict(), 8 * 2 + 2 * 2 * 2),
    ],
    ids=["plain", "guided reference", "inner epochs", "shared steps", "NFT", "guided update", "solver", "DPO"],
)
def test_forwards_are_the_rows_of_rollout_and_update(name, how, per_epoch, shallow, tmp_path):
    """8 images of 2 prompts, 4 steps (2 with flash), 2 of them trained (1 by NFT). Evaluations do not count."""
    how = shallow | dict(sample__num_prompts_per_epoch=2, num_epochs=1, eval_freq=0) | how
    epochs = lines_of(train(name, tmp_path, **how), "epoch")
    assert [line["forwards"] for line in epochs] == [per_epoch] * how["num_epochs"]


RECORDED_WITH = {  # where a config has other settings since
    BRANCHES: dict(train__learning_rate=1e-3, sample__num_branches=6),
    NFT: dict(
        train__learning_rate=1e-3, train__beta=1e-4, train__reference_guidance_scale=0.0, train__shared_noise=False
    ),
}


@pytest.mark.parametrize("name", [WINDOW, BRANCHES, NFT, DPO])
def test_golden_first_losses(name, tmp_path):
    lora = dict(lora__rank=32, lora__alpha=64)
    folder = train(name, tmp_path, num_epochs=1, eval_freq=0, **lora, **RECORDED_WITH.get(name, {}))
    golden = json.loads(Path(__file__).with_name("golden").joinpath("first_losses.json").read_text())[name]
    assert lines_of(folder, "epoch")[0]["reward/avg"] == pytest.approx(golden.pop("reward")[0], rel=0, abs=1e-6)
    for key, values in golden.items():
        found = [row[key] for row in lines_of(folder, "update")]
        torch.testing.assert_close(found, values, rtol=1e-3, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


def test_pictures_of_an_evaluation_have_their_own_prompts_and_scores_below_them(recorded):
    """Weights that a run leaves score what it logged: test_models.py, test_evaluation.py."""
    shown = spread(prompts.load_prompts("dataset/shapes", "validation"), FEW["eval__num_prompts"])
    pictures, captions, scores = zip(*sheets.panel_pictures(sheets.evaluations(recorded("window").folder)[0]))
    assert list(captions) == [prompt.text for prompt in shown]
    measured = redness(torch.stack([from_picture(picture) for picture in pictures]), None, None)
    assert measured.tolist() == pytest.approx([float(score) for score in scores], abs=7e-4)  # of three digits
    assert measured.std() > 3e-3


def test_a_runs_first_lines_say_what_its_epochs_are(shallow, tmp_path, capsys):
    how = shallow | dict(num_epochs=1, eval_freq=0)
    (epoch,) = lines_of(train("shapes_qwenimage_pr", tmp_path, **how), "epoch")
    printed = capsys.readouterr().out
    (said,) = [line for line in printed.splitlines() if line.startswith("an epoch: ")]
    assert printed.index(said) < printed.index("epoch 1/1")
    assert f"{epoch['images']:g} images, at 64x64 pixels" in said
    assert " on one " in said


def test_a_run_with_branches_logs_each_step_and_draws_the_branches_of_a_trunk(recorded):
    """The means over steps are the epoch's."""
    folder = recorded("branches").folder
    config = json.loads((folder / "config.json").read_text())
    first = lines_of(folder, "epoch")[0]
    num_steps = round((config["sample"]["num_steps"] - 1) * config["train"]["timestep_fraction"])
    for figure in ("reward", "group_std", "ratio_std", "clip_fraction_high", "sigma", "transition_std", "weight"):
        names = [name for name in first if name.startswith(f"steps/{figure}/")]
        assert names == [f"steps/{figure}/{step}" for step in range(num_steps)], figure
    rewards_by_step = [first[f"steps/reward/{step}"] for step in range(num_steps)]
    assert sum(rewards_by_step) / num_steps == pytest.approx(first["reward/avg"])
    clipped = [first[f"steps/clip_fraction_high/{step}"] for step in range(num_steps)]
    of_updates = [line["clip_fraction_high"] for line in lines_of(folder, "update") if line["epoch"] == 0]
    assert sum(clipped) / num_steps == pytest.approx(sum(of_updates) / len(of_updates))
    last = num_steps - 1
    assert first[f"steps/transition_std/{last}"] < first["steps/transition_std/0"]
    assert first[f"steps/ratio_std/{last}"] > first["steps/ratio_std/0"], "less noise, larger ratios"
    assert first["steps/weight/0"] == pytest.approx(3**0.5 * first["steps/transition_std/0"])

    drawn = sheets.group_sheets(folder, "branches")
    assert list(drawn) == list(range(EPOCHS)), "no sheet after the last epoch, which draws no rollout"
    page = Image.open(drawn[0])
    assert page.width == 14 + (1 + config["sample"]["num_branches"]) * (128 + 14)
    evaluated_seldom = recorded("window").folder
    assert list(sheets.group_sheets(evaluated_seldom, "groups")) == [0], "as often as a run evaluates"


@pytest.mark.slow
def test_the_printed_reward_rises_by_updates_of_an_epochs_gradients_alone(capsys, monkeypatch):
    """-1.32 to -1.04 in 4 epochs; with the advantages' sign turned round it falls."""
    add_gradients = minimal_grpo.add_gradients
    without = []

    def noting(pipeline, *batch):
        without.append(all(p.grad is None for p in pipeline.transformer.parameters()))
        add_gradients(pipeline, *batch)

    monkeypatch.setattr(minimal_grpo, "add_gradients", noting)
    minimal_grpo.train("jpeg_compressibility", num_epochs=4, num_prompts=2, group_size=8)
    printed = [float(number) for number in re.findall(r"reward (-?[0-9.]+)", capsys.readouterr().out)]
    assert without == [True] * 4 * minimal_grpo.NUM_UPDATES
    assert len(printed) == 4
    assert sum(printed[-2:]) / 2 > sum(printed[:2]) / 2 + 0.1


@torch.no_grad()
def minimal_sample(pipeline, seeds):
    """Text of two prompts of different lengths, their images and their noisy steps."""
    text = pipeline.encode_prompt(["a photo of a red circle", "a photo of a cross"])
    return text, *minimal_grpo.sample(pipeline, text, [torch.Generator().manual_seed(seed) for seed in seeds])


def test_the_minimal_script_samples_and_scores_as_the_package_does():
    """Schedule, draws, decoding and log-probs."""
    pipeline = minimal_grpo.load_pipeline()
    _, images, noisy_steps = minimal_sample(pipeline, [5, 6])
    samples = pipeline_with_logprob(
        pipeline,
        ["a photo of a red circle", "a photo of a cross"],
        [torch.Generator().manual_seed(seed) for seed in (5, 6)],
        window=range(minimal_grpo.NUM_NOISY),
        noise_level=minimal_grpo.NOISE_LEVEL,
        num_steps=minimal_grpo.NUM_STEPS,
        height=64,
        width=64,
        guidance_scale=1.0,
    )
    torch.testing.assert_close(images, samples.images, rtol=0, atol=1e-4)
    assert len(noisy_steps) == len(samples.trace) == minimal_grpo.NUM_NOISY
    for (timestep, latents, next_latents, log_prob), traced in zip(noisy_steps, samples.trace):
        torch.testing.assert_close(timestep, traced.timestep)
        torch.testing.assert_close(latents, traced.latents, rtol=0, atol=1e-4)
        torch.testing.assert_close(next_latents, traced.step.prev_sample, rtol=0, atol=1e-4)
        torch.testing.assert_close(log_prob, traced.step.log_prob, rtol=0, atol=1e-4)


def test_a_ratio_to_the_rollouts_log_prob_is_clipped():
    pipeline = minimal_grpo.load_pipeline()
    text, _, noisy_steps = minimal_sample(pipeline, [0, 1])
    noisy_steps = [step._replace(log_prob=step.log_prob - 1) for step in noisy_steps]
    for advantage, clipped in ((1.0, True), (-1.0, False)):  # a ratio of e is clipped where it would grow
        pipeline.transformer.zero_grad()
        minimal_grpo.add_gradients(pipeline, text, noisy_steps, torch.tensor([advantage, advantage]))
        assert pipeline.transformer.proj_out.weight.grad.any() != clipped
