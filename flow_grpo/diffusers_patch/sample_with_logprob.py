"""What all models' entry points do: from prompts to images, with the log-probs of the noisy steps on the way."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo import rng
from flow_grpo.diffusers_patch.denoise_with_logprob import TracedStep, branch_with_logprob, denoise_with_logprob
from flow_grpo.diffusers_patch.stepwise_with_logprob import Request, joined


@dataclass(frozen=True)
class PromptEmbeds:
    """What a transformer is conditioned on. B rows, L text tokens, D text width."""

    embeds: Tensor  # [B, L, D]
    pooled: Tensor | None = None  # [B, D'], for models that take the prompt as one vector, too
    mask: Tensor | None = None  # [B, L] bool, False where padded; None = the transformer sees all tokens
    negative: "PromptEmbeds | None" = None  # one row: what guidance leads away from; None = no second forward

    def take(self, rows) -> "PromptEmbeds":
        """The given rows (slice or index tensor)."""
        return self._map(lambda parts: parts[0][rows], [self])

    @classmethod
    def concat(cls, parts: list["PromptEmbeds"]) -> "PromptEmbeds":
        """Join along B; all parts padded to one width."""
        return cls._map(torch.cat, parts)

    def padded(self, width: int) -> "PromptEmbeds":
        """Rows of `width` tokens, masked beyond their own; for transformers that take a mask."""
        missing = width - self.embeds.shape[1]
        mask = torch.ones(self.embeds.shape[:2], dtype=torch.bool, device=self.embeds.device)
        mask = F.pad(mask if self.mask is None else self.mask, (0, missing))
        return replace(self, embeds=F.pad(self.embeds, (0, 0, 0, missing)), mask=mask)

    def trimmed(self, multiple: int) -> "PromptEmbeds":
        """Without the columns that are padding in every row, but for those up to a multiple. Waits for the device."""
        if self.mask is None:
            return self
        width = -(-self.mask.sum(1).max().item() // multiple) * multiple
        return replace(self, embeds=self.embeds[:, :width], mask=self.mask[:, :width])

    def expand(self, num: int) -> "PromptEmbeds":
        """One row as `num` rows."""
        return self._map(lambda parts: parts[0].expand(num, *parts[0].shape[1:]), [self])

    @staticmethod
    def _map(change: Callable, parts: list["PromptEmbeds"]) -> "PromptEmbeds":
        tensors = {f.name: [getattr(part, f.name) for part in parts] for f in fields(PromptEmbeds)[:-1]}
        changed = {name: None if values[0] is None else change(values) for name, values in tensors.items()}
        return replace(parts[0], **changed)


@dataclass(frozen=True)
class Sampled:
    """What an entry point returns. B prompts; K noisy steps; J outcomes per noisy step."""

    images: Tensor  # [B, 3, H, W] f32 in [0, 1]; per step: [B, K, J, 3, H, W]
    latents: Tensor  # [B, ...] f32, of the images; per step: [B, K, J, ...]
    trace: list[TracedStep]  # one per noisy step, in order


@torch.no_grad()
def sample_window(
    model: ModuleType,
    pipeline,
    prompts: list[str] | PromptEmbeds,
    generators: list[torch.Generator],
    *,
    window: range,
    guidance_scale: float,
    velocity: Callable | None = None,
    latents: Tensor | None = None,
    num_steps: int = 10,
    resolution: int = 512,
    vae_batch_size: int = 8,
    **how,
) -> Sampled:
    """One image per prompt, by SDE steps inside `window` and ODE steps outside it (Flow-GRPO, arXiv:2505.05470).

    Args:
        model: the model's file.
        prompts: B texts, or their embeddings.
        generators: B CPU generators; each draws its image's noise, then its steps' in order.
        window: the noisy steps, within [0, num_steps); empty for a deterministic image.
        velocity: (x, t, embeds) -> velocity; None = `predict_velocity` of the pipeline's own transformer.
        latents: [B, ...] standard normal to start from, instead of the generators' first draw.
        how: groups, flash_ratio, flash_solver, scored, unscored of denoise_with_logprob; noise_level, sde_type of
            sde_step_with_logprob.
    """
    start = _start(model, pipeline, prompts, generators, velocity, latents, num_steps, resolution, guidance_scale)
    latents, trace = denoise_with_logprob(**start.full(), window=window, **how)
    return Sampled(model.decode_latents(pipeline, latents, resolution, vae_batch_size), latents, trace)


@torch.no_grad()
def sample_perstep(
    model: ModuleType,
    pipeline,
    prompts: list[str] | PromptEmbeds,
    generators: list[torch.Generator],
    *,
    steps: range,
    guidance_scale: float,
    num_branches: int = 6,
    completion_batch_size: int = 24,
    velocity: Callable | None = None,
    num_steps: int = 10,
    resolution: int = 512,
    vae_batch_size: int = 8,
    **how,
) -> Sampled:
    """A deterministic trunk per prompt and `num_branches` noisy branches at each of its `steps`, all finished
    deterministically and decoded (TempFlow-GRPO, arXiv:2508.04324). Arguments as in `sample_window`;
    `completion_batch_size` rows per forward for the branches on their way."""
    start = _start(model, pipeline, prompts, generators, velocity, None, num_steps, resolution, guidance_scale)
    branching = dict(steps=steps, num_branches=num_branches, batch_size=completion_batch_size)
    latents, trace = branch_with_logprob(**start.full(), **branching, **how)
    images = model.decode_latents(pipeline, latents.flatten(0, 2), resolution, vae_batch_size)
    return Sampled(images.unflatten(0, latents.shape[:3]), latents, trace)


@torch.no_grad()
def prepare_encode(
    model: ModuleType,
    pipeline,
    prompts: list[str] | PromptEmbeds,
    generators: list[torch.Generator],
    *,
    noisy: range,
    names: Iterable,
    guidance_scale: float,
    num_branches: int = 0,
    scheduler=None,
    latents: Tensor | None = None,
    groups: list[int] | None = None,
    short: list[PromptEmbeds] | None = None,
    num_steps: int = 10,
    resolution: int = 512,
    flash_ratio: float = 0.0,
    flash_solver: str = "dpm",
    **how,
) -> list[Request]:
    """Requests for stepwise_with_logprob.walk: `sample_window`'s images or, with `num_branches`, `sample_perstep`'s
    trunks. Further arguments as there, noise_level and sde_type among them; `short` [B] as in Request.

    Args:
        noisy: the window, or the steps at which branches leave.
        names: B, to know the requests by when they are finished.
        scheduler: with timesteps set, for requests to share; None = one for these, from `num_steps`.
    """
    start = _start(model, pipeline, prompts, generators, None, latents, num_steps, resolution, guidance_scale)
    same = dict(scheduler=scheduler or start.scheduler, guidance_scale=guidance_scale, flash_solver=flash_solver)

    def request(row: int, name, **kind) -> Request:
        here = slice(row, row + 1)
        kind = dict(latents=start.latents[here], flash_ratio=flash_ratio) | kind | same
        text = dict(embeds=start.embeds.take(here), short=short and short[row])
        return Request(name, noise=partial(start.noise, here), how=how, **text, **kind)

    if groups is None:
        return [request(row, name, noisy=noisy, num_branches=num_branches) for row, name in enumerate(names)]
    return _with_shared_beginnings(request, names, groups, noisy)


def _with_shared_beginnings(request: Callable, names: Iterable, groups: list[int], noisy: range) -> list[Request]:
    """One request per group, which the group's own follow where the noise begins."""
    heirs = {group: [] for group in groups}
    for row, name in enumerate(names):
        heirs[groups[row]].append(request(row, name, latents=None, noisy=noisy, step=noisy.start))
    return [request(groups.index(group), None, flash_ratio=0.0, heirs=those) for group, those in heirs.items()]


@torch.no_grad()
def post_decode(
    model: ModuleType, pipeline, finished: Iterable[Request], *, resolution: int, vae_batch_size: int = 8
) -> Iterator[tuple[list[Request], Sampled]]:
    """Images of finished requests, some B requests together as soon as they fill a decode."""
    some = []
    for request in finished:
        some.append(request)
        if sum(max(1, len(one.branches)) for one in some) >= vae_batch_size:
            yield some, _decoded(model, pipeline, some, resolution, vae_batch_size)
            some = []
    if some:
        yield some, _decoded(model, pipeline, some, resolution, vae_batch_size)


def _decoded(model, pipeline, finished: list[Request], resolution: int, vae_batch_size: int) -> Sampled:
    latents, trace = joined(finished)
    outcomes = latents.shape[1:3] if finished[0].num_branches else ()
    flat = latents.flatten(0, len(outcomes))
    images = model.decode_latents(pipeline, flat, resolution, vae_batch_size)
    return Sampled(images.unflatten(0, (len(finished), *outcomes)), latents, trace)


@dataclass(frozen=True)
class _Start:
    """B prompts about to be walked."""

    velocity: Callable  # (x, t, embeds=) -> velocity
    embeds: PromptEmbeds
    scheduler: Any
    latents: Tensor
    generators: list[torch.Generator]

    def noise(self, rows: slice, num: int) -> Tensor:
        """[rows * num, ...], the next draws of these rows."""
        shape = (num, *self.latents.shape[1:])
        return rng.normal(shape, self.generators[rows], self.latents.device).flatten(0, 1)

    def full(self) -> dict[str, Any]:
        """The arguments that both walks of denoise_with_logprob.py take."""
        return dict(
            velocity=lambda x, t, rows: self.velocity(x, t, embeds=self.embeds.take(rows)),
            scheduler=self.scheduler,
            latents=self.latents,
            noise=partial(self.noise, slice(None)),
        )


def _start(model, pipeline, prompts, generators, velocity, latents, num_steps, resolution, guidance_scale) -> _Start:
    embeds = prompts
    if not isinstance(prompts, PromptEmbeds):
        embeds = model.encode_prompts(pipeline, prompts, guided=guidance_scale > 1)
    if velocity is None:
        velocity = partial(model.predict_velocity, pipeline.transformer, guidance_scale=guidance_scale)
    device = embeds.embeds.device
    if latents is None:
        latents = model.initial_latents(pipeline, generators, resolution, device)
    return _Start(velocity, embeds, model.schedule(pipeline, num_steps, resolution, device), latents, generators)


def schedule(pipeline, num_steps: int, num_tokens: int, device):
    """A copy of the pipeline's scheduler with `timesteps` [T] and `sigmas` [T + 1] set for images of `num_tokens`."""
    scheduler = copy.deepcopy(pipeline.scheduler)
    config = scheduler.config
    if config.use_dynamic_shifting:
        slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
        shift = config.base_shift + slope * (num_tokens - config.base_image_seq_len)  # larger images, noisier steps
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=shift, device=device)
    else:
        scheduler.set_timesteps(num_steps, device=device)
    scheduler.sigmas = scheduler.sigmas.to(device)
    return scheduler


def packed_tokens(pipeline, resolution: int) -> int:
    """Of a square image of `resolution` pixels, where a token is 2 x 2 latents."""
    return (resolution // (pipeline.vae_scale_factor * 2)) ** 2


def packed_schedule(pipeline, num_steps: int, resolution: int, device):
    """`schedule` for models of packed latents."""
    return schedule(pipeline, num_steps, packed_tokens(pipeline, resolution), device)


def packed_noise(pipeline, generators: list[torch.Generator], resolution: int, device) -> Tensor:
    """Standard normal [B, N, C] float32, row b from generators[b]."""
    shape = (packed_tokens(pipeline, resolution), pipeline.transformer.config.in_channels)
    return rng.normal(shape, generators, device)


def guided(forward: Callable, embeds: PromptEmbeds, num: int, guidance_scale: float) -> tuple[Tensor, Tensor]:
    """Classifier-free guidance: neg + g (pos - neg), and pos. At g <= 1 pos twice, without a second forward."""
    positive = forward(embeds)
    if guidance_scale <= 1:
        return positive, positive
    negative = forward(embeds.negative.expand(num))
    return negative + guidance_scale * (positive - negative), positive


def encode(vae: Callable, images: Tensor, batch_size: int) -> Tensor:
    """Images [B, 3, H, W] in [0, 1] through `vae`, `batch_size` at a time -> [B, ...] float32."""
    return torch.cat([vae(part * 2 - 1).float() for part in images.split(batch_size)])


def decode(vae: Callable, latents: Tensor, batch_size: int, fixed: bool) -> Tensor:
    """[B, ...] through `vae`, `batch_size` at a time -> images [B, 3, H, W] float32 in [0, 1].

    fixed: fill up the last ones with copies, so that `vae` meets one shape.
    """
    num = len(latents)
    if fixed:
        latents = latents[torch.arange(-(-num // batch_size) * batch_size, device=latents.device).clamp(max=num - 1)]
    images = torch.cat([vae(part).float() for part in latents.split(batch_size)])[:num]
    return (images / 2 + 0.5).clamp(0, 1)
