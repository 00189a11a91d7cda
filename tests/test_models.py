"""Every model, sampler, kind of rollout and objective on one code path; SD3.5 and FLUX.1 as tiny random pipelines."""

import itertools
import json
import shutil

import pytest
import torch
import warm
from build_random_pipeline import build
from rounding import UNIT
from safetensors.torch import load_file
from small import MODELS, file_of, lines_of, train

from flow_grpo import rng, settings

PROMPTS = ["a photo of a red circle", "two blue squares", "a photo of three crosses"]
SIZE, STEPS = 64, 4
OWN_GUIDANCE = {"qwenimage": "true_cfg_scale", "sd3": "guidance_scale", "flux": "guidance_scale"}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A diffusers folder of each model."""
    folders = {name: str(tmp_path_factory.mktemp("models") / name) for name in ("sd3", "flux")}
    for name, folder in folders.items():
        build(name, folder)
    return folders | {"qwenimage": "flow_grpo/assets/tiny_qwenimage"}


@pytest.fixture(params=["sd3", "flux"])
def loaded(request, folders):
    """(model file, its pipeline). In float64: what remains between two orders of a sum is the rounding of a velocity,
    up to 2.5 here, to float32."""
    model = MODELS[request.param]
    pipeline = model.PIPELINE.from_pretrained(folders[request.param], torch_dtype=torch.float64)
    pipeline.set_progress_bar_config(disable=True)
    return model, pipeline


def generators():
    return [rng.generator(0, "noise", b) for b in range(len(PROMPTS))]


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_without_noise_it_is_diffusers_own_pipeline(loaded, guidance_scale):
    model, pipeline = loaded
    size = dict(num_steps=STEPS, resolution=SIZE, guidance_scale=guidance_scale)
    found = model.pipeline_with_logprob(
        pipeline, PROMPTS, generators(), window=range(0), noise_level=0.0, vae_batch_size=2, **size
    )
    latents = model.initial_latents(pipeline, generators(), SIZE, "cpu")
    how = dict(height=SIZE, width=SIZE, num_inference_steps=STEPS, output_type="pt", guidance_scale=guidance_scale)
    expected = pipeline(PROMPTS, latents=latents, **how).images
    assert found.images.shape == (3, 3, SIZE, SIZE)
    rounded = (7 * 4 + STEPS * 8) * UNIT  # guidance adds 4 + 3 velocities while sigma falls by 1; latents are up to 8
    torch.testing.assert_close(found.images, expected.float(), rtol=0, atol=rounded)


def test_the_schedule_is_the_pipelines_own(loaded):
    model, pipeline = loaded
    ours = model.schedule(pipeline, STEPS, SIZE, "cpu")
    pipeline(PROMPTS[:1], height=SIZE, width=SIZE, num_inference_steps=STEPS, output_type="latent")
    assert torch.equal(ours.sigmas, pipeline.scheduler.sigmas)
    assert torch.equal(ours.timesteps, pipeline.scheduler.timesteps)


def test_guidance_and_prompt_are_heard_and_a_prompt_gets_what_it_gets_alone(loaded):
    model, pipeline = loaded
    x, t = model.initial_latents(pipeline, generators(), SIZE, "cpu"), torch.tensor([900.0, 500.0, 100.0])
    embeds = model.encode_prompts(pipeline, PROMPTS, width=20)
    with torch.no_grad():
        found, other = (model.predict_velocity(pipeline.transformer, x, t, embeds, g) for g in (1.0, 4.0))
        for row in range(3):
            alone = model.encode_prompts(pipeline, PROMPTS[row : row + 1], width=20)
            rows = slice(row, row + 1)
            v = model.predict_velocity(pipeline.transformer, x[rows], t[rows], alone, 4.0)
            torch.testing.assert_close(v, other[rows], rtol=0, atol=4 * UNIT)
        swapped = model.predict_velocity(pipeline.transformer, x, t, embeds.take(torch.tensor([1, 2, 0])), 1.0)
    assert (found - other).abs().max() > 1e-4
    assert (found - swapped).abs().max() > 1e-4


def test_unpacked_latents_hold_the_images_layout(loaded):
    """A change of the image's top left corner of latents changes the picture there and not far from it."""
    model, pipeline = loaded
    latents = model.initial_latents(pipeline, generators()[:1], SIZE, "cpu")
    spatial = model.unpack_latents(pipeline, latents, SIZE)
    assert spatial.shape == (1, 16, 8, 8)
    assert spatial.flatten().sort().values.equal(latents.flatten().sort().values)


def test_a_prompt_of_too_many_tokens_is_named(loaded):
    model, pipeline = loaded
    with pytest.raises(ValueError, match=r"has 7 tokens, over config.text_tokens = 6: 'a photo of a red circle'"):
        model.encode_prompts(pipeline, PROMPTS, width=6)


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
    model, sde_type, branches, objective, folders, tmp_path
):
    sde_type = "cps_gaussian" if (sde_type, objective) == ("cps", "guard") else sde_type  # Guard corrects a Gaussian
    how = dict(model=folders[model], reward_fn={"jpeg_compressibility": 1.0}, num_epochs=1, eval_freq=1)
    how |= dict(sample__sde_type=sde_type, sample__noise_level=0.3 if sde_type == "dance" else 0.7)
    variants = ",guard" if objective == "guard" else ""
    folder = train(f"pickscore_{model}{branches}{variants}", tmp_path, **how)
    first, second = lines_of(folder, "update")
    assert first["parity/log_prob_abs_diff_max"] == 0
    assert first["ratio_std"] == 0
    assert first["grad_norm"] > 0
    assert second["ratio_std"] > 0
    assert (folder / "pytorch_lora_weights.safetensors").is_file()


def test_the_saved_lora_is_heard_by_a_fresh_pipeline(loaded, folders, tmp_path):
    model, pipeline = loaded
    name = model.__name__.split(".")[-1].split("_")[0]
    how = dict(model=folders[name], train__learning_rate=1e-2, train__ema_interval=1, num_epochs=1, eval_freq=0)
    folder = train(f"pickscore_{name}", tmp_path, **how)
    size = dict(num_steps=STEPS, resolution=SIZE, noise_level=0.0)
    before = model.pipeline_with_logprob(pipeline, PROMPTS, generators(), window=range(0), **size).images
    pipeline.load_lora_weights(folder)
    after = model.pipeline_with_logprob(pipeline, PROMPTS, generators(), window=range(0), **size).images
    assert (after - before).abs().max() > 1e-3


TWINS = [f"train_{model}{what}" for model in ("sd3", "flux") for what in ("", "_pr", "_nft")] + ["train_sd3_dpo"]


@pytest.mark.parametrize("script", TWINS)
def test_the_twins_run_as_commands(script, folders, tmp_path):
    model, online = script.split("_")[1], ",online" if script.endswith("dpo") else ""
    command = [
        f"scripts/{script}.py",
        f"--config={file_of(script)}:{script.replace('train', 'pickscore')}{online},smoke",
    ]
    command += [f"--config.output_dir={tmp_path}", f"--config.model={folders[model]}", "--config.num_epochs=1"]
    command += ["--config.train.ema_interval=1"]
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
    plain = model.predict_velocity
    monkeypatch.setattr(model, "predict_velocity", lambda net, x, *args: (rows.append(len(x)), plain(net, x, *args))[1])
    how = dict(num_epochs=1, eval_freq=0, sample__sde_window_range=(1, 3), sample__sde_window_size=2)
    train("shapes_qwenimage,fast", tmp_path, **how)
    in_update = 2 * 2 * 4  # batches, window steps, images
    assert sum(rows) == 2 * (1 * 1 + 3 * 4) + in_update


@pytest.mark.parametrize("start", range(STEPS * 2))
def test_flash_ends_near_the_full_walk_on_the_tiny_model(start):
    """For every place of a window of one step: .4 of the steps that are left move no pixel's mean by over 0.02."""
    model = MODELS["qwenimage"]
    pipeline = model.PIPELINE.from_pretrained("flow_grpo/assets/tiny_qwenimage")
    prompts = ["a photo of a red circle", "a photo of two blue squares"] * 4
    how = dict(num_steps=2 * STEPS + 1, resolution=SIZE, guidance_scale=1.0, noise_level=0.7)
    walks = []
    for ratio in (0.0, 0.4):
        noise = [rng.generator(0, b) for b in range(8)]
        window = range(start, start + 1)
        walks.append(model.pipeline_with_logprob(pipeline, prompts, noise, window=window, flash_ratio=ratio, **how))
    assert torch.equal(walks[0].trace[0].step.log_prob, walks[1].trace[0].step.log_prob)
    assert (walks[0].images - walks[1].images).abs().mean() < 0.02


def test_a_setting_of_the_other_script_is_refused(tmp_path):
    assert "sample.completion_batch_size" in settings.ignored_by(settings.GRPO)
    for key, value in dict(sde_window_schedule="decay", same_latent=True).items():
        with pytest.raises(ValueError, match=rf"sample.{key} is set to {value}, but this script would ignore it"):
            train("shapes_qwenimage_pr", tmp_path, **{f"sample__{key}": value})


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_text_that_the_transformer_sees_whole_cannot_be_cut(name, folders, tmp_path):
    how = dict(model=folders[name], sample__engine="stepwise", sample__text_multiple=8)
    with pytest.raises(ValueError, match=r"text_multiple is 8, .* is conditioned on its padding"):
        train(f"pickscore_{name}", tmp_path, **how)


def test_a_folder_of_another_model_is_refused(folders, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(folders["sd3"], copy)
    assert json.loads((copy / "model_index.json").read_text())["_class_name"] == "StableDiffusion3Pipeline"
    with pytest.raises(ValueError, match="holds a StableDiffusion3Pipeline, not a FluxPipeline"):
        train("pickscore_flux", tmp_path / "runs", model=str(copy))
