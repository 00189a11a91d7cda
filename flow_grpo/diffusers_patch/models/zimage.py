"""Z-Image and Z-Image-Turbo: diffusers' ZImagePipeline taken apart into what training needs."""

from typing import NamedTuple

import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import Size

PATCH = "2-1"  # names the layers for patches of 2 x 2 latents and 1 frame


class ZImage(FlowModel):
    """Latents are pictures [B, C, h, w]. The transformer sees text, and padding of its own up to a multiple of 32
    tokens; what lies behind that is masked."""

    NAME = "zimage"
    PIPELINE = ZImagePipeline
    TRANSFORMER = ZImageTransformer2DModel
    SHARD_UNITS = ("ZImageTransformerBlock",)
    LORA_TARGETS = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
    PICTURES = True
    TEXT_TOKENS = 512  # its chat template's among them
    TEXT_WIDTH = "cap_feat_dim"
    GUIDANCE_SCALE = 4.0  # of Z-Image; Z-Image-Turbo takes 0
    GUIDES_FROM_ZERO = True
    CUDNN_ATTENTION = False  # as fast: benchmarks/RESULTS.md
    CUTS_PADDING = True

    def num_text_tokens(self, prompt: Prompt) -> int:
        return loading.chat_length(self.pipeline.tokenizer, prompt.text, thinks=True)

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Take the text encoder's last states but one, those of the template among them."""
        device = self.pipeline.text_encoder.device
        states_of_prompts, _ = self.pipeline.encode_prompt(prompt.text, device, do_classifier_free_guidance=False)
        # A prompt's states are [L, D].
        (states,) = states_of_prompts
        return Condition(states[None])

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """Compute what the transformer's own forward does of a list of captions, which it joins to the width of the
        longest. Here all rows have the condition's width, so that shapes depend on no prompt."""
        transformer = self.transformer
        embed = transformer.all_x_embedder[PATCH]
        project = transformer.all_final_layer[PATCH]
        dtype = embed.weight.dtype
        time = transformer.t_embedder((1000 - t) / 1000 * transformer.t_scale).to(dtype)

        # Image tokens [B, N, D], then learned padding up to a multiple of 32.
        num_tokens = self.num_tokens(size)
        image = embed(patches(x.to(dtype)))
        padding = transformer.x_pad_token.expand(len(x), -num_tokens % SEQ_MULTI_OF, -1)
        image = torch.cat([image, padding], 1)

        # Text tokens [B, L, D], in which learned padding stands in for what is no prompt's own.
        padded = PaddedText.of(condition)
        text = transformer.cap_embedder(padded.embeds.to(dtype))
        text = torch.where(padded.is_own[..., None], text, transformer.cap_pad_token)
        mask = None
        if condition.mask is not None and padded.seen.shape[1] > SEQ_MULTI_OF:
            mask = padded.seen

        # Both parts are refined apart, then joined, the image first.
        image_angles, text_angles = self._angles(padded.seen, size)
        image = self.through(transformer.noise_refiner, image, None, image_angles, time)
        text = self.through(transformer.context_refiner, text, mask, text_angles)
        if mask is not None:
            mask = F.pad(mask, (image.shape[1], 0), value=True)
        joint = torch.cat([image, text], 1)
        angles = torch.cat([image_angles, text_angles], 1)
        joint = self.through(transformer.layers, joint, mask, angles, time)
        rows, columns = self.grid(size)
        return -pictures(project(joint[:, :num_tokens], c=time), rows, columns).float()

    def _angles(self, seen: Tensor, size: Size) -> tuple[Tensor, Tensor]:
        """Rotary angles of image tokens and of text tokens, [B, L, D / 2] complex. Text is at 1, 2, ..., the image
        behind the text that is `seen` [B, L], and the image's padding at 0."""
        num_rows, width = seen.shape
        make_grid = self.transformer.create_coordinate_grid

        # Positions [B, L, 3] on three axes.
        text = make_grid((width, 1, 1), (1, 0, 0), seen.device).flatten(0, 2)
        text = text.expand(num_rows, -1, -1)

        # Positions [B, N, 3] of an image: only the first axis moves with the length of a row's text.
        rows, columns = self.grid(size)
        image = make_grid((1, rows, columns), device=seen.device).flatten(0, 2)
        first_behind = 1 + seen.sum(1)
        image = image + F.pad(first_behind[:, None, None], (0, 2))
        image = F.pad(image, (0, 0, 0, -image.shape[1] % SEQ_MULTI_OF))

        rope = self.transformer.rope_embedder
        image_angles = rope(image.flatten(0, 1)).unflatten(0, (num_rows, -1))
        text_angles = rope(text.flatten(0, 1)).unflatten(0, (num_rows, -1))
        return image_angles, text_angles


class PaddedText(NamedTuple):
    """Text of a multiple of 32 tokens."""

    embeds: Tensor  # [B, L, D]
    is_own: Tensor  # [B, L] bool, tokens of the prompt
    seen: Tensor  # [B, L] bool, these and the padding in the last 32 tokens that have any of them

    @classmethod
    def of(cls, condition: Condition) -> "PaddedText":
        missing = -condition.num_tokens % SEQ_MULTI_OF
        padded = condition.padded(condition.num_tokens + missing)
        assert padded.mask is not None
        seen = padded.mask.unflatten(1, (-1, SEQ_MULTI_OF)).any(2).repeat_interleave(SEQ_MULTI_OF, 1)
        return cls(padded.text_embeds, padded.mask, seen)


def patches(x: Tensor) -> Tensor:
    """Cut [B, C, h, w] into [B, N, 4 C]: 2 x 2 latents, each with its channels."""
    # Sides are split: [B, C, h / 2, 2, w / 2, 2].
    x = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def pictures(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Put patches [B, N, 4 C] together to [B, C, h, w]."""
    # Tokens are laid out: [B, h / 2, w / 2, 2, 2, C].
    x = tokens.unflatten(1, (rows, columns)).unflatten(3, (2, 2, -1))
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)
