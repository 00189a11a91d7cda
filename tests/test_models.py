"""Every model of the registry draws as in diffusers, trains with ratios of 1, and goes back to diffusers."""

import inspect
import itertools
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import noise_levels
import pytest
import torch
import warm
from diffusers import UniPCMultistepScheduler
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from huggingface_hub import constants
from PIL import Image
from rounding import rounding
from safetensors.torch import load_file
from small import (
    MODELS,
    as_prompts,
    change_json,
    evaluated,
    few_prompts,
    file_of,
    generators,
    lines_of,
    loaded,
    prepare,
    size_of,
    train,
)
from test_ranks import on_two_ranks
from torch.overrides import TorchFunctionMode

from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch import loading, model_classes, registry
from flow_grpo.diffusers_patch.models.qwenimage import normalisation, without_lengths
from flow_grpo.diffusers_patch.sample_with_logprob import pipeline_with_logprob
from flow_grpo.diffusers_patch.size import Size

TEXTS = "a red circle", "a photo of a blue square and a green cross", "two blue squares"
UNEQUAL = "a red circle", "two blue squares " * 12, "a green cross " * 25
SIBLINGS = {"flux": dict(guidance_embeds=False), "sd3": dict(dual_attention_layers=())}  # FLUX.1-schnell, SD3.5-large
SIBLINGS |= {"qwenimage_21": dict(causal_condition=False)}
# Qwen-Image-Edit-2509 and the first one, whose tiny transformer is that of 2511.
SIBLINGS |= {"qwenimage_edit": dict(zero_cond_t=False), "qwenimage_edit_first": dict(zero_cond_t=False)}
SIZE = Size(64, 64)
SIDES = dict(height=64, width=64)
STEPS = 4


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Settings of a run on few prompts, of which JPEG's bytes are the reward: no two images score alike."""
    splits = ("train", "test", "validation")
    folder = tmp_path_factory.mktemp("few")
    data = few_prompts(folder / "prompts", splits=splits)
    few_prompts(folder / "prompts_edits", name="qwenimage_edit", splits=splits)
    few_prompts(folder / "prompts_motions", name="wan", splits=splits)
    return dict(dataset=data, num_epochs=1, reward_fn={"jpeg_compressibility": 1.0})


def of_model(few, name):
    """The settings `few` for a tiny model, with prompts that it takes."""
    how = dict(model=registry.tiny_folder(name), frames=size_of(name).frames)
    if MODELS[name].MOST_SOURCES:
        how |= dict(dataset=few["dataset"] + "_edits", text_tokens=40)
    if MODELS[name].FRAMES_PER_LATENT:
        how |= dict(dataset=few["dataset"] + "_motions", text_tokens=32)
    return few | how


@pytest.fixture(autouse=True)
def small_sources(monkeypatch):
    """Sources of diffusers' own pipeline are as small as those of the tiny model."""
    for name in ("VAE_IMAGE_SIZE", "CONDITION_IMAGE_SIZE"):
        monkeypatch.setattr(pipeline_qwenimage_edit_plus, name, SIZE.height * SIZE.width)
    sides_of = pipeline_qwenimage_edit.calculate_dimensions

    def small_sides_of(pixels, aspect):
        return sides_of(SIZE.height * SIZE.width, aspect)

    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", small_sides_of)
    small = [(width // 16, height // 16) for width, height in pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS]
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", small)


@pytest.fixture(params=MODELS)
def model(request):
    """In float64: what remains between two orders of a sum is the rounding of a velocity, up to 16, to float32."""
    return loaded(request.param, torch_dtype=torch.float64)


def other_shift(model):
    """Give the model a scheduler of the other kind of shift: of FLUX.1-schnell it is static, of FLUX.1-dev dynamic. A
    pipeline that computes no dynamic shift gets another static one."""
    scheduler = model.pipeline.scheduler
    computes_shift = "mu" in inspect.unwrap(model.PIPELINE.__call__).__code__.co_varnames
    other = computes_shift and not scheduler.config.use_dynamic_shifting
    model.pipeline.scheduler = type(scheduler).from_config(scheduler.config, use_dynamic_shifting=other, shift=1.0)


def drawn_by_diffusers(model, size, guidance_scale, prompts):
    """Draw by its own pipeline. Each prompt is drawn by itself, since Qwen-Image-2.1's image lies behind the longest
    one of a batch. What is transparent is white."""
    how = model.call_arguments(size, STEPS, guidance_scale) | dict(output_type="pt")
    noise = model.noise(size, generators(len(prompts))).split(1)
    images = []
    for prompt, x in zip(prompts, noise):
        sources = {}
        if prompt.sources:
            pictures = prompt.pictures()
            # As in a model card: the first Qwen-Image-Edit would not resize a list for its text encoder.
            sources = dict(image=pictures if len(pictures) > 1 else pictures[0])
        output = model.pipeline(prompt=prompt.text, latents=x, **sources, **how)
        images.append(output.frames if "frames" in output else output.images)
    color, alpha = torch.cat(images).split([3, images[0].shape[-3] - 3], -3)
    if not alpha.numel():
        return color
    return color * alpha + (1 - alpha)


def assert_diffusers_own(model, prompts, condition, guidance_scale=4.0, size=None, **how):
    """Images without noise, of prompts or of what they were encoded to."""
    size = size or size_of(model.NAME)
    how |= dict(window=range(0), noise_level=0.0, num_steps=STEPS, guidance_scale=guidance_scale)
    how |= dict(height=size.height, width=size.width, frames=size.frames)
    samples = pipeline_with_logprob(model.pipeline, condition, generators(len(prompts)), **how)
    assert samples.trace == []
    # Guidance adds 4 + 3 velocities, up to 16, while sigma falls by 1; latents are up to 8.
    expected = drawn_by_diffusers(model, size, guidance_scale, prompts).float().view_as(samples.images)
    torch.testing.assert_close(samples.images, expected, rtol=0, atol=rounding(size=7 * 16 + STEPS * 8))


@pytest.mark.parametrize(
    ("height", "width", "guidance_scale"),
    [
        *(pytest.param(*sides, scale, marks=pytest.mark.slow) for *sides, scale in ((64, 64, 1.0), (96, 64, 4.0))),
        (64, 96, 4.0),
    ],
)
def test_without_noise_it_is_diffusers_own_pipeline(model, guidance_scale, height, width):
    if width > height and model.NAME in SIBLINGS:
        config = model.transformer.config | SIBLINGS[model.NAME]
        model.pipeline.transformer = model.TRANSFORMER.from_config(config).double()
        model = type(model)(model.pipeline, model.device)
        if model.NAME == "flux":
            other_shift(model)
    prompts = as_prompts(TEXTS, model.NAME)
    size = size_of(model.NAME, height, width)
    assert_diffusers_own(model, prompts, prompts, guidance_scale, size, vae_batch_size=2)


@pytest.mark.parametrize("width", [pytest.param(None, marks=pytest.mark.slow), 96])
@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].CUTS_PADDING])
def test_prompts_of_unequal_lengths_are_diffusers_own_whatever_they_are_padded_to(name, width):
    model = loaded(name, torch_dtype=torch.float64)
    prompts = as_prompts(UNEQUAL, name)
    assert_diffusers_own(model, prompts, model.encode(prompts, width=width))


@pytest.mark.parametrize("other", [False, True], ids=["its own shift", "the other shift"])
def test_the_schedule_is_the_pipelines_own_and_leaves_it_alone(model, other):
    if other:
        other_shift(model)
    own = model.pipeline.scheduler
    before = str(vars(own))
    size = size_of(model.NAME, 64, 96)
    ours = model.schedule(STEPS, size)
    assert str(vars(own)) == before
    drawn_by_diffusers(model, size, 1.0, as_prompts(TEXTS[:1], model.NAME))
    assert torch.equal(ours.sigmas, own.sigmas)
    assert torch.equal(ours.timesteps, own.timesteps)


@torch.no_grad()
def test_guidance_and_prompt_are_heard_and_neither_neighbours_nor_padding(model):
    size = size_of(model.NAME)
    x = model.noise(size, generators(3))
    t = torch.tensor([900.0, 500.0, 100.0])
    rows = []
    model.network.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    prompts = as_prompts(TEXTS, model.NAME)
    condition = model.encode(prompts, width=32)
    close = dict(rtol=0, atol=rounding(size=16 * 4))
    plain = model.velocity(x, t, condition, 1.0, size)
    guided = model.velocity(x, t, condition, 4.0, size)
    assert rows == [3] * sum(1 + model.is_guided(scale) for scale in (1.0, 4.0)), "a second forward only for guidance"
    for row in range(3):
        part = slice(row, row + 1)
        alone = model.velocity(x[part], t[part], model.encode(prompts[part], width=32), 4.0, size)
        torch.testing.assert_close(alone, guided[part], **close)
    if model.CUTS_PADDING:
        torch.testing.assert_close(model.velocity(x, t, model.encode(prompts), 4.0, size), guided, **close)
    swapped = model.velocity(x, t, condition.take(torch.tensor([1, 2, 0])), 1.0, size)
    assert (plain - guided).abs().max() > 1e-4
    assert (plain - swapped).abs().max() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("width", [None, 32])
@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].NEGATIVE_PROMPT is not None])
def test_one_forward_computes_both_velocities_of_guidance_where_it_is_asked_to(name, width):
    model = loaded(name, torch_dtype=torch.float64)
    size = size_of(name)
    x = model.noise(size, generators(3))
    t = torch.tensor([900.0, 500.0, 100.0])
    condition = model.encode(as_prompts(UNEQUAL, name), width=width and 96)
    rows = []
    model.network.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    in_two = model.velocity(x, t, condition, 4.0, size)
    model.batches_guidance = True
    in_one = model.velocity(x, t, condition, 4.0, size)
    model.velocity(x, t, condition, model.unguided(4.0), size)
    assert rows == [3, 3, 6, 3]
    torch.testing.assert_close(in_one, in_two, rtol=0, atol=rounding(size=16 * 4))


@torch.no_grad()
def test_texts_of_two_widths_share_no_forward_where_padding_is_not_masked():
    model = loaded("sd3")
    model.batches_guidance = True
    condition = model.encode(as_prompts(TEXTS[:1], "sd3"), width=32)
    wider = replace(condition, negative=model.encode(as_prompts([""], "sd3"), width=40, guided=False))
    refused = r"texts of \d+ tokens and negatives of \d+ .* set config.batched_guidance to False"
    with pytest.raises(ValueError, match=refused):
        model.velocity(model.noise(SIZE, generators(1)), torch.tensor([500.0]), wider, 4.0, SIZE)


def _parts(index):
    return index if isinstance(index, tuple) else (index,)


def _selects_by_values(part):
    is_mask = isinstance(part, torch.Tensor) and part.dtype == torch.bool
    return is_mask or isinstance(part, list)


class HostReads(TorchFunctionMode):
    """Names of the usual calls that would copy from the host, or to it, on a GPU. It does not see copies by `to`."""

    COPIES = ("tensor", "as_tensor", "item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")
    FACTORIES = ("arange", "empty", "full", "linspace", "ones", "zeros")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        on_host = name in self.FACTORIES and kwargs.get("device") is None
        by_list_or_mask = name == "__getitem__" and any(map(_selects_by_values, _parts(args[1])))
        if name in self.COPIES or on_host or by_list_or_mask:
            self.names.append(name)
        return function(*args, **kwargs)


@torch.no_grad()
def test_a_forward_copies_nothing_from_the_host(model):
    """Each copy would wait for all that the GPU has to do. The second forward counts: the first one fills caches."""
    size = size_of(model.NAME)
    x = model.noise(size, generators(3))
    t = torch.tensor([900.0, 500.0, 100.0])
    condition = model.encode(as_prompts(TEXTS, model.NAME), width=32)
    model.velocity(x, t, condition, 4.0, size)
    with HostReads() as reads:
        model.velocity(x, t, condition, 4.0, size)
    expected = []
    if model.transformer.config.get("zero_cond_t"):
        # diffusers tells tokens of the image from those of its source by a list, once in each of both forwards.
        expected = ["tensor", "tensor"]
    assert reads.names == expected


@torch.no_grad()
def test_diffusers_own_pipeline_still_draws_prompts_of_unequal_lengths_together():
    """Masks of its own are of integers, and our Qwen-Image stands in for the function that reads them."""
    model = loaded("qwenimage", torch_dtype=torch.float64)
    noise = model.noise(SIZE, generators(2))
    how = model.call_arguments(SIZE, STEPS, 1.0) | dict(output_type="pt")
    prompts = list(UNEQUAL[:2])
    together = model.pipeline(prompt=prompts, latents=noise, **how).images
    for number, prompt in enumerate(prompts):
        alone = model.pipeline(prompt=prompt, latents=noise[number : number + 1], **how).images
        torch.testing.assert_close(together[number], alone[0], rtol=0, atol=rounding(size=16 * 4))
    with pytest.raises(ValueError, match=r"the mask of text \[2, 5\] is \[2, 4\]"):
        without_lengths(torch.zeros(2, 5, 3), torch.ones(2, 4))


def test_a_prompt_of_too_many_tokens_is_named(model):
    prompts = as_prompts(TEXTS, model.NAME)
    for call in (lambda width: model.check_prompts(prompts, width), lambda width: model.encode(prompts, width=width)):
        with pytest.raises(ValueError, match=r"tokens than config.text_tokens = 2; the longest has \d+: 'a photo"):
            call(2)
    long = as_prompts(["red " * 9000], model.NAME)
    with pytest.raises(ValueError, match="that its pipeline reads"):
        model.encode(long)


def test_distilled_weights_of_flux2_klein_refuse_a_guidance_that_diffusers_would_ignore():
    model = loaded("flux2_klein")
    t = torch.full((len(TEXTS),), 500.0)
    x = model.noise(SIZE, generators(3))
    condition = model.encode(as_prompts(TEXTS), width=20)
    guided = model.velocity(x, t, condition, 4.0, SIZE)
    model.pipeline.register_to_config(is_distilled=True)
    assert not torch.equal(model.velocity(x, t, condition, 1.0, SIZE), guided)
    with pytest.raises(UserError, match=r"4\.0"):
        model.velocity(x, t, condition, 4.0, SIZE)


def test_distilled_weights_of_krea_2_have_a_constant_shift():
    model = loaded("krea2", torch_dtype=torch.float64)
    before = model.schedule(STEPS, SIZE).sigmas
    model.pipeline.register_to_config(is_distilled=True)
    ours = model.schedule(STEPS, SIZE).sigmas
    drawn_by_diffusers(model, SIZE, 0.0, as_prompts(TEXTS[:1]))
    assert torch.equal(ours, model.pipeline.scheduler.sigmas)
    assert not torch.equal(ours, before)


def test_a_video_of_one_frame_is_diffusers_own_image():
    model = loaded("wan", torch_dtype=torch.float64)
    assert_diffusers_own(model, as_prompts(TEXTS), as_prompts(TEXTS), size=Size(64, 96))


def test_encoded_videos_are_those_of_diffusers_and_their_images_their_first_frames():
    model = loaded("wan")
    videos = torch.rand(2, 5, 3, 64, 64, generator=generators(1)[0])
    latents = model.encode_images(videos, batch_size=1)
    assert latents.shape[1:] == model.latent_shape(Size(64, 64, 5))
    mean, std = normalisation(model.pipeline.vae)
    encoded = model.pipeline.vae.encode(videos.transpose(1, 2) * 2 - 1).latent_dist.mode()
    torch.testing.assert_close(latents, (encoded - mean) / std, rtol=0, atol=rounding(size=16))
    # The encoder is causal.
    torch.testing.assert_close(latents[:, :, :1], model.encode_images(videos[:, 0]), rtol=0, atol=rounding(size=16))


@pytest.mark.parametrize("num_steps", [4, 20, 50])
def test_eulers_steps_take_the_sigmas_of_a_pipeline_with_unipcs(num_steps):
    """UniPC begins a millionth below 1 and cuts timesteps to whole numbers."""
    model = loaded("wan")
    unipc = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    model.pipeline.scheduler = unipc
    model.pipeline(TEXTS[0], num_inference_steps=num_steps, num_frames=5, output_type="latent", **SIDES)
    ours = model.schedule(num_steps, Size(64, 64, 5))
    torch.testing.assert_close(ours.sigmas, unipc.sigmas, rtol=0, atol=2e-6)
    torch.testing.assert_close(ours.timesteps, unipc.timesteps.float(), rtol=0, atol=1.0)
    levels = model.noise_levels(num_steps, Size(64, 64, 5))
    assert len(levels) == 1000
    assert levels[0] == 1000
    assert "UniPC" in loading.caution(unipc)
    assert loading.caution(loaded("wan").pipeline.scheduler) == ""


@pytest.mark.parametrize(
    ("settings", "words"), [(dict(boundary_ratio=0.9), "two transformers"), (dict(expand_timesteps=True), "each token")]
)
def test_wan_22_is_refused_before_its_weights_are_loaded(settings, words, tmp_path):
    folder = shutil.copytree(registry.tiny_folder("wan"), tmp_path / "model")
    change_json(folder / "model_index.json", **settings)
    with pytest.raises(UserError, match=f"{words}.* Wan 2.1"):
        MODELS["wan"].without_weights(str(folder))


def test_a_pipeline_that_animates_a_picture_is_refused_by_what_it_is(tmp_path):
    folder = shutil.copytree(registry.tiny_folder("wan"), tmp_path / "model")
    change_json(folder / "model_index.json", _class_name="WanImageToVideoPipeline")
    with pytest.raises(UserError, match=r"WanImageToVideoPipeline: its videos begin with a given picture.*Wan 2\.1"):
        model_classes.of_folder(str(folder))


def test_an_error_of_the_code_of_ones_own_model_is_shown_and_a_name_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "value_error_model.py").write_text("raise ValueError('of its own')\n")
    # Its name begins with that of the module that it lacks.
    (tmp_path / "lacking_model.py").write_text("import lacking\n")
    tiny = registry.tiny_folder("qwenimage")
    with pytest.raises(ValueError, match=r"^of its own$"):
        model_classes.resolve(tiny, "value_error_model:Own")
    with pytest.raises(ModuleNotFoundError, match="'lacking'"):
        model_classes.resolve(tiny, "lacking_model:Own")
    for name in (":Own", ".relative:Own", "no_such_package.module:Own", "pathlib:Path"):
        with pytest.raises(UserError, match="Python finds no such FlowModel"):
            model_classes.resolve(tiny, name)


def test_images_of_qwenimage_21_are_opaque_where_they_are_encoded_and_on_white_where_they_are_decoded():
    model = loaded("qwenimage_21")
    images = torch.rand(2, 3, SIZE.height, SIZE.width, generator=generators(1)[0])
    opaque = torch.cat([images, torch.ones_like(images[:, :1])], 1) * 2 - 1
    expected = model.pipeline._encode_vae_image(opaque[:, :, None], None).flatten(2).mT
    torch.testing.assert_close(model.encode_images(images), expected, rtol=0, atol=rounding(size=16))
    with torch.no_grad():
        last = model.pipeline.vae.decoder.conv_out
        last.weight.zero_()
        for alpha, red in ((-1.0, 1.0), (0.0, 0.75), (1.0, 0.5)):
            last.bias.copy_(torch.tensor([0.0, 0.0, 0.0, alpha]))
            decoded = model.decode(model.noise(SIZE, generators(2)), SIZE)
            torch.testing.assert_close(decoded, torch.full_like(images, red), rtol=0, atol=rounding())


@pytest.mark.parametrize("name", ["flux", "zimage", "flux2_klein"])
@pytest.mark.parametrize("num_steps", [4, 10, 50])
def test_noise_levels_go_through_the_sampled_ones(name, num_steps):
    """Whatever the number of steps that the shift depends on."""
    model = MODELS[name].without_weights(registry.tiny_folder(name))
    size = Size(512, 512)
    levels = model.noise_levels(num_steps, size)
    assert len(levels) == 1000
    every = len(levels) // num_steps
    torch.testing.assert_close(levels[::every], model.schedule(num_steps, size).timesteps, rtol=0, atol=0.01)


def test_the_median_of_dpos_noise_levels_lies_within_the_sampled_sigmas_of_each_published_model():
    rows = noise_levels.of_published_models()
    assert {registry.published(row.model).model for row in rows} == {*registry.names()}
    for row in rows:
        low, median, high = row.trained
        assert 0 < low < median < high < 1, row.model
        assert row.sampled[-1] < median < row.sampled[0], row.model


@pytest.mark.parametrize("name", MODELS)
def test_single_step_goes_from_noise_to_the_image(name):
    """diffusers stretches Qwen-Image's last sigma to its terminal one, which of a single step is 0 / 0."""
    model = MODELS[name].without_weights(registry.tiny_folder(name))
    assert model.schedule(1, SIZE).sigmas.tolist() == [1.0, 0.0]


def test_noise_levels_of_weights_with_sigmas_of_their_own_lie_between_these(tmp_path):
    folder = shutil.copytree(registry.tiny_folder("qwenimage_21"), tmp_path / "model")
    change_json(folder / "model_index.json", sample_sigmas=[1.0, 0.9, 0.3, 0.2])
    model = MODELS["qwenimage_21"].without_weights(str(folder))
    with pytest.raises(UserError, match=r"eval\.num_steps is 10"):
        model.check_steps(10, "eval.num_steps")
    assert model.sigmas(4) == [1.0, 0.9, 0.3, 0.2]
    assert model.sigmas(8) == pytest.approx([1.0, 0.95, 0.9, 0.6, 0.3, 0.25, 0.2, 0.1])
    assert len(model.noise_levels(4, SIZE)) == 1000


def test_a_class_with_a_schedule_of_its_own_has_to_say_its_noise_levels():
    class Own(MODELS["sd3"]):
        def schedule(self, num_steps, size):
            return super().schedule(2 * num_steps, size)

    with pytest.raises(UserError, match="override noise_levels"):
        Own.without_weights(registry.tiny_folder("sd3")).noise_levels(4, SIZE)


def test_qwenimage_21_takes_sigmas_of_its_weights_at_their_number_alone():
    model = loaded("qwenimage_21")
    model.pipeline.register_to_config(sample_sigmas=[1.0, 0.9, 0.3])
    ours = model.schedule(3, SIZE)
    model.pipeline(prompt=TEXTS[0], num_inference_steps=STEPS, output_type="latent", **SIDES)
    assert torch.equal(ours.sigmas, model.pipeline.scheduler.sigmas)
    with pytest.raises(UserError, match=r"num_steps is 4, but .* for 3 steps"):
        model.schedule(STEPS, SIZE)


@torch.no_grad()
def open_eyes(model):
    """Draw weights with which the tiny text encoder's tower sees a picture: its own are zeros."""
    weight = model.pipeline.text_encoder.model.visual.merger.mlp[-1].weight
    weight.normal_(0, 0.1, generator=generators(1)[0])


@torch.no_grad()
def test_three_sources_of_shapes_of_their_own_are_seen_as_by_diffusers():
    model = loaded("qwenimage_edit", torch_dtype=torch.float64)
    open_eyes(model)
    pixels = torch.randint(0, 256, (3, 90, 120, 3), generator=generators(1)[0], dtype=torch.uint8).numpy()
    first, second, third = (Image.fromarray(picture) for picture in pixels)
    sources = first, second.crop((0, 0, 45, 90)), third.crop((0, 0, 120, 40))
    prompts = [Prompt("a red circle", {}, sources), Prompt("a red circle", {}, sources[::-1])]
    condition = model.encode(prompts[:1])
    assert [tuple(source.shape[2:]) for source in condition.sources] == [(8, 8), (12, 4), (4, 12)]
    assert_diffusers_own(model, prompts[:1], condition)
    assert not torch.equal(condition.text_embeds, model.encode([replace(prompts[0], sources=(first,) * 3)]).text_embeds)
    for wrong in (prompts, [Prompt("a red circle")], [Prompt("a red circle", {}, (first,) * 4)]):
        with pytest.raises(UserError, match="source"):
            model.check_sources(wrong)
    with pytest.raises(UserError, match="no source image"):
        loaded("qwenimage").encode(prompts)


@torch.no_grad()
@pytest.mark.parametrize(("box", "sides"), [((0, 0, 120, 60), (96, 32)), ((0, 0, 50, 90), (32, 96))])
def test_text_encoder_and_transformer_of_the_first_qwenimage_edit_see_one_picture_as_in_diffusers(box, sides):
    model = loaded("qwenimage_edit_first", torch_dtype=torch.float64)
    open_eyes(model)
    pixels = torch.randint(0, 256, (90, 120, 3), generator=generators(1)[0], dtype=torch.uint8).numpy()
    picture = Image.fromarray(pixels).crop(box)
    prompts = [Prompt("a red circle", {}, (picture,))]
    condition = model.encode(prompts)
    assert_diffusers_own(model, prompts, condition)
    assert condition.num_tokens == model.num_text_tokens(prompts[0])
    (source,) = condition.sources
    assert source.shape[2:] == (sides[1] // 8, sides[0] // 8)
    # What it was resized to is seen alike, what it was turned to is not.
    resized = model.pipeline.image_processor.resize(picture, sides[1], sides[0])
    turned = resized.transpose(Image.Transpose.ROTATE_180)
    first, second = (model.encode([replace(prompts[0], sources=(other,))]) for other in (resized, turned))
    assert torch.equal(condition.text_embeds, first.text_embeds)
    assert not torch.equal(condition.text_embeds, second.text_embeds)


@torch.no_grad()
@pytest.mark.parametrize("box", [(0, 0, 120, 60), (0, 0, 50, 90), None], ids=["wide", "high", "none"])
def test_flux_kontext_sees_a_source_at_the_size_that_its_pipeline_prefers_and_draws_without_one(box):
    model = loaded("flux_kontext", torch_dtype=torch.float64)
    pixels = torch.randint(0, 256, (90, 120, 3), generator=generators(1)[0], dtype=torch.uint8).numpy()
    sources = () if box is None else (Image.fromarray(pixels).crop(box),)
    prompts = [Prompt("a red circle", {}, sources)]
    condition = model.encode(prompts)
    assert_diffusers_own(model, prompts, condition, guidance_scale=2.5)
    shapes = model.row_shapes(SIZE, condition.num_tokens, prompts[0])
    encoded_shapes = {name: tuple(tensor.shape[1:]) for name, tensor in condition.tensors().items()}
    assert encoded_shapes == {name: shape for name, shape in shapes.items() if name != "latents"}


@torch.no_grad()
@pytest.mark.parametrize(("name", "layer"), [("qwenimage_21", "time_text_embed"), ("krea2", "time_embed")])
def test_the_timestep_is_rounded_as_by_its_pipeline(name, layer):
    model = loaded(name, torch_dtype=torch.bfloat16)
    seen = []
    model.transformer.get_submodule(layer).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    guidance_scale = 0.0 if model.GUIDES_FROM_ZERO else 1.0
    model.pipeline(TEXTS[0], **model.call_arguments(SIZE, 20, guidance_scale), output_type="latent")
    x = model.noise(SIZE, generators(1))
    condition = model.encode(as_prompts(TEXTS[:1]))
    for t in model.schedule(20, SIZE).timesteps:
        model.velocity(x, t[None], condition, guidance_scale, SIZE)
    assert torch.equal(torch.stack(seen[:20]), torch.stack(seen[20:]))


HOW = dict(eval_freq=0, sample__guidance_scale=2.0, sample__num_prompts_per_epoch=4, sample__num_images_per_prompt=2)
RUNS = {  # beside the window below: each type of noise, both rollouts and both objectives
    "branches in slots": ("_pr", dict(sample__sde_type="dance", sample__noise_level=0.3, height=96, text_tokens=40)),
    "base of 8 bits": (",guard", dict(sample__sde_type="cps_gaussian", base_precision="fp8_weights")),
    "branches, compiled": ("_pr,guard", dict(compile=True, fsdp__activation_checkpointing=1.0, text_tokens=40)),
    "window, sharded": (",guard", dict(sample__sde_type="cps_gaussian", fsdp__mode="shard")),
}
EXACT = []
for name, kind in itertools.product(MODELS, RUNS):
    # Each model draws branches in slots, one model shows each other kind, and two ranks are test_ranks.py's.
    is_slow = kind == "window, sharded" or (name != "qwenimage" and kind != "branches in slots")
    EXACT.append(pytest.param(name, kind, marks=[pytest.mark.slow] if is_slow else []))


def assert_begins_exact(folder):
    """The first update's log-probs are the rollout's, and the second's are not."""
    first, second = lines_of(folder, "update")
    assert first["parity/log_prob_abs_diff_max"] == 0
    assert first["ratio_std"] == 0
    assert first["grad_norm"] > 0
    assert second["ratio_std"] > 0


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_a_first_update_has_the_rollouts_log_probs_bit_for_bit(name, kind, few, tmp_path, monkeypatch):
    """With guidance, but where each of two conditions would be traced, and prompts of unequal lengths in each batch."""
    variants, how = RUNS[kind]
    how = HOW | of_model(few, name) | how
    if kind == "branches in slots" and MODELS[name].CUTS_PADDING:
        how |= dict(sample__text_multiple=8)
    if "compile" in how:
        how |= dict(sample__guidance_scale=0.0 if MODELS[name].GUIDES_FROM_ZERO else 1.0)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(loading, "compile_decoder", lambda pipeline: None)  # which computes no log-prob
    run = on_two_ranks if "fsdp__mode" in how else train
    assert_begins_exact(run(f"shapes_qwenimage{variants}", tmp_path / "runs", **how))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_window_from_a_cache_is_exact_too_and_diffusers_and_evaluate_py_read_what_its_run_leaves(name, few, tmp_path):
    how = HOW | dict(eval_freq=1, height=64, width=96, sample__sde_type="sde", cache_dir=str(tmp_path / "cache"))
    how |= dict(train__learning_rate=1e-2, train__ema_interval=1)
    folder = train("shapes_qwenimage", tmp_path / "runs", **of_model(few, name) | how)
    assert_begins_exact(folder)
    _, (row,) = evaluated(tmp_path, folder, "--weights", "last")
    tests = [line for line in lines_of(folder, "test") if "test/avg" in line]
    assert row["avg"] == tests[-1]["test/avg"] != tests[0]["test/avg"]
    pipeline = loaded(name).pipeline

    def draw():
        prompts = as_prompts(TEXTS, name)
        settings = dict(window=range(0), num_steps=STEPS, noise_level=0.0, frames=size_of(name).frames)
        return pipeline_with_logprob(pipeline, prompts, generators(3), **settings, **SIDES).images

    before = draw()
    pipeline.load_lora_weights(folder)
    assert (draw() - before).abs().max() > 1e-3


TWINS = []
for path in sorted(Path("scripts").glob("train_*.py")):
    if "qwenimage" not in path.stem:
        is_slow = path.stem != "train_flux_nft"
        TWINS.append(pytest.param(path.stem, marks=[pytest.mark.slow] if is_slow else []))


@pytest.mark.parametrize("script", TWINS)
def test_the_twins_smoke_runs_need_nothing_that_is_not_shipped(script, few, tmp_path):
    online = ",online" if script.endswith("dpo") else ""
    run = f"{script.replace('train', 'pickscore')}{online},smoke"
    command = [f"scripts/{script}.py", f"--config={file_of(script)}:{run}", f"--config.dataset={few['dataset']}"]
    command += [f"--config.output_dir={tmp_path}", "--config.num_epochs=1", "--config.train.ema_interval=1"]
    done = warm.run([*command, "--config.eval.num_prompts=2", "--config.eval.num_steps=2"])
    assert done.returncode == 0, done.stderr[-2000:]
    (folder,) = tmp_path.iterdir()
    assert folder.name == run.replace(",", "_")
    assert all(line["grad_norm"] > 0 for line in lines_of(folder, "update"))
    exported = load_file(folder / "pytorch_lora_weights.safetensors")
    assert any(weight.any() for name, weight in exported.items() if "lora_B" in name), "a fresh adapter's are 0"
    assert (folder / "reward.png").is_file()


@pytest.mark.parametrize("start", [0, STEPS, 2 * STEPS - 1])
def test_flash_ends_near_the_full_walk_on_the_tiny_model(start):
    """For a first, middle and last window of one step, with 0.4 of the steps that are left."""
    pipeline = loaded("qwenimage").pipeline
    prompts = ["a photo of a red circle", "a photo of two blue squares"] * 4
    how = dict(num_steps=2 * STEPS + 1, **SIDES, guidance_scale=1.0, noise_level=0.7)
    walks = []
    for ratio in (0.0, 0.4):
        window = range(start, start + 1)
        walks.append(pipeline_with_logprob(pipeline, prompts, generators(8), window=window, flash_ratio=ratio, **how))
    assert torch.equal(walks[0].trace[0].step.log_prob, walks[1].trace[0].step.log_prob)
    assert (walks[0].images - walks[1].images).abs().mean() < 0.02


OTHERS = [(name, "_nft") for name in ("flux", "flux_kontext", "flux2_klein", "qwenimage_21", "krea2", "wan")]
OTHERS += [("qwenimage_edit", "_dpo,online"), ("sd3", "_dpo"), ("wan", "_dpo,online"), ("wan", "_dpo")]
OTHERS += [("qwenimage_edit_first", "_nft")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind"), OTHERS)
def test_images_that_are_no_square_are_trained_by_the_other_algorithms(model, kind, few, tmp_path):
    """Windows and branches: above. Each model with each algorithm, on squares: the twins."""
    how = of_model(few, model) | dict(height=96, width=64, sample__guidance_scale=2.0)
    if "_dpo" in kind:
        how |= dict(preferences__min_margin=0.0)
    if kind == "_dpo":
        pairs = prepare("shapes_qwenimage_dpo", tmp_path / "pairs", **how, validation_share=0.0)
        how |= dict(preferences__path=str(pairs))
    folder = train(f"shapes_qwenimage{kind}", tmp_path / "runs", **how)
    assert all(line["grad_norm"] > 0 for line in lines_of(folder, "update"))
    assert len(lines_of(folder, "eval")) == 2


def test_a_lora_of_the_hub_is_no_model_and_its_folder_here_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--me--style" / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / "pytorch_lora_weights.safetensors").touch()
    (tmp_path / "models--me--style" / "refs").mkdir()
    (tmp_path / "models--me--style" / "refs" / "main").write_text("a" * 40)
    with pytest.raises(UserError, match=f"'me/style' is a LoRA.*{folder}"):
        loading.pipeline_name("me/style")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the environment may say otherwise
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")
    with pytest.raises(UserError, match=r"'me/mine'.*Connection refused"):
        loading.pipeline_name("me/mine")
    assert caplog.records == []  # of attempts
