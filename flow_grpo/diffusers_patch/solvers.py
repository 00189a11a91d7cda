"""Solvers that denoise in fewer forwards, after the noisy steps.

A solver takes a velocity at each of its `timesteps` [S], in scheduler units and in their order, and ends at sigma = 0.
It holds a schedule and no images: what a row must remember of its earlier velocities is the caller's to keep.
"""

from functools import lru_cache

import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from flow_grpo.diffusers_patch.sampling_params import SOLVERS


class DPMSolver:
    """DPM-Solver++ of 2nd order, midpoint (arXiv:2211.01095), over max(1, ratio * what is left) of the scheduler's own
    sigmas, evenly spread from step `start` to sigma = 0. diffusers' scheduler computes it."""

    def __init__(self, scheduler, start: int, ratio: float):
        num_steps = len(scheduler.timesteps)
        num = max(1, int((num_steps - start) * ratio + 1e-9))  # 50 * 0.58 is 28.99...
        self.scheduler = DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++",
            solver_type="midpoint",
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            final_sigmas_type="zero",
        )
        self.scheduler.set_timesteps(num)
        picks = torch.linspace(start, num_steps, num + 1).round().long().to(scheduler.sigmas.device)
        self.scheduler.sigmas, self.timesteps = scheduler.sigmas[picks], scheduler.timesteps[picks[:-1]]
        self.scheduler.timesteps = self.timesteps

    def step(self, velocity: Tensor, index: int, latents: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """From timesteps[index] to the next one, or to the image: the latents there, and the rows' memory, which is the
        step's prediction of the image. [R, ...] each; the memory is what the step before returned, None for the first.
        """
        scheduler = self.scheduler
        scheduler.model_outputs, scheduler.lower_order_nums = [None, memory], min(index, 2)
        scheduler._step_index = index  # otherwise it searches for its timestep, a host sync
        after = scheduler.step(velocity, self.timesteps[index], latents, return_dict=False)[0]
        return after, scheduler.model_outputs[-1]


class Extrapolation:
    """Euler's steps of the scheduler from step `start` to sigma = 0, of which a share of `ratio` asks for a velocity.

    The others extrapolate it, linearly in sigma, from the last two that were asked for. So the grid and its errors stay
    those of the whole schedule, which keeps the order of rewards better than a solver of its own on a coarser grid.
    """

    def __init__(self, scheduler, start: int, ratio: float):
        num_steps, sigmas = len(scheduler.timesteps), scheduler.sigmas
        steps = asked_steps(start, num_steps, ratio)
        self.timesteps, self.weights = scheduler.timesteps[steps], []  # of the velocity, and of its change
        for before, step, following in zip([None, *steps], steps, [*steps[1:], num_steps], strict=False):
            to_come = sigmas[step + 1 : following + 1]
            bent = (to_come.diff() * (to_come[:-1] - sigmas[step])).sum()
            change = 0.0 if before is None else bent / (sigmas[step] - sigmas[before])
            self.weights.append((sigmas[following] - sigmas[step], change))

    def step(self, velocity: Tensor, index: int, latents: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """As DPMSolver.step; the memory is the velocity."""
        whole, change = self.weights[index]
        last = velocity if memory is None else memory
        return latents + whole * velocity + change * (velocity - last), velocity


def asked_steps(start: int, num_steps: int, ratio: float) -> list[int]:
    """round(ratio * what is left) of the steps from `start` on, at least the first: every second one is left out, from
    the last backwards, where that is enough, since late steps change an image least; else evenly spread ones stay."""
    left = num_steps - start
    num = max(1, round(left * ratio))
    if 2 * num >= left:
        left_out = range(num_steps - 1, start, -2)[: left - num]
        return [step for step in range(start, num_steps) if step not in left_out]
    return torch.linspace(start, num_steps - 1, num + 1).floor().long().tolist()[:-1]


Solver = DPMSolver | Extrapolation
KINDS = dict(zip(SOLVERS, (DPMSolver, Extrapolation), strict=True))


@lru_cache(maxsize=256)
def solver_of(name: str, scheduler, start: int, ratio: float) -> Solver:
    """One for all requests that begin at this step of this scheduler."""
    return KINDS[name](scheduler, start, ratio)
