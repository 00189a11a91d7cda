"""What a user can get wrong is said before any weight is loaded, and a number that went wrong stops the run in time."""

import json
import shutil

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from small import config_of, train

from flow_grpo import checkpoints, checksums, rewards
from flow_grpo.scoring.scorers import RewardFailed

WINDOW, BRANCHES = "shapes_qwenimage", "shapes_qwenimage_pr"
TINY = "flow_grpo/assets/tiny_qwenimage"


@pytest.fixture
def weightless(tmp_path):
    """The tiny model with weights that no one can read."""
    folder = tmp_path / "weightless"
    shutil.copytree(TINY, folder)
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(b"not weights")
    return str(folder)


def test_a_config_without_fault_goes_on_to_the_weights(weightless, tmp_path):
    with pytest.raises((SafetensorError, OSError)):  # as diffusers' or our own loader meets them first
        train(WINDOW, tmp_path, model=weightless)


@pytest.mark.parametrize(
    ("name", "how", "says"),
    [
        (
            WINDOW,
            dict(sample__num_prompts_per_epoch=3, sample__num_images_per_prompt=3),
            r"3 prompts x 3 images = 9 .*\[1, 3, 9\]",
        ),
        (WINDOW, dict(train__updates_per_epoch=5), r"4 images x 2 trained steps = 8 rows .* 5; .*\[1, 2, 4, 8\]"),
        (WINDOW, dict(sample__sde_window_range=(0, 4)), r"range = \(0, 4\) .* 4 steps; .* up to \(0, 3\)"),
        (WINDOW, dict(sample__sde_window_size=4), r"sde_window_size = 4 in sde_window_range = \(0, 3\)"),
        (
            WINDOW,
            dict(sample__sde_window_size=0, sample__sde_window_schedule="decay"),
            r"nothing is left to move by .*'decay'",
        ),
        (WINDOW, dict(sample__flash_solver="heun"), r"flash_solver is 'heun'; it may be 'dpm', 'extrapolate'"),
        (WINDOW, dict(sample__flash_solver="extrapolate"), r"flash_ratio 0 leaves no forward out"),
        (WINDOW, dict(fsdp__activation_memory=1.5), r"activation_memory is 1.5; it must be from 0 to 1"),
        (WINDOW, dict(fsdp__activation_memory=0.5), r"activation_memory is 0.5: .* it takes config.compile"),
        (
            WINDOW,
            dict(fsdp__activation_memory=0.5, compile=True, fsdp__activation_checkpointing=True),
            r"fsdp.activation_checkpointing, which recomputes all, off",
        ),
        (WINDOW, dict(base_precision="fp8", lora__rank=0), r"base_precision is 'fp8', but with config.lora.rank 0"),
        (WINDOW, dict(base_precision="4bit", fsdp__mode="shard"), r"base_precision is '4bit' with .* 'shard'"),
        (
            WINDOW,
            dict(base_precision="8bit", sample__merge_adapter=True),
            r"the copy of a base of 8 bits has 8 bits, too",
        ),
        (WINDOW, dict(base_precision="4bit", sample__merge_adapter=True), r"a base of 4 bits has no merged copy"),
        (WINDOW, dict(base_precision="2bit"), r"base_precision is '2bit'; it may be '', 'fp8', '8bit', '4bit'"),
        (WINDOW, dict(attention="flash_3"), r"attention is 'flash_3'; it may be '', 'flash_4'"),
        (WINDOW, dict(attention="flash_4", lora__rank=8), r"'bf16' or 'fp16' .*: config.precision is 'fp32'"),
        (WINDOW, dict(attention="flash_4", precision="bf16", lora__rank=0), r"an adapter to train: .*lora.rank 0"),
        (
            WINDOW,
            dict(attention="flash_4", precision="bf16", lora__rank=8, model="flow_grpo/assets/tiny_sd3"),
            r"attention is 'flash_4', which is for .* \(Qwen-Image\); for flow_grpo/assets/tiny_sd3 set ''",
        ),
        (
            WINDOW,
            dict(attention="flash_4", precision="bf16", lora__rank=8),
            r"attention is 'flash_4', which runs on H100, .* not on this machine without a GPU",
        ),
        (WINDOW, dict(weights_cache="x"), r"weights_cache is 'x', but config.base_precision '' stores no other"),
        (WINDOW, dict(weights_cache="/dev/null/x", base_precision="fp8"), r"/dev/null/x cannot be written: Not a"),
        (WINDOW, dict(sample__text_multiple=8), r"text_multiple is 8: .* config.sample.engine 'stepwise'"),
        (
            BRANCHES,
            dict(sample__engine="stepwise", sample__text_multiple=1, text_tokens=40, compile=True),
            r"text_multiple is 1: 40 text tokens make 40 widths, .* at most 32",
        ),
        (WINDOW, dict(vae_precision="fp16"), r"vae_precision is 'fp16'; it may be 'fp32', 'bf16'"),
        (WINDOW, dict(sample__flash_ratio=1.5), r"flash_ratio is 1.5; it must be from 0 to 1"),
        (WINDOW, dict(sample__sde_type="cps", train__objective="guard"), r"'cps_gaussian' is the same step with one"),
        (WINDOW, dict(eval__rewards=("shape",)), r"no reward 'shape'"),
        (WINDOW, dict(sample__num_branches=2), r"num_branches is 2; branches are for train_\*_pr.py"),
        (BRANCHES, dict(sample__num_branches=1), r"num_branches is 1; .* at least 2"),
        (
            BRANCHES,
            dict(sample__sde_window_size=1),
            r"sample.sde_window_size is set to 1, but this script would ignore",
        ),
        (WINDOW, dict(sample__completion_batch_size=7), r"completion_batch_size is 7: .* 'stepwise'"),
        (WINDOW, dict(sample__sde_type="sda"), r"sample.sde_type is 'sda'; it may be 'sde', 'dance', 'cps'"),
        (WINDOW, dict(train__step_weight="sqrt2"), r"train.step_weight is 'sqrt2'"),
        (WINDOW, dict(sample__noise_level=0.0), r"noise_level is 0"),
        (WINDOW, dict(train__learning_rate=float("nan")), r"train.learning_rate is nan"),
        (WINDOW, dict(train__timestep_fraction=0.1), r"timestep_fraction 0.1 leaves no denoising step"),
        (WINDOW, dict(height=72), r"config.height is 72; it must be a multiple of 16"),
        (WINDOW, dict(eval__width=8), r"config.eval.width is 8; it must be a multiple of 16"),
        (WINDOW, dict(fsdp__mode="zero"), r"fsdp.mode is 'zero'"),
        (WINDOW, dict(fsdp__mode="hybrid", fsdp__shard_size=2), r"1 ranks do not divide into groups of shard_size = 2"),
        (WINDOW, dict(sample__fast_precision="fp8"), r"fast_precision is 'fp8', but no layer has other products"),
        (WINDOW, dict(fsdp__offload_weights=True), r"offload_weights with fsdp.mode 'replicate'"),
        (WINDOW, dict(fsdp__offload_weights=True, fsdp__mode="shard"), r"offload_weights needs torchrun"),
        (BRANCHES, dict(fsdp__mode="shard"), r"merge_adapter with config.fsdp.mode 'shard': only replicated"),
        (WINDOW, dict(reward_fn={"shapes": float("nan")}), r"reward_fn.shapes is nan"),
        (BRANCHES, dict(reward_fn={"shape": 1.0}), r"no reward 'shape'"),
        (WINDOW, dict(lora__path="nowhere"), r"nowhere/pytorch_lora_weights.safetensors does not exist"),
        (WINDOW, dict(model="nowhere/at/all"), r"'nowhere/at/all' is no diffusers folder and no hub id"),
        (WINDOW, dict(dataset="nowhere"), r"'nowhere' needs train_metadata.jsonl or train.txt"),
        (WINDOW, dict(resume_from="nowhere"), r"no checkpoint at nowhere"),
        (WINDOW, dict(project="a/b?c"), r"config.project is 'a/b\?c'; wandb says"),
        (
            WINDOW,
            dict(embeddings_cache="/proc/nowhere"),
            r"config.embeddings_cache: /proc/nowhere .* cannot be written",
        ),
        (WINDOW, dict(reward__device="cuda:99"), r"config.reward.device of shapes is 'cuda:99', which is not there"),
        (WINDOW, dict(fsdp__shard_size=7), r"fsdp.shard_size is 7 with config.fsdp.mode 'replicate'"),
        (WINDOW, dict(train__adam_eps=0.0), r"config.train.adam_eps is 0.0; it must be from 1e-20"),
    ],
)
def test_settings_are_checked_before_any_weight_is_loaded(name, how, says, weightless, tmp_path):
    with pytest.raises(ValueError, match=says):
        train(name, tmp_path / "runs", **({"model": weightless} | how))
    assert not (tmp_path / "runs").exists()


def test_a_prompt_that_is_too_long_is_named(weightless, tmp_path):
    with pytest.raises(ValueError, match=r"a prompt has \d+ tokens, over config.text_tokens = 8: 'a photo"):
        train(WINDOW, tmp_path, model=weightless, text_tokens=8)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"shape": 1.0}, r"no reward 'shape' .* nearest: shapes"),
        ({"shapes": "1"}, r"reward_fn.shapes is '1'"),
        ({"shapes": True}, r"reward_fn.shapes is True"),
        ({"shapes": float("inf")}, r"reward_fn.shapes is inf"),
        ({}, r"reward_fn is empty; there are: .*shapes"),
    ],
)
def test_unknown_rewards_and_wrong_weights(weights, says):
    with pytest.raises(ValueError, match=says):
        rewards.check_rewards(weights)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("train_metadata.jsonl", "", r"train_metadata.jsonl is empty"),
        ("train_metadata.jsonl", '{"prompt": "a"}\n{"prompt": ', r"train_metadata.jsonl, line 2: not JSON"),
        ("train_metadata.jsonl", '{"prompt": "a"}\n\n', r"train_metadata.jsonl, line 2"),
        ("train_metadata.jsonl", '{"text": "a"}\n', r'train_metadata.jsonl, line 1: needs an object with a "prompt"'),
        ("train.txt", "a circle\n \n", r"train.txt, line 2: empty prompt"),
    ],
)
def test_prompt_files_name_file_and_line(file, text, says, weightless, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / file).write_text(text)
    (folder / "test.txt").write_text("a circle\n")
    with pytest.raises(ValueError, match=says):
        train(WINDOW, tmp_path / "runs", model=weightless, dataset=str(folder))


def test_a_folder_with_another_pipeline(weightless, tmp_path):
    (tmp_path / "weightless" / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    with pytest.raises(ValueError, match="holds a WanPipeline; there are QwenImagePipeline, "):
        train(WINDOW, tmp_path / "runs", model=weightless)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"no run 'shapes_qwenimag,smoke' .* nearest: shapes_qwenimage"):
        config_of("shapes_qwenimag")
    with pytest.raises(AttributeError, match='Did you mean "num_steps"'):
        config_of(WINDOW).sample.num_stepz = 3


def test_a_checkpoint_of_another_config_is_refused_before_any_weight_is_loaded(weightless, tmp_path):
    config = config_of(WINDOW, tmp_path, model=weightless, reward_fn={"shapes": 1.0})
    checkpoint = tmp_path / config.name / "checkpoints" / "epoch_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(config.to_dict()))
    progress = {"format": checkpoints.FORMAT, **checkpoints.Progress(1, 2)._asdict()}
    (checkpoint / "progress.json").write_text(json.dumps(progress))
    checksums.write(checkpoint, {})
    with pytest.raises(ValueError, match=r"another config \(lora\.rank: 4 -> 8, train\.beta: 0\.0 -> 0\.5\)"):
        train(WINDOW, tmp_path, model=weightless, resume_from="latest", train__beta=0.5, lora__rank=8)


def test_a_reward_that_is_no_number_stops_the_run_and_names_the_prompt(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(
        '"""NaN for every circle."""\n\n\ndef load(device):\n'
        '    return lambda images, prompts, metadata: [float("nan") if "a" in p else 1.0 for p in prompts]\n'
    )
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    with pytest.raises(RewardFailed, match=r"reward 'broken' \(thread\): reward 'broken' is nan for 'a"):
        train(WINDOW, tmp_path / "runs", reward_fn={"broken": 1.0})


def test_an_adapter_that_is_not_finite_is_refused_before_any_weight_is_loaded(weightless, tmp_path):
    folder = train(BRANCHES, tmp_path / "first", num_epochs=1, eval_freq=0)
    path = folder / "pytorch_lora_weights.safetensors"
    weights = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    name = next(name for name in weights if "lora_B" in name)
    save_file(weights | {name: torch.full_like(weights[name], float("nan"))}, path, metadata)
    with pytest.raises(ValueError, match=rf"{path} cannot .* 1 of {len(weights)} tensors .* infinities, .*lora_B"):
        train(BRANCHES, tmp_path / "second", lora__path=str(folder), model=weightless)
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("name", [WINDOW, BRANCHES])
def test_an_advantage_that_overflows_moves_no_weight_and_spoils_no_checkpoint(name, tmp_path, monkeypatch):
    """Rewards are finite, but from the second epoch on (two batches each) their sum is not."""
    (tmp_path / "brightness.py").write_text(
        "from itertools import count\n\n\ndef load(device):\n    calls = count()\n"
        "    return lambda images, *_: images.mean((1, 2, 3)) * (1 if next(calls) < 2 else 3e38)\n"
    )
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    how = dict(reward_fn={"brightness": 1.0}, eval_freq=0, reward__batch_size=999, sample__engine="full", save_freq=1)
    with pytest.raises(FloatingPointError, match=r"nan for image \d+ \('a.*'\), trained step \d, in update 3") as error:
        train(name, tmp_path / "runs", **how)
    run = next(entry.locals["run"] for entry in error.traceback if "run" in entry.locals)
    checkpoint = checkpoints.find(run.folder / "checkpoints")
    assert str(error.value).endswith(f"was not made; it has moved no weight; the last checkpoint is {checkpoint}")
    state = checkpoints.training_state(run.pipeline.transformer, run.optimizer, run.ema)
    after = {key: tensor.clone() for key, tensor in state.items()}
    assert checkpoints.load(checkpoint, state) == checkpoints.Progress(1, 2)
    torch.testing.assert_close(after, state, rtol=0, atol=0)
