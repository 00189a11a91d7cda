"""Solvers that denoise in fewer forwards, after the noisy steps.

A solver takes a velocity at each of its `timesteps` [S], in scheduler units and in their order, and ends at sigma = 0.
It holds a schedule and no images: what a row must remember of its earlier velocities is the caller's to keep.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from flow_grpo.diffusers_patch.sde_with_logprob import Schedule


class SolverStep(NamedTuple):
    """A step of R rows by a solver."""

    latents: Tensor  # [R, ...], at the solver's next timestep, or the image
    memory: Tensor  # [R, ...], what the rows' next step must be given


class DPMSolver:
    """DPM-Solver++ of 2nd order, midpoint (arXiv:2211.01095), over a share of `ratio` of the scheduler's own sigmas,
    evenly spread from step `start` to sigma = 0. diffusers' scheduler computes it."""

    def __init__(self, scheduler: Schedule, start: int, ratio: float):
        self.scheduler: Any = DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++",
            solver_type="midpoint",
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            final_sigmas_type="zero",
        )
        num_steps = len(scheduler.timesteps)
        num_asked = num_forwards("dpm", num_steps - start, ratio)
        self.scheduler.set_timesteps(num_asked)

        # Its sigmas are replaced by some of those that the model was to be sampled at: a schedule of diffusers' own
        # would not know the model's shift.
        steps = torch.linspace(start, num_steps, num_asked + 1).round().long().to(scheduler.sigmas.device)
        self.timesteps = scheduler.timesteps[steps[:-1]]
        self.scheduler.timesteps = self.timesteps
        self.scheduler.sigmas = scheduler.sigmas[steps]

    def step(self, velocity: Tensor, index: int, latents: Tensor, memory: Tensor | None) -> SolverStep:
        """Step from timesteps[index] to the next one, or to the image. [R, ...] each. The memory, which the step before
        returned and which is None for the first, is that step's prediction of the image."""
        scheduler = self.scheduler
        scheduler.model_outputs = [None, memory]
        scheduler.lower_order_nums = min(index, 2)
        # Without an index it searches for its timestep, a host sync.
        scheduler._step_index = index
        next_latents = scheduler.step(velocity, self.timesteps[index], latents, return_dict=False)[0]
        return SolverStep(next_latents, memory=scheduler.model_outputs[-1])


class Weights(NamedTuple):
    """Factors of a velocity, and of its change since the one before, with which both move latents to the next step that
    asks for one."""

    velocity: Tensor  # [] f32
    change: Tensor | float  # [] f32; 0 for the first, which has none before it


class Extrapolation:
    """Euler's steps of the scheduler from step `start` to sigma = 0, of which a share of `ratio` asks for a velocity.

    The others extrapolate it, linearly in sigma, from the last two that were asked for. So the grid and its errors stay
    those of the whole schedule, which keeps the order of rewards better than a solver of its own on a coarser grid.
    """

    def __init__(self, scheduler: Schedule, start: int, ratio: float):
        num_steps = len(scheduler.timesteps)
        steps = asked_steps(start, num_steps, ratio)
        self.timesteps = scheduler.timesteps[steps]
        self.weights: list[Weights] = []

        # All Euler steps from one asked step to the next are one sum: of dt v, and of dt (sigma - sigma_asked) times
        # the slope of v in sigma.
        sigmas = scheduler.sigmas
        ends = [*steps[1:], num_steps]
        for index, (step, end) in enumerate(zip(steps, ends, strict=True)):
            change = 0.0
            if index > 0:
                extrapolated = sigmas[step + 1 : end + 1]
                bend = (extrapolated.diff() * (extrapolated[:-1] - sigmas[step])).sum()
                change = bend / (sigmas[step] - sigmas[steps[index - 1]])
            self.weights.append(Weights(sigmas[end] - sigmas[step], change))

    def step(self, velocity: Tensor, index: int, latents: Tensor, memory: Tensor | None) -> SolverStep:
        """Step as DPMSolver.step does; the memory is the velocity before."""
        weights = self.weights[index]
        last_velocity = velocity if memory is None else memory
        next_latents = latents + weights.velocity * velocity + weights.change * (velocity - last_velocity)
        return SolverStep(next_latents, memory=velocity)


def asked_steps(start: int, num_steps: int, ratio: float) -> list[int]:
    """Choose the steps from `start` on whose velocity is asked for, `num_forwards` of them, the first always."""
    num_left = num_steps - start
    num_asked = num_forwards("extrapolate", num_left, ratio)
    if 2 * num_asked >= num_left:
        # Late steps change an image least, so every second one is left out, from the last backwards.
        left_out = range(num_steps - 1, start, -2)[: num_left - num_asked]
        return [step for step in range(start, num_steps) if step not in left_out]

    # More than every second one must go: evenly spread ones stay.
    return torch.linspace(start, num_steps - 1, num_asked + 1).floor().long().tolist()[:-1]


def num_forwards(solver: str, num_left: int, ratio: float) -> int:
    """Return how many velocities a solver asks for on its way through the `num_left` last steps of a schedule."""
    if solver == "extrapolate":
        return max(1, round(num_left * ratio))
    # In floating point, 50 * 0.58 is 28.99..., which must be 29.
    return max(1, int(num_left * ratio + 1e-9))


Solver = DPMSolver | Extrapolation
# By the names of SOLVERS in sampling_params.py.
SOLVER_CLASSES: dict[str, type[Solver]] = {"dpm": DPMSolver, "extrapolate": Extrapolation}


@lru_cache(maxsize=256)
def solver_of(name: str, scheduler: Schedule, start: int, ratio: float) -> Solver:
    """Make the solver that all requests share which begin at this step of this scheduler."""
    return SOLVER_CLASSES[name](scheduler, start, ratio)
