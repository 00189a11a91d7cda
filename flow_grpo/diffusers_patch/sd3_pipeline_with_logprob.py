"""Stable Diffusion 3 and 3.5: diffusers' StableDiffusion3Pipeline taken apart into the functions that training needs,
and the two entry points. Two CLIP encoders and T5, pooled embeddings, latents [B, C, h, w], a static shift.
"""

import sys
from functools import partial

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from flow_grpo import rng, shipped
from flow_grpo.diffusers_patch import loading, sample_with_logprob
from flow_grpo.diffusers_patch.sample_with_logprob import PromptEmbeds

PIPELINE, TRANSFORMER = StableDiffusion3Pipeline, SD3Transformer2DModel
SHARD_UNITS = ("JointTransformerBlock",)
LORA_TARGETS = tuple(
    f"attn.{linear}"
    for linear in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
CUDNN_ATTENTION = True
MASKED_TEXT = False  # the transformer was trained to see padding, and sees it

check_folder = partial(loading.check_folder, PIPELINE)
without_weights = partial(loading.without_weights, PIPELINE)
load_pipeline = partial(loading.load_pipeline, PIPELINE, TRANSFORMER)
transformer_folder, text_version = loading.transformer_folder, loading.text_version


def check_prompts(pipeline, prompts: list[str], width: int) -> None:
    """Raises ValueError for a prompt of more than `width` T5 tokens. CLIP reads the first 77 of its own, as ever."""
    loading.check_lengths(prompts, lambda text: len(pipeline.tokenizer_3(text).input_ids), width)


@torch.no_grad()
def encode_prompts(pipeline, prompts: list[str], *, width: int | None = None, guided: bool = True) -> PromptEmbeds:
    """Embeddings of B prompts, each encoded by itself so that its numbers do not depend on its neighbours.

    Args:
        width: T5 tokens, padded or cut to; None = diffusers' 256. L is this and CLIP's 77.
        guided: also embed the negative prompt, which is empty.

    Raises:
        ValueError: a prompt has more than `width` tokens.
    """
    if width is not None:
        check_prompts(pipeline, prompts, width)
    how = dict(device=pipeline.text_encoder.device, max_sequence_length=width or 256)

    def encode(text: str) -> PromptEmbeds:
        found = pipeline.encode_prompt(text, text, text, do_classifier_free_guidance=False, **how)
        return PromptEmbeds(found[0], pooled=found[2])

    unique = {prompt: encode(prompt) for prompt in dict.fromkeys(prompts)}
    rows = PromptEmbeds.concat([unique[prompt] for prompt in prompts])
    return PromptEmbeds(rows.embeds, rows.pooled, negative=encode("") if guided else None)


def latent_side(pipeline, resolution: int) -> int:
    """Of a square image of `resolution` pixels."""
    return resolution // pipeline.vae_scale_factor


def schedule(pipeline, num_steps: int, resolution: int, device):
    """A copy of the pipeline's scheduler with `timesteps` [T] and `sigmas` [T + 1] set for images of this size."""
    num_tokens = (latent_side(pipeline, resolution) // pipeline.transformer.config.patch_size) ** 2
    return sample_with_logprob.schedule(pipeline, num_steps, num_tokens, device)


def initial_latents(pipeline, generators: list[torch.Generator], resolution: int, device) -> Tensor:
    """Standard normal [B, C, h, w] float32, row b from generators[b]."""
    side = latent_side(pipeline, resolution)
    return rng.normal((pipeline.transformer.config.in_channels, side, side), generators, device)


def row_shapes(folder: str, resolution: int, width: int) -> dict[str, tuple[int, ...]]:
    """Of one image and its prompt, as encode_images and encode_prompts make them. Needs no weight."""
    pipeline, config = without_weights(folder), TRANSFORMER.load_config(shipped.find(folder), subfolder="transformer")
    side, length = latent_side(pipeline, resolution), pipeline.tokenizer_max_length + width
    text = dict(embeds=(length, config["joint_attention_dim"]), pooled=(config["pooled_projection_dim"],))
    return dict(latents=(config["in_channels"], side, side), **text)


def predict_velocity(transformer, x: Tensor, t: Tensor, embeds: PromptEmbeds, guidance_scale: float) -> Tensor:
    """Guided velocity [B, C, h, w] float32 at x, t [B] in scheduler units (1000 sigma): neg + g (pos - neg)."""
    dtype = transformer.context_embedder.weight.dtype

    def forward(text: PromptEmbeds) -> Tensor:
        return transformer(
            hidden_states=x.to(dtype),
            timestep=t,
            encoder_hidden_states=text.embeds.to(dtype),
            pooled_projections=text.pooled.to(dtype),
            return_dict=False,
        )[0].float()

    return sample_with_logprob.guided(forward, embeds, len(x), guidance_scale)[0]


def unpack_latents(pipeline, latents: Tensor, resolution: int) -> Tensor:
    """[B, C, h, w] as they are."""
    return latents


@torch.no_grad()
def encode_images(pipeline, images: Tensor, batch_size: int = 8) -> Tensor:
    """Images [B, 3, H, W] in [0, 1] -> their most likely latents [B, C, h, w] float32, `batch_size` at a time."""
    vae, config = pipeline.vae, pipeline.vae.config

    def encode(part: Tensor) -> Tensor:
        return (vae.encode(part.to(vae.dtype)).latent_dist.mode().float() - config.shift_factor) * config.scaling_factor

    return sample_with_logprob.encode(encode, images, batch_size)


@torch.no_grad()
def decode_latents(pipeline, latents: Tensor, resolution: int, batch_size: int = 8) -> Tensor:
    """[B, C, h, w] -> images [B, 3, H, W] float32 in [0, 1], `batch_size` at a time."""
    vae, config = pipeline.vae, pipeline.vae.config

    def decode(part: Tensor) -> Tensor:
        return vae.decode((part / config.scaling_factor + config.shift_factor).to(vae.dtype), return_dict=False)[0]

    return sample_with_logprob.decode(decode, latents, batch_size, loading.fixed_shape(vae))


THIS = sys.modules[__name__]
pipeline_with_logprob = partial(sample_with_logprob.sample_window, THIS, guidance_scale=4.5)
pipeline_with_logprob_perstep = partial(sample_with_logprob.sample_perstep, THIS, guidance_scale=4.5)
