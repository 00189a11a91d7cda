"""Requests of continuous batching: where each stands, what its next step needs, and what its noisy steps left.

An image is one request. A trunk with branches is one, each of its branches is one, and so is the prefix that the images
of a group share before their noise.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flow_grpo.diffusers_patch.condition import Condition, ConditionShapes
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.sde_with_logprob import Schedule, SDEStep
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.diffusers_patch.solvers import Solver, solver_of


class TracedStep(NamedTuple):
    """One noisy step. J outcomes were drawn from each of B latents; J = 1 in a window."""

    timestep: Tensor  # [B] f32
    latents: Tensor  # [B, ...] f32, before the step
    step: SDEStep  # of B * J rows; the J outcomes of a latent are neighbours


class BatchKey(NamedTuple):
    """Everything that requests must have in common to share a forward."""

    needs_log_prob: bool
    guidance_scale: float
    size: Size
    latents_shape: torch.Size
    condition_shapes: ConditionShapes


class StepKey(NamedTuple):
    """Everything that requests of a forward must have in common to take their steps in one call."""

    schedule: int  # id of the solver or of the scheduler
    solver_step: int | None = None  # of a solver
    num_branches: int | None = None  # of a noisy step
    noise_level: float | None = None  # of a noisy step
    sde_type: str | None = None  # of a noisy step


@dataclass(eq=False)
class Request:
    """One row of the forwards: an image, a trunk, a branch, or the prefix that a group shares before its noise."""

    name: Any  # what the caller knows it by
    condition: Condition  # 1 row
    latents: Tensor  # [1, ...] f32, before its next step; it gets those of the prefix that it continues
    size: Size
    scheduler: Schedule
    params: SamplingParams
    noisy_steps: range = range(0)
    num_branches: int = 1  # above 1: a trunk; it goes on without noise, and ends with its last noisy step
    generator: torch.Generator | None = None  # of the normal draws of its noisy steps, in their order
    short_condition: Condition | None = None  # with less padding, for steps without a log-prob; None = `condition`
    step: int = 0  # index of its next step among the timesteps of its solver or scheduler
    continuations: list["Request"] = field(default_factory=list)  # of a prefix, which ends at the step of the first one
    trunk: "Request | None" = None  # of a branch
    branches: list["Request"] = field(default_factory=list)  # of a trunk, in the order of its steps
    solver: Solver | None = None  # what takes its next step, if not Euler
    solver_memory: Tensor | None = None  # [1, ...], what its solver remembers of earlier velocities
    trace: list[TracedStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin_solver()

    @property
    def is_trunk(self) -> bool:
        """True if branches leave its noisy steps."""
        return self.num_branches > 1

    @property
    def needs_log_prob(self) -> bool:
        """True if its next velocity enters a log-prob."""
        return self.step in self.noisy_steps

    @property
    def batch_key(self) -> BatchKey:
        """Requests with equal keys can share a forward."""
        return BatchKey(
            self.needs_log_prob,
            self.params.guidance_scale,
            self.size,
            self.latents.shape,
            self.current_condition.shapes,
        )

    @property
    def step_key(self) -> StepKey:
        """Requests of one forward with equal keys take their next steps in one call."""
        # A solver's step has coefficients of its own; in a scheduler's, each row may stand at its own timestep.
        if self.solver is not None:
            return StepKey(id(self.solver), solver_step=self.step)
        if not self.needs_log_prob:
            return StepKey(id(self.scheduler))
        return StepKey(
            id(self.scheduler),
            num_branches=self.num_branches,
            noise_level=self.params.noise_level,
            sde_type=self.params.sde_type,
        )

    @property
    def current_condition(self) -> Condition:
        """Condition of its next velocity."""
        if self.needs_log_prob or self.short_condition is None:
            return self.condition
        return self.short_condition

    @property
    def timesteps(self) -> Tensor:
        """Timesteps [T] f32 of what takes its steps now: its solver, or its scheduler."""
        if self.solver is not None:
            return self.solver.timesteps
        return self.scheduler.timesteps

    @property
    def timestep(self) -> Tensor:
        """Timestep [] f32 of its next velocity."""
        return self.timesteps[self.step]

    @property
    def finished(self) -> bool:
        """True if it has no next step. A prefix ends where its continuations begin, a trunk with its last branches."""
        if self.continuations:
            return self.step >= self.continuations[0].step
        if self.is_trunk:
            return self.step >= self.noisy_steps.stop
        return self.step >= len(self.timesteps)

    @property
    def branches_finished(self) -> bool:
        """True if all branches that have left it are finished."""
        return all(branch.finished for branch in self.branches)

    def begin_solver(self) -> None:
        """Once the noise is over, go on with fewer forwards where that was asked for."""
        if not self.params.flash_ratio or self.solver is not None:
            return
        # A trunk ends with its noise, and a prefix before it.
        if self.is_trunk or self.continuations:
            return
        if self.noisy_steps.stop <= self.step < len(self.scheduler.timesteps):
            self.solver = solver_of(self.params.flash_solver, self.scheduler, self.step, self.params.flash_ratio)
            # From here on a step is an index of the solver's own timesteps, none of which is noisy.
            self.step = 0
            self.noisy_steps = range(0)

    def start_continuations(self) -> list["Request"]:
        """Give a finished prefix's latents to its continuations, and return these; [] for any other request."""
        if not self.continuations or not self.finished:
            return []
        for request in self.continuations:
            request.latents = self.latents
        return self.continuations
