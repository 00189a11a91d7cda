"""Krea 2: diffusers' Krea2Pipeline taken apart into what training needs.

One stream of text, then image. Text is several layers of one encoder, which the transformer fuses itself.
"""

import itertools

from diffusers import Krea2Pipeline, Krea2Transformer2DModel
from torch import Tensor

from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.models.qwenimage import decoded, encoded
from flow_grpo.diffusers_patch.size import Size

# Shift of the distilled weights, whatever the size, which Krea2Pipeline has in its call.
DISTILLED_SHIFT = 1.15

BLOCK_LAYERS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.gate", "ff.up", "ff.down")


class Krea2(FlowModel):
    """Latents are packed [B, N, C]; text is masked, and its embeddings are those of all layers, one after another."""

    NAME = "krea2"
    PIPELINE = Krea2Pipeline
    TRANSFORMER = Krea2Transformer2DModel
    SHARD_UNITS = ("Krea2TransformerBlock",)
    # Blocks that fuse the text have layers of the same names. They are not adapted, so that no gradient flows there.
    LORA_TARGETS = tuple(
        f"transformer_blocks.{block}.{layer}" for block, layer in itertools.product(range(28), BLOCK_LAYERS)
    )
    TEXT_TOKENS = 512  # those of the template behind the system's message among them
    GUIDANCE_SCALE = 3.5  # of Krea-2-Raw; Krea-2-Turbo takes 0
    GUIDES_FROM_ZERO = True
    IN_COMFYUI = False  # its files have the original names, such as attn.wq for attn.to_q
    CUDNN_ATTENTION = False  # not tried
    CUTS_PADDING = True

    def num_text_tokens(self, prompt: Prompt) -> int:
        pipeline = self.pipeline
        tokens = pipeline.tokenizer(pipeline.prompt_template_encode_prefix + prompt.text).input_ids
        behind_prefix = len(tokens) - pipeline.prompt_template_encode_start_idx
        return behind_prefix + pipeline.prompt_template_encode_num_suffix_tokens

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Take the text encoder's states of several layers, without those of the system's message, [1, L, layers x D].

        The pipeline pads in front of the template's end. There is no padding here: all text is at one position, and
        does not see it.
        """
        states, _ = self.pipeline.encode_prompt(
            prompt.text,
            device=self.pipeline.text_encoder.device,
            max_sequence_length=self.num_text_tokens(prompt),
        )
        return Condition(states.flatten(2))

    def text_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        text_width = self.transformer_config["num_text_layers"] * self.transformer_config["text_hidden_dim"]
        return {"text_embeds": (width, text_width), "mask": (width,)}

    def shift(self, num_steps: int, size: Size) -> float | None:
        """Return the constant shift of distilled weights; other weights have one that is linear in the tokens."""
        return DISTILLED_SHIFT if self.pipeline.config["is_distilled"] else None

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """Give the transformer sigma as the timestep, which its pipeline rounds to the transformer's dtype."""
        transformer = self.transformer
        dtype = transformer.img_in.weight.dtype
        rows, columns = self.grid(size)
        num_layers = transformer.config.num_text_layers
        velocity = transformer(
            hidden_states=x.to(dtype),
            encoder_hidden_states=condition.text_embeds.to(dtype).unflatten(2, (num_layers, -1)),
            timestep=(t / 1000).to(dtype),
            position_ids=self.pipeline.prepare_position_ids(condition.num_tokens, rows, columns, x.device),
            encoder_attention_mask=condition.mask,
            return_dict=False,
        )[0]
        return velocity.float()

    def features(self, latents: Tensor, size: Size) -> Tensor:
        """Unpack latents [B, N, C] to [B, c, h, w]."""
        return self.pipeline._unpack_latents(latents, size.height, size.width)[:, :, 0]

    def decode_batch(self, latents: Tensor, size: Size) -> Tensor:
        return decoded(self.pipeline, self.features(latents, size))

    def encode_pictures(self, images: Tensor) -> Tensor:
        return encoded(self.pipeline, images)
