"""FLUX.2-klein: diffusers' Flux2KleinPipeline taken apart into what training needs.

Text is three layers of one encoder; latents are normalised per channel of a patch; the shift depends on the number of
steps, too. Distilled weights take no guidance; those of the base variants take it as a second forward.
"""

from typing import Any

import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import JOINT_ATTENTION, FlowModel
from flow_grpo.diffusers_patch.size import Size


class Flux2Klein(FlowModel):
    """Latents are pictures of patches [B, C, h, w]; the transformer was trained to see padding, and sees it."""

    NAME = "flux2_klein"
    PIPELINE = Flux2KleinPipeline
    TRANSFORMER = Flux2Transformer2DModel
    SHARD_UNITS = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    # "attn.to_out" alone would also match the other blocks' "attn.to_out.0", so that the single blocks, of which the
    # 9 B model has 24, are numbered.
    LORA_TARGETS = (
        *JOINT_ATTENTION,
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
        "attn.to_qkv_mlp_proj",
        *(f"single_transformer_blocks.{block}.attn.to_out" for block in range(24)),
    )
    PICTURES = True
    TEXT_TOKENS = 512  # its chat template's among them
    GUIDANCE_SCALE = 1.0  # of distilled weights; those of the base variants take 4
    CUDNN_ATTENTION = False  # not tried

    def num_text_tokens(self, prompt: Prompt) -> int:
        return loading.chat_length(self.pipeline.tokenizer, prompt.text, thinks=False)

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Encode to `width` tokens, None = diffusers' 512, of three layers' states each."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt.text,
            device=self.pipeline.text_encoder.device,
            max_sequence_length=width or self.TEXT_TOKENS,
        )
        return Condition(embeds)

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Shape [C, h, w] of patches."""
        rows, columns = self.grid(size)
        return self.transformer_config["in_channels"], rows, columns

    def shift(self, num_steps: int, size: Size) -> float:
        """Compute the shift that was fitted to sizes and numbers of sampled steps, up to 200."""
        return compute_empirical_mu(self.num_tokens(size), num_steps)

    def velocity(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """Guide as FlowModel does. Raises UserError for guidance of distilled weights, which diffusers ignores."""
        if self.is_guided(guidance_scale) and self.pipeline.config["is_distilled"]:
            raise UserError(f"the guidance scale is {guidance_scale}, but these weights are distilled: set 1")
        return super().velocity(x, t, condition, guidance_scale, size)

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """Give the transformer patches as tokens, and one row's positions, which are everyone's."""
        transformer = self.transformer
        pipeline = self.pipeline
        dtype = transformer.x_embedder.weight.dtype
        # Outside, the positions would be made on the host, which waits for the device.
        with x.device:
            text_ids = pipeline._prepare_text_ids(condition.text_embeds[:1])
            image_ids = pipeline._prepare_latent_ids(x[:1])
        velocity = transformer(
            hidden_states=pipeline._pack_latents(x.to(dtype)),
            timestep=t / 1000,
            encoder_hidden_states=condition.text_embeds.to(dtype),
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        # Tokens [B, N, C] are patches [B, C, h, w] again.
        return velocity.float().transpose(1, 2).reshape(x.shape)

    def features(self, latents: Tensor, size: Size) -> Tensor:
        """Unpack patches [B, 4 c, h / 2, w / 2] to [B, c, h, w]."""
        return self.pipeline._unpatchify_latents(latents)

    def decode_batch(self, latents: Tensor, size: Size) -> Tensor:
        """Decode patches, whose channels have a mean and a standard deviation each."""
        vae = self.pipeline.vae
        mean, std = normalisation(vae)
        z = self.features(latents * std + mean, size)
        return vae.decode(z.to(vae.dtype), return_dict=False)[0]

    def encode_batch(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        mean, std = normalisation(vae)
        z = vae.encode(images.to(vae.dtype)).latent_dist.mode().float()
        return (self.pipeline._patchify_latents(z) - mean) / std


def normalisation(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of patches, [1, C, 1, 1] f32 each: those of the VAE's batch norm."""
    mean = vae.bn.running_mean.float().view(1, -1, 1, 1)
    variance = vae.bn.running_var.float().view(1, -1, 1, 1)
    return mean, torch.sqrt(variance + vae.config.batch_norm_eps)
