"""Wan 2.1, text to video: diffusers' WanPipeline taken apart into what training needs.

Published weights come with UniPC's scheduler, of which training takes the sigmas.
"""

from collections.abc import Mapping

import torch
from diffusers import DiffusionPipeline, WanPipeline, WanTransformer3DModel
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.models.qwenimage import normalisation
from flow_grpo.diffusers_patch.size import Size


class Wan(FlowModel):
    """Latents are videos [B, C, f, h, w], of which the first stands for one frame and the others for four each; the
    transformer was trained to see padding, and sees it."""

    NAME = "wan"
    PIPELINE = WanPipeline
    TRANSFORMER = WanTransformer3DModel
    SHARD_UNITS = ("WanTransformerBlock",)
    LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    TEXT_TOKENS = 512
    TEXT_WIDTH = "text_dim"
    GUIDANCE_SCALE = 5.0
    FRAMES_PER_LATENT = 4
    CUDNN_ATTENTION = False  # not tried
    IN_COMFYUI = False  # it has the original names, such as self_attn.q for attn1.to_q
    COMPILES_DECODER = False  # its calls share a list of what the frames before have left
    GIVES_SIGMAS = False

    def __init__(self, pipeline: DiffusionPipeline, device: torch.device, transformer_config: Mapping | None = None):
        """Raise UserError for weights of Wan 2.2, which the same pipeline class draws with."""
        super().__init__(pipeline, device, transformer_config)
        if pipeline.config["boundary_ratio"] is not None:
            raise UserError(
                "these weights have two transformers, for noisy steps and for the others (Wan 2.2 A14B), and one is "
                "trained here; take Wan 2.1's weights for text to video"
            )
        if pipeline.config["expand_timesteps"]:
            raise UserError(
                "these weights take a timestep for each token, to begin with a given picture (Wan 2.2 TI2V), which is "
                "not trained here; take Wan 2.1's weights for text to video"
            )

    def num_text_tokens(self, prompt: Prompt) -> int:
        return len(self.pipeline.tokenizer(prompt.text).input_ids)

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Encode to `width` tokens, None = the 512 of diffusers; those behind the prompt's own are 0."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt.text,
            do_classifier_free_guidance=False,
            max_sequence_length=width or self.TEXT_TOKENS,
            device=self.pipeline.text_encoder.device,
        )
        return Condition(embeds)

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Shape [C, f, h, w] of a video's latents."""
        side = self.pipeline.vae_scale_factor_spatial
        num_latents = 1 + (size.frames - 1) // self.FRAMES_PER_LATENT
        return self.transformer_config["in_channels"], num_latents, size.height // side, size.width // side

    def num_tokens(self, size: Size) -> int:
        """Tokens of the transformer, of 2 x 2 latents of one frame each."""
        _, num_latents, height, width = self.latent_shape(size)
        return num_latents * (height // 2) * (width // 2)

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        dtype = self.transformer.patch_embedding.weight.dtype
        velocity = self.transformer(x.to(dtype), t, condition.text_embeds.to(dtype), return_dict=False)[0]
        return velocity.float()

    def features(self, latents: Tensor, size: Size) -> Tensor:
        """Fold frames into channels, [B, C f, h, w]."""
        return latents.flatten(1, 2)

    def decode_batch(self, latents: Tensor, size: Size) -> Tensor:
        """Decode to videos [B, f, 3, H, W] or, of one frame, to images. Channels have a mean and a std each."""
        vae = self.pipeline.vae
        mean, std = normalisation(vae)
        z = latents * std + mean
        decoded = vae.decode(z.to(vae.dtype), return_dict=False)[0]
        # The VAE has channels before frames.
        videos = decoded.transpose(1, 2)
        if size.frames == 1:
            return videos[:, 0]
        return videos

    def encode_batch(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        mean, std = normalisation(vae)
        videos = images if images.ndim == 5 else images[:, None]
        latents = vae.encode(videos.transpose(1, 2).to(vae.dtype)).latent_dist.mode()
        return (latents.float() - mean) / std
