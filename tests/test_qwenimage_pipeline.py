"""Our pieces of Qwen-Image against diffusers' own pipeline, on the shipped tiny model."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from ml_collections import ConfigDict
from peft.tuners.lora import LoraLayer
from small import as_prompts, generators, loaded

from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.condition import TENSORS, Condition
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage
from flow_grpo.diffusers_patch.sample_with_logprob import pipeline_with_logprob, pipeline_with_logprob_perstep
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.kernels.single_frame_vae import convolve_in_2d
from flow_grpo.weights import policies

TINY = str(Path(__file__).parents[1] / "flow_grpo" / "assets" / "tiny_qwenimage")
PROMPTS = ["a red circle", "a photo of a blue square and a green cross", "a drawing of two circles"]
STEPS, SIZE, SIDES = 4, Size(64, 64), dict(height=64, width=64)


@pytest.fixture(scope="module")
def model():
    return loaded("qwenimage")


def test_embeddings_are_padded_with_zeros_and_a_mask_or_not_at_all(model):
    condition = model.encode(as_prompts(PROMPTS), width=40)
    assert condition.text_embeds.shape[:2] == condition.mask.shape == (3, 40)
    assert (condition.text_embeds[~condition.mask] == 0).all()
    assert (condition.text_embeds[condition.mask] != 0).any(-1).all()
    alone = model.encode(as_prompts(PROMPTS[:1]), guided=False)
    assert alone.mask is None
    assert alone.negative is None
    assert condition.negative.text_embeds.shape[0] == 3


def test_every_field_of_a_condition_is_taken_joined_and_repeated():
    """So that a new one cannot be forgotten."""
    rows = {name: torch.arange(3.0).view(3, 1, 1).expand(3, 4, 2) for name in TENSORS} | {
        "mask": torch.ones(3, 4).bool()
    }
    whole = Condition(**rows, negative=Condition(**{name: -values for name, values in rows.items() if name != "mask"}))
    again = Condition.concat([whole.take(slice(0, 2)), whole.take(torch.tensor([2]))])
    repeated = whole.take(slice(1, 2)).take(torch.zeros(5, dtype=torch.long))
    assert set(whole.tensors()) == set(TENSORS)
    for name, values in whole.tensors().items():
        assert torch.equal(getattr(again, name), values)
        assert torch.equal(getattr(repeated, name), values[1:2].expand_as(getattr(repeated, name)))
        assert len(getattr(repeated, name)) == 5
    assert again.negative.equals(whole.negative)
    assert torch.equal(repeated.negative.text_embeds, -repeated.text_embeds)
    wider = whole.padded(6)
    assert wider.trimmed(2).text_embeds.shape == whole.text_embeds.shape
    assert torch.equal(wider.pooled, whole.pooled)
    assert wider.mask.sum() == 12


@pytest.mark.parametrize(("guidance_scale", "branches"), [(1.0, 1), (4.0, 3)])
def test_both_entry_points_return_log_probs_that_replay_bit_for_bit_and_the_images_of_their_latents(
    model, guidance_scale, branches
):
    how = dict(num_steps=STEPS, guidance_scale=guidance_scale, noise_level=0.7, vae_batch_size=5, **SIDES)
    if branches == 1:
        steps = range(1, 3)
        sampled = pipeline_with_logprob(model.pipeline, PROMPTS, generators(3), window=steps, **how)
        assert sampled.images.shape == (3, 3, 64, 64)
    else:
        steps, how = range(STEPS - 1), how | dict(num_branches=branches, completion_batch_size=4)
        sampled = pipeline_with_logprob_perstep(model.pipeline, PROMPTS, generators(3), steps=steps, **how)
        assert sampled.images.shape == (3, len(steps), branches, 3, 64, 64)
    images = model.decode(sampled.latents.flatten(0, -3), SIZE, batch_size=1)
    torch.testing.assert_close(sampled.images.flatten(0, -4), images, rtol=0, atol=1e-3)
    scheduler, condition = model.schedule(STEPS, SIZE), model.encode(as_prompts(PROMPTS), guided=guidance_scale > 1)
    assert len(sampled.trace) == len(steps)
    for i, traced in zip(steps, sampled.trace, strict=True):
        assert (traced.timestep == scheduler.timesteps[i]).all()
        with torch.no_grad():
            v = model.velocity(traced.latents, traced.timestep, condition, guidance_scale, SIZE)
        rows = [part.repeat_interleave(branches, 0) for part in (v, traced.timestep, traced.latents)]
        replayed = sde_step_with_logprob(scheduler, *rows, prev_sample=traced.step.next_latents, noise_level=0.7)
        assert torch.equal(replayed.log_prob, traced.step.log_prob)


@torch.no_grad()
def test_convolutions_in_2d_decode_the_same_picture():
    """In float64 two kernels of one sum differ by 1e-15 of it; 1e-9 leaves room for what the layers make of that. A
    run's decoder has them: test_fast_path.py."""
    plain = loaded("qwenimage", torch_dtype=torch.float64).pipeline.vae
    vae = copy.deepcopy(plain)
    convolve_in_2d(vae)
    z = torch.randn(2, plain.config.z_dim, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clip = torch.cat([z, z.flip(0)], dim=2)
    for latents in (z, clip):
        torch.testing.assert_close(vae.decode(latents).sample, plain.decode(latents).sample, rtol=0, atol=1e-9)


@pytest.mark.parametrize("width", [None, 2048])
def test_a_prompt_that_the_pipeline_would_cut_is_refused(model, width):
    """Whatever is asked for: two prompts that differ at their ends would have one embedding."""
    fits = "red " * 1017 + "circle"
    assert model.encode(as_prompts([fits]), width=width, guided=False).text_embeds.shape[1] == (width or 1024)
    with pytest.raises(ValueError, match="more tokens than the 1024 that its pipeline reads; the longest has 1025"):
        model.encode(as_prompts([f"{fits} red"]), width=width, guided=False)


def test_a_folders_pipeline_says_which_model_it_is(tmp_path):
    assert model_classes.of_folder(TINY) is QwenImage
    with pytest.raises(ValueError, match="no diffusers folder"):
        model_classes.of_folder(str(tmp_path))
    shutil.copy(Path(TINY, "model_index.json"), tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace('"QwenImagePipeline"', '"WanPipeline"'))
    with pytest.raises(ValueError, match="holds a WanPipeline; there are QwenImagePipeline, "):
        model_classes.of_folder(str(tmp_path))


def test_lora_targets_are_a_blocks_twelve_linear_layers(model):
    transformer = copy.deepcopy(model.transformer)
    linears = {name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)}
    policies.attach(transformer, ConfigDict(dict(rank=2, alpha=4)), QwenImage.LORA_TARGETS)
    adapted = {name for name, module in transformer.named_modules() if isinstance(module, LoraLayer)}
    assert adapted == {name for name in linears if name.startswith("transformer_blocks.") and "_mod." not in name}
    assert len(adapted) == 12 * len(transformer.transformer_blocks)
