"""Denoising by continuous batching: many requests share forwards of a fixed number of rows.

A request leaves when it is finished and another takes its place. Each has its own timestep and its own schedule. Which
requests share a forward changes no trajectory: a forward has one shape, in which a row's velocity does not depend on
its neighbours, and all else that belongs to a request (schedule, noise, solver) is stored in it. Steps whose velocity
enters a log-prob have forwards of their own, of the shape of the update's, so that the update computes the same bits;
they run inside `exact()`. The others may be faster than exact: they run inside `fast()`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from flow_grpo.base import rng
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.request import Request, TracedStep
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep, sde_step_with_logprob
from flow_grpo.diffusers_patch.size import Size

Velocity = Callable[[Tensor, Tensor, Condition, float, Size], Tensor]  # of x [B, ...], t [B], ..., guidance_scale, size


@dataclass
class Batching:
    """How many rows a forward has, and how many of them were used."""

    log_prob_rows: int  # of steps whose velocity enters a log-prob: the update's batch size
    ode_rows: int  # of the others
    filled: bool = True  # every forward has as many rows as that; else as many as there are
    num_forwards: int = 0
    rows: int = 0  # that were some request's
    capacity: int = 0  # rows that all forwards together had room for

    @property
    def occupancy(self) -> float:
        """Fraction of the rows that were some request's."""
        return self.rows / max(self.capacity, 1)

    def size(self, request: Request) -> int:
        """Rows of a forward that takes the request's next step."""
        return self.log_prob_rows if request.needs_log_prob else self.ode_rows


def denoise(
    velocity: Velocity,
    requests: Iterable[Request],
    batching: Batching,
    exact: Callable = nullcontext,
    fast: Callable = nullcontext,
) -> Iterator[Request]:
    """Denoise all requests; yields each as it is finished, with its latents and trace, a trunk with its last branch.
    A shared prefix is not yielded; its continuations are.

    Args:
        requests: taken one by one, when there is room for them.
        exact: () -> context of the forwards whose velocity enters a log-prob; `fast` of the others.
    """
    coming, in_flight, room = iter(requests), [], batching.log_prob_rows + batching.ode_rows
    while True:
        while len(in_flight) < room and (request := next(coming, None)) is not None:
            in_flight += request.start_continuations() or [request]
        if not in_flight:
            return
        batch = next_batch(in_flight, batching)
        mode = exact if batch[0].needs_log_prob else fast
        new = step_scheduler(batch, denoise_step(velocity, batch, batching, mode))
        ended = {request for request in batch + new if request.finished}
        in_flight = [request for request in in_flight + new if request not in ended]
        yield from completed_roots([request for request in batch + new if request in ended])


def completed_roots(ended: list[Request]) -> list[Request]:
    """Of requests that a forward has finished: images, and trunks all of whose branches are finished."""
    roots = dict.fromkeys(request.trunk or request for request in ended if not request.continuations)
    return [root for root in roots if root.finished and all(branch.finished for branch in root.branches)]


def next_batch(in_flight: list[Request], batching: Batching) -> list[Request]:
    """Requests of one key for the next forward: the first full forward, or else the fullest."""
    by_key = {}
    for request in in_flight:
        by_key.setdefault(request.batch_key, []).append(request)
    requests = max(by_key.values(), key=lambda requests: min(len(requests) / batching.size(requests[0]), 1.0))
    return requests[: batching.size(requests[0])]


def denoise_step(velocity: Velocity, batch: list[Request], batching: Batching, mode: Callable) -> Tensor:
    """Velocities of a batch, by one forward inside mode(), maybe filled up with copies of the last row."""
    first, (x, t) = batch[0], inputs_of(batch)
    num = len(x)
    condition = Condition.concat([request.current_condition for request in batch])
    size = batching.size(first) if batching.filled else num
    batching.num_forwards += 1
    batching.rows += num
    batching.capacity += size
    if size > num:
        rows = torch.arange(size, device=x.device).clamp(max=num - 1)
        x, t, condition = x[rows], t[rows], condition.take(rows)
    with mode():
        v = velocity(x, t, condition, first.params.guidance_scale, first.size)
    return v[:num].detach()


def inputs_of(requests: list[Request]) -> tuple[Tensor, Tensor]:
    """Latents [R, ...] and timesteps [R] of R requests."""
    return torch.cat([request.latents for request in requests]), torch.stack([r.timestep for r in requests])


def step_scheduler(batch: list[Request], velocities: Tensor) -> list[Request]:
    """Move every request of a batch by one step, in place; returns new ones: branches and continuations."""
    new, groups = [], {}
    for request, v in zip(batch, velocities.split(1), strict=True):
        params, key = request.params, (id(request.scheduler),)  # one call for all that take the same kind of step
        if request.solver:
            key = id(request.solver), request.step
        elif request.needs_log_prob:
            key += request.num_branches, params.noise_level, params.sde_type
        groups.setdefault(key, []).append((request, v))
    for pairs in groups.values():
        requests, v = [request for request, _ in pairs], torch.cat([v for _, v in pairs])
        if requests[0].solver:
            solver_step(requests, v)
        elif requests[0].needs_log_prob:
            new += noisy_step(requests, v)
        else:
            euler_step(requests, v)
    for request in batch:
        request.step += 1
        request.begin_solver()
        new += request.start_continuations()
    return new


def euler_step(requests: list[Request], velocities: Tensor) -> None:
    """One of the ODE, for requests of one schedule."""
    x, t = inputs_of(requests)
    after = sde_step_with_logprob(requests[0].scheduler, velocities, t, x, noise_level=0.0).prev_sample
    for request, latents in zip(requests, after.split(1)):
        request.latents = latents


def solver_step(requests: list[Request], velocities: Tensor) -> None:
    """One of a solver, for requests at the same of its steps."""
    first, (x, _) = requests[0], inputs_of(requests)
    memory = None if first.memory is None else torch.cat([request.memory for request in requests])
    after, memory = first.solver.step(velocities, first.step, x, memory)
    for request, latents, remembered in zip(requests, after.split(1), memory.split(1)):
        request.latents, request.memory = latents, remembered


def noisy_step(requests: list[Request], velocities: Tensor) -> list[Request]:
    """One of the SDE, for requests of one schedule and kind of noise; returns the trunks' branches."""
    outcomes, params = requests[0].num_branches, requests[0].params
    x, t = inputs_of(requests)
    step = sde_step_with_logprob(
        requests[0].scheduler,
        *(part.repeat_interleave(outcomes, 0) for part in (velocities, t, x)),
        noise_level=params.noise_level,
        sde_type=params.sde_type,
        noise=rng.normal((outcomes, *x.shape[1:]), [r.generator for r in requests], x.device).flatten(0, 1),
    )
    new, steps = [], zip(*(part.split(outcomes) for part in step))
    for request, timestep, latents, drawn in zip(requests, t.split(1), x.split(1), map(SDEStep._make, steps)):
        request.trace.append(TracedStep(timestep, latents, drawn))
        if request.is_trunk:
            new += make_branches(request, drawn.prev_sample)
        else:
            request.latents = drawn.prev_sample
    if new:
        euler_step(requests, velocities)
    return new


def make_branches(trunk: Request, latents: Tensor) -> list[Request]:
    """The branches of a trunk at its present step, from `latents` [J, ...]."""
    shared, step = (trunk.size, trunk.scheduler, trunk.params), trunk.step + 1
    branches = [
        Request(trunk.name, trunk.condition, row, *shared, short=trunk.short, step=step, trunk=trunk)
        for row in latents.split(1)
    ]
    trunk.branches += branches
    return branches


def joined(finished: list[Request]) -> tuple[Tensor, list[TracedStep]]:
    """Latents [B, ...] of images, or [B, K, J, ...] of trunks' branches, and a TracedStep of all rows per step."""
    trace = []
    for traced_steps in zip(*(request.trace for request in finished), strict=True):
        timesteps, latents, steps = zip(*traced_steps)
        trace.append(TracedStep(torch.cat(timesteps), torch.cat(latents), SDEStep(*map(torch.cat, zip(*steps)))))
    shape = len(finished), len(finished[0].noisy), finished[0].num_branches
    if not finished[0].is_trunk:
        return torch.cat([request.latents for request in finished]), trace
    branches = [branch.latents for request in finished for branch in request.branches]
    return torch.cat(branches).unflatten(0, shape), trace
