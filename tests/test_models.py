"""Every model, sampler, kind of rollout and objective on one code path; SD3.5 and FLUX.1 as tiny random pipelines."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import warm
from build_random_pipeline import build
from rounding import rounding
from safetensors.torch import load_file
from small import MODELS, as_prompts, few_prompts, file_of, lines_of, loaded, prepare, train

from flow_grpo.base import rng
from flow_grpo.diffusers_patch.sample_with_logprob import pipeline_with_logprob
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.settings import table

PROMPTS = ["a photo of a red circle", "two blue squares", "a photo of three crosses"]
SIZE, SIDES, STEPS = Size(64, 64), dict(height=64, width=64), 4
OWN_GUIDANCE = {"qwenimage": "true_cfg_scale", "sd3": "guidance_scale", "flux": "guidance_scale"}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A diffusers folder of each model."""
    folders = {name: str(tmp_path_factory.mktemp("models") / name) for name in ("sd3", "flux")}
    for name, folder in folders.items():
        build(name, folder)
    return folders | {"qwenimage": "flow_grpo/assets/tiny_qwenimage"}


@pytest.fixture(params=["sd3", "flux"])
def model(request, folders):
    """In float64: what remains between two orders of a sum is the rounding of a velocity, up to 2.5 here, to
    float32."""
    return loaded(request.param, Path(folders[request.param]).parent, torch_dtype=torch.float64)


def generators():
    return [rng.generator(0, "noise", b) for b in range(len(PROMPTS))]


def other_shift(model):
    """Give the model a scheduler of the other kind of shift: of FLUX.1-schnell it is static, of FLUX.1-dev dynamic."""
    scheduler = model.pipeline.scheduler
    other = not scheduler.config.use_dynamic_shifting
    model.pipeline.scheduler = type(scheduler).from_config(scheduler.config, use_dynamic_shifting=other, shift=1.0)


@pytest.mark.parametrize("size", [SIZE, Size(64, 96), Size(96, 64)], ids=str)
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_without_noise_it_is_diffusers_own_pipeline(model, guidance_scale, size):
    if size.width > size.height:
        other_shift(model)
        if model.NAME == "flux":  # as FLUX.1-schnell, which takes no guidance
            config = model.transformer.config | dict(guidance_embeds=False)
            model.pipeline.transformer = model.TRANSFORMER.from_config(config).double()
            model.transformer_config = model.transformer.config
    same = dict(height=size.height, width=size.width, guidance_scale=guidance_scale)
    how = dict(window=range(0), noise_level=0.0, num_steps=STEPS, vae_batch_size=2)
    found = pipeline_with_logprob(model.pipeline, PROMPTS, generators(), **how, **same)
    latents, how = model.noise(size, generators()), dict(num_inference_steps=STEPS, output_type="pt")
    expected = model.pipeline(PROMPTS, latents=latents, **how, **same).images
    assert found.images.shape == (3, 3, size.height, size.width)
    # guidance adds 4 + 3 velocities, up to 4, while sigma falls by 1; latents are up to 8
    torch.testing.assert_close(found.images, expected.float(), rtol=0, atol=rounding(size=7 * 4 + STEPS * 8))


@pytest.mark.parametrize("size", [SIZE, Size(64, 96)], ids=str)
@pytest.mark.parametrize("other", [False, True], ids=["its own shift", "the other shift"])
def test_the_schedule_is_the_pipelines_own(model, other, size):
    if other:
        other_shift(model)
    ours, own = model.schedule(STEPS, size), model.pipeline.scheduler
    sides = dict(height=size.height, width=size.width)
    model.pipeline(PROMPTS[:1], num_inference_steps=STEPS, output_type="latent", **sides)
    assert torch.equal(ours.sigmas, own.sigmas)
    assert torch.equal(ours.timesteps, own.timesteps)


def test_guidance_and_prompt_are_heard_and_a_prompt_gets_what_it_gets_alone(model):
    x, t = model.noise(SIZE, generators()), torch.tensor([900.0, 500.0, 100.0])
    condition = model.encode(as_prompts(PROMPTS), width=20)
    with torch.no_grad():
        found, other = (model.velocity(x, t, condition, g, SIZE) for g in (1.0, 4.0))
        for row in range(3):
            alone = model.encode(as_prompts(PROMPTS[row : row + 1]), width=20)
            rows = slice(row, row + 1)
            v = model.velocity(x[rows], t[rows], alone, 4.0, SIZE)
            torch.testing.assert_close(v, other[rows], rtol=0, atol=rounding(size=4))
        swapped = model.velocity(x, t, condition.take(torch.tensor([1, 2, 0])), 1.0, SIZE)
    assert (found - other).abs().max() > 1e-4
    assert (found - swapped).abs().max() > 1e-4


def test_features_hold_the_images_layout(model):
    size = Size(64, 96)
    latents = model.noise(size, generators()[:1])
    spatial = model.features(latents, size)
    assert spatial.shape == (1, 16, 8, 12)
    assert spatial.flatten().sort().values.equal(latents.flatten().sort().values)


def test_a_prompt_of_too_many_tokens_is_named(model):
    with pytest.raises(ValueError, match=r"has 7 tokens, over config.text_tokens = 6: 'a photo of a red circle'"):
        model.encode(as_prompts(PROMPTS), width=6)
    most = {"sd3": 256, "flux": 512}[model.NAME]
    with pytest.raises(ValueError, match=rf"over the {most} that its pipeline reads"):
        model.encode(as_prompts(["red " * most]))
    model.check(as_prompts(["red " * most]), most + 1)


WINDOW, BRANCHES = "", "_pr"
PAIRWISE = [  # each model with each type of noise once, each of the two with both rollouts and both objectives
    *(("qwenimage", "sde", WINDOW, "clip"), ("qwenimage", "dance", BRANCHES, "clip")),
    *(("qwenimage", "cps", BRANCHES, "guard"), ("sd3", "sde", BRANCHES, "guard")),
    *(("sd3", "dance", WINDOW, "guard"), ("sd3", "cps", WINDOW, "clip")),
    *(("flux", "sde", BRANCHES, "clip"), ("flux", "dance", WINDOW, "guard")),
    *(("flux", "cps", WINDOW, "guard"), ("flux", "cps", BRANCHES, "clip")),
]


def test_every_two_choices_are_combined_in_a_run():
    choices = (set(MODELS), {"sde", "dance", "cps"}, {WINDOW, BRANCHES}, {"clip", "guard"})
    for one, other in itertools.combinations(range(4), 2):
        assert {(run[one], run[other]) for run in PAIRWISE} == set(itertools.product(choices[one], choices[other]))


@pytest.mark.parametrize(("model", "sde_type", "branches", "objective"), PAIRWISE)
def test_every_combination_of_two_choices_runs_with_the_rollouts_log_probs_bit_for_bit(
    model, sde_type, branches, objective, folders, shallow, tmp_path
):
    sde_type = "cps_gaussian" if (sde_type, objective) == ("cps", "guard") else sde_type  # Guard corrects a Gaussian
    how = dict(model=shallow["model"] if model == "qwenimage" else folders[model])
    how |= dict(reward_fn={"jpeg_compressibility": 1.0}, num_epochs=1, eval_freq=0)
    how |= dict(sample__sde_type=sde_type, sample__noise_level=0.3 if sde_type == "dance" else 0.7)
    variants = ",guard" if objective == "guard" else ""
    folder = train(f"pickscore_{model}{branches}{variants}", tmp_path, **how)
    first, second = lines_of(folder, "update")
    assert first["parity/log_prob_abs_diff_max"] == 0
    assert first["ratio_std"] == 0
    assert first["grad_norm"] > 0
    assert second["ratio_std"] > 0
    assert (folder / "pytorch_lora_weights.safetensors").is_file()


def test_the_saved_lora_is_heard_by_a_fresh_pipeline(model, folders, tmp_path):
    name, pipeline = model.NAME, model.pipeline
    how = dict(model=folders[name], train__learning_rate=1e-2, train__ema_interval=1, num_epochs=1, eval_freq=0)
    folder = train(f"pickscore_{name}", tmp_path, **how)
    size = dict(num_steps=STEPS, noise_level=0.0, **SIDES)
    before = pipeline_with_logprob(pipeline, PROMPTS, generators(), window=range(0), **size).images
    pipeline.load_lora_weights(folder)
    after = pipeline_with_logprob(pipeline, PROMPTS, generators(), window=range(0), **size).images
    assert (after - before).abs().max() > 1e-3


TWINS = [f"train_{model}{what}" for model in ("sd3", "flux") for what in ("", "_pr", "_nft")] + ["train_sd3_dpo"]


@pytest.mark.parametrize("script", TWINS)
def test_the_twins_smoke_runs_need_nothing_that_is_not_shipped(script, tmp_path):
    online = ",online" if script.endswith("dpo") else ""
    command = [
        f"scripts/{script}.py",
        f"--config={file_of(script)}:{script.replace('train', 'pickscore')}{online},smoke",
    ]
    command += [f"--config.output_dir={tmp_path}", "--config.num_epochs=1", "--config.train.ema_interval=1"]
    command += ["--config.eval.num_prompts=2", "--config.eval.num_steps=2"]
    done = warm.run(command)
    assert done.returncode == 0, done.stderr[-2000:]
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"{script.replace('train', 'pickscore')}{online}_smoke".replace(",", "_")
    assert all(line["grad_norm"] > 0 for line in lines_of(folder, "update"))
    exported = load_file(folder / "pytorch_lora_weights.safetensors")
    assert any(weight.any() for name, weight in exported.items() if "lora_B" in name), "a fresh adapter's are 0"
    assert (folder / "reward.png").is_file()


def test_a_tiny_model_that_was_not_built_is_an_error_before_any_weight(tmp_path):
    with pytest.raises(ValueError, match="no diffusers folder"):
        train("pickscore_sd3", tmp_path / "runs", model=str(tmp_path / "tiny_sd3"))


@pytest.mark.parametrize("variants", [",fast", ",mixgrpo,flash", ",mixgrpo,fast,guard"])
def test_variants_of_a_run_combine(variants, tmp_path):
    folder = train(f"shapes_qwenimage{variants}", tmp_path, eval_freq=0)
    updates = lines_of(folder, "update")
    assert len(updates) == 4
    assert updates[0]["parity/log_prob_abs_diff_max"] == 0


def test_fasts_shared_prefix_makes_as_many_rows_as_the_formula_says(tmp_path, monkeypatch):
    """2 prompts of 4 images, batches of 4, so a group is a batch: `start` rows for it, 4 for every step from there."""
    model, rows = MODELS["qwenimage"], []
    plain = model.velocity
    monkeypatch.setattr(model, "velocity", lambda self, x, *args: (rows.append(len(x)), plain(self, x, *args))[1])
    how = dict(num_epochs=1, eval_freq=0, sample__sde_window_range=(1, 3), sample__sde_window_size=2)
    train("shapes_qwenimage,fast", tmp_path, **how)
    in_update = 2 * 2 * 4  # batches, window steps, images
    assert sum(rows) == 2 * (1 * 1 + 3 * 4) + in_update


@pytest.mark.parametrize("start", range(STEPS * 2))
def test_flash_ends_near_the_full_walk_on_the_tiny_model(start):
    """For every place of a window of one step: .4 of the steps that are left move no pixel's mean by over 0.02."""
    pipeline = loaded("qwenimage", "").pipeline
    prompts = ["a photo of a red circle", "a photo of two blue squares"] * 4
    how = dict(num_steps=2 * STEPS + 1, **SIDES, guidance_scale=1.0, noise_level=0.7)
    walks = []
    for ratio in (0.0, 0.4):
        noise = [rng.generator(0, b) for b in range(8)]
        window = range(start, start + 1)
        walks.append(pipeline_with_logprob(pipeline, prompts, noise, window=window, flash_ratio=ratio, **how))
    assert torch.equal(walks[0].trace[0].step.log_prob, walks[1].trace[0].step.log_prob)
    assert (walks[0].images - walks[1].images).abs().mean() < 0.02


def test_a_setting_of_the_other_script_is_refused(tmp_path):
    assert "sample.sde_window_schedule" in table.ignored_by(table.PR)
    for key, value in dict(sde_window_schedule="progressive", same_latent=True).items():
        with pytest.raises(ValueError, match=rf"sample.{key} is set to {value!r}, but this script would ignore it"):
            train("shapes_qwenimage_pr", tmp_path, **{f"sample__{key}": value})


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_text_that_the_transformer_sees_whole_cannot_be_cut(name, folders, tmp_path):
    how = dict(model=folders[name], sample__engine="stepwise", sample__text_multiple=8)
    with pytest.raises(ValueError, match=r"text_multiple is 8, .* is conditioned on its padding"):
        train(f"pickscore_{name}", tmp_path, **how)


def test_config_model_alone_picks_the_model(folders, tmp_path):
    """The same config, with another folder."""
    how = dict(num_epochs=1, eval_freq=0, reward_fn={"jpeg_compressibility": 1.0})
    for name in ("sd3", "flux"):
        lines = lines_of(train("shapes_qwenimage", tmp_path / name, model=folders[name], **how), "update")
        assert lines[0]["parity/log_prob_abs_diff_max"] == 0
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    with pytest.raises(ValueError, match="holds a WanPipeline; there are"):
        train("shapes_qwenimage", tmp_path / "runs", model=str(tmp_path))


ALGORITHMS = ["", "_pr", "_nft", "_dpo,online", "_dpo"]
SIZES = [Size(64, 96), Size(96, 64)]
PAIRS = [(model, kind, SIZES[(m + k) % 2]) for m, model in enumerate(MODELS) for k, kind in enumerate(ALGORITHMS)]


@pytest.mark.parametrize(("model", "kind", "size"), PAIRS, ids=str)
def test_images_that_are_no_square_are_trained_by_every_algorithm(model, kind, size, folders, shallow, tmp_path):
    """Each model and algorithm at one of two sizes, evaluated at the other, where ratios are compared bit for bit."""
    how = dict(model=shallow["model"] if model == "qwenimage" else folders[model], num_epochs=1)
    how |= dict(height=size.height, width=size.width, sample__guidance_scale=2.0)
    how |= dict(eval__height=size.width, eval__width=size.height, reward_fn={"jpeg_compressibility": 1.0})
    how |= dict(sample__engine="stepwise") if kind == "_nft" else {}
    how |= dict(preferences__min_margin=0.0) if "_dpo" in kind else {}
    if kind == "_dpo":
        data = dict(dataset=few_prompts(tmp_path / "data", 32), validation_share=0.0)
        how |= dict(preferences__path=str(prepare("shapes_qwenimage_dpo", tmp_path / "pairs", **how | data)))
    folder = train(f"shapes_qwenimage{kind}", tmp_path / "runs", **how)
    updates = lines_of(folder, "update")
    assert {line.get("parity/log_prob_abs_diff_max", 0.0) for line in updates[:1]} == {0.0}
    assert all(line["grad_norm"] > 0 for line in updates)
    assert len(lines_of(folder, "eval")) == 2
    if kind in ("", "_pr"):
        assert updates[0]["ratio_std"] == 0
