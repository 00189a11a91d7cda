"""The two entry points as someone with a diffusers pipeline calls them: what they take, and what they say of misuse."""

import functools
import itertools
import shutil

import pytest
import torch
from refused import assert_refused
from small import MODELS, ROOT, as_prompts, generators, loaded

from flow_grpo.base.errors import UserError
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.sample_with_logprob import pipeline_with_logprob, pipeline_with_logprob_perstep
from flow_grpo.diffusers_patch.sampling_params import LARGEST_ETA, SDE_TYPES, SMALLEST_ETA
from flow_grpo.diffusers_patch.size import Size

PROMPTS = ["a photo of a red circle", "two blue squares"]
SIDES = dict(height=64, width=96)
TINY = ROOT / "flow_grpo/assets/tiny_qwenimage"


@pytest.fixture(scope="module")
def model():
    return loaded("qwenimage")


def window(model, prompts=PROMPTS, noise=None, **changed):
    arguments = dict(window=range(1, 3), noise_level=0.7, num_steps=4, guidance_scale=1.0) | SIDES | changed
    if arguments["noise_level"] == "missing":
        del arguments["noise_level"]
    if noise is None:
        noise = generators(2)
    return pipeline_with_logprob(model.pipeline, prompts, noise, **arguments)


def branches(model, **changed):
    arguments = dict(steps=range(2), noise_level=0.7, num_steps=3, num_branches=2, guidance_scale=1.0)
    return pipeline_with_logprob_perstep(model.pipeline, PROMPTS, generators(2), **arguments | SIDES | changed)


WINDOW = [  # what is passed to the entry point, and words of the sentence
    (dict(num_step=50), "pipeline_with_logprob()", "'num_step'"),
    (dict(noise_level="missing"), "pipeline_with_logprob()", "'noise_level'"),
    (dict(height=100), "height is 100", "16"),
    (dict(noise_level=float("nan")), "noise_level is nan"),
    (dict(guidance_scale=float("inf")), "guidance_scale is inf"),
    (dict(num_steps=0), "num_steps is 0"),
    (dict(sde_type="sda"), "sde_type is 'sda'", "'dance'"),
    (dict(flash_ratio=1.5), "flash_ratio is 1.5"),
    (dict(flash_solver="ddim"), "flash_solver is 'ddim'", "'extrapolate'"),
    (dict(window=range(0, 4, 2)), "window is range(0, 4, 2)"),
    (dict(window=range(3, 5)), "window is range(3, 5)", "4 steps"),
    (dict(noise=[torch.Generator()]), "1 generator for 2 prompts"),
    (dict(noise_level=1e-30), "noise_level is 1e-30", "0.001 to 10"),
    (dict(noise_level=2.5, sde_type="cps_gaussian"), "noise_level is 2.5", "0.001 to 1.0"),
    (dict(window=range(1, 4), sde_type="cps_gaussian"), "range(1, 4) of 4"),
    (dict(prompts=[], noise=[]), "prompts is empty"),
]
BRANCHES = [
    (dict(num_branch=2), "perstep()", "'num_branch'"),
    (dict(num_branches=0), "num_branches is 0"),
    (dict(num_branches=1), "num_branches is 1", "2"),
    (dict(steps=range(3), sde_type="cps"), "range(0, 3) of 3"),
    (dict(steps=range(0)), "steps is range(0, 0)"),
    (dict(steps=3), "steps is 3"),
]


@pytest.mark.parametrize(("entry", "rows"), [(window, WINDOW), (branches, BRANCHES)], ids=["window", "branches"])
def test_what_cannot_be_meant_is_refused_before_anything_is_encoded(entry, rows, model, monkeypatch):
    """An argument that there is not, or one that is missing, is a TypeError of the entry point."""
    monkeypatch.setattr(MODELS["qwenimage"], "encode", None)

    cases = []
    for changed, *words in rows:
        error = TypeError if "()" in words[0] else ValueError
        cases.append((str(changed), functools.partial(entry, model, **changed), words, error))
    assert_refused(cases)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_whatever_is_not_refused_has_finite_images_and_log_probs(sde_type, model):
    """The least and the most noise, up to the last step, which has none in cps; and an image in a single step."""
    for noise_level, num_steps in itertools.product((SMALLEST_ETA, LARGEST_ETA[sde_type]), (1, 20)):
        noisy = range(num_steps - sde_type.startswith("cps"))
        samples = window(model, window=noisy, num_steps=num_steps, noise_level=noise_level, sde_type=sde_type)
        assert samples.images.isfinite().all()
        for traced in samples.trace:
            assert traced.step.log_prob.isfinite().all()


def test_guidance_needs_a_negative(model):
    with pytest.raises(ValueError, match=r"guidance_scale is 4.0, .* guided=False"):
        window(model, model.encode(as_prompts(PROMPTS), guided=False), guidance_scale=4.0)
    assert not model.is_guided(0.0)


def test_a_pipeline_of_another_class_is_named(model):
    with pytest.raises(ValueError, match="the pipeline is a SimplePipeline; there are QwenImagePipeline"):
        window(type("Loaded", (), {"pipeline": type("SimplePipeline", (), {})()}))


def test_a_folders_pipeline_says_which_model_it_is(tmp_path):
    assert model_classes.of_folder(str(TINY)) is MODELS["qwenimage"]
    with pytest.raises(ValueError, match="no diffusers pipeline"):
        model_classes.of_folder(str(tmp_path))
    shutil.copy(TINY / "model_index.json", tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace('"QwenImagePipeline"', '"LTXPipeline"'))
    with pytest.raises(ValueError, match="holds a LTXPipeline; there are QwenImagePipeline, "):
        model_classes.of_folder(str(tmp_path))


@pytest.mark.parametrize(("entry", "shape"), [(window, (2,)), (branches, (2, 2, 2))], ids=["window", "branches"])
def test_an_entry_point_returns_the_images_of_its_latents_and_the_trace_of_its_noisy_steps(entry, shape, model):
    """Branches prompt by prompt, step by step. That a trace's log-probs replay: test_models.py."""
    samples = entry(model, vae_batch_size=3)
    assert samples.images.shape == (*shape, 3, 64, 96)
    images = model.decode(samples.latents.flatten(0, -3), Size(64, 96), batch_size=1)
    torch.testing.assert_close(samples.images.flatten(0, -4), images, rtol=0, atol=1e-3)
    num_steps, noisy = (4, range(1, 3)) if entry is window else (3, range(2))
    timesteps = model.schedule(num_steps, Size(64, 96)).timesteps.tolist()
    for i, traced in zip(noisy, samples.trace, strict=True):
        assert traced.timestep.tolist() == [timesteps[i]] * 2


def test_what_may_be_said_in_two_ways_is_the_same(model):
    one = window(model, PROMPTS[:1], generators(1)).images
    two = window(model).images
    assert one.shape == (1, 3, 64, 96)
    assert torch.equal(window(model, PROMPTS[0], generators(1)).images, one)
    assert torch.equal(window(model, PROMPTS[0], generators(1)[0]).images, one)
    assert torch.equal(window(model, model.encode(as_prompts(PROMPTS), guided=False)).images, two)
    assert torch.equal(window(model, guidance_scale=None).images, window(model, guidance_scale=4.0).images)


def test_one_generator_draws_for_all_prompts(model):
    samples = window(model, PROMPTS * 2, torch.Generator().manual_seed(7))
    again = window(model, PROMPTS * 2, torch.Generator().manual_seed(7))
    assert torch.equal(samples.images, again.images)
    assert (samples.latents[0] - samples.latents[2]).abs().max() > 0.1, "one prompt, two noises"


def test_a_size_that_a_model_cannot_draw_is_refused():
    """SD3's position embeddings end at 256 pixels; the pipeline of Qwen-Image-2.1 would cut a side."""
    sizes = {
        "sd3": ([Size(256, 64)], [Size(272, 64), Size(64, 272), Size(64, 64, 5)]),
        "qwenimage_21": ([Size(64, 96)], [Size(64, 80), Size(64, 64, 5)]),
        "wan": ([Size(64, 64), Size(64, 80, 33)], []),
    }
    for name, (right, wrong) in sizes.items():
        check = loaded(name).check_size
        rows = []
        for size in wrong:
            words = ["frames is 5", name, "set 1"] if size.frames > 1 else [size]
            rows.append((str(size), functools.partial(check, size), words))
        assert_refused(rows)
        for size in right:
            check(size)


@pytest.mark.parametrize(("frames", "words"), [(6, "set 5 or 9"), (2, "set 1 or 5"), (33 + 3, "set 33 or 37")])
def test_frames_that_a_model_of_videos_cannot_draw_are_refused_with_the_next_that_it_can(frames, words):
    with pytest.raises(
        UserError, match=f"frames is {frames}, but wan draws 1 frame more than a multiple of 4: {words}"
    ):
        loaded("wan").check_size(Size(64, 64, frames))


def test_a_size_is_written_as_it_is_read():
    for text, written in (("768x512", "768x512"), ("512", "512x512"), ("64x96x1", "64x96"), ("64x96x5", "64x96x5")):
        assert str(Size.parse(text)) == written
    for text in ("x512", "512x", "large", "512x512x", "512x512x3x3", "-64", "100", "512x512x0"):
        with pytest.raises(ValueError, match=r"is written as|multiple of 16|positive whole number"):
            Size.parse(text)
