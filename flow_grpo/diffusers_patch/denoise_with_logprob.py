"""The walks from noise to image that all models share: a noisy window, or a trunk with branches.

A model brings `predict_velocity`; a walk asks for it as `velocity(x [B, ...], t [B], rows)`, where `rows` (a slice or
an index tensor) says to which rows of the prompt embeddings the latents belong. Forwards whose velocity enters a
log-prob run inside `scored()`, as the update's do; the others inside `unscored()`: they may be faster than exact.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep, sde_step_with_logprob


class TracedStep(NamedTuple):
    """One noisy step. J outcomes were drawn from each of B latents; J = 1 in a window."""

    timestep: Tensor  # [B] f32
    latents: Tensor  # [B, ...] f32, before the step
    step: SDEStep  # of B * J rows; the J outcomes of a latent are neighbours


def denoise_with_logprob(
    velocity: Callable,
    scheduler,
    latents: Tensor,
    *,
    window: range,
    noise: Callable,
    groups: list[int] | None = None,
    flash_ratio: float = 0.0,
    flash_solver: str = "dpm",
    scored: Callable = nullcontext,
    unscored: Callable = nullcontext,
    **how,
) -> tuple[Tensor, list[TracedStep]]:
    """Walk from noise to image: SDE steps inside `window`, ODE steps outside it (Flow-GRPO-Fast; MixGRPO).

    Args:
        latents: [B, ...] f32, standard normal.
        window: consecutive steps; range(0) for a deterministic walk.
        noise: noise(num) -> standard normal [B * num, ...] for the next noisy step.
        groups: B numbers; rows of one number start from the first one's latents and are one row until the window.
        flash_ratio: above 0, what follows the window takes this share of its forwards (MixGRPO-Flash), by a solver.
        how: noise_level and sde_type of the noisy steps.

    Returns:
        The image's latents [B, ...] f32 and a TracedStep per step of the window.
    """
    ode = _Ode(velocity, scheduler, unscored, len(latents), flash_ratio, flash_solver)
    rows = member = torch.arange(len(latents), device=latents.device)
    if groups is not None:
        rows, member = _first_of_each(groups, latents.device)
    x, trace = ode.steps(latents[rows], range(window.start), rows)[member], []
    for i in window:
        timestep = scheduler.timesteps[i].expand(len(x))
        with scored():
            v = velocity(x, timestep, slice(None)).detach()
        step = sde_step_with_logprob(scheduler, v, timestep, x, noise=noise(1), **how)
        trace.append(TracedStep(timestep, x, step))
        x = step.prev_sample
    return ode.finish(x, window.stop, torch.arange(len(x), device=x.device)), trace


def branch_with_logprob(
    velocity: Callable,
    scheduler,
    latents: Tensor,
    *,
    steps: range,
    num_branches: int,
    batch_size: int,
    noise: Callable,
    flash_ratio: float = 0.0,
    flash_solver: str = "dpm",
    scored: Callable = nullcontext,
    unscored: Callable = nullcontext,
    **how,
) -> tuple[Tensor, list[TracedStep]]:
    """Walk a deterministic trunk, leave it at each of `steps` in `num_branches` noisy steps, and finish every branch by
    the ODE (TempFlow-GRPO, arXiv:2508.04324). The branches of a step share the trunk's velocity. On their way to the
    image they take at most `batch_size` rows per forward, and `flash_ratio` of these as in `denoise_with_logprob`.

    Returns:
        The branches' latents [B, K, J, ...] f32 (the trunk is not finished) and a TracedStep per step of `steps`.
    """
    trunk, trace, branches = latents, [], []
    ode = _Ode(velocity, scheduler, unscored, batch_size, flash_ratio, flash_solver)
    origin = torch.arange(len(latents), device=latents.device).repeat_interleave(num_branches)  # of each branch
    for i in range(steps[-1] + 1):
        timestep = scheduler.timesteps[i].expand(len(trunk))
        with scored():
            v = velocity(trunk, timestep, slice(None)).detach()
        if i in steps:
            t = timestep[:1].expand(len(origin))
            step = sde_step_with_logprob(scheduler, v[origin], t, trunk[origin], noise=noise(num_branches), **how)
            trace.append(TracedStep(timestep, trunk, step))
            branches.append(ode.finish(step.prev_sample, i + 1, origin))
        trunk = sde_step_with_logprob(scheduler, v, timestep, trunk, noise_level=0.0).prev_sample
    return torch.stack(branches).unflatten(1, (len(latents), num_branches)).transpose(0, 1), trace


class _Ode(NamedTuple):
    """Deterministic steps of many rows. `rows` [R] are their rows of the prompt embeddings."""

    velocity: Callable
    scheduler: object
    unscored: Callable
    batch_size: int  # rows per forward
    flash_ratio: float  # 0 = Euler
    flash_solver: str

    def steps(self, x: Tensor, steps: range, rows: Tensor) -> Tensor:
        """Euler's."""
        for i in steps:
            t = self.scheduler.timesteps[i]
            v = self._velocity(x, t, rows)
            x = sde_step_with_logprob(self.scheduler, v, t.expand(len(x)), x, noise_level=0.0).prev_sample
        return x

    def finish(self, x: Tensor, start: int, rows: Tensor) -> Tensor:
        """From step `start` to sigma = 0."""
        num_steps = len(self.scheduler.timesteps)
        if not self.flash_ratio or start == num_steps:
            return self.steps(x, range(start, num_steps), rows)
        solver = SOLVERS[self.flash_solver](self.scheduler, start, self.flash_ratio)
        for t in solver.timesteps:
            x = solver.step(self._velocity(x, t, rows), t, x, return_dict=False)[0]
        return x

    def _velocity(self, x: Tensor, t: Tensor, rows: Tensor) -> Tensor:
        with self.unscored():
            parts = zip(x.split(self.batch_size), rows.split(self.batch_size), strict=True)
            return torch.cat([self.velocity(part, t.expand(len(part)), which) for part, which in parts])


def _first_of_each(groups: list[int], device) -> tuple[Tensor, Tensor]:
    """The first row of each group [G], and the place in that list of every row's group [B]."""
    numbers = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    firsts = torch.tensor([groups.index(group) for group in numbers], device=device)
    return firsts, torch.tensor([numbers[group] for group in groups], device=device)


def dpm_solver(scheduler, start: int, ratio: float) -> DPMSolverMultistepScheduler:
    """DPM-Solver++ of 2nd order, midpoint (arXiv:2211.01095), over max(1, ratio * what is left) of the scheduler's own
    sigmas, evenly spread from step `start` to sigma = 0."""
    num_steps = len(scheduler.timesteps)
    num = max(1, int((num_steps - start) * ratio))
    solver = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        final_sigmas_type="zero",
    )
    solver.set_timesteps(num)
    picks = torch.linspace(start, num_steps, num + 1).round().long().to(scheduler.sigmas.device)
    solver.sigmas, solver.timesteps = scheduler.sigmas[picks], scheduler.timesteps[picks[:-1]]
    solver.set_begin_index(0)  # otherwise it searches for its first timestep, a host sync
    return solver


class Extrapolation:
    """Euler's steps of the scheduler from step `start` to sigma = 0, of which a share of `ratio` asks for a velocity.

    The others extrapolate it, linearly in sigma, from the last two that were asked for. So the grid and its errors stay
    those of the full walk, which keeps the order of rewards better than a solver of its own on a coarser grid. Taken
    like a diffusers scheduler: a velocity at each of `timesteps`, in order, goes to `step`.
    """

    def __init__(self, scheduler, start: int, ratio: float):
        num_steps, sigmas = len(scheduler.timesteps), scheduler.sigmas
        asked = asked_steps(start, num_steps, ratio)
        self.timesteps = scheduler.timesteps[asked]
        self.last, self.weights = None, []  # the last velocity; of each one to come, and of its change since the last
        for before, here, following in zip([None, *asked], asked, [*asked[1:], num_steps], strict=False):
            to_come = sigmas[here + 1 : following + 1]
            bent = (to_come.diff() * (to_come[:-1] - sigmas[here])).sum()
            change = 0.0 if before is None else bent / (sigmas[here] - sigmas[before])
            self.weights.append((sigmas[following] - sigmas[here], change))
        self.weights.reverse()

    def step(self, velocity: Tensor, timestep: Tensor, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Latents at the next of `timesteps`, or of the image."""
        whole, change = self.weights.pop()
        last, self.last = velocity if self.last is None else self.last, velocity
        return (latents + whole * velocity + change * (velocity - last),)


def asked_steps(start: int, num_steps: int, ratio: float) -> list[int]:
    """round(ratio * what is left) of the steps from `start` on, at least the first: every second one is left out, from
    the last backwards, where that is enough, since late steps change an image least; else evenly spread ones stay."""
    left = num_steps - start
    num = max(1, round(left * ratio))
    if 2 * num >= left:
        left_out = range(num_steps - 1, start, -2)[: left - num]
        return [step for step in range(start, num_steps) if step not in left_out]
    return torch.linspace(start, num_steps - 1, num + 1).floor().long().tolist()[:-1]


SOLVERS = {"dpm": dpm_solver, "extrapolate": Extrapolation}
