"""Z-Image and Z-Image-Turbo: diffusers' ZImagePipeline taken apart into what training needs."""

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
    PIPELINE, TRANSFORMER = ZImagePipeline, ZImageTransformer2DModel
    SHARD_UNITS = ("ZImageTransformerBlock",)
    LORA_TARGETS = tuple(f"attention.{linear}" for linear in ("to_q", "to_k", "to_v", "to_out.0"))
    PICTURES = True
    TEXT_TOKENS, TEXT_WIDTH = 512, "cap_feat_dim"  # its chat template's tokens among them
    GUIDANCE_SCALE = 4.0  # of Z-Image; Z-Image-Turbo takes 0
    CUDNN_ATTENTION = False  # as fast: benchmarks/RESULTS.md
    CUTS_PADDING = True

    def num_text_tokens(self, prompt: Prompt) -> int:
        return loading.chat_length(self.pipeline.tokenizer, prompt.text, thinks=True)

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """The text encoder's last states but one, those of the template among them."""
        device = self.pipeline.text_encoder.device
        (states,), _ = self.pipeline.encode_prompt(prompt.text, device, do_classifier_free_guidance=False)
        return Condition(states[None])

    @classmethod
    def is_guided(cls, guidance_scale: float) -> bool:
        """Above 0: a scale is 1 less than other models', as in ZImagePipeline."""
        return guidance_scale > 0

    @staticmethod
    def guide(positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """Guidance as in Z-Image: pos + g (pos - neg)."""
        return positive + guidance_scale * (positive - negative)

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """What the transformer's own forward computes of a list of captions, which it joins to the width of the
        longest. Here all rows have the condition's width, so that shapes depend on no prompt."""
        transformer, num_tokens = self.transformer, self.num_tokens(size)
        embed, project = transformer.all_x_embedder[PATCH], transformer.all_final_layer[PATCH]
        time = transformer.t_embedder((1000 - t) / 1000 * transformer.t_scale).to(embed.weight.dtype)
        text, is_text, seen = padded_text(condition)
        image_angles, text_angles = self._angles(seen, size)
        mask = seen if condition.mask is not None and seen.shape[1] > SEQ_MULTI_OF else None

        image = embed(patches(x.to(embed.weight.dtype)))
        padding = transformer.x_pad_token.expand(len(x), -num_tokens % SEQ_MULTI_OF, -1)
        image = self.through(transformer.noise_refiner, torch.cat([image, padding], 1), None, image_angles, time)
        text = transformer.cap_embedder(text.to(embed.weight.dtype))
        text = torch.where(is_text[..., None], text, transformer.cap_pad_token)
        text = self.through(transformer.context_refiner, text, mask, text_angles)

        mask = None if mask is None else F.pad(mask, (image.shape[1], 0), value=True)
        joint, angles = torch.cat([image, text], 1), torch.cat([image_angles, text_angles], 1)
        joint = self.through(transformer.layers, joint, mask, angles, time)
        return -pictures(project(joint[:, :num_tokens], c=time), *self.grid(size)).float()

    def _angles(self, seen: Tensor, size: Size) -> tuple[Tensor, Tensor]:
        """Of image tokens and of text tokens, [B, L, D / 2] complex. Text is at 1, 2, ..., the image behind the text
        that is `seen` [B, L], and the image's padding at 0."""
        places, (num_rows, width) = self.transformer.create_coordinate_grid, seen.shape
        image = places((1, *self.grid(size)), device=seen.device).flatten(0, 2)
        image = image + F.pad(1 + seen.sum(1)[:, None, None], (0, 2))
        image = F.pad(image, (0, 0, 0, -image.shape[1] % SEQ_MULTI_OF))
        text = places((width, 1, 1), (1, 0, 0), seen.device).flatten(0, 2).expand(num_rows, -1, -1)
        rope = self.transformer.rope_embedder
        return tuple(rope(part.flatten(0, 1)).unflatten(0, (num_rows, -1)) for part in (image, text))


def padded_text(condition: Condition) -> tuple[Tensor, Tensor, Tensor]:
    """Text [B, L, D] of a multiple of 32 tokens; which are a prompt's own, and which are seen, [B, L] bool each."""
    missing = -condition.num_tokens % SEQ_MULTI_OF
    text = F.pad(condition.text_embeds, (0, 0, 0, missing))
    own = text.new_ones(condition.text_embeds.shape[:2], dtype=torch.bool) if condition.mask is None else condition.mask
    own = F.pad(own, (0, missing))
    seen = own.unflatten(1, (-1, SEQ_MULTI_OF)).any(2).repeat_interleave(SEQ_MULTI_OF, 1)
    return text, own, seen


def patches(x: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, N, 4 C]: 2 x 2 latents, each with its channels."""
    x = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def pictures(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The other way round, [B, N, 4 C] -> [B, C, h, w]."""
    x = tokens.unflatten(1, (rows, columns)).unflatten(3, (2, 2, -1))
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)
