"""The two entry points as someone with a diffusers pipeline calls them: what they take, and what they say of misuse."""

import inspect

import pytest
import torch
from small import MODELS, loaded

from flow_grpo import rng
from flow_grpo.diffusers_patch import flux_pipeline_with_logprob as flux
from flow_grpo.diffusers_patch import qwenimage_pipeline_with_logprob as qwenimage
from flow_grpo.diffusers_patch import sd3_pipeline_with_logprob as sd3
from flow_grpo.diffusers_patch.size import Size

PROMPTS = ["a photo of a red circle", "two blue squares"]
ENTRIES = [getattr(module, name) for module in (qwenimage, sd3, flux) for name in qwenimage.__all__[1:]]
SIDES = dict(height=64, width=96)


@pytest.fixture(scope="module")
def model():
    return loaded("qwenimage", "")


def noise(count=2):
    return [rng.generator(0, "noise", number) for number in range(count)]


def window(model, prompts=PROMPTS, generators=None, **changed):
    how = dict(window=range(1, 3), noise_level=0.7, num_steps=4, guidance_scale=1.0) | SIDES | changed
    how = {name: value for name, value in how.items() if value != "missing"}
    return qwenimage.pipeline_with_logprob(
        model.pipeline, prompts, noise() if generators is None else generators, **how
    )


def branches(model, **changed):
    how = dict(steps=range(2), noise_level=0.7, num_steps=3, num_branches=2, guidance_scale=1.0) | SIDES | changed
    return qwenimage.pipeline_with_logprob_perstep(model.pipeline, PROMPTS, noise(), **how)


@pytest.fixture
def encodes_nothing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was encoded")

    monkeypatch.setattr(MODELS["qwenimage"], "encode", refuse)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_every_argument_of_an_entry_point_is_named_and_explained(entry):
    parameters = inspect.signature(entry).parameters
    assert not {p.kind for p in parameters.values()} & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    assert {"pipeline", "prompts", "generators", "noise_level", "height", "width", "num_steps"} <= set(parameters)
    assert "arXiv" in entry.__doc__
    assert "Args:" in entry.__doc__


@pytest.mark.usefixtures("encodes_nothing")
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (dict(num_step=50), r"pipeline_with_logprob\(\) got an unexpected keyword argument 'num_step'"),
        (dict(num_inference_steps=8), r"pipeline_with_logprob\(\) got an unexpected .* 'num_inference_steps'"),
        (dict(sampl_type="x"), r"pipeline_with_logprob\(\) got an unexpected keyword argument 'sampl_type'"),
        (dict(resolution=64), r"pipeline_with_logprob\(\) got an unexpected keyword argument 'resolution'"),
        (dict(noise_level="missing"), r"pipeline_with_logprob\(\) missing .* argument: 'noise_level'"),
    ],
)
def test_an_argument_that_there_is_not_is_a_type_error_of_the_entry_point(changed, says, model):
    with pytest.raises(TypeError, match=says):
        window(model, **changed)


@pytest.mark.usefixtures("encodes_nothing")
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (dict(height=100), r"height is 100; it must be a positive multiple of 16 pixels"),
        (dict(width=0), r"width is 0; it must be a positive multiple of 16 pixels"),
        (dict(noise_level=-1), r"noise_level is -1; it must be finite, at least 0"),
        (dict(noise_level=float("nan")), r"noise_level is nan; it must be finite"),
        (dict(guidance_scale=float("inf")), r"guidance_scale is inf; it must be finite"),
        (dict(num_steps=0), r"num_steps is 0; it must be an integer of at least 1"),
        (dict(sde_type="sda"), r"sde_type is 'sda'; it may be 'sde', 'dance'"),
        (dict(flash_ratio=1.5), r"flash_ratio is 1.5; it must be finite, at least 0 and at most 1"),
        (dict(flash_solver="ddim"), r"flash_solver is 'ddim'; it may be 'dpm', 'extrapolate'"),
        (dict(window=2), r"window is 2; it must be a range of consecutive steps"),
        (dict(window=range(0, 4, 2)), r"window is range\(0, 4, 2\); it must be a range of consecutive steps"),
        (dict(window=range(3, 5)), r"window is range\(3, 5\), beyond the last of 4 steps"),
        (dict(generators=[torch.Generator()]), r"1 generators for 2 prompts"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_before_anything_is_encoded(changed, says, model):
    with pytest.raises(ValueError, match=says):
        window(model, **changed)


@pytest.mark.usefixtures("encodes_nothing")
@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        (dict(num_branch=2), TypeError, r"perstep\(\) got an unexpected keyword argument 'num_branch'"),
        (dict(window=range(2)), TypeError, r"perstep\(\) got an unexpected keyword argument 'window'"),
        (dict(num_branches=0), ValueError, r"num_branches is 0"),
        (dict(steps=range(0)), ValueError, r"a step to leave at"),
        (dict(steps=3), ValueError, r"steps is 3; it must be a range"),
    ],
)
def test_the_entry_point_of_branches_says_the_same(changed, error, says, model):
    with pytest.raises(error, match=says):
        branches(model, **changed)


def test_a_pipeline_of_another_class_is_named(model):
    with pytest.raises(ValueError, match="the pipeline is a SimplePipeline; there are QwenImagePipeline"):
        window(type("Loaded", (), {"pipeline": type("SimplePipeline", (), {})()}))


def test_one_prompt_is_a_list_of_one(model):
    one = window(model, PROMPTS[0], noise(1))
    listed = window(model, PROMPTS[:1], noise(1))
    assert one.images.shape == (1, 3, 64, 96)
    assert torch.equal(one.images, listed.images)
    assert torch.equal(window(model, PROMPTS[0], noise(1)[0]).images, one.images)


def test_one_generator_draws_for_all_prompts(model):
    found = window(model, PROMPTS * 2, torch.Generator().manual_seed(7))
    again = window(model, PROMPTS * 2, torch.Generator().manual_seed(7))
    assert torch.equal(found.images, again.images)
    assert (found.latents[0] - found.latents[2]).abs().max() > 0.1, "one prompt, two noises"


def test_a_condition_takes_the_place_of_texts(model):
    encoded = model.encode(PROMPTS, guided=False)
    assert torch.equal(window(model, encoded).images, window(model).images)


def test_without_a_guidance_scale_it_is_the_models_own(model):
    assert torch.equal(window(model, guidance_scale=None).images, window(model, guidance_scale=4.0).images)


def test_sd3_refuses_a_size_beyond_its_position_embeddings(tmp_path):
    model = loaded("sd3", tmp_path)
    model.check_size(Size(256, 64))
    with pytest.raises(ValueError, match="272x64 pixels is too large: this model draws up to 256"):
        model.check_size(Size(272, 64))


@pytest.mark.parametrize("text", ["768x512", "512", "64x96"])
def test_a_size_is_written_as_it_is_read(text):
    size = Size.parse(text)
    assert str(size) in (text, f"{text}x{text}")
    assert size == Size(*map(int, str(size).split("x")))


@pytest.mark.parametrize("text", ["x512", "512x", "large", "512x512x3", "-64", "100"])
def test_a_text_that_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"is written as|multiple of 16"):
        Size.parse(text)
