"""Qwen-Image-2.1: diffusers' QwenImage21Pipeline taken apart into what training needs, without images to be edited.

One causal stream of text, then image, latents [B, N, C] of 16 x 16 pixels, guidance distilled in. Text does not see the
timestep. Images have an alpha channel, and are composited on white.
"""

import diffusers
import numpy as np
import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21AttnProcessor,
    _qwenimage21_prepare_qkv,
    apply_rotary_emb_qwen,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin, Qwen3VLProcessor

from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import NUM_LEVELS, FlowModel
from flow_grpo.diffusers_patch.models.qwenimage import decoded, encoded
from flow_grpo.diffusers_patch.size import Size


class TextProcessor(Qwen3VLProcessor):
    """The part for texts of the pipeline's processor; the part for videos would need torchvision."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None):
        ProcessorMixin.__init__(self, tokenizer, chat_template=chat_template or tokenizer.chat_template)
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])


class QwenImage21Pipeline(diffusers.QwenImage21Pipeline):
    """Diffusers' own, under its name, with a processor of texts."""

    @classmethod
    def from_pretrained(cls, folder: str, **options) -> "QwenImage21Pipeline":
        if options.get("processor") is None:
            options["processor"] = TextProcessor(AutoTokenizer.from_pretrained(folder, subfolder="processor"))
        return super().from_pretrained(folder, **options)


class QwenImage21(FlowModel):
    """Latents are tokens [B, N, C]; text is masked."""

    NAME = "qwenimage_21"
    PIPELINE, TRANSFORMER = QwenImage21Pipeline, QwenImage21Transformer2DModel
    SHARD_UNITS = ("QwenImage21TransformerBlock",)
    LORA_TARGETS = (
        *(f"attn.{linear}" for linear in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"img_mlp.{linear}" for linear in ("proj", "gate_layer", "out")),
    )
    TEXT_TOKENS, TEXT_WIDTH = 8191, "context_in_dim"  # positions in the transformer's table, but for the image's
    GUIDANCE_SCALE = 1.0
    CUDNN_ATTENTION = False  # not tried
    CUTS_PADDING = True

    def __init__(self, pipeline, device, transformer_config=None):
        super().__init__(pipeline, device, transformer_config)
        if pipeline.transformer is not None:
            for block in pipeline.transformer.transformer_blocks:
                block.attn.processor = OwnPositions()

    def check_size(self, size: Size) -> None:
        """Raises UserError for a side that is no multiple of 32: its pipeline would cut it."""
        if size.height % 32 or size.width % 32:
            raise UserError(f"{self.NAME} draws sides that are multiples of 32 pixels, not {size}")

    def num_text_tokens(self, prompt: Prompt) -> int:
        """With those of the template, but for the system's message."""
        text = self.pipeline.prompt_template_t2i.format(prompt.text)
        return len(self.pipeline.processor.tokenizer(text).input_ids) - self.pipeline._drop_idx

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """The text encoder's last states before its norm, without those of the system's message."""
        return Condition(self.pipeline.encode_prompt(prompt.text, device=self.pipeline.text_encoder.device)[0])

    def grid(self, size: Size) -> tuple[int, int]:
        """Of latents: each is a token."""
        factor = self.pipeline.vae_scale_factor
        return size.height // factor, size.width // factor

    def schedule(self, num_steps: int, size: Size):
        """With sigmas of the weights' own, where they come with such. Raises UserError if these are not `num_steps`."""
        self.check_steps(num_steps)
        return self._schedule_of(num_steps, num_steps, size)

    def check_steps(self, num_steps: int, name: str = "num_steps") -> None:
        """Raises UserError for another number of steps than the weights have sigmas for."""
        own = self.pipeline.config.sample_sigmas
        if own and len(own) != num_steps:
            raise UserError(f"{name} is {num_steps}, but these weights have sigmas of their own, for {len(own)} steps")

    def noise_levels(self, num_steps: int, size: Size) -> Tensor:
        return self._schedule_of(NUM_LEVELS, num_steps, size).timesteps

    def sigmas(self, num_levels: int) -> bool | list[float]:
        """The weights' own sigmas, where they come with such; of another number, between these and 0."""
        own = self.pipeline.config.sample_sigmas
        if not own or len(own) == num_levels:
            return own or True
        places = np.arange(num_levels) / num_levels
        return np.interp(places, np.arange(len(own) + 1) / len(own), [*own, 0.0]).tolist()

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """What the transformer's own forward computes of a batch whose image lies behind the longest text. Here it lies
        behind each row's own text, so that a row depends on no neighbour."""
        transformer, num_text = self.transformer, condition.num_tokens
        dtype = transformer.img_in.weight.dtype
        text, image = transformer.txt_in(condition.text_embeds.to(dtype)), transformer.img_in(x.to(dtype))
        tokens, is_image, mask = torch.cat([text, image], 1), None, None
        time = t.to(dtype) / 1000  # rounded twice, as by the pipeline
        if transformer.config.causal_condition:  # the last row is the text's
            time, is_image = F.pad(time, (0, 1)), torch.arange(tokens.shape[1], device=x.device) >= num_text
        time = transformer.time_text_embed(time, tokens)
        if condition.mask is not None:
            mask = F.pad(condition.mask, (0, image.shape[1]), value=True)
        angles, segments = self._angles(condition, size), [(0, num_text, True)]
        others = transformer.modulation(time), angles, None, is_image, None, None, None, segments, mask
        tokens = self.through(transformer.transformer_blocks, tokens, *others)
        return transformer.proj_out(transformer.norm_out(tokens[:, num_text:], time[: len(x)])).float()

    def _angles(self, condition: Condition, size: Size) -> Tensor:
        """Of text tokens and of image tokens, [B, L, D / 2] complex. A text's are 0, 1, ... on three axes. The image is
        behind it on the first one, and around 0 on the others."""
        rope, (rows, columns), device = self.transformer.pos_embed, self.grid(size), condition.text_embeds.device
        num_rows, num_text = condition.text_embeds.shape[:2]
        tables = rope.freqs = [table.to(device) for table in rope.freqs]
        with device:
            text, row, column = torch.arange(num_text), *(torch.arange(n) - (n - n // 2) for n in (rows, columns))
            lengths = torch.full((num_rows,), num_text) if condition.mask is None else condition.mask.sum(1)
        frames = torch.cat([text.expand(num_rows, -1), lengths[:, None].expand(-1, rows * columns)], 1)
        sides = row.repeat_interleave(columns), column.repeat(rows)
        around = [table[torch.cat([text, side])].expand(num_rows, -1, -1) for table, side in zip(tables[1:], sides)]
        return torch.cat([tables[0][frames], *around], 2)

    def decode_batch(self, latents: Tensor, size: Size) -> Tensor:
        return on_white(decoded(self.pipeline, self.features(latents, size)))

    def encode_batch(self, images: Tensor) -> Tensor:
        """Of opaque images."""
        z = encoded(self.pipeline, F.pad(images, (0, 0, 0, 0, 0, 1), value=1.0))
        return self.pipeline._pack_latents(z, *z.shape)


def on_white(images: Tensor) -> Tensor:
    """RGBA [B, 4, H, W] in [-1, 1] -> RGB [B, 3, H, W]."""
    alpha = (images[:, 3:].float() + 1) / 2
    return images[:, :3] * alpha + (1 - alpha)


class OwnPositions(QwenImage21AttnProcessor):
    """Attention with rotary angles [B, L, D / 2] of each row's own; with angles [L, D / 2] it is diffusers' own."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        *,
        rotary_emb: Tensor,
        segments: list[tuple[int, int, bool]] | None,
        key_valid: Tensor | None,
        **of_diffusers,
    ) -> Tensor:
        """Tokens [B, L, C]; segments [(0, number of text tokens, True)]; key_valid [B, L] bool."""
        if rotary_emb.ndim == 2:
            of_diffusers |= dict(rotary_emb=rotary_emb, segments=segments, key_valid=key_valid)
            return super().__call__(attn, hidden_states, **of_diffusers)
        queries, keys, values, _ = _qwenimage21_prepare_qkv(attn, hidden_states, None, None, None, None)
        queries, keys = (
            apply_rotary_emb_qwen(tokens.transpose(1, 2), rotary_emb, use_real=False).transpose(1, 2)
            for tokens in (queries, keys)
        )
        ((_, num_text, _),) = segments
        mask, options = None if key_valid is None else key_valid[:, None, None], dict(backend=self._attention_backend)
        text, image = queries[:, :num_text], queries[:, num_text:]
        # what is padded comes after all that a text's own tokens see
        text = dispatch_attention_fn(text, keys[:, :num_text], values[:, :num_text], is_causal=True, **options)
        image = dispatch_attention_fn(image, keys, values, attn_mask=mask, **options)
        out = torch.cat([text, image], 1).flatten(2).type_as(queries)
        for layer in attn.to_out:
            out = layer(out)
        return out
