"""Solvers that take what is left of a walk, after its noisy steps, in fewer forwards.

Each is taken like a diffusers scheduler: a velocity at each of its `timesteps`, in order, goes to `step`.
"""

import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor


def dpm_solver(scheduler, start: int, ratio: float) -> DPMSolverMultistepScheduler:
    """DPM-Solver++ of 2nd order, midpoint (arXiv:2211.01095), over max(1, ratio * what is left) of the scheduler's own
    sigmas, evenly spread from step `start` to sigma = 0."""
    num_steps = len(scheduler.timesteps)
    num = max(1, int((num_steps - start) * ratio + 1e-9))  # 50 * 0.58 is 28.99...
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
        steps = asked_steps(start, num_steps, ratio)
        self.timesteps = scheduler.timesteps[steps]
        self.last, self.weights = None, []  # the last velocity; of each one to come, and of its change since the last
        for before, step, following in zip([None, *steps], steps, [*steps[1:], num_steps], strict=False):
            to_come = sigmas[step + 1 : following + 1]
            bent = (to_come.diff() * (to_come[:-1] - sigmas[step])).sum()
            change = 0.0 if before is None else bent / (sigmas[step] - sigmas[before])
            self.weights.append((sigmas[following] - sigmas[step], change))
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
