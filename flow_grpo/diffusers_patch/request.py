"""A request of continuous batching: where it stands, what it needs for its next step, and what its noisy steps left."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.diffusers_patch.solvers import Solver, solver_of


class TracedStep(NamedTuple):
    """One noisy step. J outcomes were drawn from each of B latents; J = 1 in a window."""

    timestep: Tensor  # [B] f32
    latents: Tensor  # [B, ...] f32, before the step
    step: SDEStep  # of B * J rows; the J outcomes of a latent are neighbours


@dataclass(eq=False)
class Request:
    """One row of the forwards: an image, a trunk, a branch, or the prefix that a group shares before its noise."""

    name: Any  # what the caller knows it by
    condition: Condition  # 1 row
    latents: Tensor | None  # [1, ...] f32, before its next step; None = from the prefix that it continues
    size: Size
    scheduler: Any  # timesteps [T], sigmas [T + 1]
    params: SamplingParams
    noisy: range = range(0)  # its noisy steps
    num_branches: int = 1  # above 1: a trunk; it goes on without noise, and ends with its last noisy step
    generator: torch.Generator | None = None  # of the normal draws of its noisy steps, in their order
    short: Condition | None = None  # without padding, for steps that enter no log-prob; None = the same for all
    step: int = 0  # the next one
    continuations: list["Request"] = field(default_factory=list)  # of a prefix, which ends at the step of the first one
    trunk: "Request | None" = None  # of a branch
    branches: list["Request"] = field(default_factory=list)  # of a trunk, in the order of its steps
    solver: Solver | None = None  # what takes its next step, if not Euler
    memory: Tensor | None = None  # [1, ...], what its solver remembers
    trace: list[TracedStep] = field(default_factory=list)

    def __post_init__(self):
        self.begin_solver()

    @property
    def is_trunk(self) -> bool:
        """Whether branches leave its noisy steps."""
        return self.num_branches > 1

    @property
    def needs_log_prob(self) -> bool:
        """Whether its next velocity enters a log-prob."""
        return self.step in self.noisy

    @property
    def batch_key(self) -> tuple:
        """Requests with equal keys can share a forward."""
        shapes = self.latents.shape, self.current_condition.shapes
        return self.needs_log_prob, self.params.guidance_scale, self.size, shapes

    @property
    def current_condition(self) -> Condition:
        return self.condition if self.needs_log_prob or self.short is None else self.short

    @property
    def timestep(self) -> Tensor:
        """[] f32, where its next velocity is."""
        return (self.solver or self.scheduler).timesteps[self.step]

    @property
    def finished(self) -> bool:
        """Whether there is no next step. A prefix is finished where its continuations begin."""
        if self.continuations:
            return self.step >= self.continuations[0].step
        steps = self.noisy.stop if self.is_trunk else len((self.solver or self.scheduler).timesteps)
        return self.step >= steps

    def begin_solver(self) -> None:
        """Once the noise is over, go on with fewer forwards where that was asked for."""
        params, num_steps = self.params, len(self.scheduler.timesteps)
        waits = self.is_trunk or self.continuations or self.solver
        if params.flash_ratio and not waits and self.noisy.stop <= self.step < num_steps:
            self.solver, self.step = solver_of(params.flash_solver, self.scheduler, self.step, params.flash_ratio), 0
            self.noisy = range(0)

    def start_continuations(self) -> list["Request"]:
        """Of a prefix that is finished, with its latents; [] of any other request."""
        if not self.continuations or not self.finished:
            return []
        for request in self.continuations:
            request.latents = self.latents
        return self.continuations
