"""Stable Diffusion 3 and 3.5: diffusers' StableDiffusion3Pipeline taken apart into what training needs."""

from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import JOINT_ATTENTION, FlowModel
from flow_grpo.diffusers_patch.size import Size


class StableDiffusion3(FlowModel):
    """Latents are pictures [B, C, h, w]; the transformer was trained to see padding, and sees it."""

    NAME = "sd3"
    PIPELINE = StableDiffusion3Pipeline
    TRANSFORMER = SD3Transformer2DModel
    SHARD_UNITS = ("JointTransformerBlock",)
    LORA_TARGETS = JOINT_ATTENTION
    PICTURES = True
    TEXT_TOKENS = 256  # of T5; CLIP reads the first 77 of its own
    GUIDANCE_SCALE = 4.5
    CUDNN_ATTENTION = True
    GIVES_SIGMAS = False

    def check_size(self, size: Size) -> None:
        """Raise UserError for a side beyond the learned position embeddings."""
        super().check_size(size)
        config = self.transformer_config
        largest = config["pos_embed_max_size"] * config["patch_size"] * self.pipeline.vae_scale_factor
        if max(size.height, size.width) > largest:
            raise UserError(f"an image of {size} pixels is too large: this model draws up to {largest} pixels a side")

    def num_text_tokens(self, prompt: Prompt) -> int:
        tokenizer = self.pipeline.tokenizer_3
        # Pipelines may be without T5.
        if tokenizer is None:
            return 0
        return len(tokenizer(prompt.text).input_ids)

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Encode to `width` T5 tokens, None = diffusers' 256; L is this and CLIP's 77."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompt.text,
            prompt_2=prompt.text,
            prompt_3=prompt.text,
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=width or self.TEXT_TOKENS,
        )
        return Condition(embeds, pooled)

    def text_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        # CLIP's tokens come before T5's, whatever the width.
        shapes = super().text_shapes(self.pipeline.tokenizer_max_length + width)
        shapes["pooled"] = (self.transformer_config["pooled_projection_dim"],)
        return shapes

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        assert condition.pooled is not None
        dtype = self.transformer.context_embedder.weight.dtype
        velocity = self.transformer(
            hidden_states=x.to(dtype),
            timestep=t,
            encoder_hidden_states=condition.text_embeds.to(dtype),
            pooled_projections=condition.pooled.to(dtype),
            return_dict=False,
        )[0]
        return velocity.float()
