"""Base class of loaded models, as training sees them. A model file derives a class from it, or from another model's."""

import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from diffusers import DiffusionPipeline
from huggingface_hub import snapshot_download
from torch import Tensor

from flow_grpo.base import checksums, folders, locations, rng
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, quoted
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch.condition import SOURCES, Condition
from flow_grpo.diffusers_patch.sde_with_logprob import Schedule
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.kernels import compilation

NUM_LEVELS = 1000  # of the forward process

# Ends of the names of an attention's layers, where text has layers of its own.
JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)


class Modulation(NamedTuple):
    """Parts of a transformer that see the timestep alone, so that weights.modulation can precompute them."""

    embedding: str  # name of the module that embeds times [B], given the tokens, of which it reads the dtype
    layers: tuple[tuple[str, str], ...]  # ends of the names of an activation of it, and of the linear layer behind it


class EncodedNegative(NamedTuple):
    """Row of a negative prompt, and what it was made of."""

    digest: str  # of the prompt
    width: int | None  # as in `encode`
    row: Condition


class Network(torch.nn.Module):
    """Transformer behind one call, which returns one tensor, whatever diffusers returns. Sharding wraps this call, and
    hooks of forwards are registered on it. Weights keep the names that they have in the transformer."""

    def __init__(self, transformer: torch.nn.Module, call: Callable[..., Tensor]):
        super().__init__()
        self.transformer = transformer
        self.call = call

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        # Checked when the model is made, and here, since parallelism may be enabled at any time.
        loading.check_parallelism(self.transformer)
        return self.call(x, t, condition.dense(), guidance_scale, size)


class FlowModel(ABC):
    """Diffusers pipeline on a device, taken apart into what training needs. Parts of the pipeline may be None where
    nothing asks for them; `transformer_config` stands in for that of a transformer that it lacks."""

    NAME: ClassVar[str]  # in the names of configs and tools
    PIPELINE: ClassVar[type[DiffusionPipeline]]
    TRANSFORMER: ClassVar[type[Any]]  # of diffusers, with the methods of its ModelMixin and ConfigMixin
    SHARD_UNITS: ClassVar[tuple[str, ...]]  # classes of the blocks
    LORA_TARGETS: ClassVar[tuple[str, ...]]  # ends of the names of the layers that an adapter adapts
    TEXT_TOKENS: ClassVar[int]  # that its pipeline reads; where not CUTS_PADDING, it may be told to read more
    TEXT_WIDTH: ClassVar[str] = "joint_attention_dim"  # the transformer's setting that is the width of text
    GUIDANCE_SCALE: ClassVar[float]  # the published one
    PICTURES: ClassVar[bool] = False  # whether latents are [B, C, h, w]; else tokens [B, N, C]
    CUDNN_ATTENTION: ClassVar[bool]  # whether cuDNN's attention is safe
    CUTS_PADDING: ClassVar[bool] = False  # whether text that is padding is masked, so that it may be cut
    FRAMES_PER_LATENT: ClassVar[int] = 0  # of a video, for which a latent behind the first stands; 0 = it draws images
    MOST_SOURCES: ClassVar[int] = 0  # images to be edited that a prompt may have
    NEEDS_SOURCE: ClassVar[bool] = True  # where it may have some, whether it must; else it is drawn without one
    ENCODERS: ClassVar[tuple[str, ...]] = ("text_encoder*", "tokenizer*", "processor*")  # folders of what `encode` uses
    IN_COMFYUI: ClassVar[bool] = True  # whether ComfyUI knows diffusers' names of layers, as exported LoRAs have them
    COMPILES_DECODER: ClassVar[bool] = True  # whether the VAE's decoder is one graph
    ATTENTIONS: ClassVar[tuple[str, ...]] = ()  # values of config.attention besides "" that `fuse` understands
    MODULATION: ClassVar[Modulation | None] = None  # where it is many weights that see the timestep alone
    NEGATIVE_PROMPT: ClassVar[str | None] = ""  # what guidance leads away from; None = it is no second forward
    ON_DISK: ClassVar[bool] = True  # whether its weights are files of config.model; a benchmark draws them
    GUIDES_FROM_ZERO: ClassVar[bool] = False  # whether no guidance is a scale of 0: it is 1 less than other models'
    GIVES_SIGMAS: ClassVar[bool] = True  # whether its pipeline gives its scheduler 1, ..., 1 / num_steps to shift

    def __init__(self, pipeline: DiffusionPipeline, device: torch.device, transformer_config: Mapping | None = None):
        loading.check_parallelism(pipeline.transformer)
        self.pipeline = pipeline
        self.device = device
        self.transformer_config = transformer_config or pipeline.transformer.config
        self.network = Network(pipeline.transformer, self.forward)
        self.detach_negative = False  # whether velocities have no gradient by their negative forward
        self.batches_guidance = False  # whether the negative's rows share the positive's forward
        self.known_timesteps: Tensor | None = None  # [T] f32, on the CPU, of a precomputed modulation; None = any
        self._last_negative: EncodedNegative | None = None

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
        """Load a folder or hub id, with the transformer's weights still on the meta device: fsdp_utils.prepare fills
        them in. Text encoders are float32 on a CPU and bfloat16 elsewhere.

        Args:
            alone: the transformer without text encoders and VAE.
            text: False = without text encoders.
        """
        folder = locations.resolve(folder)
        transformer = cls.empty_transformer(folder)
        if alone:
            return cls(loading.without_weights(cls.PIPELINE, folder, transformer=transformer), device)
        text_dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        dtypes = {"vae": vae_dtype, "default": text_dtype}
        left_out = {}
        if not text:
            index = loading.read_index(cls.PIPELINE, folder)
            parts = [name for name, value in index.items() if loading.is_part(value)]
            left_out = dict.fromkeys(loading.text_encoders(parts))
        with loading.foreign(folder, "text encoders or VAE"):
            pipeline = cls.PIPELINE.from_pretrained(folder, transformer=transformer, dtype=dtypes, **left_out)
        return cls(loading.frozen(pipeline, device), device)

    @classmethod
    def without_weights(cls, folder: str) -> "FlowModel":
        """Load tokenizers and scheduler alone, for checks that need no weight."""
        config = cls.TRANSFORMER.load_config(locations.resolve(folder), subfolder="transformer")
        return cls(loading.without_weights(cls.PIPELINE, folder), torch.device("cpu"), config)

    @classmethod
    def empty_transformer(cls, folder: str) -> torch.nn.Module:
        """Make the transformer of a folder or hub id, with meta weights and real position tables."""
        with loading.foreign(folder, "transformer/config.json"), loading.empty_weights():
            config = cls.TRANSFORMER.load_config(locations.resolve(folder), subfolder="transformer")
            return cls.TRANSFORMER.from_config(config)

    @staticmethod
    def transformer_folder(folder: str) -> Path:
        """Return the folder of the transformer's safetensors; a hub id is downloaded first."""
        folder = locations.resolve(folder)
        if not Path(folder).is_dir():
            folder = snapshot_download(folder, allow_patterns=["transformer/*"])
        return Path(folder, "transformer")

    @classmethod
    def text_version(cls, folder: str, digests_file: Path | None = None) -> dict[str, str]:
        """Return all that tells these text encoders from others: their files' digests (see checksums), the pipeline's
        class, which has the template of a prompt, and its own settings, such as the pixels of a source that they see;
        or a hub id's commit."""
        folder = locations.resolve(folder)
        if not Path(folder).is_dir():
            snapshot = snapshot_download(folder, allow_patterns=["model_index.json"])
            return {folder: Path(snapshot).name}
        version = checksums.digests_in(Path(folder), [f"{part}/**/*" for part in cls.ENCODERS], digests_file)
        for name, value in folders.read_json(Path(folder, "model_index.json")).items():
            is_setting = not name.startswith("_") and not loading.is_part(value)
            if is_setting or name == "_class_name":
                version[name] = json.dumps(value)
        return version

    @property
    def transformer(self) -> Any:
        """Transformer that is trained, as diffusers has it, with its names of weights."""
        return self.pipeline.transformer

    @cached_property
    def blocks(self) -> list[torch.nn.Module]:
        """Modules of the classes SHARD_UNITS, in the order of the transformer."""
        return compilation.modules_of(self.network, self.SHARD_UNITS)

    def check_size(self, size: Size) -> None:
        """Raise UserError for an image or a video that the model cannot draw. Needs no weight."""
        if size.frames == 1:
            return
        step = self.FRAMES_PER_LATENT
        if not step:
            raise UserError(f"frames is {size.frames}, but {self.NAME} draws images: set 1")
        surplus = (size.frames - 1) % step
        if surplus:
            below = size.frames - surplus
            raise UserError(
                f"frames is {size.frames}, but {self.NAME} draws 1 frame more than a multiple of {step}: set {below} "
                f"or {below + step}"
            )

    def check_steps(self, num_steps: int, name: str = "num_steps") -> None:  # noqa: B027 (most models take any)
        """Raise UserError for a number of steps, a setting `name`, that the weights cannot take. Needs no weight."""

    def check_sources(self, prompts: list[Prompt]) -> None:
        """Raise UserError for a prompt whose number of source images the model does not take, and for prompts whose
        sources differ in number or shape, which could share no forward. Needs no weight."""
        least = 1 if self.MOST_SOURCES and self.NEEDS_SOURCE else 0
        if not self.MOST_SOURCES:
            takes = "no source image"
        elif least == self.MOST_SOURCES == 1:
            takes = "one source image"
        else:
            takes = f"{least} to {self.MOST_SOURCES} source images"
        for prompt in prompts:
            num_sources = len(prompt.sources)
            if not least <= num_sources <= self.MOST_SOURCES:
                raise UserError(f"{self.NAME} takes {takes}; {quoted(prompt.text)} has {num_sources}")
        check_one_shape(prompts, self.source_sizes)

    def source_sizes(self, prompt: Prompt) -> tuple[tuple[int, int], ...]:
        """Width and height in pixels at which the transformer sees each source of a prompt; for models that take some.
        Needs no weight."""
        return ()

    def check_prompts(self, prompts: list[Prompt], width: int | None) -> int:
        """Return the tokens of the longest prompt. Raise UserError for one of more tokens than `encode` keeps at this
        width. Needs tokenizers only."""
        if width is None or (self.CUTS_PADDING and width >= self.TEXT_TOKENS):
            most = self.TEXT_TOKENS
            limit = f"the {self.TEXT_TOKENS} that its pipeline reads"
        else:
            most = width
            limit = f"config.text_tokens = {width}"
        longest_count = 0
        too_long: dict[str, int] = {}
        for prompt in prompts:
            count = self.num_text_tokens(prompt)
            longest_count = max(longest_count, count)
            if count > most:
                too_long[prompt.text] = count
        if too_long:
            longest = max(too_long, key=lambda text: too_long[text])
            raise UserError(
                f"{counted(len(too_long), 'prompts')} of more tokens than {limit}; the longest has "
                f"{too_long[longest]}: {quoted(longest)}"
            )
        return longest_count

    @abstractmethod
    def num_text_tokens(self, prompt: Prompt) -> int:
        """Count the tokens of a prompt as TEXT_TOKENS and widths do. Needs tokenizers only."""

    @abstractmethod
    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Encode one row, without a negative. Where CUTS_PADDING, it has the prompt's own length, without a mask;
        elsewhere `width` tokens, None = as diffusers has it."""

    @torch.no_grad()
    def encode(self, prompts: list[Prompt], *, width: int | None = None, guided: bool = True) -> Condition:
        """Encode B prompts, each by itself so that its numbers do not depend on its neighbours. Raises UserError for
        one of too many tokens.

        Args:
            width: text tokens, padded to; None = as diffusers has it. Where CUTS_PADDING, there is a mask with a width,
                and without one where lengths differ.
            guided: also encode the negative prompt, where guidance is a second forward.
        """
        self.check_sources(prompts)
        self.check_prompts(prompts, width)

        # Prompts that repeat are encoded once.
        encoded = {}
        for prompt in prompts:
            if prompt.digest not in encoded:
                encoded[prompt.digest] = self.encode_one(prompt, width)
        rows = [encoded[prompt.digest] for prompt in prompts]
        condition = Condition.stack(rows, width if self.CUTS_PADDING else None)
        if not guided or self.NEGATIVE_PROMPT is None:
            return condition
        negative_rows = []
        for prompt in prompts:
            negative = replace(prompt, text=self.NEGATIVE_PROMPT)
            negative_rows.append(self._encode_negative(negative, width))
        return replace(condition, negative=Condition.stack(negative_rows))

    def _encode_negative(self, prompt: Prompt, width: int | None) -> Condition:
        """Encode a negative prompt, or return the row of the last one if that was the same.

        Negatives have one text, so that without sources all are the same. Callers encode many prompts one by one, and
        the text encoders would see that text again beside each.
        """
        last = self._last_negative
        if last is None or last.digest != prompt.digest or last.width != width:
            last = EncodedNegative(prompt.digest, width, self.encode_one(prompt, width))
            self._last_negative = last
        return last.row

    def with_sources(self, condition: Condition, prompt: Prompt) -> Condition:
        """Add the latents [1, c, h, w] of a prompt's sources to its condition of one row."""
        latents = {}
        for name, picture, (width, height) in zip(SOURCES, prompt.pictures(), self.source_sizes(prompt)):
            # Pixels are [1, 3, H, W] in [-1, 1].
            pixels = self.pipeline.image_processor.preprocess(picture, height, width)
            latents[name] = self.encode_pictures(pixels.to(self.device))
        return replace(condition, **latents)

    def grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of the transformer's image tokens, of 2 x 2 latents each."""
        side = self.pipeline.vae_scale_factor * 2
        return size.height // side, size.width // side

    def num_tokens(self, size: Size) -> int:
        """Image tokens of the transformer, on which the schedule depends."""
        return math.prod(self.grid(size))

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Shape of one image's latents: [N, C], or [C, h, w] where the transformer takes PICTURES."""
        channels = self.transformer_config["in_channels"]
        if self.PICTURES:
            factor = self.pipeline.vae_scale_factor
            return channels, size.height // factor, size.width // factor
        return self.num_tokens(size), channels

    @classmethod
    def image_shape(cls, size: Size) -> tuple[int, ...]:
        """Shape of a decoded image, (3, H, W), or video, (f, 3, H, W): the size, unless `decode_batch` returns another
        one, such as the frames of a video side by side. Needs no weight."""
        shape = (3, size.height, size.width)
        return shape if size.frames == 1 else (size.frames, *shape)

    def text_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Shape of one row of each text field of a Condition with `width` tokens."""
        shapes: dict[str, tuple[int, ...]] = {"text_embeds": (width, self.transformer_config[self.TEXT_WIDTH])}
        if self.CUTS_PADDING:
            shapes["mask"] = (width,)
        return shapes

    def row_shapes(self, size: Size, width: int, prompt: Prompt | None = None) -> dict[str, tuple[int, ...]]:
        """Shape of one row of the latents and of each field of a Condition, as encode_images and encode make them;
        `prompt` is an example, for models that take sources. Needs no weight."""
        shapes = {"latents": self.latent_shape(size), **self.text_shapes(width)}
        if prompt is not None:
            for name, (source_width, source_height) in zip(SOURCES, self.source_sizes(prompt)):
                # A token's channels are those of 2 x 2 latents.
                channels = self.transformer_config["in_channels"] // 4
                factor = self.pipeline.vae_scale_factor
                shapes[name] = (channels, source_height // factor, source_width // factor)
        return shapes

    def noise(self, size: Size, generators: list[torch.Generator]) -> Tensor:
        """Draw standard normal latents [B, ...] float32, row b from generators[b]."""
        return rng.normal(self.latent_shape(size), generators, self.device)

    def schedule(self, num_steps: int, size: Size) -> Schedule:
        """Copy the pipeline's scheduler, with `timesteps` [T] and `sigmas` [T + 1] set for images of this size."""
        schedule = self._schedule_of(num_steps, num_steps, size)
        known = self.known_timesteps
        if known is not None and not torch.isin(schedule.timesteps.cpu(), known).all():
            raise UserError(
                f"{num_steps} steps at {size} have timesteps for which config.precompute_modulation has computed "
                "nothing: it knows those of config.sample.num_steps and config.eval.num_steps at the run's size; set "
                "False"
            )
        return schedule

    def transformer_times(self, timesteps: Tensor) -> Tensor:
        """Return all times that the transformer embeds for velocities at timesteps [T], where it has MODULATION."""
        return timesteps / 1000

    def noise_levels(self, num_steps: int, size: Size) -> Tensor:
        """Timesteps [1000] f32 of the whole forward process, shifted as those of `num_steps` sampled steps are. Raises
        UserError where the model has a schedule of its own, and says nothing about its noise levels."""
        has_own_schedule = type(self).schedule is not FlowModel.schedule
        if has_own_schedule and type(self).noise_levels is FlowModel.noise_levels:
            raise UserError(
                f"{type(self).__name__} overrides schedule, so its noise levels for training are unknown: override "
                "noise_levels, too, or shift and sigmas in the place of both"
            )
        return self._schedule_of(NUM_LEVELS, num_steps, size).timesteps

    def _schedule_of(self, num_levels: int, num_steps: int, size: Size) -> Schedule:
        """Copy the pipeline's scheduler, set to `num_levels` levels, with the shift of `num_steps` sampled steps."""
        return loading.schedule(
            self.pipeline.scheduler,
            num_levels,
            self.num_tokens(size),
            self.device,
            sigmas=self.sigmas(num_levels),
            shift=self.shift(num_steps, size),
        )

    def sigmas(self, num_levels: int) -> bool | list[float]:
        """Return the sigmas that the scheduler is given to shift: True = 1, ..., 1 / num_levels, False = none."""
        return self.GIVES_SIGMAS

    def shift(self, num_steps: int, size: Size) -> float | None:
        """Return the shift of a scheduler with dynamic shifts; None = linear in the tokens, as its config has it."""
        return None

    @classmethod
    def unguided(cls, guidance_scale: float) -> float:
        """Scale of one forward without a negative: `guidance_scale` where it is the transformer's input, else 0."""
        return guidance_scale if cls.NEGATIVE_PROMPT is None else 0.0

    @classmethod
    def is_guided(cls, guidance_scale: float) -> bool:
        """Tell whether a velocity of this scale takes a second forward, of the negative prompt."""
        unguided_scale = 0 if cls.GUIDES_FROM_ZERO else 1
        return cls.NEGATIVE_PROMPT is not None and guidance_scale > unguided_scale

    @classmethod
    def check_text_multiple(cls, multiple: int, name: str) -> None:
        """Raise UserError where padding is to be cut to a multiple, and the model of this name sees it."""
        if multiple and not cls.CUTS_PADDING:
            raise UserError(
                f"config.sample.text_multiple is {multiple}, but {name} is conditioned on its padding, so none of it "
                "can be taken away; set 0"
            )

    @classmethod
    def call_arguments(cls, size: Size, num_steps: int, guidance_scale: float) -> dict[str, Any]:
        """Return size, steps and guidance as arguments of the diffusers pipeline's call, whose second forward is asked
        for by a negative prompt or by the scale alone."""
        arguments: dict[str, Any] = dict(height=size.height, width=size.width, num_inference_steps=num_steps)
        if cls.FRAMES_PER_LATENT:
            arguments["num_frames"] = size.frames
        takes_true_cfg = "true_cfg_scale" in inspect.signature(cls.PIPELINE.__call__).parameters
        if cls.NEGATIVE_PROMPT is None or not takes_true_cfg:
            return arguments | {"guidance_scale": guidance_scale}
        arguments["true_cfg_scale"] = guidance_scale
        if cls.is_guided(guidance_scale):
            arguments["negative_prompt"] = cls.NEGATIVE_PROMPT
        return arguments

    @classmethod
    def guide(cls, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """Combine two velocities by classifier-free guidance (arXiv:2207.12598): neg + g (pos - neg), or with
        GUIDES_FROM_ZERO pos + g (pos - neg)."""
        start = positive if cls.GUIDES_FROM_ZERO else negative
        return start + guidance_scale * (positive - negative)

    @abstractmethod
    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """Run one forward of the transformer, with the arguments and the result of `velocity`. `guidance_scale` is for
        those that take it as an input."""

    def velocity(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        """Compute the guided velocity [B, ...] float32 at x [B, ...], t [B] in scheduler units (1000
        sigma): the policy itself."""
        if not self.is_guided(guidance_scale):
            return self.network(x, t, condition, guidance_scale, size)
        if condition.negative is None:
            raise ValueError(f"guidance_scale is {guidance_scale}, but the condition was encoded with guided=False")
        if self.detach_negative and torch.is_grad_enabled():
            # First, so that what it computes is freed before the positive forward keeps what its backward needs.
            with compilation.training_graph(self.network, self.blocks):
                negative = self.network(x, t, condition.negative, guidance_scale, size)
            positive = self.network(x, t, condition, guidance_scale, size)
        elif self.batches_guidance:
            rows = self._both_rows(condition)
            velocities = self.network(torch.cat([x, x]), torch.cat([t, t]), rows, guidance_scale, size)
            positive, negative = velocities.chunk(2)
        else:
            positive = self.network(x, t, condition, guidance_scale, size)
            negative = self.network(x, t, condition.negative, guidance_scale, size)
        return self.guide(positive, negative, guidance_scale)

    def _both_rows(self, condition: Condition) -> Condition:
        """Return a condition's rows and its negative's, for one forward."""
        assert condition.negative is not None, "`velocity` sees to it"
        widths = condition.num_tokens, condition.negative.num_tokens
        if not self.CUTS_PADDING and widths[0] != widths[1]:
            raise ValueError(
                f"{self.NAME} masks no padding, so texts of {widths[0]} tokens and negatives of {widths[1]} cannot "
                "share a forward: set config.batched_guidance to False"
            )
        return condition.with_negative_rows()

    def through(self, blocks: torch.nn.ModuleList, x: Tensor, *block_inputs: Any) -> Tensor:
        """Pass tokens [B, L, D] through blocks of the transformer, with their other inputs."""
        transformer = self.transformer
        for block in blocks:
            if torch.is_grad_enabled() and transformer.gradient_checkpointing:
                x = transformer._gradient_checkpointing_func(block, x, *block_inputs)
            else:
                x = block(x, *block_inputs)
        return x

    def fuse(self, attention: str = "") -> None:  # noqa: B027 (most models have nothing to do)
        """Give the transformer, before its blocks are compiled, parts that take fewer kernels than diffusers' do, and
        compute the same but for rounding. None here. `attention` is config.attention."""

    def features(self, latents: Tensor, size: Size) -> Tensor:
        """Unpack latents [B, ...] to [B, c, h, w], still normalised."""
        if self.PICTURES:
            return latents
        z = self.pipeline._unpack_latents(latents, size.height, size.width, self.pipeline.vae_scale_factor)
        # A VAE of videos has [B, c, 1, h, w], with one frame.
        return z.reshape(len(z), -1, *z.shape[-2:])

    def decode_batch(self, latents: Tensor, size: Size) -> Tensor:
        """Decode latents [B, ...] to images [B, 3, H, W] in [-1, 1], or to videos [B, f, 3, H, W]; here to images, by a
        VAE with a scale and a shift."""
        vae = self.pipeline.vae
        z = self.features(latents, size) / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(z.to(vae.dtype), return_dict=False)[0]

    def encode_pictures(self, images: Tensor) -> Tensor:
        """Encode images [B, 3, H, W] in [-1, 1] to their most likely latents as pictures [B, c, h, w] float32, which
        those of sources are, too; here by such a VAE."""
        vae = self.pipeline.vae
        z = vae.encode(images.to(vae.dtype)).latent_dist.mode().float()
        return (z - vae.config.shift_factor) * vae.config.scaling_factor

    def encode_batch(self, images: Tensor) -> Tensor:
        """Encode images [B, 3, H, W] in [-1, 1], or videos, to their most likely latents [B, ...] float32; here
        images."""
        z = self.encode_pictures(images)
        if self.PICTURES:
            return z
        return self.pipeline._pack_latents(z, *z.shape)

    @torch.no_grad()
    def decode(self, latents: Tensor, size: Size, batch_size: int = 8) -> Tensor:
        """Decode latents [B, ...] to images [B, 3, H, W] or videos [B, f, 3, H, W], float32 in [0, 1], `batch_size`
        frames at a time; of a longer video all of its frames."""
        num_images = len(latents)
        batch_size = size.num_together(batch_size)
        if self.pipeline.vae.decoder._compiled_call_impl is not None:
            # A compiled decoder, which has a graph for each shape, gets one: the last batch is filled with copies.
            num_rows = math.ceil(num_images / batch_size) * batch_size
            rows = torch.arange(num_rows, device=latents.device).clamp(max=num_images - 1)
            latents = latents[rows]
        batches = [self.decode_batch(part, size).float() for part in latents.split(batch_size)]
        return _to_unit(torch.cat(batches)[:num_images])

    def decode_with_gradients(self, latents: Tensor, size: Size) -> Tensor:
        """Decode latents [B, ...], all together, to images [B, 3, H, W] float32 in [0, 1] that have gradients by
        them."""
        return _to_unit(self.decode_batch(latents, size).float())

    @torch.no_grad()
    def encode_images(self, images: Tensor, batch_size: int = 8) -> Tensor:
        """Encode images [B, 3, H, W] or videos [B, f, 3, H, W] in [0, 1] to their most likely latents [B, ...] float32,
        `batch_size` frames at a time."""
        num_frames = images.shape[1:-3].numel()
        parts = images.split(max(batch_size // num_frames, 1))
        return torch.cat([self.encode_batch(part * 2 - 1).float() for part in parts])


def check_one_shape(prompts: list[Prompt], sizes_of: Callable[[Prompt], tuple[tuple[int, int], ...]]) -> None:
    """Raise UserError for prompts whose sources do not all have one number and shape."""
    prompt_of_sizes = {sizes_of(prompt): prompt for prompt in prompts}
    if len(prompt_of_sizes) < 2:
        return
    # Two are enough to see what differs.
    examples = []
    for sizes, prompt in list(prompt_of_sizes.items())[:2]:
        shapes = ", ".join(f"{width}x{height}" for width, height in sizes)
        examples.append(f"{quoted(prompt.text)} has {shapes or 'none'}")
    raise UserError(
        f"sources of all prompts must have one number and shape (width x height), but {' and '.join(examples)}"
    )


def _to_unit(images: Tensor) -> Tensor:
    """Map images from [-1, 1] to [0, 1], and cut off what lies beyond."""
    return (images / 2 + 0.5).clamp(0, 1)
