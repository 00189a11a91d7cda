"""A loaded model as training sees it. Each model file has a class of it, one level deep."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline
from huggingface_hub import snapshot_download
from torch import Tensor

from flow_grpo.base import checksums, folders, locations, rng
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.size import Size

NUM_LEVELS = 1000  # of the forward process
JOINT_ATTENTION = tuple(  # ends of the names of a block's layers, where text has layers of its own
    f"attn.{layer}"
    for layer in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)


class Network(torch.nn.Module):
    """A transformer behind one call, which returns one tensor, whatever diffusers returns: what is sharded, and what
    hooks of forwards are registered on. Weights keep the names that they have in the transformer."""

    def __init__(self, transformer: torch.nn.Module, call: Callable[..., Tensor]):
        super().__init__()
        self.transformer, self.call = transformer, call

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        return self.call(x, t, condition.dense(), guidance_scale, size)


class FlowModel(ABC):
    """A diffusers pipeline on a device, taken apart into what training needs. Parts of the pipeline may be None where
    nothing asks for them; `transformer_config` stands in for that of a transformer that it lacks."""

    NAME: ClassVar[str]  # in the names of configs and tools
    PIPELINE: ClassVar[type[DiffusionPipeline]]
    TRANSFORMER: ClassVar[type[torch.nn.Module]]
    SHARD_UNITS: ClassVar[tuple[str, ...]]  # classes of the blocks
    LORA_TARGETS: ClassVar[tuple[str, ...]]  # ends of the names of the layers that an adapter adapts
    TEXT_TOKENS: ClassVar[int]  # that its pipeline reads; where not CUTS_PADDING, it may be told to read more
    TEXT_WIDTH: ClassVar[str] = "joint_attention_dim"  # the transformer's setting that is the width of text
    GUIDANCE_SCALE: ClassVar[float]  # the published one
    PICTURES: ClassVar[bool] = False  # whether latents are [B, C, h, w]; else tokens [B, N, C]
    CUDNN_ATTENTION: ClassVar[bool]  # whether cuDNN's attention is safe
    CUTS_PADDING: ClassVar[bool] = False  # whether text that is padding is masked, so that it may be cut
    MOST_SOURCES: ClassVar[int] = 0  # images to be edited that a prompt may have; where not 0, it has one or more
    ENCODERS: ClassVar[tuple[str, ...]] = ("text_encoder*", "tokenizer*", "processor*")  # folders of what `encode` uses
    ATTENTIONS: ClassVar[tuple[str, ...]] = ()  # values of config.attention besides "" that `fuse` understands
    NEGATIVE_PROMPT: ClassVar[str | None] = ""  # what guidance leads away from; None = it is no second forward
    GIVES_SIGMAS: ClassVar[bool] = True  # whether its pipeline gives its scheduler 1, ..., 1 / num_steps to shift

    def __init__(self, pipeline: DiffusionPipeline, device: torch.device, transformer_config: Mapping | None = None):
        self.pipeline, self.device = pipeline, device
        self.transformer_config = transformer_config or pipeline.transformer.config
        self.network = Network(pipeline.transformer, self.forward)

    @classmethod
    def load(
        cls,
        folder: str,
        device: torch.device,
        *,
        vae_dtype: torch.dtype = torch.float32,
        alone: bool = False,
        text: bool = True,
    ) -> "FlowModel":
        """Of a folder or hub id, with the transformer's weights still on the meta device: fsdp_utils.prepare fills them
        in. Text encoders are float32 on a CPU and bfloat16 elsewhere. `alone`: neither text encoders nor VAE; without
        `text`: no text encoders."""
        folder, transformer = locations.resolve(folder), cls.empty_transformer(folder)
        if alone:
            return cls(loading.without_weights(cls.PIPELINE, folder, transformer=transformer), device)
        dtypes = {"vae": vae_dtype, "default": torch.float32 if device.type == "cpu" else torch.bfloat16}
        left_out = {} if text else dict.fromkeys(loading.text_encoders(cls.PIPELINE.load_config(folder)))
        with loading.foreign(folder, "text encoders or VAE"):
            pipeline = cls.PIPELINE.from_pretrained(folder, transformer=transformer, dtype=dtypes, **left_out)
        return cls(loading.frozen(pipeline, device), device)

    @classmethod
    def without_weights(cls, folder: str) -> "FlowModel":
        """With tokenizers and scheduler alone, for checks that need no weight."""
        config = cls.TRANSFORMER.load_config(locations.resolve(folder), subfolder="transformer")
        return cls(loading.without_weights(cls.PIPELINE, folder), torch.device("cpu"), config)

    @classmethod
    def empty_transformer(cls, folder: str) -> torch.nn.Module:
        """The transformer of a folder or hub id, with meta weights and real position tables."""
        with loading.foreign(folder, "transformer/config.json"), init_empty_weights():
            config = cls.TRANSFORMER.load_config(locations.resolve(folder), subfolder="transformer")
            return cls.TRANSFORMER.from_config(config)

    @staticmethod
    def transformer_folder(folder: str) -> Path | None:
        """Where the transformer's safetensors lie; a hub id is downloaded first."""
        folder = locations.resolve(folder)
        if not Path(folder).is_dir():
            folder = snapshot_download(folder, allow_patterns=["transformer/*"])
        return Path(folder, "transformer")

    @classmethod
    def text_version(cls, folder: str, memory: Path | None = None) -> dict[str, str]:
        """What tells text encoders from others: their files' digests (see checksums) and the pipeline's own settings,
        such as the pixels of a source that they see; or a hub id's commit."""
        folder = locations.resolve(folder)
        if not Path(folder).is_dir():
            return {folder: Path(snapshot_download(folder, allow_patterns=["model_index.json"])).name}
        digests = checksums.digests_in(Path(folder), [f"{part}/**/*" for part in cls.ENCODERS], memory)
        for name, value in folders.read_json(Path(folder, "model_index.json")).items():
            if not name.startswith("_") and not isinstance(value, list):  # lists are components
                digests[name] = json.dumps(value)
        return digests

    @property
    def transformer(self) -> torch.nn.Module:
        """What is trained: diffusers' own, with its names of weights."""
        return self.pipeline.transformer

    def check_size(self, size: Size) -> None:  # noqa: B027 (most models have nothing to add to what Size checks)
        """Raises UserError for an image that the model cannot draw. Needs no weight."""

    def check_steps(self, num_steps: int, name: str = "num_steps") -> None:  # noqa: B027 (most models take any)
        """Raises UserError for a number of steps, a setting `name`, that the weights cannot take. Needs no weight."""

    def check_sources(self, prompts: list[Prompt]) -> None:
        """Raises UserError for a prompt whose number of source images the model does not take. Needs no weight."""
        for prompt in prompts:
            if not min(self.MOST_SOURCES, 1) <= len(prompt.sources) <= self.MOST_SOURCES:
                takes = f"1 to {self.MOST_SOURCES} source images" if self.MOST_SOURCES else "no source image"
                raise UserError(f"{self.NAME} takes {takes}; {quoted(prompt.text)} has {len(prompt.sources)}")

    def check(self, prompts: list[Prompt], width: int | None) -> None:
        """Raises UserError for a prompt of more tokens than `encode` keeps at this width. Needs tokenizers only."""
        if width is None or (self.CUTS_PADDING and width >= self.TEXT_TOKENS):
            most, limit = self.TEXT_TOKENS, f"the {self.TEXT_TOKENS} that its pipeline reads"
        else:
            most, limit = width, f"config.text_tokens = {width}"
        counts = {prompt.text: self.num_text_tokens(prompt) for prompt in prompts}
        if too_long := [text for text, count in counts.items() if count > most]:
            longest = max(too_long, key=counts.get)
            raise UserError(
                f"{len(too_long)} prompts have more tokens than {limit}; the longest has {counts[longest]}: "
                f"{quoted(longest)}"
            )

    @abstractmethod
    def num_text_tokens(self, prompt: Prompt) -> int:
        """That TEXT_TOKENS and widths count. Needs tokenizers only."""

    @abstractmethod
    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """One row, without a negative. Where CUTS_PADDING, of the prompt's own length, without a mask; elsewhere of
        `width` tokens, None = as diffusers has it."""

    @torch.no_grad()
    def encode(self, prompts: list[Prompt], *, width: int | None = None, guided: bool = True) -> Condition:
        """B prompts, each encoded by itself so that its numbers do not depend on its neighbours. Raises UserError for
        one of too many tokens.

        Args:
            width: text tokens, padded to; None = as diffusers has it. Where CUTS_PADDING, there is a mask with a width,
                and without one where lengths differ.
            guided: also encode the negative prompt, where guidance is a second forward.
        """
        self.check_sources(prompts)
        self.check(prompts, width)
        with_negative = guided and self.NEGATIVE_PROMPT is not None
        negatives = [replace(prompt, text=self.NEGATIVE_PROMPT) for prompt in prompts if with_negative]
        unique = {prompt.digest: prompt for prompt in (*prompts, *negatives)}
        rows = {digest: self.encode_one(prompt, width) for digest, prompt in unique.items()}
        condition = Condition.stack([rows[prompt.digest] for prompt in prompts], width if self.CUTS_PADDING else None)
        if not negatives:
            return condition
        return replace(condition, negative=Condition.stack([rows[prompt.digest] for prompt in negatives]))

    def grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of the transformer's image tokens, of 2 x 2 latents each."""
        side = self.pipeline.vae_scale_factor * 2
        return size.height // side, size.width // side

    def num_tokens(self, size: Size) -> int:
        """Image tokens of the transformer, on which the schedule depends."""
        return math.prod(self.grid(size))

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Of one image: [N, C], or [C, h, w] where the transformer takes PICTURES."""
        channels, factor = self.transformer_config["in_channels"], self.pipeline.vae_scale_factor
        if self.PICTURES:
            return channels, size.height // factor, size.width // factor
        return self.num_tokens(size), channels

    def text_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Of one row of a Condition with `width` tokens, by field."""
        embeds = dict(text_embeds=(width, self.transformer_config[self.TEXT_WIDTH]))
        return embeds | (dict(mask=(width,)) if self.CUTS_PADDING else {})

    def row_shapes(self, size: Size, width: int, prompt: Prompt | None = None) -> dict[str, tuple[int, ...]]:
        """Of one image and its prompt, as encode_images and encode make them; `prompt` is an example, for models that
        take sources. Needs no weight."""
        return dict(latents=self.latent_shape(size)) | self.text_shapes(width)

    def noise(self, size: Size, generators: list[torch.Generator]) -> Tensor:
        """Standard normal latents [B, ...] float32, row b from generators[b]."""
        return rng.normal(self.latent_shape(size), generators, self.device)

    def schedule(self, num_steps: int, size: Size):
        """A copy of the pipeline's scheduler with `timesteps` [T] and `sigmas` [T + 1] set for images of this size."""
        return self._schedule_of(num_steps, num_steps, size)

    def noise_levels(self, num_steps: int, size: Size) -> Tensor:
        """Timesteps [1000] f32 of the whole forward process, shifted as those of `num_steps` sampled steps are. Raises
        UserError where the model has a schedule of its own, and says nothing about its noise levels."""
        if type(self).schedule is not FlowModel.schedule and type(self).noise_levels is FlowModel.noise_levels:
            raise UserError(
                f"{type(self).__name__} overrides schedule, so its noise levels for training are unknown: override "
                "noise_levels, too, or shift and sigmas in the place of both"
            )
        return self._schedule_of(NUM_LEVELS, num_steps, size).timesteps

    def _schedule_of(self, num_levels: int, num_steps: int, size: Size):
        """The pipeline's scheduler set to `num_levels` levels, with the shift of `num_steps` sampled steps."""
        return loading.schedule(
            self.pipeline.scheduler,
            num_levels,
            self.num_tokens(size),
            self.device,
            sigmas=self.sigmas(num_levels),
            shift=self.shift(num_steps, size),
        )

    def sigmas(self, num_levels: int) -> bool | list[float]:
        """The sigmas that the pipeline gives its scheduler to shift: True = 1, ..., 1 / num_levels, False = none."""
        return self.GIVES_SIGMAS

    def shift(self, num_steps: int, size: Size) -> float | None:
        """The shift of a scheduler with dynamic shifts; None = linear in the tokens, as its config has it."""
        return None

    @classmethod
    def unguided(cls, guidance_scale: float) -> float:
        """The scale of one forward without a negative: `guidance_scale` where it is the transformer's input, else 0."""
        return guidance_scale if cls.NEGATIVE_PROMPT is None else 0.0

    @classmethod
    def is_guided(cls, guidance_scale: float) -> bool:
        """Whether a velocity of this scale takes a second forward, of the negative prompt."""
        return cls.NEGATIVE_PROMPT is not None and guidance_scale > 1

    @staticmethod
    def guide(positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """Of two velocities: classifier-free guidance (arXiv:2207.12598), neg + g (pos - neg)."""
        return negative + guidance_scale * (positive - negative)

    @abstractmethod
    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """One forward of the transformer, as `velocity`. `guidance_scale` is for those that take it as an input."""

    def velocity(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """Guided velocity [B, ...] float32 at x [B, ...], t [B] in scheduler units (1000 sigma): the policy itself."""
        positive = self.network(x, t, condition, guidance_scale, size)
        if not self.is_guided(guidance_scale):
            return positive
        if condition.negative is None:
            raise ValueError(f"guidance_scale is {guidance_scale}, but the condition was encoded with guided=False")
        return self.guide(positive, self.network(x, t, condition.negative, guidance_scale, size), guidance_scale)

    def through(self, blocks: torch.nn.ModuleList, x: Tensor, *others: Any) -> Tensor:
        """Tokens [B, L, D] through blocks of the transformer, with what else these take."""
        transformer = self.transformer
        for block in blocks:
            if torch.is_grad_enabled() and transformer.gradient_checkpointing:
                x = transformer._gradient_checkpointing_func(block, x, *others)
            else:
                x = block(x, *others)
        return x

    def fuse(self, attention: str = "") -> None:  # noqa: B027 (most models have nothing to do)
        """Before its blocks are compiled: give the transformer parts that take fewer kernels than diffusers' do, and
        compute the same but for rounding. None here. `attention` is config.attention."""

    def features(self, latents: Tensor, size: Size) -> Tensor:
        """[B, ...] -> [B, c, h, w], as the VAE sees them but for its normalisation."""
        if self.PICTURES:
            return latents
        z = self.pipeline._unpack_latents(latents, size.height, size.width, self.pipeline.vae_scale_factor)
        return z.reshape(len(z), -1, *z.shape[-2:])  # a VAE of videos has one frame

    def decode_batch(self, latents: Tensor, size: Size) -> Tensor:
        """[B, ...] -> images [B, 3, H, W] in [-1, 1]; here by a VAE with a scale and a shift."""
        vae = self.pipeline.vae
        z = self.features(latents, size) / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(z.to(vae.dtype), return_dict=False)[0]

    def encode_batch(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] -> their most likely latents [B, ...] float32; here too."""
        vae = self.pipeline.vae
        z = vae.encode(images.to(vae.dtype)).latent_dist.mode().float()
        z = (z - vae.config.shift_factor) * vae.config.scaling_factor
        return z if self.PICTURES else self.pipeline._pack_latents(z, *z.shape)

    @torch.no_grad()
    def decode(self, latents: Tensor, size: Size, batch_size: int = 8) -> Tensor:
        """[B, ...] -> images [B, 3, H, W] float32 in [0, 1], `batch_size` at a time, in one shape if compiled."""
        num = len(latents)
        if self.pipeline.vae.decoder._compiled_call_impl is not None:  # it would be compiled for each number of images
            whole = -(-num // batch_size) * batch_size
            latents = latents[torch.arange(whole, device=latents.device).clamp(max=num - 1)]
        images = torch.cat([self.decode_batch(part, size).float() for part in latents.split(batch_size)])[:num]
        return (images / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def encode_images(self, images: Tensor, batch_size: int = 8) -> Tensor:
        """Images [B, 3, H, W] in [0, 1] -> their most likely latents [B, ...] float32, `batch_size` at a time."""
        return torch.cat([self.encode_batch(part * 2 - 1).float() for part in images.split(batch_size)])
