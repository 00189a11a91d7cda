"""Our pieces of Qwen-Image against diffusers' own pipeline, on the shipped tiny model."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from ml_collections import ConfigDict
from peft.tuners.lora import LoraLayer
from small import as_prompts, loaded

from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.condition import TENSORS, Condition
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage
from flow_grpo.kernels.single_frame_vae import convolve_in_2d
from flow_grpo.weights import policies

TINY = str(Path(__file__).parents[1] / "flow_grpo" / "assets" / "tiny_qwenimage")
PROMPTS = ["a red circle", "a photo of a blue square and a green cross", "a drawing of two circles"]


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
