"""Qwen-Image: diffusers' QwenImagePipeline taken apart into the functions that training needs, and two entry points
that anyone with such a pipeline can call: `pipeline_with_logprob` and `pipeline_with_logprob_perstep`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import init_empty_weights
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from huggingface_hub import snapshot_download
from torch import Tensor
from torch.nn import functional as F

from flow_grpo import rng
from flow_grpo.diffusers_patch.denoise_with_logprob import TracedStep, branch_with_logprob, denoise_with_logprob
from flow_grpo.diffusers_patch.single_frame_vae import convolve_in_2d

PIPELINE = QwenImagePipeline
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


@dataclass(frozen=True)
class PromptEmbeds:
    """What the transformer is conditioned on. B rows, L text tokens, D text width."""

    embeds: Tensor  # [B, L, D], zero where padded
    mask: Tensor | None  # [B, L] bool, False where padded; None = no row is padded
    negative: Tensor | None  # [1, L', D] of the negative prompt, unpadded; None = no guidance

    def take(self, rows) -> "PromptEmbeds":
        """The given rows (slice or index tensor)."""
        return PromptEmbeds(self.embeds[rows], None if self.mask is None else self.mask[rows], self.negative)

    @classmethod
    def concat(cls, parts: list["PromptEmbeds"]) -> "PromptEmbeds":
        """Join along B; all parts padded to one width."""
        mask = None if parts[0].mask is None else torch.cat([p.mask for p in parts])
        return cls(torch.cat([p.embeds for p in parts]), mask, parts[0].negative)


def check_folder(folder: str) -> None:
    """Raises ValueError unless `folder` (or hub id) holds a QwenImagePipeline. Reads one json file."""
    try:
        found = PIPELINE.load_config(folder).get("_class_name")
    except OSError as error:
        raise ValueError(f"config.model {folder!r} is no diffusers folder and no hub id: {error}") from error
    if found != PIPELINE.__name__:
        raise ValueError(f"config.model {folder!r} holds a {found}, not a {PIPELINE.__name__}")


def transformer_folder(folder: str) -> Path:
    """Where the transformer's safetensors lie; a hub id is downloaded first."""
    if Path(folder).is_dir():
        return Path(folder, "transformer")
    return Path(snapshot_download(folder, allow_patterns=["transformer/*"]), "transformer")


def without_weights(folder: str) -> QwenImagePipeline:
    """The pipeline's tokenizer and scheduler alone, for checks that need no weight."""
    return PIPELINE.from_pretrained(folder, transformer=None, text_encoder=None, vae=None)


def load_pipeline(folder: str, device: torch.device, vae_dtype=torch.float32) -> QwenImagePipeline:
    """The pipeline with its transformer's weights still on the meta device: fsdp_utils.prepare fills them in.

    The text encoder is float32 on a CPU and bfloat16 elsewhere, the VAE `vae_dtype`.
    """
    with init_empty_weights():  # real RoPE tables, meta weights
        config = QwenImageTransformer2DModel.load_config(folder, subfolder="transformer")
        transformer = QwenImageTransformer2DModel.from_config(config)
    encoder_dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtypes = {"vae": vae_dtype, "default": encoder_dtype}
    pipeline = PIPELINE.from_pretrained(folder, transformer=transformer, dtype=dtypes)
    pipeline.vae.to(device).requires_grad_(False).eval()
    convolve_in_2d(pipeline.vae)
    pipeline.text_encoder.to(device).requires_grad_(False).eval()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def check_prompts(pipeline, prompts: list[str], width: int) -> None:
    """Raises ValueError for a prompt of more than `width` tokens. Needs the tokenizer only."""
    drop = pipeline.prompt_template_encode_start_idx
    for prompt in prompts:
        length = len(pipeline.tokenizer(pipeline.prompt_template_encode.format(prompt)).input_ids) - drop
        if length > width:
            raise ValueError(f"a prompt has {length} tokens, over config.text_tokens = {width}: {prompt!r}")


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
    negative = pipeline.encode_prompt(NEGATIVE_PROMPT, device)[0] if guided else None
    return PromptEmbeds(embeds, mask, negative)


def schedule(pipeline, num_steps: int, resolution: int, device):
    """A copy of the pipeline's scheduler with `timesteps` [T] and `sigmas` [T + 1] set for images of this size."""
    scheduler = copy.deepcopy(pipeline.scheduler)
    config = scheduler.config
    mu = calculate_shift(
        (resolution // (pipeline.vae_scale_factor * 2)) ** 2,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu, device=device)
    scheduler.sigmas = scheduler.sigmas.to(device)
    return scheduler


def initial_latents(pipeline, generators: list[torch.Generator], resolution: int, device) -> Tensor:
    """Standard normal [B, N, C] float32, row b from generators[b]."""
    tokens = (resolution // (pipeline.vae_scale_factor * 2)) ** 2
    return rng.normal((tokens, pipeline.transformer.config.in_channels), generators, device)


def predict_velocity(transformer, x: Tensor, t: Tensor, embeds: PromptEmbeds, guidance_scale: float) -> Tensor:
    """Guided velocity [B, N, C] float32 at x [B, N, C], t [B] in scheduler units (1000 sigma): the policy itself.

    Guidance as in Qwen-Image: neg + g (pos - neg), rescaled per token to the norm of pos. No second forward at g <= 1.
    """
    side, dtype = int(x.shape[1] ** 0.5), transformer.img_in.weight.dtype

    def forward(text: Tensor, mask: Tensor | None) -> Tensor:
        return transformer(
            hidden_states=x.to(dtype),
            timestep=t / 1000,
            encoder_hidden_states=text.to(dtype),
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, side, side)]] * len(x),
            return_dict=False,
        )[0].float()

    positive = forward(embeds.embeds, embeds.mask)
    if guidance_scale <= 1:
        return positive
    negative = forward(embeds.negative.expand(len(x), -1, -1), None)
    guided = negative + guidance_scale * (positive - negative)
    return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))


@torch.no_grad()
def decode_latents(pipeline, latents: Tensor, resolution: int, batch_size: int = 8) -> Tensor:
    """[B, N, C] -> images [B, 3, H, W] float32 in [0, 1], `batch_size` at a time."""
    vae = pipeline.vae
    channels = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean, device=vae.device, dtype=vae.dtype).view(channels)
    std = torch.tensor(vae.config.latents_std, device=vae.device, dtype=vae.dtype).view(channels)
    images = []
    for part in latents.split(batch_size):
        z = pipeline._unpack_latents(part, resolution, resolution, pipeline.vae_scale_factor).to(vae.dtype)
        images.append(vae.decode(z * std + mean, return_dict=False)[0][:, :, 0].float())
    return (torch.cat(images) / 2 + 0.5).clamp(0, 1)


@dataclass(frozen=True)
class Sampled:
    """What a pipeline with log-probs returns. B prompts; J outcomes per noisy step."""

    images: Tensor  # [B, 3, H, W] f32 in [0, 1]; per step: [B, K, J, 3, H, W]
    latents: Tensor  # [B, N, C] f32, of the images; per step: [B, K, J, N, C]
    trace: list[TracedStep]  # one per noisy step, in order


@torch.no_grad()
def pipeline_with_logprob(
    pipeline,
    prompts: list[str] | PromptEmbeds,
    generators: list[torch.Generator],
    *,
    window: range,
    velocity: Callable | None = None,
    num_steps: int = 10,
    resolution: int = 512,
    guidance_scale: float = 4.0,
    vae_batch_size: int = 8,
    **how,
) -> Sampled:
    """One image per prompt, by SDE steps inside `window` and ODE steps outside it (Flow-GRPO, arXiv:2505.05470).

    Args:
        prompts: B texts, or their embeddings.
        generators: B CPU generators; each draws its image's noise, then its steps' in order.
        window: the noisy steps, within [0, num_steps); empty for a deterministic image.
        velocity: (x, t, embeds) -> velocity; None = `predict_velocity` of the pipeline's own transformer.
        how: noise_level and sde_type of sde_step_with_logprob; unscored of denoise_with_logprob.
    """
    walk = _Walk.start(pipeline, prompts, generators, velocity, num_steps, resolution, guidance_scale)
    latents, trace = denoise_with_logprob(**vars(walk), window=window, **how)
    return Sampled(decode_latents(pipeline, latents, resolution, vae_batch_size), latents, trace)


@torch.no_grad()
def pipeline_with_logprob_perstep(
    pipeline,
    prompts: list[str] | PromptEmbeds,
    generators: list[torch.Generator],
    *,
    steps: range,
    num_branches: int = 6,
    completion_batch_size: int = 24,
    velocity: Callable | None = None,
    num_steps: int = 10,
    resolution: int = 512,
    guidance_scale: float = 4.0,
    vae_batch_size: int = 8,
    **how,
) -> Sampled:
    """A deterministic trunk per prompt and `num_branches` noisy branches at each of its `steps`, all finished
    deterministically and decoded (TempFlow-GRPO, arXiv:2508.04324). Arguments as in `pipeline_with_logprob`;
    `completion_batch_size` rows per forward for the branches on their way."""
    walk = _Walk.start(pipeline, prompts, generators, velocity, num_steps, resolution, guidance_scale)
    branching = dict(steps=steps, num_branches=num_branches, batch_size=completion_batch_size)
    latents, trace = branch_with_logprob(**vars(walk), **branching, **how)
    images = decode_latents(pipeline, latents.flatten(0, 2), resolution, vae_batch_size)
    return Sampled(images.unflatten(0, latents.shape[:3]), latents, trace)


@dataclass(frozen=True)
class _Walk:
    """The arguments that both walks of denoise_with_logprob.py take."""

    velocity: Callable
    scheduler: object
    latents: Tensor
    noise: Callable

    @classmethod
    def start(cls, pipeline, prompts, generators, velocity, num_steps, resolution, guidance_scale):
        embeds = prompts
        if not isinstance(prompts, PromptEmbeds):
            embeds = encode_prompts(pipeline, prompts, guided=guidance_scale > 1)
        if velocity is None:
            velocity = partial(predict_velocity, pipeline.transformer, guidance_scale=guidance_scale)
        device = embeds.embeds.device
        latents = initial_latents(pipeline, generators, resolution, device)
        return cls(
            velocity=lambda x, t, rows: velocity(x, t, embeds=embeds.take(rows)),
            scheduler=schedule(pipeline, num_steps, resolution, device),
            latents=latents,
            noise=lambda num: rng.normal((num, *latents.shape[1:]), generators, device).flatten(0, 1),
        )
