"""Qwen-Image: diffusers' QwenImagePipeline taken apart into what training needs."""

from typing import Any

import torch
from diffusers import DiffusionPipeline, QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.transformers import transformer_qwenimage
from torch import Tensor, nn
from torch.nn import functional as F

from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import JOINT_ATTENTION, FlowModel, Modulation
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.kernels import flash_attention
from flow_grpo.kernels.lora_linear import results_of
from flow_grpo.kernels.qk_norm_rope import norm_rotate_join


class QwenImage(FlowModel):
    """Latents are packed [B, N, C]; text is masked."""

    NAME = "qwenimage"
    PIPELINE = QwenImagePipeline
    TRANSFORMER = QwenImageTransformer2DModel
    SHARD_UNITS = ("QwenImageTransformerBlock",)
    LORA_TARGETS = (*JOINT_ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    TEXT_TOKENS = 1024
    GUIDANCE_SCALE = 4.0
    CUDNN_ATTENTION = True
    CUTS_PADDING = True
    ATTENTIONS = (flash_attention.NAME,)
    MODULATION = Modulation(
        "time_text_embed",
        (("img_mod.0", "img_mod.1"), ("txt_mod.0", "txt_mod.1"), ("norm_out.silu", "norm_out.linear")),
    )
    NEGATIVE_PROMPT = " "  # an empty one has no token to attend to

    def num_text_tokens(self, prompt: Prompt) -> int:
        """Count the tokens that the pipeline keeps: the prompt's and those of the template behind it."""
        pipeline = self.pipeline
        text = pipeline.prompt_template_encode.format(self.read_text(prompt))
        return len(pipeline.tokenizer(text).input_ids) - pipeline.prompt_template_encode_start_idx

    def read_text(self, prompt: Prompt) -> str:
        """Return the text that the text encoder reads in its template."""
        return prompt.text

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Take the last states of the text encoder, without those of the template's beginning."""
        embeds, _ = self.pipeline.encode_prompt(prompt.text, self.pipeline.text_encoder.device)
        return Condition(embeds)

    @classmethod
    def guide(cls, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """Guide as Qwen-Image does: neg + g (pos - neg), rescaled per token to the norm of pos."""
        combined = super().guide(positive, negative, guidance_scale)
        norm = positive.norm(dim=-1, keepdim=True)
        return combined * (norm / combined.norm(dim=-1, keepdim=True))

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        rows, columns = self.grid(size)
        return self.transformed(x, t, condition, [(1, rows, columns)])

    def transformed(self, x: Tensor, t: Tensor, condition: Condition, grids: list[tuple[int, int, int]]) -> Tensor:
        """Run a forward of the tokens of images one after another; `grids` are their frames, rows and columns."""
        transformer = self.transformer
        dtype = transformer.img_in.weight.dtype
        velocity = transformer(
            hidden_states=x.to(dtype),
            timestep=t / 1000,
            encoder_hidden_states=condition.text_embeds.to(dtype),
            encoder_hidden_states_mask=condition.mask,
            img_shapes=[grids] * len(x),
            return_dict=False,
        )[0]
        return velocity.float()

    def fuse(self, attention: str = "") -> None:
        """Compute queries and keys by one kernel each, on a GPU, and take `attention` wherever it is asked for."""
        if self.device.type == "cuda" or attention:
            join_attention(self.transformer, attention)

    def decode_batch(self, latents: Tensor, size: Size) -> Tensor:
        return decoded(self.pipeline, self.features(latents, size))

    def encode_pictures(self, images: Tensor) -> Tensor:
        return encoded(self.pipeline, images)


def encoded(pipeline: DiffusionPipeline, images: Tensor) -> Tensor:
    """Most likely latents [B, c, h, w] f32 of images [B, 3, H, W] in [-1, 1]."""
    vae = pipeline.vae
    mean, std = normalisation(vae)
    # The VAE takes videos [B, 3, T, H, W]: here of one frame.
    video = images[:, :, None].to(vae.dtype)
    latents = (vae.encode(video).latent_dist.mode().float() - mean) / std
    return latents[:, :, 0]


def decoded(pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [-1, 1] of latents [B, c, h, w], whose channels have a mean and a std each."""
    vae = pipeline.vae
    mean, std = normalisation(vae)
    # The VAE takes latents of videos [B, c, T, h, w]: here of one frame.
    video = latents[:, :, None] * std + mean
    return vae.decode(video.to(vae.dtype), return_dict=False)[0][:, :, 0]


def normalisation(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the VAE's latents, [1, c, 1, 1, 1] f32 each."""
    mean = torch.tensor(vae.config.latents_mean, device=vae.device).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std, device=vae.device).view(1, -1, 1, 1, 1)
    return mean, std


class JointAttention:
    """Processor of diffusers' Attention, in the place of QwenDoubleStreamAttnProcessor2_0, with config.attention. Image
    tokens go first, so that what is masked goes last."""

    _attention_backend: AttentionBackendName | None = None  # transformer.set_attention_backend sets it

    def __init__(self, attention: str = ""):
        self.attention = attention

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend among image tokens [B, N, C] and text tokens [B, T, C], with a mask [B, T] of the text or None, and
        the rotary angles of both."""
        assert encoder_hidden_states is not None
        assert image_rotary_emb is not None
        assert attention_mask is None, "the mask is the text's: encoder_hidden_states_mask"
        image_qkv = _heads_of([attn.to_q, attn.to_k, attn.to_v], hidden_states, attn.heads)
        text_qkv = _heads_of([attn.add_q_proj, attn.add_k_proj, attn.add_v_proj], encoder_hidden_states, attn.heads)
        image_queries, image_keys, image_values = image_qkv
        text_queries, text_keys, text_values = text_qkv

        # Queries, keys and values [B, N + T, H, D].
        angles = list(image_rotary_emb)
        queries = _join([image_queries, text_queries], [attn.norm_q, attn.norm_added_q], angles)
        keys = _join([image_keys, text_keys], [attn.norm_k, attn.norm_added_k], angles)
        values = torch.cat([image_values, text_values], 1)
        out = self._attend(queries, keys, values, encoder_hidden_states_mask)

        num_tokens = [hidden_states.shape[1], encoder_hidden_states.shape[1]]
        image_out, text_out = out.flatten(2).to(values.dtype).split(num_tokens, 1)
        for layer in attn.to_out:
            image_out = layer(image_out)
        return image_out, attn.to_add_out(text_out)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention [B, L, H, D]; the mask [B, T] is of the last tokens. "flash_4" takes all padding to come last."""
        num_rows, num_tokens = queries.shape[:2]
        if self.attention == flash_attention.NAME:
            lengths = torch.full((num_rows,), num_tokens, dtype=torch.int32, device=queries.device)
            if mask is not None:
                lengths = lengths - mask.logical_not().sum(1, dtype=torch.int32)
            return flash_attention.attend_first(queries, keys, values, lengths)[0]
        if mask is not None:
            num_image_tokens = num_tokens - mask.shape[1]
            mask = F.pad(mask, (num_image_tokens, 0), value=True)[:, None, None]
        return dispatch_attention_fn(queries, keys, values, attn_mask=mask, backend=self._attention_backend)


def _heads_of(layers: list[nn.Module], tokens: Tensor, num_heads: int) -> list[Tensor]:
    """Results [B, L, H, D] of layers of one input [B, L, C]."""
    return [result.unflatten(-1, (num_heads, -1)) for result in results_of(layers, tokens)]


def _join(parts: list[Tensor], norms: list[Any], angles: list[Tensor]) -> Tensor:
    """Norm, rotate and join the heads of image and text."""
    return norm_rotate_join(parts, [norm.weight for norm in norms], angles, norms[0].eps)


def join_attention(transformer: Any, attention: str = "") -> None:
    """Give a transformer's attention this processor, where the norms' weights are frozen and a head's width is a power
    of 2, as the kernel has it."""
    for block in transformer.transformer_blocks:
        attn = block.attn
        weights = [norm.weight for norm in (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)]
        if all(len(weight).bit_count() == 1 and not weight.requires_grad for weight in weights):
            attn.processor = JointAttention(attention)
        else:
            assert not attention, "norms are trained, or of another width"


def without_lengths(embeds: Tensor, mask: Tensor | None) -> tuple[int, None, Tensor | None]:
    """Return the width T of padded text [B, T, C], no lengths, and the mask [B, T] as bool.

    It stands in for diffusers' function, which also counts each text's tokens. Nothing reads the counts, and for them a
    number is copied from the host: each forward waited for all that the GPU still had to do.
    """
    if mask is not None:
        if mask.shape != embeds.shape[:2]:
            raise ValueError(f"the mask of text {list(embeds.shape[:2])} is {list(mask.shape)}")
        mask = mask.bool()
    return embeds.shape[1], None, mask


transformer_qwenimage.compute_text_seq_len_from_mask = without_lengths
