"""Denoising by continuous batching: many requests share forwards of a fixed number of rows.

A request leaves when it is finished and another takes its place. Each has its own timestep and its own schedule. Which
requests share a forward changes no trajectory: a forward has one shape, in which a row's velocity does not depend on
its neighbours, and all else that belongs to a request (schedule, noise, solver) is stored in it. Steps whose velocity
enters a log-prob have forwards of their own, of the shape of the update's, so that the update computes the same bits;
they run inside `exact()`. The others may be faster than exact: they run inside `fast()`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flow_grpo.base import rng
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.request import BatchKey, Request, StepKey, TracedStep
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep, sde_step_with_logprob
from flow_grpo.diffusers_patch.size import Size

# (x [B, ...], t [B], condition, guidance_scale, size) -> [B, ...].
Velocity = Callable[[Tensor, Tensor, Condition, float, Size], Tensor]
ForwardContext = Callable[[], AbstractContextManager[Any]]


@dataclass
class Batching:
    """How many rows a forward has, and how many of them were used."""

    log_prob_rows: int  # of steps whose velocity enters a log-prob: the update's batch size
    ode_rows: int  # of the others
    filled: bool = True  # every forward is filled up to that many rows; else it has as many as there are
    num_forwards: int = 0
    rows: int = 0  # of all forwards together, without the copies that filled them up
    capacity: int = 0  # rows that all forwards together had room for

    @property
    def occupancy(self) -> float:
        """Fraction of the forwards' room that requests took."""
        return self.rows / max(self.capacity, 1)

    def forward_rows(self, request: Request) -> int:
        """Return the number of rows of a forward that takes the request's next step."""
        return self.log_prob_rows if request.needs_log_prob else self.ode_rows


def denoise(
    velocity: Velocity,
    requests: Iterable[Request],
    batching: Batching,
    exact: ForwardContext = nullcontext,
    fast: ForwardContext = nullcontext,
) -> Iterator[Request]:
    """Denoise all requests; yields each as it is finished, with its latents and trace, a trunk with its last branch.
    A shared prefix is not yielded; its continuations are.

    Args:
        requests: taken one by one, when there is room for them.
        exact: () -> context of the forwards whose velocity enters a log-prob; `fast` of the others.
    """
    waiting = iter(requests)
    in_flight: list[Request] = []
    while True:
        admit(waiting, in_flight, batching.log_prob_rows + batching.ode_rows)
        if not in_flight:
            return
        batch = next_batch(in_flight, batching)
        context = exact if batch[0].needs_log_prob else fast
        velocities = compute_velocities(velocity, batch, batching, context)
        started = take_steps(batch, velocities)

        ended = [request for request in batch + started if request.finished]
        ended_set = set(ended)
        in_flight = [request for request in in_flight + started if request not in ended_set]
        yield from completed_roots(ended)


def admit(waiting: Iterator[Request], in_flight: list[Request], room: int) -> None:
    """Add waiting requests to those in flight until there are `room` of them."""
    while len(in_flight) < room:
        request = next(waiting, None)
        if request is None:
            return
        # A prefix of a window that begins with the first step has nothing to do: its continuations start at once.
        in_flight += request.start_continuations() or [request]


def completed_roots(ended: list[Request]) -> list[Request]:
    """Return the requests that a caller waits for and that `ended` completes: images, and trunks all of whose branches
    are finished."""
    # A dict keeps the order, which a set would not.
    roots: dict[Request, None] = {}
    for request in ended:
        is_prefix = bool(request.continuations)
        if not is_prefix:
            roots[request.trunk or request] = None
            # Else a trunk and its branches, which name each other, would keep their latents until a garbage collection.
            request.trunk = None
    return [root for root in roots if root.finished and root.branches_finished]


def next_batch(in_flight: list[Request], batching: Batching) -> list[Request]:
    """Choose requests of one key for the next forward: the first full forward, or else the fullest."""
    by_key: dict[BatchKey, list[Request]] = {}
    for request in in_flight:
        by_key.setdefault(request.batch_key, []).append(request)

    best: list[Request] = []
    best_fill = 0.0
    for requests in by_key.values():
        fill = min(len(requests) / batching.forward_rows(requests[0]), 1.0)
        if fill > best_fill:
            best = requests
            best_fill = fill
    return best[: batching.forward_rows(best[0])]


def compute_velocities(velocity: Velocity, batch: list[Request], batching: Batching, context: ForwardContext) -> Tensor:
    """Compute velocities [R, ...] of R requests by one forward, which may be filled up with copies of the last row."""
    first = batch[0]
    num_rows = len(batch)
    x, t = inputs_of(batch)
    condition = Condition.concat([request.current_condition for request in batch])
    forward_rows = batching.forward_rows(first) if batching.filled else num_rows
    batching.num_forwards += 1
    batching.rows += num_rows
    batching.capacity += forward_rows
    if forward_rows > num_rows:
        rows = torch.arange(forward_rows, device=x.device).clamp(max=num_rows - 1)
        x = x[rows]
        t = t[rows]
        condition = condition.take(rows)
    with context():
        v = velocity(x, t, condition, first.params.guidance_scale, first.size)
    return v[:num_rows].detach()


class Inputs(NamedTuple):
    """Inputs of a velocity of R rows."""

    x: Tensor  # [R, ...] f32
    t: Tensor  # [R] f32, timesteps


def inputs_of(requests: list[Request]) -> Inputs:
    """Join the latents and the timesteps of R requests."""
    x = torch.cat([request.latents for request in requests])
    t = torch.stack([request.timestep for request in requests])
    return Inputs(x, t)


def take_steps(batch: list[Request], velocities: Tensor) -> list[Request]:
    """Move every request of a batch by one step, in place; returns new ones: branches and continuations."""
    rows_by_key: dict[StepKey, list[int]] = {}
    for row, request in enumerate(batch):
        rows_by_key.setdefault(request.step_key, []).append(row)

    started: list[Request] = []
    for rows in rows_by_key.values():
        requests = [batch[row] for row in rows]
        # Slices, since a list of indices would be copied to the device, which is waited for.
        v = torch.cat([velocities[row : row + 1] for row in rows])
        if requests[0].solver is not None:
            solver_step(requests, v)
        elif requests[0].needs_log_prob:
            started += noisy_step(requests, v)
        else:
            euler_step(requests, v)

    for request in batch:
        request.step += 1
        request.begin_solver()
        started += request.start_continuations()
    return started


def euler_step(requests: list[Request], velocities: Tensor) -> None:
    """Take a step of the ODE, for requests of one schedule."""
    x, t = inputs_of(requests)
    step = sde_step_with_logprob(requests[0].scheduler, velocities, t, x, noise_level=0.0)
    for request, latents in zip(requests, step.prev_sample.split(1), strict=True):
        request.latents = latents


def solver_step(requests: list[Request], velocities: Tensor) -> None:
    """Take a step of a solver, for requests that share the solver and stand at one step of it."""
    solver = requests[0].solver
    assert solver is not None
    # Before a solver's first step no request has a memory.
    memories = [request.solver_memory for request in requests if request.solver_memory is not None]
    memory = torch.cat(memories) if memories else None
    step = solver.step(velocities, requests[0].step, inputs_of(requests).x, memory)
    for row, request in enumerate(requests):
        request.latents = step.latents[row : row + 1]
        request.solver_memory = step.memory[row : row + 1]


def noisy_step(requests: list[Request], velocities: Tensor) -> list[Request]:
    """Take a step of the SDE, for R requests of one `step_key`; `take_steps` then counts it.

    Each request's trace gets the step with its J outcomes. An image (J = 1) moves to its outcome. A trunk makes a
    branch of each of its outcomes, and itself moves by the ODE. Returns the branches.

    Args:
        velocities: [R, ...].
    """
    first = requests[0]
    num_outcomes = first.num_branches
    x, t = inputs_of(requests)
    generators = [request.generator for request in requests if request.generator is not None]
    assert len(generators) == len(requests), "a noisy step draws from its request's generator"
    # Noise [R, J, ...], J draws from each request's own generator; latents and velocities are repeated to R * J rows.
    noise = rng.normal((num_outcomes, *x.shape[1:]), generators, x.device)
    step = sde_step_with_logprob(
        first.scheduler,
        velocities.repeat_interleave(num_outcomes, 0),
        t.repeat_interleave(num_outcomes, 0),
        x.repeat_interleave(num_outcomes, 0),
        noise_level=first.params.noise_level,
        sde_type=first.params.sde_type,
        noise=noise.flatten(0, 1),
    )
    branches: list[Request] = []
    for row, request in enumerate(requests):
        outcomes = slice(row * num_outcomes, (row + 1) * num_outcomes)
        request_step = SDEStep(*(part[outcomes] for part in step))
        request.trace.append(TracedStep(t[row : row + 1], x[row : row + 1], request_step))
        if request.is_trunk:
            branches += make_branches(request, request_step.prev_sample)
        else:
            request.latents = request_step.prev_sample
    if first.is_trunk:
        # The trunk itself goes on without noise.
        euler_step(requests, velocities)
    return branches


def make_branches(trunk: Request, latents: Tensor) -> list[Request]:
    """Make the branches of a trunk at its present step, from `latents` [J, ...]."""
    branches = []
    for branch_latents in latents.split(1):
        branch = Request(
            trunk.name,
            trunk.condition,
            branch_latents,
            trunk.size,
            trunk.scheduler,
            trunk.params,
            short_condition=trunk.short_condition,
            step=trunk.step + 1,
            trunk=trunk,
        )
        branches.append(branch)
    trunk.branches += branches
    return branches


def joined(finished: list[Request]) -> tuple[Tensor, list[TracedStep]]:
    """Join latents to [B, ...] of images, or [B, K, J, ...] of trunks' branches, and traces to a TracedStep of all rows
    per step."""
    traces = [request.trace for request in finished]
    trace = [_join_rows(traced_steps) for traced_steps in zip(*traces, strict=True)]
    first = finished[0]
    if not first.is_trunk:
        return torch.cat([request.latents for request in finished]), trace
    branch_latents = [branch.latents for trunk in finished for branch in trunk.branches]
    shape = (len(finished), len(first.noisy_steps), first.num_branches)
    return torch.cat(branch_latents).unflatten(0, shape), trace


def _join_rows(traced_steps: tuple[TracedStep, ...]) -> TracedStep:
    """Join the rows of one step of several requests."""
    # Each field of the requests' SDESteps by itself.
    steps = [traced.step for traced in traced_steps]
    joined_fields = [torch.cat(values) for values in zip(*steps, strict=True)]
    return TracedStep(
        timestep=torch.cat([traced.timestep for traced in traced_steps]),
        latents=torch.cat([traced.latents for traced in traced_steps]),
        step=SDEStep(*joined_fields),
    )
