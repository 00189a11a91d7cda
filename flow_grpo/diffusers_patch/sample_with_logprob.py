"""From prompts to images, with the log-probs of the noisy steps on the way: two entry points for anyone with a
diffusers pipeline, and what training calls.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flow_grpo.base import rng
from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.denoise_with_logprob import Batching, Request, TracedStep, Velocity, denoise, joined
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.size import Size


@dataclass(frozen=True)
class Samples:
    """What an entry point returns. B prompts; K noisy steps; J outcomes per noisy step."""

    images: Tensor  # [B, 3, H, W] f32 in [0, 1]; per step: [B, K, J, 3, H, W]
    latents: Tensor  # [B, ...] f32, of the images; per step: [B, K, J, ...]
    trace: list[TracedStep]  # one per noisy step, in order


@dataclass(frozen=True)
class NoiseSource:
    """The normal draws of B images, in the order of their steps."""

    latents: Tensor  # [B, ...], the first ones
    generators: list[torch.Generator]

    def noise(self, rows: slice, num: int) -> Tensor:
        """[rows * num, ...], the next draws of these rows."""
        shape = (num, *self.latents.shape[1:])
        return rng.normal(shape, self.generators[rows], self.latents.device).flatten(0, 1)


@dataclass(frozen=True)
class SamplingJob:
    """B prompts about to be sampled."""

    model: FlowModel
    condition: Condition  # B rows
    generators: list[torch.Generator]  # B; each draws its image's noise, then its steps' in order
    params: SamplingParams
    size: Size

    def noise_source(self, latents: Tensor | None) -> NoiseSource:
        """Of these prompts' normal draws; `latents` may take the place of the first ones."""
        return NoiseSource(
            self.model.noise(self.size, self.generators) if latents is None else latents, self.generators
        )

    def schedule(self) -> Any:
        """A scheduler with timesteps set."""
        return self.model.schedule(self.params.num_steps, self.size)


class Branching(NamedTuple):
    """Branches that leave a trunk."""

    num_branches: int  # at each step
    completion_batch_size: int  # rows per forward on their way to the image


@torch.no_grad()
def pipeline_with_logprob(
    pipeline: DiffusionPipeline,
    prompts: str | list[str] | Condition,
    generators: torch.Generator | list[torch.Generator],
    *,
    window: range,
    noise_level: float,
    num_steps: int = 10,
    height: int = 512,
    width: int = 512,
    guidance_scale: float | None = None,
    sde_type: str = "sde",
    flash_ratio: float = 0.0,
    flash_solver: str = "dpm",
    latents: Tensor | None = None,
    groups: list[int] | None = None,
    vae_batch_size: int = 8,
) -> Samples:
    """One image per prompt, by SDE steps inside `window` and ODE steps outside it (Flow-GRPO, arXiv:2505.05470).

    Args:
        prompts: one text, B texts, or B rows of a model's `encode`.
        generators: one CPU generator for all, or B; each draws its image's noise, then its steps' in order.
        window: the noisy steps, within range(num_steps); range(0) for a deterministic image.
        noise_level: eta of the noisy steps; `sde_type` as in sde_step_with_logprob.
        height, width: pixels, multiples of 16.
        guidance_scale: None = the model's published one; at most 1 = no second forward.
        flash_ratio: above 0, what follows the window takes this share of its forwards, by `flash_solver` of solvers.py.
        latents: [B, ...] standard normal to start from, instead of the generators' first draw.
        groups: B numbers; rows of one number start from the first one's latents and are one row until the window.

    Raises:
        UserError: before anything is encoded, for a value that cannot be meant.
    """
    scale = _guidance_scale(pipeline, guidance_scale)
    params = SamplingParams(num_steps, scale, noise_level, sde_type, flash_ratio, flash_solver)
    _check_counts(_num_rows(prompts), dict(groups=groups, latents=latents), dict(vae_batch_size=vae_batch_size))
    job = _checked_job(pipeline, prompts, generators, params, Size(height, width), window, "window")
    return sample(job, noisy=window, latents=latents, groups=groups, vae_batch_size=vae_batch_size)


@torch.no_grad()
def pipeline_with_logprob_perstep(
    pipeline: DiffusionPipeline,
    prompts: str | list[str] | Condition,
    generators: torch.Generator | list[torch.Generator],
    *,
    steps: range,
    noise_level: float,
    num_branches: int = 6,
    num_steps: int = 10,
    height: int = 512,
    width: int = 512,
    guidance_scale: float | None = None,
    sde_type: str = "sde",
    flash_ratio: float = 0.0,
    flash_solver: str = "dpm",
    completion_batch_size: int = 24,
    vae_batch_size: int = 8,
) -> Samples:
    """A deterministic trunk per prompt and `num_branches` noisy branches at each of its `steps`, all finished
    deterministically and decoded (TempFlow-GRPO, arXiv:2508.04324). Arguments as in `pipeline_with_logprob`.

    Args:
        steps: at which branches leave, within range(num_steps).
        num_branches: of each trunk and step.
        completion_batch_size: rows per forward of the branches on their way to the image.

    Raises:
        UserError: before anything is encoded, for a value that cannot be meant.
    """
    sizes = dict(vae_batch_size=vae_batch_size, completion_batch_size=completion_batch_size, num_branches=num_branches)
    _check_counts(_num_rows(prompts), {}, sizes)
    if not steps:
        raise UserError(f"steps is {steps}; there must be a step at which branches leave")
    scale = _guidance_scale(pipeline, guidance_scale)
    params = SamplingParams(num_steps, scale, noise_level, sde_type, flash_ratio, flash_solver)
    job = _checked_job(pipeline, prompts, generators, params, Size(height, width), steps, "steps")
    branching = Branching(num_branches, completion_batch_size)
    return sample(job, noisy=steps, branching=branching, vae_batch_size=vae_batch_size)


def _guidance_scale(pipeline: DiffusionPipeline, chosen: float | None) -> float:
    return model_classes.of_pipeline(pipeline).GUIDANCE_SCALE if chosen is None else chosen


def _checked_job(
    pipeline: DiffusionPipeline,
    prompts: str | list[str] | Condition,
    generators: torch.Generator | list[torch.Generator],
    params: SamplingParams,
    size: Size,
    steps: range,
    name: str,
) -> SamplingJob:
    """Encode what can have been meant; `name` is that of the argument `steps`. Raises UserError before that."""
    model, count = model_classes.of_pipeline(pipeline), _num_rows(prompts)
    model.check_size(size)
    if not isinstance(steps, range) or steps.step != 1 or not 0 <= steps.start <= max(steps.stop, steps.start):
        raise UserError(f"{name} is {steps!r}; it must be a range of consecutive steps, such as range(1, 3)")
    if steps and steps.stop > params.num_steps:
        raise UserError(f"{name} is {steps}, beyond the last of {params.num_steps} steps")
    params.check_noisy(steps)
    generators = [generators] * count if isinstance(generators, torch.Generator) else generators
    if len(generators) != count:
        raise UserError(f"{len(generators)} generators for {count} prompts; give one for each, or one for all")
    if not isinstance(prompts, Condition):
        texts = [prompts] if isinstance(prompts, str) else prompts
        prompts = model.encode([Prompt(text) for text in texts], guided=model.is_guided(params.guidance_scale))
    return SamplingJob(model, prompts, generators, params, size)


def _check_counts(num_prompts: int, per_prompt: dict[str, Sized | None], sizes: dict[str, int]) -> None:
    """Raises UserError for no prompt, for arguments `per_prompt` of another length, and for sizes below 1."""
    if not num_prompts:
        raise UserError("prompts is empty; there must be at least one")
    for name, values in per_prompt.items():
        if values is not None and len(values) != num_prompts:
            raise UserError(f"{name} has {len(values)} entries for {num_prompts} prompts; give one for each")
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise UserError(f"{name} is {size!r}; it must be an integer of at least 1")


def _num_rows(prompts: str | list[str] | Condition) -> int:
    if isinstance(prompts, Condition):
        return len(prompts.text)
    return 1 if isinstance(prompts, str) else len(prompts)


@torch.no_grad()
def sample(
    job: SamplingJob,
    *,
    noisy: range,
    branching: Branching | None = None,
    velocity: Velocity | None = None,
    latents: Tensor | None = None,
    groups: list[int] | None = None,
    vae_batch_size: int = 8,
    exact: Callable = nullcontext,
    fast: Callable = nullcontext,
) -> Samples:
    """Images of B prompts whose rows take each step together, or with `branching` their trunks' branches.

    Args:
        noisy: the window, or the steps at which branches leave.
        velocity: the policy; None = the model's own.
        exact: context of the forwards whose velocity enters a log-prob; `fast` of the others.
    """
    source = job.noise_source(latents)
    request = Request(
        None,
        job.condition,
        source.latents,
        job.size,
        job.schedule(),
        job.params,
        noisy=noisy,
        num_branches=branching.num_branches if branching else 0,
        noise=partial(source.noise, slice(None)),
    )
    if groups is not None:
        request = split_shared_prefix(request, groups)
    num = len(source.latents)
    batching = Batching(num, branching.completion_batch_size if branching else num, filled=False)
    finished = list(denoise(velocity or job.model.velocity, [request], batching, exact, fast))
    return _decoded(job.model, finished, vae_batch_size)


def split_shared_prefix(request: Request, groups: list[int]) -> Request:
    """What the groups of a request's rows share until its noise begins: the first row of each."""
    numbers = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    device = request.latents.device
    firsts = torch.tensor([groups.index(group) for group in numbers], device=device)
    request.source_rows = torch.tensor([numbers[group] for group in groups], device=device)
    request.latents, latents, request.step = None, request.latents[firsts], request.noisy.start
    shared = request.size, request.scheduler, request.params
    return Request(None, request.condition.take(firsts), latents, *shared, continuations=[request])


@torch.no_grad()
def prepare_encode(
    job: SamplingJob,
    *,
    noisy: range,
    names: Iterable[Any],
    num_branches: int = 0,
    scheduler: Any = None,
    latents: Tensor | None = None,
    groups: list[int] | None = None,
    short: list[Condition] | None = None,
) -> list[Request]:
    """Requests of one row each for `denoise`; arguments as in `sample`.

    Args:
        names: B, to know the requests by when they are finished.
        scheduler: with timesteps set, for requests to share; None = one for these.
        short: [B] as in Request.
    """
    scheduler, source, requests = scheduler or job.schedule(), job.noise_source(latents), []
    for row, name in enumerate(names):
        rows = slice(row, row + 1)
        request = Request(
            name,
            job.condition.take(rows),
            source.latents[rows],
            job.size,
            scheduler,
            job.params,
            noisy=noisy,
            num_branches=num_branches,
            noise=partial(source.noise, rows),
            short=short[row] if short else None,
        )
        requests.append(request)
    return requests if groups is None else _split_shared_prefixes(requests, groups)


def _split_shared_prefixes(requests: list[Request], groups: list[int]) -> list[Request]:
    """One request per group, which the group's own follow where the noise begins."""
    prefixes = {}
    for request, group in zip(requests, groups, strict=True):
        if group not in prefixes:
            prefixes[group] = Request(
                name=None,
                condition=request.condition,
                latents=request.latents,
                size=request.size,
                scheduler=request.scheduler,
                params=request.params,
                short=request.short,
                continuations=[request],
            )
        else:
            prefixes[group].continuations.append(request)
        request.latents, request.step = None, request.noisy.start
    return list(prefixes.values())


@torch.no_grad()
def post_decode(
    model: FlowModel, finished: Iterable[Request], *, vae_batch_size: int = 8
) -> Iterator[tuple[list[Request], Samples]]:
    """Images of finished requests, some B requests together as soon as they fill a decode; of trunks, a few decodes, so
    that little of the last one is empty."""
    ready = []
    for request in finished:
        ready.append(request)
        if sum(max(1, len(r.branches)) for r in ready) >= vae_batch_size:
            yield ready, _decoded(model, ready, vae_batch_size)
            ready = []
    if ready:
        yield ready, _decoded(model, ready, vae_batch_size)


def _decoded(model: FlowModel, finished: list[Request], vae_batch_size: int) -> Samples:
    latents, trace = joined(finished)
    shape = latents.shape[: 3 if finished[0].num_branches else 1]
    images = model.decode(latents.flatten(0, len(shape) - 1), finished[0].size, vae_batch_size)
    return Samples(images.unflatten(0, shape), latents, trace)
