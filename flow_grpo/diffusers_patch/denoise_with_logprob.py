"""The walks from noise to image that all models share: a noisy window, or a trunk with branches.

A model brings `predict_velocity`; a walk asks for it as `velocity(x [B, N, C], t [B], rows)`, where `rows` (a slice or
an index tensor) says to which rows of the prompt embeddings the latents belong.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep, sde_step_with_logprob


class TracedStep(NamedTuple):
    """One noisy step. J outcomes were drawn from each of B latents; J = 1 in a window."""

    timestep: Tensor  # [B] f32
    latents: Tensor  # [B, N, C] f32, before the step
    step: SDEStep  # of B * J rows; the J outcomes of a latent are neighbours


def denoise_with_logprob(
    velocity: Callable, scheduler, latents: Tensor, *, window: range, noise: Callable, unscored=nullcontext, **how
):
    """Walk from noise to image: SDE steps inside `window`, ODE steps outside it (Flow-GRPO-Fast; MixGRPO).

    Args:
        latents: [B, N, C] f32, standard normal.
        noise: noise(num) -> standard normal [B * num, N, C] for the next noisy step.
        unscored: () -> context for the forwards whose velocity enters no log-prob; they may be faster than exact.
        how: noise_level and sde_type of the noisy steps.

    Returns:
        The image's latents [B, N, C] f32 and a TracedStep per step of the window.
    """
    x, trace = latents, []
    for i, t in enumerate(scheduler.timesteps):
        timestep, noisy = t.expand(len(x)), i in window
        kind = how | {"noise": noise(1)} if noisy else {"noise_level": 0.0}
        with nullcontext() if noisy else unscored():
            v = velocity(x, timestep, slice(None))
        step = sde_step_with_logprob(scheduler, v, timestep, x, **kind)
        if noisy:
            trace.append(TracedStep(timestep, x, step))
        x = step.prev_sample
    return x, trace


def branch_with_logprob(
    velocity: Callable,
    scheduler,
    latents: Tensor,
    *,
    steps: range,
    num_branches: int,
    batch_size: int,
    noise: Callable,
    unscored: Callable = nullcontext,
    **how,
):
    """Walk a deterministic trunk, leave it at each of `steps` in `num_branches` noisy steps, and finish every branch by
    the ODE (TempFlow-GRPO, arXiv:2508.04324). The branches of a step share the trunk's velocity, and all branches that
    are on their way take each denoising step together, at most `batch_size` rows per forward, inside `unscored()`.

    Returns:
        The branches' latents [B, K, J, N, C] f32 (the trunk is not finished) and a TracedStep per step of `steps`.
    """
    trunk, trace = latents, []
    branches = latents.new_empty(0, *latents.shape[1:])
    origin = torch.arange(len(latents), device=latents.device).repeat_interleave(num_branches)  # of each new branch
    for i, t in enumerate(scheduler.timesteps):
        if len(branches):
            rows = origin.repeat(len(branches) // len(origin))
            with unscored():
                branches = _ode_steps(velocity, scheduler, branches, t, rows, batch_size)
        if i > steps[-1]:
            continue
        timestep = t.expand(len(trunk))
        v = velocity(trunk, timestep, slice(None))
        if i in steps:
            step = sde_step_with_logprob(
                scheduler, v[origin], t.expand(len(origin)), trunk[origin], noise=noise(num_branches), **how
            )
            trace.append(TracedStep(timestep, trunk, step))
            branches = torch.cat([branches, step.prev_sample])
        trunk = sde_step_with_logprob(scheduler, v, timestep, trunk, noise_level=0.0).prev_sample
    return branches.unflatten(0, (len(steps), len(latents), num_branches)).transpose(0, 1), trace


def _ode_steps(velocity: Callable, scheduler, x: Tensor, t: Tensor, rows: Tensor, batch_size: int) -> Tensor:
    """One ODE step of many rows at timestep t, `batch_size` rows per forward."""
    done = []
    for part, part_rows in zip(x.split(batch_size), rows.split(batch_size), strict=True):
        timestep = t.expand(len(part))
        v = velocity(part, timestep, part_rows)
        done.append(sde_step_with_logprob(scheduler, v, timestep, part, noise_level=0.0).prev_sample)
    return torch.cat(done)
