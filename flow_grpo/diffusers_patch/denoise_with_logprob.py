"""Denoising by continuous batching: many requests share forwards of a fixed number of rows.

A request leaves when it is finished and another takes its place. Each has its own timestep and its own schedule. Which
requests share a forward changes no trajectory: a forward has one shape, in which a row's velocity does not depend on
its neighbours, and all else that belongs to a request (schedule, noise, solver) is stored in it. Steps whose velocity
enters a log-prob have forwards of their own, of the shape of the update's, so that the update computes the same bits;
they run inside `exact()`. The others may be faster than exact: they run inside `fast()`.

A batch whose rows take each step together is one request of several rows.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep, sde_step_with_logprob
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.diffusers_patch.solvers import Solver, solver_of

Velocity = Callable[[Tensor, Tensor, Condition, float, Size], Tensor]  # of x [B, ...], t [B], ..., guidance_scale, size


class TracedStep(NamedTuple):
    """One noisy step. J outcomes were drawn from each of B latents; J = 1 in a window."""

    timestep: Tensor  # [B] f32
    latents: Tensor  # [B, ...] f32, before the step
    step: SDEStep  # of B * J rows; the J outcomes of a latent are neighbours


@dataclass(eq=False)
class Request:
    """R rows that take each step together: images, trunks, the prefix that a group shares before its noise, or branches
    that left at one step."""

    name: Any  # what the caller knows it by
    condition: Condition  # R rows
    latents: Tensor | None  # [R, ...] f32, before its next step; None = from the prefix that it continues
    size: Size
    scheduler: Any  # timesteps [T], sigmas [T + 1]
    params: SamplingParams
    noisy: range = range(0)  # its noisy steps
    num_branches: int = 0  # above 0: trunks; they go on without noise, and end with their last noisy step
    noise: Callable[[int], Tensor] | None = None  # J -> standard normal [R * J, ...] for its next noisy step
    short: Condition | None = None  # without padding, for steps that enter no log-prob; None = the same for all
    step: int = 0  # the next one
    continuations: list["Request"] = field(default_factory=list)  # of a prefix, which ends at the step of the first one
    source_rows: Tensor | None = None  # of a continuation, [R]: rows of the prefix; None = all
    trunk: "Request | None" = None  # of a branch
    branches: list["Request"] = field(default_factory=list)  # of trunks, in the order of their steps
    solver: Solver | None = None  # what takes its next step, if not Euler
    memory: Tensor | None = None  # [R, ...], what its solver remembers
    trace: list[TracedStep] = field(default_factory=list)

    def __post_init__(self):
        self.begin_solver()

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.latents)

    @property
    def needs_log_prob(self) -> bool:
        """Whether its next velocity enters a log-prob."""
        return self.step in self.noisy

    @property
    def batch_key(self) -> tuple:
        """Requests with equal keys can share a forward."""
        shapes = self.latents.shape[1:], self.current_condition.shapes
        return self.needs_log_prob, self.params.guidance_scale, self.size, *shapes

    @property
    def current_condition(self) -> Condition:
        """Of its next step."""
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
        steps = self.noisy.stop if self.num_branches else len((self.solver or self.scheduler).timesteps)
        return self.step >= steps

    def begin_solver(self) -> None:
        """Once the noise is over, go on with fewer forwards where that was asked for."""
        params, num_steps = self.params, len(self.scheduler.timesteps)
        waits = self.num_branches or self.continuations or self.solver
        if params.flash_ratio and not waits and self.noisy.stop <= self.step < num_steps:
            self.solver, self.step = solver_of(params.flash_solver, self.scheduler, self.step, params.flash_ratio), 0
            self.noisy = range(0)

    def start_continuations(self) -> list["Request"]:
        """Of a prefix that is finished, with its latents; [] of any other request."""
        if not self.continuations or not self.finished:
            return []
        for request in self.continuations:
            request.latents = self.latents if request.source_rows is None else self.latents[request.source_rows]
        return self.continuations


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

    def count(self, rows: int, size: int) -> None:
        """A forward of `size` rows, of which `rows` are some request's."""
        self.num_forwards, self.rows, self.capacity = self.num_forwards + 1, self.rows + rows, self.capacity + size


def denoise(
    velocity: Velocity,
    requests: Iterable[Request],
    batching: Batching,
    exact: Callable = nullcontext,
    fast: Callable = nullcontext,
) -> Iterator[Request]:
    """Denoise all requests; yields each as it is finished, with its latents and trace, trunks with their last
    branch. A shared prefix is not yielded; its continuations are.

    Args:
        requests: taken one by one, when there is room for them.
        exact: () -> context of the forwards whose velocity enters a log-prob; `fast` of the others.
    """
    coming, in_flight = iter(requests), []
    while True:
        while sum(request.num_rows for request in in_flight) < batching.log_prob_rows + batching.ode_rows:
            request = next(coming, None)
            if request is None:
                break
            in_flight += request.start_continuations() or [request]
        if not in_flight:
            return
        batch = next_batch(in_flight, batching)
        mode = exact if batch[0].needs_log_prob else fast
        new = step_scheduler(batch, denoise_step(velocity, batch, batching, mode), batching)
        in_flight = [request for request in in_flight + new if not request.finished]
        ended = [request for request in batch + new if request.finished and not request.continuations]
        yield from completed_roots(ended)


def completed_roots(ended: list[Request]) -> list[Request]:
    """Of requests that a forward has finished: images, and trunks all of whose branches are finished."""
    roots = dict.fromkeys(request.trunk or request for request in ended)
    return [root for root in roots if root.finished and all(branch.finished for branch in root.branches)]


def next_batch(in_flight: list[Request], batching: Batching) -> list[Request]:
    """Requests of one key for the next forward: a full forward if there is one, log-probs first, else the fullest."""
    by_key = {}
    for request in in_flight:
        by_key.setdefault(request.batch_key, []).append(request)
    packed = [fit_rows(requests, batching.size(requests[0])) for requests in by_key.values()]
    return max(packed, key=lambda batch: (filled_fraction(batch, batching), batch[0].needs_log_prob))


def fit_rows(requests: list[Request], size: int) -> list[Request]:
    """The first ones that fit into `size` rows; at least one."""
    chosen, rows = [], 0
    for request in requests:
        if not chosen or rows + request.num_rows <= size:
            chosen.append(request)
            rows += request.num_rows
    return chosen


def filled_fraction(batch: list[Request], batching: Batching) -> float:
    """Fraction of a forward's rows that a batch takes."""
    return sum(request.num_rows for request in batch) / batching.size(batch[0])


def denoise_step(velocity: Velocity, batch: list[Request], batching: Batching, mode: Callable) -> Tensor:
    """Velocities of a batch's rows, by one forward inside mode(), maybe filled up with copies of the last row."""
    first, num = batch[0], sum(request.num_rows for request in batch)
    x = _joined([request.latents for request in batch])
    t = _joined([request.timestep.expand(request.num_rows) for request in batch])
    condition = Condition.concat([request.current_condition for request in batch])
    size = max(batching.size(first), num) if batching.filled else num
    batching.count(num, size)
    if size > num:
        rows = torch.arange(size, device=x.device).clamp(max=num - 1)
        x, t, condition = x[rows], t[rows], condition.take(rows)
    with mode():
        v = velocity(x, t, condition, first.params.guidance_scale, first.size)
    return v[:num].detach()


def step_scheduler(batch: list[Request], velocities: Tensor, batching: Batching) -> list[Request]:
    """Move every request of a batch by one step, in place; returns new ones: branches and continuations."""
    new, groups = [], {}
    for request, v in zip(batch, velocities.split([request.num_rows for request in batch]), strict=True):
        params, key = request.params, (id(request.scheduler),)  # one call for all that take the same kind of step
        if request.solver:
            key = id(request.solver), request.step
        elif request.needs_log_prob:
            key += request.num_branches, params.noise_level, params.sde_type
        groups.setdefault(key, []).append((request, v))
    for pairs in groups.values():
        requests, v = [request for request, _ in pairs], _joined([v for _, v in pairs])
        if requests[0].solver:
            solver_step(requests, v)
        elif requests[0].needs_log_prob:
            new += noisy_step(requests, v, batching.ode_rows)
        else:
            euler_step(requests, v)
    for request in batch:
        request.step += 1
        request.begin_solver()
        new += request.start_continuations()
    return new


def euler_step(requests: list[Request], velocities: Tensor) -> None:
    """One of the ODE, for requests of one schedule."""
    sizes = [request.num_rows for request in requests]
    x = _joined([request.latents for request in requests])
    t = _joined([request.timestep.expand(size) for request, size in zip(requests, sizes)])
    after = sde_step_with_logprob(requests[0].scheduler, velocities, t, x, noise_level=0.0).prev_sample
    for request, latents in zip(requests, after.split(sizes)):
        request.latents = latents


def solver_step(requests: list[Request], velocities: Tensor) -> None:
    """One of a solver, for requests at the same of its steps."""
    first, sizes = requests[0], [request.num_rows for request in requests]
    memory = None if first.memory is None else _joined([request.memory for request in requests])
    x = _joined([request.latents for request in requests])
    after, memory = first.solver.step(velocities, first.step, x, memory)
    for request, latents, remembered in zip(requests, after.split(sizes), memory.split(sizes)):
        request.latents, request.memory = latents, remembered


def noisy_step(requests: list[Request], velocities: Tensor, ode_rows: int) -> list[Request]:
    """One of the SDE, for requests of one schedule and kind of noise; returns the trunks' branches."""
    outcomes, params = max(1, requests[0].num_branches), requests[0].params
    sizes = [request.num_rows for request in requests]
    x = _joined([request.latents for request in requests])
    t = _joined([request.timestep.expand(size) for request, size in zip(requests, sizes)])
    noise = _joined([request.noise(outcomes) for request in requests])
    source_rows = torch.arange(len(x), device=x.device).repeat_interleave(outcomes)
    step = sde_step_with_logprob(
        requests[0].scheduler,
        velocities[source_rows],
        t[source_rows],
        x[source_rows],
        noise_level=params.noise_level,
        sde_type=params.sde_type,
        noise=noise,
    )
    new, first = [], 0
    for request, size in zip(requests, sizes):
        rows, drawn = slice(first, first + size), slice(first * outcomes, (first + size) * outcomes)
        request.trace.append(TracedStep(t[rows], x[rows], SDEStep(*(part[drawn] for part in step))))
        if request.num_branches:
            new += make_branches(request, step.prev_sample[drawn], ode_rows)
        else:
            request.latents = step.prev_sample[drawn]
        first += size
    if requests[0].num_branches:
        euler_step(requests, velocities)
    return new


def make_branches(trunk: Request, latents: Tensor, ode_rows: int) -> list[Request]:
    """The branches of trunks at their present step.

    Those of a single trunk are one request if nine tenths of a forward can be filled with such requests, else a request
    each. Those of several trunks are requests as large as a forward.
    """
    source_rows = torch.arange(trunk.num_rows, device=latents.device).repeat_interleave(trunk.num_branches)
    together = ode_rows // len(latents) * len(latents) >= 0.9 * ode_rows
    size = ode_rows if trunk.num_rows > 1 else len(latents) if together else 1
    new = [
        Request(
            trunk.name,
            trunk.condition.take(rows),
            part,
            trunk.size,
            trunk.scheduler,
            trunk.params,
            short=None if trunk.short is None else trunk.short.take(rows),
            step=trunk.step + 1,
            trunk=trunk,
        )
        for part, rows in zip(latents.split(size), source_rows.split(size))
    ]
    trunk.branches += new
    return new


def joined(finished: list[Request]) -> tuple[Tensor, list[TracedStep]]:
    """Latents [B, ...] of images, or [B, K, J, ...] of trunks' branches, and a TracedStep of all rows per step."""
    trace = [
        TracedStep(
            _joined([traced.timestep for traced in traced_steps]),
            _joined([traced.latents for traced in traced_steps]),
            SDEStep(*(_joined(column) for column in zip(*(traced.step for traced in traced_steps)))),
        )
        for traced_steps in zip(*(request.trace for request in finished), strict=True)
    ]
    return _joined([_drawn(request) for request in finished]), trace


def _drawn(request: Request) -> Tensor:
    """Latents of a request's images [R, ...], or of its branches [R, K, J, ...]."""
    if not request.num_branches:
        return request.latents
    shape = len(request.noisy), request.num_rows, request.num_branches
    return _joined([branch.latents for branch in request.branches]).unflatten(0, shape).transpose(0, 1)


def _joined(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Along the rows; one tensor as it is."""
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
