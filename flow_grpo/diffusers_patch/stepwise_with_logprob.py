"""Many walks from noise to image in a fixed number of slots: a request leaves when it is finished and another takes its
place, each at its own timestep, on its own schedule (continuous batching).

Which requests share a forward changes no trajectory: a forward has one shape, in which a row's velocity does not depend
on its neighbours, and all else that belongs to a request (schedule, noise, solver) lies in it. Steps whose velocity
enters a log-prob have slots of their own, of the shape of the update's forwards, so that the update computes the same
bits; they run inside `scored()`. The others may be faster than exact: they run inside `unscored()`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flow_grpo.diffusers_patch.denoise_with_logprob import SOLVERS, TracedStep
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep, sde_step_with_logprob


@dataclass(eq=False)
class Request:
    """R rows in lockstep: an image, a trunk, what a group shares (R = 1), or branches that left a trunk at one step."""

    name: Any  # what the caller knows it by
    embeds: Any  # the model's prompt embeddings, 1 row
    latents: Tensor | None  # [R, ...] f32, before its next step; None = from the request that it will leave
    scheduler: Any  # timesteps [T], sigmas [T + 1]
    guidance_scale: float
    noisy: range = range(0)  # its noisy steps
    num_branches: int = 0  # above 0: a trunk; it goes on without noise, and ends with its last noisy step
    noise: Callable | None = None  # noise(num) -> standard normal [num, ...] for its next noisy step
    how: dict = field(default_factory=dict)  # noise_level and sde_type of its noisy steps
    flash_ratio: float = 0.0  # above 0: what follows the noise takes this share of its forwards
    flash_solver: str = "dpm"  # how, a name in denoise_with_logprob.SOLVERS
    short: Any = None  # embeds without padding, for steps that enter no log-prob; None = the same for all
    step: int = 0  # the next one
    heirs: list["Request"] = field(default_factory=list)  # not empty: it ends at their step, where they begin
    trunk: "Request | None" = None  # of a branch
    branches: list["Request"] = field(default_factory=list)  # of a trunk, in the order of their steps
    solver: Any = None  # what takes its next step, if not Euler
    trace: list[TracedStep] = field(default_factory=list)

    def __post_init__(self):
        self.begin_solver()

    @property
    def scored(self) -> bool:
        """Whether its next velocity enters a log-prob."""
        return self.step in self.noisy

    @property
    def kind(self) -> tuple:
        """Requests of one kind can share a forward."""
        text = self.text
        return self.scored, self.guidance_scale, text.embeds.shape[1:], text.mask is None, self.latents.shape[1:]

    @property
    def text(self) -> Any:
        """The embeddings of its next step."""
        return self.embeds if self.scored or self.short is None else self.short

    @property
    def timestep(self) -> Tensor:
        """[] f32, where its next velocity is."""
        return (self.solver or self.scheduler).timesteps[self.step]

    @property
    def finished(self) -> bool:
        """Whether there is no next step."""
        if self.heirs:
            return self.step >= self.heirs[0].step
        steps = self.noisy.stop if self.num_branches else len((self.solver or self.scheduler).timesteps)
        return self.step >= steps

    def begin_solver(self) -> None:
        """Once the noise is over, go on with fewer forwards where that was asked for."""
        num_steps = len(self.scheduler.timesteps)
        if self.flash_ratio and not self.num_branches and not self.solver and self.noisy.stop <= self.step < num_steps:
            self.solver, self.step = SOLVERS[self.flash_solver](self.scheduler, self.step, self.flash_ratio), 0
            self.noisy = range(0)

    def begin_heirs(self) -> list["Request"]:
        """Those that begin where this one has just ended."""
        if not self.heirs or not self.finished:
            return []
        for heir in self.heirs:
            heir.latents = self.latents
        return self.heirs


@dataclass
class Slots:
    """How many rows a forward has, and how well they were used."""

    scored: int  # of steps whose velocity enters a log-prob: the update's batch size
    free: int  # of the others
    ticks: int = 0  # forwards
    rows: int = 0  # that were some request's
    offered: int = 0

    @property
    def use(self) -> float:
        """Share of the offered rows that were used."""
        return self.rows / max(self.offered, 1)


def walk(
    velocity: Callable,
    requests: Iterable[Request],
    slots: Slots,
    scored: Callable = nullcontext,
    unscored: Callable = nullcontext,
) -> Iterator[Request]:
    """Take all requests to their end; yields each as it is finished, with its latents and trace, a trunk with its last
    branch. What a group shares is not yielded; its heirs are.

    Args:
        velocity: (x [B, ...], t [B], embeds of B rows, guidance_scale) -> velocity [B, ...].
        requests: taken one by one, when there is room for them.
    """
    coming, here, modes = iter(requests), [], (unscored, scored)
    while True:
        while sum(len(request.latents) for request in here) < slots.scored + slots.free:
            request = next(coming, None)
            if request is None:
                break
            here += request.begin_heirs() or [request]
        if not here:
            return
        tick = choose(here, slots)
        new = step_scheduler(tick, denoise_step(velocity, tick, slots, modes[tick[0].scored]), slots)
        here = [request for request in here + new if not request.finished]
        yield from complete([request for request in tick + new if request.finished and not request.heirs])


def complete(ended: list[Request]) -> list[Request]:
    """Of what a tick has finished, all that waits for no branch: images, and trunks with their last branch."""
    roots = dict.fromkeys(request.trunk or request for request in ended)
    return [root for root in roots if root.finished and all(branch.finished for branch in root.branches)]


def choose(here: list[Request], slots: Slots) -> list[Request]:
    """Requests of one kind for the next forward: of a full one if there is one, scored ones first, else the fullest."""
    by_kind = {}
    for request in here:
        by_kind.setdefault(request.kind, []).append(request)
    packed = [pack(some, slots.scored if kind[0] else slots.free) for kind, some in by_kind.items()]
    return max(packed, key=lambda some: (fill(some, slots), some[0].scored))


def pack(requests: list[Request], size: int) -> list[Request]:
    """The first ones that fit into `size` rows; at least one."""
    chosen, rows = [], 0
    for request in requests:
        if not chosen or rows + len(request.latents) <= size:
            chosen.append(request)
            rows += len(request.latents)
    return chosen


def fill(requests: list[Request], slots: Slots) -> float:
    """Share of a forward's rows that they take."""
    return sum(len(r.latents) for r in requests) / (slots.scored if requests[0].scored else slots.free)


def denoise_step(velocity: Callable, tick: list[Request], slots: Slots, mode: Callable) -> Tensor:
    """Velocities of a tick's rows, by one forward inside mode(), which is filled up with copies of the last row."""
    x = torch.cat([request.latents for request in tick])
    t = torch.cat([request.timestep.expand(len(request.latents)) for request in tick])
    embeds = tick[0].embeds.concat([request.text.expand(len(request.latents)) for request in tick])
    num = len(x)
    size = max(slots.scored if tick[0].scored else slots.free, num)
    rows = torch.arange(size, device=x.device).clamp(max=num - 1)
    slots.ticks, slots.rows, slots.offered = slots.ticks + 1, slots.rows + num, slots.offered + size
    with mode():
        v = velocity(x[rows], t[rows], embeds=embeds.take(rows), guidance_scale=tick[0].guidance_scale)
    return v[:num].detach()


def step_scheduler(tick: list[Request], velocities: Tensor, slots: Slots) -> list[Request]:
    """Move every request of a tick by one step, in place; returns those that have left them: branches and heirs."""
    new, alike = [], {}
    for request, v in zip(tick, velocities.split([len(request.latents) for request in tick]), strict=True):
        if request.solver:
            request.latents = request.solver.step(v, request.timestep, request.latents, return_dict=False)[0]
        else:  # one call for all that share a schedule
            how = (request.num_branches, *sorted(request.how.items())) if request.scored else ()
            alike.setdefault((id(request.scheduler), *how), []).append((request, v))
    for some in alike.values():
        requests, v = [request for request, _ in some], torch.cat([v for _, v in some])
        if requests[0].scored:
            new += noisy_step(requests, v, slots.free)
        else:
            euler_step(requests, v)
    for request in tick:
        request.step += 1
        request.begin_solver()
        new += request.begin_heirs()
    return new


def euler_step(requests: list[Request], velocities: Tensor) -> None:
    """One of the ODE, for requests of one schedule."""
    sizes = [len(request.latents) for request in requests]
    x = torch.cat([request.latents for request in requests])
    t = torch.cat([request.timestep.expand(size) for request, size in zip(requests, sizes)])
    after = sde_step_with_logprob(requests[0].scheduler, velocities, t, x, noise_level=0.0).prev_sample
    for request, latents in zip(requests, after.split(sizes)):
        request.latents = latents


def noisy_step(requests: list[Request], velocities: Tensor, free_slots: int) -> list[Request]:
    """One of the SDE, for requests of one row, schedule and kind of noise; returns the trunks' branches."""
    outcomes = max(1, requests[0].num_branches)
    x, t = torch.cat([r.latents for r in requests]), torch.stack([r.timestep for r in requests])
    noise = torch.cat([request.noise(outcomes) for request in requests])
    origin = torch.arange(len(x), device=x.device).repeat_interleave(outcomes)
    drawn = (requests[0].scheduler, velocities[origin], t[origin], x[origin])
    step = sde_step_with_logprob(*drawn, noise=noise, **requests[0].how)
    new = []
    for i, request in enumerate(requests):
        one, ours = slice(i, i + 1), slice(i * outcomes, (i + 1) * outcomes)
        request.trace.append(TracedStep(t[one], x[one], SDEStep(*(part[ours] for part in step))))
        if request.num_branches:
            new += branch(request, step.prev_sample[ours], free_slots)
        else:
            request.latents = step.prev_sample[ours]
    if requests[0].num_branches:
        euler_step(requests, velocities)
    return new


def branch(trunk: Request, latents: Tensor, free_slots: int) -> list[Request]:
    """What leaves a trunk at its present step, together if nine tenths of the slots can be filled with such."""
    together = free_slots // len(latents) * len(latents)
    size = len(latents) if together >= 0.9 * free_slots else 1
    common = dict(embeds=trunk.embeds, scheduler=trunk.scheduler, guidance_scale=trunk.guidance_scale, trunk=trunk)
    common |= dict(short=trunk.short, step=trunk.step + 1)
    common |= dict(flash_ratio=trunk.flash_ratio, flash_solver=trunk.flash_solver)
    new = [Request(trunk.name, latents=part, **common) for part in latents.split(size)]
    trunk.branches += new
    return new


def joined(finished: list[Request]) -> tuple[Tensor, list[TracedStep]]:
    """Images, or trunks with their branches, as `denoise_with_logprob` and `branch_with_logprob` return them."""
    latents = torch.cat([part.latents for request in finished for part in request.branches or [request]])
    if finished[0].num_branches:
        latents = latents.unflatten(0, (len(finished), len(finished[0].noisy), finished[0].num_branches))
    trace = [
        TracedStep(
            torch.cat([part.timestep for part in parts]),
            torch.cat([part.latents for part in parts]),
            SDEStep(*(torch.cat(column) for column in zip(*(part.step for part in parts)))),
        )
        for parts in zip(*(request.trace for request in finished), strict=True)
    ]
    return latents, trace
