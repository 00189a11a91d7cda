"""Sampling from prompts to images, with the log-probs of the noisy steps on the way.

`pipeline_with_logprob` and `pipeline_with_logprob_perstep` are for anyone with a diffusers pipeline. Training calls the
parts: `prepare_encode` makes requests, denoise_with_logprob.denoise denoises them, `post_decode` decodes the images.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.denoise_with_logprob import Batching, ForwardContext, Velocity, denoise, joined
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.request import Request, TracedStep
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.sde_with_logprob import Schedule
from flow_grpo.diffusers_patch.size import Size


@dataclass(frozen=True)
class Samples:
    """Images of an entry point and how they came about. B prompts; K noisy steps; J outcomes per noisy step."""

    images: Tensor  # [B, 3, H, W] f32 in [0, 1]; per step: [B, K, J, 3, H, W]; of videos [..., f, 3, H, W]
    latents: Tensor  # [B, ...] f32, of the images; per step: [B, K, J, ...]
    trace: list[TracedStep]  # one per noisy step, in order
    text_widths: list[int] = field(default_factory=list)  # B, tokens from which on text is padding; [] = not known


@dataclass(frozen=True)
class SamplingJob:
    """B prompts about to be sampled."""

    model: FlowModel
    condition: Condition  # B rows
    generators: list[torch.Generator]  # B; each draws its image's noise, then its steps' in order
    params: SamplingParams
    size: Size


@torch.no_grad()
def pipeline_with_logprob(
    pipeline: DiffusionPipeline,
    prompts: str | list[str | Prompt] | Condition,
    generators: torch.Generator | list[torch.Generator],
    *,
    window: range,
    noise_level: float,
    num_steps: int = 10,
    height: int = 512,
    width: int = 512,
    frames: int = 1,
    guidance_scale: float | None = None,
    sde_type: str = "sde",
    flash_ratio: float = 0.0,
    flash_solver: str = "dpm",
    vae_batch_size: int = 8,
) -> Samples:
    """One image per prompt, by SDE steps inside `window` and ODE steps outside it (Flow-GRPO, arXiv:2505.05470).
    Raises UserError, before anything is encoded, for a value that cannot be meant.

    Args:
        prompts: one text, B texts, B Prompts, which may have images to be edited, or B rows of a model's `encode`.
        generators: one CPU generator for all, or B; each draws its image's noise, then its steps' in order.
        window: the noisy steps, within range(num_steps); range(0) for a deterministic image.
        noise_level: eta of the noisy steps; `sde_type` as in sde_step_with_logprob.
        height, width: pixels, multiples of 16.
        frames: above 1: of a video, as the model draws them.
        guidance_scale: None = the model's published one; at most 1 = no second forward.
        flash_ratio: above 0, what follows the window takes this share of its forwards, by `flash_solver` of solvers.py.
        vae_batch_size: frames per decode.
    """
    model = model_classes.of_pipeline(pipeline)
    scale = model.GUIDANCE_SCALE if guidance_scale is None else guidance_scale
    params = SamplingParams(num_steps, scale, noise_level, sde_type, flash_ratio, flash_solver)
    _check_steps(window, params, "window")
    job = _checked_job(model, prompts, generators, params, Size(height, width, frames))
    return sample(job, noisy_steps=window, vae_batch_size=vae_batch_size)


@torch.no_grad()
def pipeline_with_logprob_perstep(
    pipeline: DiffusionPipeline,
    prompts: str | list[str | Prompt] | Condition,
    generators: torch.Generator | list[torch.Generator],
    *,
    steps: range,
    noise_level: float,
    num_branches: int = 6,
    num_steps: int = 10,
    height: int = 512,
    width: int = 512,
    frames: int = 1,
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
        num_branches: of each trunk and step, at least 2.
        completion_batch_size: rows per forward of the branches on their way to the image; at least B.
    """
    model = model_classes.of_pipeline(pipeline)
    scale = model.GUIDANCE_SCALE if guidance_scale is None else guidance_scale
    params = SamplingParams(num_steps, scale, noise_level, sde_type, flash_ratio, flash_solver)
    _check_branches(num_branches, steps)
    _check_steps(steps, params, "steps")
    job = _checked_job(model, prompts, generators, params, Size(height, width, frames))
    return sample(
        job,
        noisy_steps=steps,
        num_branches=num_branches,
        completion_batch_size=completion_batch_size,
        vae_batch_size=vae_batch_size,
    )


def _checked_job(
    model: FlowModel,
    prompts: str | list[str | Prompt] | Condition,
    generators: torch.Generator | list[torch.Generator],
    params: SamplingParams,
    size: Size,
) -> SamplingJob:
    """Check the arguments of an entry point, then encode its prompts."""
    if isinstance(prompts, str):
        prompts = [prompts]
    num_prompts = len(prompts.text_embeds) if isinstance(prompts, Condition) else len(prompts)
    if not num_prompts:
        raise UserError("prompts is empty; there must be at least one")
    if isinstance(generators, torch.Generator):
        generators = [generators] * num_prompts
    if len(generators) != num_prompts:
        num_generators = counted(len(generators), "generators")
        raise UserError(f"{num_generators} for {counted(num_prompts, 'prompts')}; give one for each")
    model.check_size(size)
    if not isinstance(prompts, Condition):
        records = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        prompts = model.encode(records, guided=model.is_guided(params.guidance_scale))
    return SamplingJob(model, prompts, generators, params, size)


def _check_branches(num_branches: int, steps: range) -> None:
    """Raise UserError unless there are branches, and steps that they leave."""
    if num_branches < 2 or not steps:
        raise UserError(f"num_branches is {num_branches}, steps is {steps}; give at least 2 branches and 1 step")


def _check_steps(steps: range, params: SamplingParams, name: str) -> None:
    """Raise UserError unless `steps`, the argument `name`, may be the noisy ones."""
    is_consecutive = isinstance(steps, range) and steps.step == 1
    if not is_consecutive or steps.start < 0:
        raise UserError(f"{name} is {steps!r}; it must be a range of consecutive steps, such as range(1, 3)")
    if steps and steps.stop > params.num_steps:
        raise UserError(f"{name} is {steps}, beyond the last of {params.num_steps} steps")
    params.check_noisy_steps(steps)


@torch.no_grad()
def sample(
    job: SamplingJob,
    *,
    noisy_steps: range,
    num_branches: int = 1,
    completion_batch_size: int = 0,
    velocity: Velocity | None = None,
    vae_batch_size: int = 8,
    fast: ForwardContext = nullcontext,
) -> Samples:
    """Sample images of B prompts that take each step together, or their trunks' branches. Arguments are as in
    `prepare_encode`.

    Args:
        completion_batch_size: rows per forward of branches; at least B.
        velocity: the policy; None = the model's own.
        fast: context of the forwards whose velocity enters no log-prob.
    """
    num_prompts = len(job.generators)
    requests = prepare_encode(job, noisy_steps=noisy_steps, names=range(num_prompts), num_branches=num_branches)
    batching = Batching(num_prompts, max(num_prompts, completion_batch_size), filled=False)
    finished = denoise(velocity or job.model.velocity, requests, batching, fast=fast)
    in_order = sorted(finished, key=lambda request: request.name)
    return _decoded(job.model, in_order, vae_batch_size)


@torch.no_grad()
def prepare_encode(
    job: SamplingJob,
    *,
    noisy_steps: range,
    names: Iterable[Any],
    num_branches: int = 1,
    scheduler: Schedule | None = None,
    latents: Tensor | None = None,
    groups: list[int] | None = None,
    short_conditions: list[Condition] | None = None,
) -> list[Request]:
    """Make a request for each prompt, for `denoise`.

    Args:
        noisy_steps: the window, or the steps at which branches leave.
        names: B, to know the requests by when they are finished.
        num_branches: above 1: that leave each trunk at each noisy step.
        scheduler: with timesteps set, for requests to share; None = one for these.
        latents: [B, ...] to start from, in the place of the generators' first draws.
        groups: B numbers; requests of one number, which start from the same latents, share a prefix.
        short_conditions: [B] as in Request.
    """
    scheduler = scheduler or job.model.schedule(job.params.num_steps, job.size)
    latents = job.model.noise(job.size, job.generators) if latents is None else latents
    requests = []
    for row, name in enumerate(names):
        request = Request(
            name,
            job.condition.take(slice(row, row + 1)),
            latents[row : row + 1],
            job.size,
            scheduler,
            job.params,
            noisy_steps=noisy_steps,
            num_branches=num_branches,
            generator=job.generators[row],
            short_condition=short_conditions[row] if short_conditions else None,
        )
        requests.append(request)
    return requests if groups is None else shared_prefixes(requests, groups)


def shared_prefixes(requests: list[Request], groups: list[int]) -> list[Request]:
    """Make a request for each group, from its first one's latents; the group's own go on where the noise begins."""
    requests_of_group: dict[int, list[Request]] = {}
    for request, group in zip(requests, groups, strict=True):
        requests_of_group.setdefault(group, []).append(request)

    prefixes = []
    for members in requests_of_group.values():
        first = members[0]
        prefix = Request(
            None,
            first.condition,
            first.latents,
            first.size,
            first.scheduler,
            first.params,
            short_condition=first.short_condition,
            continuations=members,
        )
        prefixes.append(prefix)
    for request in requests:
        request.step = request.noisy_steps.start
    return prefixes


@torch.no_grad()
def post_decode(
    model: FlowModel, finished: Iterable[Request], vae_batch_size: int
) -> Iterator[tuple[list[Request], Samples]]:
    """Decode finished requests, some B together as soon as they fill a decode of `vae_batch_size` frames. A trunk
    counts by its noisy steps, whatever branches leave them, so that trunks take a few decodes."""
    ready: list[Request] = []
    num_ready = 0
    for request in finished:
        ready.append(request)
        num_ready += len(request.noisy_steps) if request.is_trunk else 1
        if num_ready >= request.size.num_together(vae_batch_size):
            yield ready, _decoded(model, ready, vae_batch_size)
            ready = []
            num_ready = 0
    if ready:
        yield ready, _decoded(model, ready, vae_batch_size)


def _decoded(model: FlowModel, finished: list[Request], vae_batch_size: int) -> Samples:
    """Images or videos of finished requests: [B, ...], or [B, K, J, ...] of trunks' branches."""
    latents, trace = joined(finished)
    num_leading = 3 if finished[0].is_trunk else 1
    leading = latents.shape[:num_leading]
    images = model.decode(latents.flatten(0, num_leading - 1), finished[0].size, vae_batch_size)
    text_widths = []
    for request in finished:
        condition = request.short_condition or request.condition
        text_widths.append(condition.num_tokens)
    return Samples(images.unflatten(0, leading), latents, trace, text_widths)
