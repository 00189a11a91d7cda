"""Stable Diffusion 3 and 3.5: diffusers' StableDiffusion3Pipeline taken apart into what training needs.

Two CLIP encoders and T5, pooled embeddings, latents [B, C, h, w], a static shift.
"""

from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import Size

T5_TOKENS = 256  # that StableDiffusion3Pipeline reads


class StableDiffusion3(FlowModel):
    """Latents are pictures [B, C, h, w]; the transformer was trained to see padding, and sees it."""

    NAME = "sd3"
    PIPELINE, TRANSFORMER = StableDiffusion3Pipeline, SD3Transformer2DModel
    SHARD_UNITS = ("JointTransformerBlock",)
    LORA_TARGETS = tuple(
        f"attn.{linear}"
        for linear in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    )
    PICTURES = True
    GUIDANCE_SCALE = 4.5
    CUDNN_ATTENTION = True
    GIVES_SIGMAS = False

    def check_size(self, size: Size) -> None:
        """Raises UserError also for a side beyond the learned position embeddings."""
        super().check_size(size)
        config = self.transformer_config
        largest = config["pos_embed_max_size"] * config["patch_size"] * self.pipeline.vae_scale_factor
        if max(size.height, size.width) > largest:
            raise UserError(f"an image of {size} pixels is too large: this model draws up to {largest} pixels a side")

    def check(self, prompts: list[Prompt], width: int | None) -> None:
        """Raises UserError for a prompt of more than `width` T5 tokens. CLIP reads the first 77 of its own."""
        tokenizer = self.pipeline.tokenizer_3
        if tokenizer is not None:  # pipelines may be without T5
            loading.check_lengths(prompts, lambda text: len(tokenizer(text).input_ids), width, T5_TOKENS)

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """`width` T5 tokens, None = diffusers' 256; L is this and CLIP's 77."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            *[prompt.text] * 3,
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=width or T5_TOKENS,
        )
        return Condition(embeds, pooled)

    def text_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        config, length = self.transformer_config, self.pipeline.tokenizer_max_length + width
        return dict(text_embeds=(length, config["joint_attention_dim"]), pooled=(config["pooled_projection_dim"],))

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        dtype = self.transformer.context_embedder.weight.dtype
        return self.transformer(
            hidden_states=x.to(dtype),
            timestep=t,
            encoder_hidden_states=condition.text_embeds.to(dtype),
            pooled_projections=condition.pooled.to(dtype),
            return_dict=False,
        )[0].float()
