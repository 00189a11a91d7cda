"""FLUX.1: diffusers' FluxPipeline taken apart into what training needs."""

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor

from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import JOINT_ATTENTION, FlowModel
from flow_grpo.diffusers_patch.size import Size


class Flux(FlowModel):
    """Latents are packed [B, N, C]; the transformer was trained to see padding, and sees it."""

    NAME = "flux"
    PIPELINE = FluxPipeline
    TRANSFORMER = FluxTransformer2DModel
    SHARD_UNITS = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    LORA_TARGETS = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
    TEXT_TOKENS = 512  # of T5; CLIP reads the first 77 of its own
    GUIDANCE_SCALE = 3.5
    # cuDNN's attention gave NaN gradients or an illegal memory access in FLUX.1's backward (torch 2.11, cuDNN 9.19,
    # H200); flash attention, the next choice, does not.
    CUDNN_ATTENTION = False
    NEGATIVE_PROMPT = None  # guidance is an input of the distilled transformer

    def num_text_tokens(self, prompt: Prompt) -> int:
        return len(self.pipeline.tokenizer_2(prompt.text).input_ids)

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Encode to `width` T5 tokens, None = diffusers' 512."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompt.text,
            prompt_2=prompt.text,
            device=self.pipeline.text_encoder.device,
            max_sequence_length=width or self.TEXT_TOKENS,
        )
        return Condition(embeds, pooled)

    def text_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        shapes = super().text_shapes(width)
        shapes["pooled"] = (self.transformer_config["pooled_projection_dim"],)
        return shapes

    def positions(self, rows: int, columns: int) -> Tensor:
        """Positions [rows * columns, 3] of a picture's tokens: the picture's number, here 0, row and column."""
        # Outside, the positions would be made on the host, which waits for the device.
        with self.device:
            return FluxPipeline._prepare_latent_image_ids(1, rows, columns, self.device, torch.float32)

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        return self.transformed(x, t, condition, guidance_scale, self.positions(*self.grid(size)))

    def transformed(
        self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, positions: Tensor
    ) -> Tensor:
        """Run a forward of tokens [B, N, C] at `positions` [N, 3].

        The transformer has `guidance_scale` as an input; FLUX.1-schnell, which has none, ignores it.
        """
        transformer = self.transformer
        assert condition.pooled is not None
        dtype = transformer.x_embedder.weight.dtype
        guidance = None
        if transformer.config.guidance_embeds:
            guidance = torch.full_like(t, guidance_scale)
        velocity = transformer(
            hidden_states=x.to(dtype),
            timestep=t / 1000,
            guidance=guidance,
            encoder_hidden_states=condition.text_embeds.to(dtype),
            pooled_projections=condition.pooled.to(dtype),
            txt_ids=torch.zeros(condition.num_tokens, 3, device=x.device, dtype=dtype),
            img_ids=positions.to(dtype),
            return_dict=False,
        )[0]
        return velocity.float()
