"""FLUX.1: diffusers' FluxPipeline taken apart into the functions that training needs, and the two entry points.
Guidance is an input of the distilled transformer, not a second forward; latents are packed [B, N, C].
"""

import sys
from functools import partial

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor

from flow_grpo.diffusers_patch import loading, sample_with_logprob
from flow_grpo.diffusers_patch.sample_with_logprob import PromptEmbeds

PIPELINE, TRANSFORMER = FluxPipeline, FluxTransformer2DModel
SHARD_UNITS = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
LORA_TARGETS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")),
    *("attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
)
# cuDNN's attention gave NaN gradients or an illegal memory access in FLUX.1's backward (torch 2.11, cuDNN 9.19, H200);
# flash attention, the next choice, does not.
CUDNN_ATTENTION = False
MASKED_TEXT = False  # the transformer was trained to see padding, and sees it

check_folder = partial(loading.check_folder, PIPELINE)
without_weights = partial(loading.without_weights, PIPELINE)
load_pipeline = partial(loading.load_pipeline, PIPELINE, TRANSFORMER)
transformer_folder, text_version = loading.transformer_folder, loading.text_version
schedule, initial_latents = sample_with_logprob.packed_schedule, sample_with_logprob.packed_noise


def check_prompts(pipeline, prompts: list[str], width: int) -> None:
    """Raises ValueError for a prompt of more than `width` T5 tokens. CLIP reads the first 77 of its own, as ever."""
    loading.check_lengths(prompts, lambda text: len(pipeline.tokenizer_2(text).input_ids), width)


@torch.no_grad()
def encode_prompts(pipeline, prompts: list[str], *, width: int | None = None, guided: bool = True) -> PromptEmbeds:
    """Embeddings of B prompts, each encoded by itself so that its numbers do not depend on its neighbours.

    Args:
        width: T5 tokens, padded or cut to; None = diffusers' 512.
        guided: without effect; the transformer is guided by a number.

    Raises:
        ValueError: a prompt has more than `width` tokens.
    """
    if width is not None:
        check_prompts(pipeline, prompts, width)
    how = dict(device=pipeline.text_encoder.device, max_sequence_length=width or 512)
    encoded = {prompt: pipeline.encode_prompt(prompt, prompt, **how) for prompt in dict.fromkeys(prompts)}
    return PromptEmbeds.concat([PromptEmbeds(encoded[p][0], pooled=encoded[p][1]) for p in prompts])


def predict_velocity(transformer, x: Tensor, t: Tensor, embeds: PromptEmbeds, guidance_scale: float) -> Tensor:
    """Velocity [B, N, C] float32 at x [B, N, C], t [B] in scheduler units (1000 sigma): the policy itself.

    `guidance_scale` goes into the transformer; FLUX.1-schnell, which has no such input, ignores it.
    """
    side, dtype = int(x.shape[1] ** 0.5), transformer.x_embedder.weight.dtype
    guided = transformer.config.guidance_embeds
    return transformer(
        hidden_states=x.to(dtype),
        timestep=t / 1000,
        guidance=torch.full_like(t, guidance_scale) if guided else None,
        encoder_hidden_states=embeds.embeds.to(dtype),
        pooled_projections=embeds.pooled.to(dtype),
        txt_ids=torch.zeros(embeds.embeds.shape[1], 3, device=x.device, dtype=dtype),
        img_ids=PIPELINE._prepare_latent_image_ids(1, side, side, x.device, dtype),
        return_dict=False,
    )[0].float()


def unpack_latents(pipeline, latents: Tensor, resolution: int) -> Tensor:
    """[B, N, C] -> [B, c, h, w], as the VAE sees them but for its normalisation."""
    return pipeline._unpack_latents(latents, resolution, resolution, pipeline.vae_scale_factor)


@torch.no_grad()
def decode_latents(pipeline, latents: Tensor, resolution: int, batch_size: int = 8) -> Tensor:
    """[B, N, C] -> images [B, 3, H, W] float32 in [0, 1], `batch_size` at a time."""
    vae = pipeline.vae

    def decode(part: Tensor) -> Tensor:
        z = unpack_latents(pipeline, part, resolution) / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(z.to(vae.dtype), return_dict=False)[0]

    return sample_with_logprob.decode(decode, latents, batch_size, loading.fixed_shape(vae))


THIS = sys.modules[__name__]
pipeline_with_logprob = partial(sample_with_logprob.sample_window, THIS, guidance_scale=3.5)
pipeline_with_logprob_perstep = partial(sample_with_logprob.sample_perstep, THIS, guidance_scale=3.5)
