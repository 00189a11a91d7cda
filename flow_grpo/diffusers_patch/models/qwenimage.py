"""Qwen-Image: diffusers' QwenImagePipeline taken apart into what training needs."""

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import Tensor, nn
from torch.nn import functional as F

from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import JOINT_ATTENTION, FlowModel
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.kernels import flash_attention
from flow_grpo.kernels.lora_linear import results_of
from flow_grpo.kernels.qk_norm_rope import norm_rotate_join


class QwenImage(FlowModel):
    """Latents are packed [B, N, C]; text is masked."""

    NAME = "qwenimage"
    PIPELINE, TRANSFORMER = QwenImagePipeline, QwenImageTransformer2DModel
    SHARD_UNITS = ("QwenImageTransformerBlock",)
    LORA_TARGETS = (
        *JOINT_ATTENTION,
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    )
    TEXT_TOKENS = 1024
    GUIDANCE_SCALE = 4.0
    CUDNN_ATTENTION = True
    CUTS_PADDING = True
    ATTENTIONS = (flash_attention.NAME,)
    NEGATIVE_PROMPT = " "  # an empty one has no token to attend to

    def num_text_tokens(self, prompt: Prompt) -> int:
        """Without those of the template."""
        pipeline = self.pipeline
        text = pipeline.prompt_template_encode.format(self.read_text(prompt))
        return len(pipeline.tokenizer(text).input_ids) - pipeline.prompt_template_encode_start_idx

    def read_text(self, prompt: Prompt) -> str:
        """What the text encoder reads in its template."""
        return prompt.text

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """The last states of the text encoder, without those of the template."""
        return Condition(self.pipeline.encode_prompt(prompt.text, self.pipeline.text_encoder.device)[0])

    @staticmethod
    def guide(positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """Guidance as in Qwen-Image: neg + g (pos - neg), rescaled per token to the norm of pos."""
        combined = FlowModel.guide(positive, negative, guidance_scale)
        return combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        return self.transformed(x, t, condition, [(1, *self.grid(size))])

    def transformed(self, x: Tensor, t: Tensor, condition: Condition, grids: list[tuple[int, int, int]]) -> Tensor:
        """A forward of tokens of images one after another, of which `grids` are the frames, rows and columns."""
        transformer = self.transformer
        dtype = transformer.img_in.weight.dtype
        return transformer(
            hidden_states=x.to(dtype),
            timestep=t / 1000,
            encoder_hidden_states=condition.text_embeds.to(dtype),
            encoder_hidden_states_mask=condition.mask,
            img_shapes=[grids] * len(x),
            return_dict=False,
        )[0].float()

    def fuse(self, attention: str = "") -> None:
        """Queries and keys by one kernel each, on a GPU; and `attention`, wherever it is asked for."""
        if self.device.type == "cuda" or attention:
            join_attention(self.transformer, attention)

    def decode_batch(self, latents: Tensor, size: Size) -> Tensor:
        return decoded(self.pipeline, self.features(latents, size))

    def encode_batch(self, images: Tensor) -> Tensor:
        z = encoded(self.pipeline, images)
        return self.pipeline._pack_latents(z, *z.shape)


def encoded(pipeline, images: Tensor) -> Tensor:
    """Most likely latents [B, c, h, w] f32 of images [B, 3, H, W] in [-1, 1]."""
    vae, (mean, std) = pipeline.vae, normalisation(pipeline.vae)
    return ((vae.encode(images[:, :, None].to(vae.dtype)).latent_dist.mode().float() - mean) / std)[:, :, 0]


def normalisation(vae) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the VAE's latents, [1, c, 1, 1, 1] f32 each."""
    values = vae.config.latents_mean, vae.config.latents_std
    return tuple(torch.tensor(v, device=vae.device).view(1, -1, 1, 1, 1) for v in values)


def decoded(pipeline, latents: Tensor) -> Tensor:
    """Pictures of latents [B, c, h, w], which have a mean and a standard deviation per channel, in [-1, 1]."""
    vae, (mean, std) = pipeline.vae, normalisation(pipeline.vae)
    z = latents[:, :, None] * std + mean
    return vae.decode(z.to(vae.dtype), return_dict=False)[0][:, :, 0]


class JointAttention(QwenDoubleStreamAttnProcessor2_0):
    """A processor of diffusers' Attention, in the place of the one it is derived from, with config.attention. Image
    tokens go first, so that what is masked goes last."""

    def __init__(self, attention: str = ""):
        super().__init__()
        self.attention = attention

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Image tokens [B, N, C], text tokens [B, T, C], a mask [B, T] of the text or None, and the angles of both."""
        assert attention_mask is None, "the mask is the text's: encoder_hidden_states_mask"
        image, text = hidden_states, encoder_hidden_states
        of_image = results_of([attn.to_q, attn.to_k, attn.to_v], image)
        of_text = results_of([attn.add_q_proj, attn.add_k_proj, attn.add_v_proj], text)
        queries, keys, values = ([x.unflatten(-1, (attn.heads, -1)) for x in pair] for pair in zip(of_image, of_text))
        queries, keys = (
            norm_rotate_join(tokens, [image_norm.weight, text_norm.weight], list(image_rotary_emb), image_norm.eps)
            for tokens, image_norm, text_norm in (
                (queries, attn.norm_q, attn.norm_added_q),
                (keys, attn.norm_k, attn.norm_added_k),
            )
        )
        values = torch.cat(values, 1)
        out = self._attend(queries, keys, values, encoder_hidden_states_mask)
        image_out, text_out = out.flatten(2).to(values.dtype).split([image.shape[1], text.shape[1]], 1)
        for layer in attn.to_out:
            image_out = layer(image_out)
        return image_out, attn.to_add_out(text_out)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[B, L, H, D] each; the mask [B, T] is of the last tokens. "flash_4" reads it as if all padding came last."""
        num_rows, num_tokens = queries.shape[:2]
        if self.attention == flash_attention.NAME:
            lengths = torch.full((num_rows,), num_tokens, dtype=torch.int32, device=queries.device)
            lengths = lengths if mask is None else lengths - mask.logical_not().sum(1, dtype=torch.int32)
            return flash_attention.attend_first(queries, keys, values, lengths)[0]
        if mask is not None:
            mask = F.pad(mask, (num_tokens - mask.shape[1], 0), value=True)[:, None, None]
        return dispatch_attention_fn(queries, keys, values, attn_mask=mask, backend=self._attention_backend)


def join_attention(transformer: QwenImageTransformer2DModel, attention: str = "") -> None:
    """Give a transformer's attention this processor, where the norms' weights are frozen and a head's width is a power
    of 2, as the kernel has it."""
    for block in transformer.transformer_blocks:
        attn = block.attn
        norms = [attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k]
        if all(len(norm.weight).bit_count() == 1 and not norm.weight.requires_grad for norm in norms):
            attn.processor = JointAttention(attention)
        else:
            assert not attention, "norms are trained, or of another width"
