"""Our pieces of Qwen-Image against diffusers' own pipeline, on the shipped tiny model."""

import copy
import shutil
from pathlib import Path

import draw_shapes
import pytest
import torch
from diffusers import QwenImagePipeline
from ml_collections import ConfigDict
from peft.tuners.lora import LoraLayer
from rounding import UNIT, rounding

from flow_grpo import policies, rng, shapes
from flow_grpo.diffusers_patch import qwenimage_pipeline_with_logprob as qwenimage
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob
from flow_grpo.diffusers_patch.single_frame_vae import convolve_in_2d

TINY = str(Path(__file__).parents[1] / "flow_grpo" / "assets" / "tiny_qwenimage")
PROMPTS = ["a red circle", "a photo of a blue square and a green cross", "a drawing of two circles"]
STEPS, SIZE = 4, 64


@pytest.fixture(scope="module")
def pipeline():
    pipeline = QwenImagePipeline.from_pretrained(TINY)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def exact():
    """In float64, for comparisons of forwards whose sums are made in two orders. What remains is the rounding of a
    velocity, up to 16 here, to float32: 1e-6."""
    pipeline = QwenImagePipeline.from_pretrained(TINY, torch_dtype=torch.float64)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture
def calls(pipeline):
    """Rows of each call of the transformer."""
    rows = []
    hook = pipeline.transformer.register_forward_hook(lambda module, args, output: rows.append(len(output[0])))
    yield rows
    hook.remove()


def generators():
    return [rng.generator(0, "noise", b) for b in range(len(PROMPTS))]


def noise(pipeline):
    return qwenimage.initial_latents(pipeline, generators(), SIZE, "cpu")


def velocity(pipeline, prompts, guidance_scale=1.0, width=None, rows=slice(None)):
    """Of PROMPTS' rows at different timesteps."""
    embeds = qwenimage.encode_prompts(pipeline, prompts, width=width, guided=guidance_scale > 1)
    x, t = noise(pipeline)[rows], torch.tensor([900.0, 500.0, 100.0])[rows]
    with torch.no_grad():
        return qwenimage.predict_velocity(pipeline.transformer, x, t, embeds, guidance_scale)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_without_noise_it_is_diffusers_own_pipeline(exact, guidance_scale):
    """Ours rounds velocities, of which guidance adds 4 + 3 while sigma falls by 1, and at each step latents of up to 8:
    9e-6 in all."""
    pipeline, rounded = exact, (7 * 16 + STEPS * 8) * UNIT
    how = dict(num_steps=STEPS, resolution=SIZE, guidance_scale=guidance_scale)
    sampled = qwenimage.pipeline_with_logprob(
        pipeline, PROMPTS, generators(), window=range(0), noise_level=0.7, vae_batch_size=2, **how
    )
    guidance = dict(true_cfg_scale=guidance_scale, negative_prompt=[" "] * 3 if guidance_scale > 1 else None)
    size = dict(height=SIZE, width=SIZE, num_inference_steps=STEPS, output_type="pt")
    expected = pipeline(PROMPTS, latents=noise(pipeline), **guidance, **size).images
    assert sampled.images.shape == (3, 3, SIZE, SIZE)
    assert sampled.trace == []
    torch.testing.assert_close(sampled.images, expected.float(), rtol=0, atol=rounded)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_a_prompt_gets_the_velocity_that_it_gets_alone(exact, guidance_scale):
    together = velocity(exact, PROMPTS, guidance_scale)
    for row, prompt in enumerate(PROMPTS):
        alone = velocity(exact, [prompt], guidance_scale, rows=slice(row, row + 1))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=16 * UNIT * guidance_scale)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:2] * 3], ids=["of several lengths", "of one length"])
def test_padding_changes_no_velocity(exact, prompts):
    padded, plain = velocity(exact, prompts, width=40), velocity(exact, prompts)
    torch.testing.assert_close(padded, plain, rtol=0, atol=16 * UNIT)


def test_the_prompt_is_heard(pipeline):
    assert (velocity(pipeline, PROMPTS[:1] * 3) - velocity(pipeline, PROMPTS[1:2] * 3)).abs().max() > 0.01


def test_embeddings_are_padded_with_zeros_and_a_mask_or_not_at_all(pipeline):
    embeds = qwenimage.encode_prompts(pipeline, PROMPTS, width=40)
    assert embeds.embeds.shape[:2] == embeds.mask.shape == (3, 40)
    assert (embeds.embeds[~embeds.mask] == 0).all()
    assert (embeds.embeds[embeds.mask] != 0).any(-1).all()
    alone = qwenimage.encode_prompts(pipeline, PROMPTS[:1], guided=False)
    assert alone.mask is None
    assert alone.negative is None
    assert len(embeds.negative.embeds) == 1


def test_take_and_concat_undo_each_other(pipeline):
    embeds = qwenimage.encode_prompts(pipeline, PROMPTS, width=40)
    again = qwenimage.PromptEmbeds.concat([embeds.take(slice(0, 2)), embeds.take(torch.tensor([2]))])
    assert torch.equal(again.embeds, embeds.embeds)
    assert torch.equal(again.mask, embeds.mask)
    assert torch.equal(again.negative.embeds, embeds.negative.embeds)


@pytest.mark.parametrize(("guidance_scale", "forwards"), [(0.0, 1), (1.0, 1), (4.0, 2)])
def test_a_second_forward_only_for_guidance(pipeline, calls, guidance_scale, forwards):
    velocity(pipeline, PROMPTS, guidance_scale)
    assert calls == [3] * forwards


def test_guidance_turns_a_tokens_velocity_and_keeps_its_norm(pipeline):
    guided, positive = velocity(pipeline, PROMPTS, 4.0), velocity(pipeline, PROMPTS)
    norms = [v.double().norm(dim=-1) for v in (guided, positive)]
    torch.testing.assert_close(*norms, rtol=rounding(guided.shape[-1]), atol=0)
    assert (guided - positive).abs().max() > 0.01


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize("branches", [1, 3])
def test_both_entry_points_return_log_probs_that_replay_bit_for_bit(pipeline, guidance_scale, branches):
    how = dict(noise_level=0.7, sde_type="sde")
    size = dict(num_steps=STEPS, resolution=SIZE, guidance_scale=guidance_scale)
    if branches == 1:
        steps = range(1, 3)
        sampled = qwenimage.pipeline_with_logprob(pipeline, PROMPTS, generators(), window=steps, **size, **how)
        assert sampled.images.shape == (3, 3, SIZE, SIZE)
    else:
        steps, branching = range(STEPS - 1), dict(num_branches=branches, completion_batch_size=4)
        sampled = qwenimage.pipeline_with_logprob_perstep(
            pipeline, PROMPTS, generators(), steps=steps, **branching, **size, **how
        )
        assert sampled.images.shape == (3, len(steps), branches, 3, SIZE, SIZE)
    scheduler = qwenimage.schedule(pipeline, STEPS, SIZE, "cpu")
    embeds = qwenimage.encode_prompts(pipeline, PROMPTS, guided=guidance_scale > 1)
    assert len(sampled.trace) == len(steps)
    for i, traced in zip(steps, sampled.trace, strict=True):
        assert (traced.timestep == scheduler.timesteps[i]).all()
        with torch.no_grad():
            v = qwenimage.predict_velocity(
                pipeline.transformer, traced.latents, traced.timestep, embeds, guidance_scale
            )
        rows = [part.repeat_interleave(branches, 0) for part in (v, traced.timestep, traced.latents)]
        replayed = sde_step_with_logprob(scheduler, *rows, prev_sample=traced.step.prev_sample, **how)
        assert torch.equal(replayed.log_prob, traced.step.log_prob)


def test_images_are_those_of_the_latents_returned(exact):
    """Decoded five at a time and alone: the same float64 sums, rounded to float32 at the end."""
    pipeline = exact
    size = dict(num_steps=STEPS, resolution=SIZE, guidance_scale=1.0, noise_level=0.7)
    branching = dict(steps=range(2), num_branches=2, vae_batch_size=5)
    sampled = qwenimage.pipeline_with_logprob_perstep(pipeline, PROMPTS, generators(), **branching, **size)
    for where in ((0, 0, 0), (1, 0, 1), (2, 1, 0)):
        image = qwenimage.decode_latents(pipeline, sampled.latents[where][None], SIZE)[0]
        torch.testing.assert_close(sampled.images[where], image, rtol=0, atol=2 * UNIT)


def test_an_image_is_its_own_generators_whatever_its_batch(exact):
    pipeline = exact
    how = dict(window=range(1, 3), num_steps=STEPS, resolution=SIZE, guidance_scale=1.0, noise_level=0.7)
    together = qwenimage.pipeline_with_logprob(pipeline, PROMPTS, generators(), **how)
    alone = qwenimage.pipeline_with_logprob(pipeline, PROMPTS[2:], generators()[2:], **how)
    torch.testing.assert_close(together.images[2:], alone.images, rtol=0, atol=16 * UNIT)


def test_the_schedule_is_the_pipelines_and_leaves_it_alone(pipeline):
    before = str(pipeline.scheduler.__dict__)
    assert len(qwenimage.schedule(pipeline, STEPS + 3, SIZE, "cpu").timesteps) == STEPS + 3
    assert str(pipeline.scheduler.__dict__) == before
    scheduler = qwenimage.schedule(pipeline, STEPS, SIZE, "cpu")
    pipeline(PROMPTS[:1], height=SIZE, width=SIZE, num_inference_steps=STEPS, true_cfg_scale=1.0, output_type="latent")
    assert torch.equal(scheduler.timesteps, pipeline.scheduler.timesteps)
    assert torch.equal(scheduler.sigmas, pipeline.scheduler.sigmas)
    assert scheduler.sigmas[-1] == 0


@pytest.fixture(scope="module")
def renders():
    prompts = shapes.split(shapes.all_prompts())[1]
    layouts = draw_shapes.sample_layouts(
        draw_shapes.prompt_table(prompts), torch.arange(3), torch.Generator().manual_seed(0)
    )
    return draw_shapes.render(layouts)


@torch.no_grad()
def test_latent_statistics_are_used_the_right_way_round(exact, renders):
    """Latents are stored as float32: numbers up to 8 round by 5e-7."""
    pipeline, renders = exact, renders.double()
    vae, config = pipeline.vae, pipeline.vae.config
    z = vae.encode(renders[:, :, None] * 2 - 1).latent_dist.mean
    mean, std = (torch.tensor(s).view(1, -1, 1, 1, 1) for s in (config.latents_mean, config.latents_std))
    latents = pipeline._pack_latents((z - mean) / std, 3, 16, *z.shape[3:])
    expected = (vae.decode(z).sample[:, :, 0] / 2 + 0.5).clamp(0, 1)
    decoded = qwenimage.decode_latents(pipeline, latents, SIZE, batch_size=2)
    torch.testing.assert_close(decoded, expected.float(), rtol=0, atol=8 * UNIT)
    assert (decoded - renders).abs().mean() < 0.05


@torch.no_grad()
def test_convolutions_in_2d_decode_the_same_picture_with_less(exact, renders):
    """In float64 two kernels of one sum differ by 1e-15 of it; 1e-9 leaves room for what the layers make of that."""
    pipeline, renders = exact, renders.double()
    vae = copy.deepcopy(pipeline.vae)
    convolve_in_2d(vae)
    z = vae.encode(renders[:, :, None] * 2 - 1).latent_dist.mean
    torch.testing.assert_close(vae.decode(z).sample, pipeline.vae.decode(z).sample, rtol=0, atol=1e-9)
    clip = torch.cat([z, z.flip(0)], dim=2)
    torch.testing.assert_close(vae.decode(clip).sample, pipeline.vae.decode(clip).sample, rtol=0, atol=1e-9)
    for slices in (conv.weight for name, conv in vae.decoder.named_modules() if name.endswith("conv1")):
        slices[:, :, :-1] = torch.nan  # a kernel's earlier slices are not looked at
    assert vae.decode(z).sample.isfinite().all()
    assert vae.decode(clip).sample.isnan().any()


def test_a_prompt_of_too_many_tokens_is_named(pipeline):
    suffix = len(pipeline.tokenizer("<|im_end|>\n<|im_start|>assistant\n").input_ids)
    words = max(len(prompt.split()) for prompt in PROMPTS)
    qwenimage.check_prompts(pipeline, PROMPTS, words + suffix)
    for check in (qwenimage.check_prompts, lambda *args: qwenimage.encode_prompts(*args[:2], width=args[2])):
        with pytest.raises(ValueError, match=rf"{words + suffix} tokens.*= {words + suffix - 1}: '{PROMPTS[1]}'"):
            check(pipeline, PROMPTS, words + suffix - 1)


def test_a_folder_must_hold_this_pipeline(tmp_path):
    qwenimage.check_folder(TINY)
    with pytest.raises(ValueError, match="no diffusers folder"):
        qwenimage.check_folder(str(tmp_path))
    shutil.copy(Path(TINY, "model_index.json"), tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace('"QwenImagePipeline"', '"FluxPipeline"'))
    with pytest.raises(ValueError, match="holds a FluxPipeline, not a QwenImagePipeline"):
        qwenimage.check_folder(str(tmp_path))


def test_lora_targets_are_a_blocks_twelve_linear_layers(pipeline):
    transformer = copy.deepcopy(pipeline.transformer)
    linears = {name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)}
    policies.attach(transformer, ConfigDict(dict(rank=2, alpha=4)), qwenimage.LORA_TARGETS)
    adapted = {name for name, module in transformer.named_modules() if isinstance(module, LoraLayer)}
    blocks = [f"transformer_blocks.{i}." for i in range(len(transformer.transformer_blocks))]
    for block in blocks:
        in_block = {name for name in linears if name.startswith(block)}
        assert {name for name in adapted if name.startswith(block)} == {n for n in in_block if "_mod." not in n}
        assert len({name for name in adapted if name.startswith(block)}) == 12
    assert len(adapted) == 12 * len(blocks)
