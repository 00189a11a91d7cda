"""Qwen-Image: diffusers' QwenImagePipeline taken apart into the functions that training needs, and two entry points
that anyone with such a pipeline can call: `pipeline_with_logprob` and `pipeline_with_logprob_perstep`.
"""

import sys
from functools import partial

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from torch import Tensor
from torch.nn import functional as F

from flow_grpo import shipped
from flow_grpo.diffusers_patch import loading, sample_with_logprob
from flow_grpo.diffusers_patch.sample_with_logprob import PromptEmbeds

PIPELINE, TRANSFORMER = QwenImagePipeline, QwenImageTransformer2DModel
SHARD_UNITS = ("QwenImageTransformerBlock",)
LORA_TARGETS = tuple(
    f"{stream}.{linear}"
    for stream, linears in {
        "attn": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        "img_mlp": ("net.0.proj", "net.2"),
        "txt_mlp": ("net.0.proj", "net.2"),
    }.items()
    for linear in linears
)
NEGATIVE_PROMPT = " "  # what Qwen-Image is guided away from; an empty string has no token to attend to
CUDNN_ATTENTION = True
MASKED_TEXT = True  # padding is hidden from the transformer

check_folder = partial(loading.check_folder, PIPELINE)
without_weights = partial(loading.without_weights, PIPELINE)
load_pipeline = partial(loading.load_pipeline, PIPELINE, TRANSFORMER)
transformer_folder, text_version = loading.transformer_folder, loading.text_version
schedule, initial_latents = sample_with_logprob.packed_schedule, sample_with_logprob.packed_noise


def check_prompts(pipeline, prompts: list[str], width: int) -> None:
    """Raises ValueError for a prompt of more than `width` tokens. Needs the tokenizer only."""
    template, drop = pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx
    loading.check_lengths(prompts, lambda text: len(pipeline.tokenizer(template.format(text)).input_ids) - drop, width)


@torch.no_grad()
def encode_prompts(pipeline, prompts: list[str], *, width: int | None = None, guided: bool = True) -> PromptEmbeds:
    """Embeddings of B prompts, each encoded by itself so that its numbers do not depend on its neighbours.

    Args:
        width: pad to this many tokens, always with a mask. None = to the longest, no mask where no row is padded.
        guided: also embed the negative prompt.

    Raises:
        ValueError: a prompt has more than `width` tokens.
    """
    device = pipeline.text_encoder.device
    if width is not None:
        check_prompts(pipeline, prompts, width)
    unique = {prompt: pipeline.encode_prompt(prompt, device)[0][0] for prompt in dict.fromkeys(prompts)}
    widths = {len(row) for row in unique.values()}
    masked = width is not None or len(widths) > 1
    width = width or max(widths)
    embeds = torch.stack([F.pad(unique[prompt], (0, 0, 0, width - len(unique[prompt]))) for prompt in prompts])
    lengths = torch.tensor([len(unique[prompt]) for prompt in prompts], device=device)
    mask = torch.arange(width, device=device) < lengths[:, None] if masked else None
    negative = PromptEmbeds(pipeline.encode_prompt(NEGATIVE_PROMPT, device)[0]) if guided else None
    return PromptEmbeds(embeds, mask=mask, negative=negative)


def row_shapes(folder: str, resolution: int, width: int) -> dict[str, tuple[int, ...]]:
    """Of one image and its prompt, as encode_images and encode_prompts make them. Needs no weight."""
    pipeline, config = without_weights(folder), TRANSFORMER.load_config(shipped.find(folder), subfolder="transformer")
    num_tokens = sample_with_logprob.packed_tokens(pipeline, resolution)
    text = dict(embeds=(width, config["joint_attention_dim"]), mask=(width,))
    return dict(latents=(num_tokens, config["in_channels"]), **text)


def predict_velocity(transformer, x: Tensor, t: Tensor, embeds: PromptEmbeds, guidance_scale: float) -> Tensor:
    """Guided velocity [B, N, C] float32 at x [B, N, C], t [B] in scheduler units (1000 sigma): the policy itself.

    Guidance as in Qwen-Image: neg + g (pos - neg), rescaled per token to the norm of pos. No second forward at g <= 1.
    """
    side, dtype = int(x.shape[1] ** 0.5), transformer.img_in.weight.dtype

    def forward(text: PromptEmbeds) -> Tensor:
        return transformer(
            hidden_states=x.to(dtype),
            timestep=t / 1000,
            encoder_hidden_states=text.embeds.to(dtype),
            encoder_hidden_states_mask=text.mask,
            img_shapes=[[(1, side, side)]] * len(x),
            return_dict=False,
        )[0].float()

    combined, positive = sample_with_logprob.guided(forward, embeds, len(x), guidance_scale)
    if guidance_scale <= 1:
        return positive
    return combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))


def unpack_latents(pipeline, latents: Tensor, resolution: int) -> Tensor:
    """[B, N, C] -> [B, c, h, w], as the VAE sees them but for its normalisation."""
    return pipeline._unpack_latents(latents, resolution, resolution, pipeline.vae_scale_factor)[:, :, 0]


def normalisation(vae) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the VAE's latents, [1, c, 1, 1, 1] f32 each."""
    values = vae.config.latents_mean, vae.config.latents_std
    return tuple(torch.tensor(v, device=vae.device).view(1, -1, 1, 1, 1) for v in values)


@torch.no_grad()
def encode_images(pipeline, images: Tensor, batch_size: int = 8) -> Tensor:
    """Images [B, 3, H, W] in [0, 1] -> their most likely latents [B, N, C] float32, `batch_size` at a time."""
    vae, (mean, std) = pipeline.vae, normalisation(pipeline.vae)

    def encode(part: Tensor) -> Tensor:
        z = (vae.encode(part[:, :, None].to(vae.dtype)).latent_dist.mode().float() - mean) / std
        return pipeline._pack_latents(z, len(z), z.shape[1], *z.shape[-2:])

    return sample_with_logprob.encode(encode, images, batch_size)


@torch.no_grad()
def decode_latents(pipeline, latents: Tensor, resolution: int, batch_size: int = 8) -> Tensor:
    """[B, N, C] -> images [B, 3, H, W] float32 in [0, 1], `batch_size` at a time."""
    vae, (mean, std) = pipeline.vae, normalisation(pipeline.vae)

    def decode(part: Tensor) -> Tensor:
        z = unpack_latents(pipeline, part, resolution)[:, :, None] * std + mean
        return vae.decode(z.to(vae.dtype), return_dict=False)[0][:, :, 0]

    return sample_with_logprob.decode(decode, latents, batch_size, loading.fixed_shape(vae))


THIS = sys.modules[__name__]
pipeline_with_logprob = partial(sample_with_logprob.sample_window, THIS, guidance_scale=4.0)
pipeline_with_logprob_perstep = partial(sample_with_logprob.sample_perstep, THIS, guidance_scale=4.0)
