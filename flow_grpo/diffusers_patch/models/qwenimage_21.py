"""Qwen-Image-2.1: diffusers' QwenImage21Pipeline taken apart into what training needs, without images to be edited.

One causal stream of text, then image, latents [B, N, C] of 16 x 16 pixels, guidance distilled in. Text does not see the
timestep. Images have an alpha channel, and are composited on white.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline, QwenImage21Transformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21AttnProcessor,
    _qwenimage21_prepare_qkv,
    apply_rotary_emb_qwen,
)
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin, Qwen3VLProcessor

from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import NUM_LEVELS, FlowModel
from flow_grpo.diffusers_patch.models.qwenimage import decoded, encoded
from flow_grpo.diffusers_patch.sde_with_logprob import Schedule
from flow_grpo.diffusers_patch.size import Size


class TextProcessor(Qwen3VLProcessor):
    """Part for texts of the pipeline's processor; the part for videos would need torchvision."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None):
        ProcessorMixin.__init__(self, tokenizer, chat_template=chat_template or tokenizer.chat_template)
        self.image_token = "<|image_pad|>"
        self.video_token = "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)


class QwenImage21Pipeline(diffusers.QwenImage21Pipeline):
    """Pipeline of diffusers, under its name, with a processor of texts."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike, **options: Any) -> "QwenImage21Pipeline":
        if options.get("processor") is None:
            tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path, subfolder="processor")
            options["processor"] = TextProcessor(tokenizer)
        return super().from_pretrained(pretrained_model_name_or_path, **options)


class QwenImage21(FlowModel):
    """Latents are tokens [B, N, C]; text is masked."""

    NAME = "qwenimage_21"
    PIPELINE = QwenImage21Pipeline
    TRANSFORMER = QwenImage21Transformer2DModel
    SHARD_UNITS = ("QwenImage21TransformerBlock",)
    LORA_TARGETS = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "img_mlp.proj",
        "img_mlp.gate_layer",
        "img_mlp.out",
    )
    TEXT_TOKENS = 8191  # positions in the transformer's table, but for the image's
    TEXT_WIDTH = "context_in_dim"
    GUIDANCE_SCALE = 1.0
    CUDNN_ATTENTION = False  # not tried
    CUTS_PADDING = True

    def __init__(self, pipeline: DiffusionPipeline, device: torch.device, transformer_config: Mapping | None = None):
        super().__init__(pipeline, device, transformer_config)
        if pipeline.transformer is not None:
            for block in pipeline.transformer.transformer_blocks:
                block.attn.processor = RowPositions()

    def check_size(self, size: Size) -> None:
        """Raise UserError for a side that is no multiple of 32: its pipeline would cut it."""
        super().check_size(size)
        if size.height % 32 or size.width % 32:
            raise UserError(f"{self.NAME} draws sides that are multiples of 32 pixels, not {size}")

    def num_text_tokens(self, prompt: Prompt) -> int:
        """Count tokens with those of the template, but for the system's message."""
        text = self.pipeline.prompt_template_t2i.format(prompt.text)
        return len(self.pipeline.processor.tokenizer(text).input_ids) - self.pipeline._drop_idx

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Take the text encoder's last states before its norm, without those of the system's message."""
        embeds, *_ = self.pipeline.encode_prompt(prompt.text, device=self.pipeline.text_encoder.device)
        return Condition(embeds)

    def grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of latents, each of which is a token."""
        factor = self.pipeline.vae_scale_factor
        return size.height // factor, size.width // factor

    def schedule(self, num_steps: int, size: Size) -> Schedule:
        """Set the weights' own sigmas, where they come with such. Raises UserError if these are not `num_steps`."""
        self.check_steps(num_steps)
        return self._schedule_of(num_steps, num_steps, size)

    def check_steps(self, num_steps: int, name: str = "num_steps") -> None:
        """Raise UserError for another number of steps than the weights have sigmas for."""
        sigmas = self.pipeline.config["sample_sigmas"]
        if sigmas and len(sigmas) != num_steps:
            raise UserError(
                f"{name} is {num_steps}, but these weights have sigmas of their own, for {len(sigmas)} steps"
            )

    def noise_levels(self, num_steps: int, size: Size) -> Tensor:
        return self._schedule_of(NUM_LEVELS, num_steps, size).timesteps

    def sigmas(self, num_levels: int) -> bool | list[float]:
        """Return the weights' own sigmas, where they come with such; of another number, between these and 0."""
        sigmas = self.pipeline.config["sample_sigmas"]
        if not sigmas:
            return True
        if len(sigmas) == num_levels:
            return sigmas
        num_sigmas = len(sigmas)
        places = np.arange(num_levels) / num_levels
        places_of_sigmas = np.arange(num_sigmas + 1) / num_sigmas
        return np.interp(places, places_of_sigmas, [*sigmas, 0.0]).tolist()

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """Compute what the transformer's own forward does of a batch whose image lies behind the longest text. Here it
        lies behind each row's own text, so that a row depends on no neighbour."""
        transformer = self.transformer
        num_text = condition.num_tokens
        dtype = transformer.img_in.weight.dtype
        text = transformer.txt_in(condition.text_embeds.to(dtype))
        image = transformer.img_in(x.to(dtype))
        tokens = torch.cat([text, image], 1)
        mask = None
        if condition.mask is not None:
            mask = F.pad(condition.mask, (0, image.shape[1]), value=True)

        # The timestep is rounded twice, as by the pipeline.
        time = t.to(dtype) / 1000
        is_image = None
        if transformer.config.causal_condition:
            # Text does not see the timestep: its time is 0, in one more row behind those of the images.
            time = F.pad(time, (0, 1))
            is_image = torch.arange(tokens.shape[1], device=x.device) >= num_text
        time = transformer.time_text_embed(time, tokens)

        modulation = transformer.modulation(time)
        angles = self._angles(condition, size)
        # A segment is its first token, its end, and whether it is text.
        segments = [(0, num_text, True)]
        # None: attention_mask, and then layer_cache, kv_cache_mode, cache_write_slice.
        block_inputs = (modulation, angles, None, is_image, None, None, None, segments, mask)
        tokens = self.through(transformer.transformer_blocks, tokens, *block_inputs)
        image = transformer.norm_out(tokens[:, num_text:], time[: len(x)])
        return transformer.proj_out(image).float()

    def _angles(self, condition: Condition, size: Size) -> Tensor:
        """Rotary angles of text tokens and of image tokens, [B, L, D / 2] complex. A text's positions are 0, 1, ... on
        three axes. The image is behind it on the first one, and around 0 on the others."""
        device = condition.text_embeds.device
        num_rows, num_text = condition.text_embeds.shape[:2]
        rows, columns = self.grid(size)
        # Outside, the positions would be made on the host, which waits for the device.
        with device:
            text_places = torch.arange(num_text)
            row_places = torch.arange(rows) - (rows - rows // 2)
            column_places = torch.arange(columns) - (columns - columns // 2)
            text_lengths = torch.full((num_rows,), num_text)
        if condition.mask is not None:
            text_lengths = condition.mask.sum(1)

        # Positions on the first axis are [B, L], since they depend on a row's text, on the others [L].
        image_frames = text_lengths[:, None].expand(-1, rows * columns)
        frames = torch.cat([text_places.expand(num_rows, -1), image_frames], 1)
        heights = torch.cat([text_places, row_places.repeat_interleave(columns)])
        widths = torch.cat([text_places, column_places.repeat(rows)])
        rope = self.transformer.pos_embed
        # The tables stay on the device, so that only the first forward copies them.
        rope.freqs = [table.to(device) for table in rope.freqs]
        frame_angles, height_angles, width_angles = rope.freqs
        return torch.cat(
            [
                frame_angles[frames],
                height_angles[heights].expand(num_rows, -1, -1),
                width_angles[widths].expand(num_rows, -1, -1),
            ],
            2,
        )

    def decode_batch(self, latents: Tensor, size: Size) -> Tensor:
        return on_white(decoded(self.pipeline, self.features(latents, size)))

    def encode_pictures(self, images: Tensor) -> Tensor:
        """Encode opaque images."""
        # Alpha is a fourth channel.
        opaque = F.pad(images, (0, 0, 0, 0, 0, 1), value=1.0)
        return encoded(self.pipeline, opaque)


def on_white(images: Tensor) -> Tensor:
    """Composite RGBA [B, 4, H, W] in [-1, 1] on white, to RGB [B, 3, H, W]."""
    alpha = (images[:, 3:].float() + 1) / 2
    return images[:, :3] * alpha + (1 - alpha)


class RowPositions(QwenImage21AttnProcessor):
    """Attention with rotary angles [B, L, D / 2] for each row; with angles [L, D / 2] it is that of diffusers."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        *args: Any,
        rotary_emb: Tensor | None = None,
        segments: list[tuple[int, int, bool]] | None = None,
        key_valid: Tensor | None = None,
        **other_inputs: Any,
    ) -> Tensor:
        """Attend among tokens [B, L, C]; segments [(0, number of text tokens, True)]; key_valid [B, L] bool."""
        assert not args, "blocks give all but the tokens by name"
        assert rotary_emb is not None
        if rotary_emb.ndim == 2:
            return super().__call__(
                attn, hidden_states, rotary_emb=rotary_emb, segments=segments, key_valid=key_valid, **other_inputs
            )
        # None: rotary_emb, layer_cache, kv_cache_mode, cache_write_slice.
        queries, keys, values, _ = _qwenimage21_prepare_qkv(attn, hidden_states, None, None, None, None)
        queries = _rotated(queries, rotary_emb)
        keys = _rotated(keys, rotary_emb)
        mask = None if key_valid is None else key_valid[:, None, None]

        # Text is causal, the image sees all. A text's padding comes after all that its own tokens see.
        assert segments is not None
        ((_, num_text, _),) = segments
        text = dispatch_attention_fn(
            queries[:, :num_text],
            keys[:, :num_text],
            values[:, :num_text],
            is_causal=True,
            backend=self._attention_backend,
        )
        image = dispatch_attention_fn(
            queries[:, num_text:], keys, values, attn_mask=mask, backend=self._attention_backend
        )
        out = torch.cat([text, image], 1).flatten(2).type_as(queries)
        for layer in attn.to_out:
            out = layer(out)
        return out


def _rotated(tokens: Tensor, angles: Tensor) -> Tensor:
    """Heads [B, L, H, D] rotated by angles [B, L, D / 2]; diffusers takes [L, D / 2] of heads' second dimension."""
    rotated = apply_rotary_emb_qwen(tokens.transpose(1, 2), angles, use_real=False)
    assert isinstance(rotated, Tensor)
    return rotated.transpose(1, 2)
