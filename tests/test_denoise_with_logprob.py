"""Denoising against loops written out by hand, with a velocity that is a formula."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flow_grpo.base import rng
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.denoise_with_logprob import Batching, denoise, joined
from flow_grpo.diffusers_patch.request import Request, TracedStep
from flow_grpo.diffusers_patch.sample_with_logprob import shared_prefixes
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.diffusers_patch.solvers import DPMSolver, Extrapolation, asked_steps

NUM_STEPS = 6
NUM_PROMPTS = 3
NUM_BRANCHES = 4
SHAPE = (5, 2)
SIZE = Size(64, 96)
SIGMAS = torch.tensor([1.0, 0.9, 0.75, 0.6, 0.4, 0.15, 0.0])


class Scheduler(SimpleNamespace):
    __hash__ = object.__hash__  # as diffusers' schedulers, which solvers are kept by


SCHEDULER = Scheduler(sigmas=SIGMAS, timesteps=1000 * SIGMAS[:-1])
TIMESTEPS = SCHEDULER.timesteps.tolist()
PROMPTS = torch.tensor([0.3, -0.5, 0.8]).view(-1, 1, 1)  # what the velocity makes of each row's prompt
NOISE_LEVEL = 0.7


def formula(x, t, rows):
    return torch.tanh(2 * x) * PROMPTS[rows] + 0.3 * x - (t / 1000).view(-1, 1, 1)


def generators():
    return [rng.generator(0, "noise", row) for row in range(NUM_PROMPTS)]


class Forward(NamedTuple):
    """A call of the velocity."""

    timestep: float  # of the first row
    num_rows: int
    is_fast: bool  # inside the context of forwards without a log-prob


class Denoised(NamedTuple):
    """Results of requests for some prompts."""

    latents: Tensor
    trace: list[TracedStep]
    forwards: list[Forward]

    @property
    def num_rows(self):
        return sum(forward.num_rows for forward in self.forwards)


def denoised(noisy_steps, num_branches=1, ode_rows=1000, prompts=range(NUM_PROMPTS), groups=None, **flash):
    streams = generators()
    latents = rng.normal(SHAPE, streams)
    params = SamplingParams(NUM_STEPS, 1.0, NOISE_LEVEL, **flash)
    forwards = []
    inside = []

    @contextmanager
    def fast():
        inside.append(True)
        yield
        inside.clear()

    def velocity(x, t, condition, guidance_scale, size):
        assert (guidance_scale, size) == (1.0, SIZE)
        forwards.append(Forward(t[0].item(), len(x), bool(inside)))
        return formula(x, t, condition.text_embeds[:, 0, 0].long())

    requests = []
    for name, prompt in enumerate(prompts):
        request = Request(
            name,
            Condition(torch.full((1, 1, 1), float(prompt))),
            latents[prompt : prompt + 1],
            SIZE,
            SCHEDULER,
            params,
            noisy_steps=noisy_steps,
            num_branches=num_branches,
            generator=streams[name],
        )
        requests.append(request)
    if groups:
        requests = shared_prefixes(requests, groups)
    finished = denoise(velocity, requests, Batching(NUM_PROMPTS, ode_rows, filled=False), fast=fast)
    final_latents, trace = joined(sorted(finished, key=lambda request: request.name))
    return Denoised(final_latents, trace, forwards)


def noisy_step(x, i, prompt, noise):
    t = SCHEDULER.timesteps[i : i + 1]
    v = formula(x, t, slice(prompt, prompt + 1))
    return sde_step_with_logprob(SCHEDULER, v, t, x, noise=noise, noise_level=NOISE_LEVEL)


def ode_steps(x, steps, prompt):
    for i in steps:
        v = formula(x, SCHEDULER.timesteps[i : i + 1], slice(prompt, prompt + 1))
        x = x + v * (SIGMAS[i + 1] - SIGMAS[i])
    return x


@pytest.mark.parametrize("window", [range(0), range(2), range(2, 4), range(NUM_STEPS - 1)])
def test_a_window_is_the_loop_one_would_write_whose_log_probs_are_outside_the_fast_context(window):
    result = denoised(window)
    for i, traced in zip(window, result.trace, strict=True):
        assert traced.timestep.tolist() == [TIMESTEPS[i]] * NUM_PROMPTS
    assert result.forwards == [Forward(TIMESTEPS[i], NUM_PROMPTS, i not in window) for i in range(NUM_STEPS)]
    for row, stream in enumerate(generators()):
        x = torch.randn(1, *SHAPE, generator=stream)
        for i in range(NUM_STEPS):
            if i not in window:
                x = ode_steps(x, [i], row)
                continue
            step = noisy_step(x, i, row, torch.randn(1, *SHAPE, generator=stream))
            traced = result.trace[i - window.start]
            torch.testing.assert_close(traced.latents[row], x[0])
            torch.testing.assert_close(traced.step.log_prob[row], step.log_prob[0])
            torch.testing.assert_close(traced.step.prev_sample[row], step.prev_sample[0])
            x = step.prev_sample
        torch.testing.assert_close(result.latents[row], x[0])


@pytest.mark.parametrize("steps", [range(NUM_STEPS - 1), range(3), range(1, 4)])
def test_branches_are_what_one_gets_one_at_a_time_without_a_forward_too_many(steps):
    result = denoised(steps, NUM_BRANCHES)
    assert result.latents.shape == (NUM_PROMPTS, len(steps), NUM_BRANCHES, *SHAPE)
    branch_rows = sum(NUM_STEPS - 1 - i for i in steps)
    assert result.num_rows == NUM_PROMPTS * steps.stop + NUM_PROMPTS * NUM_BRANCHES * branch_rows
    exact = [forward for forward in result.forwards if not forward.is_fast]
    assert exact == [Forward(TIMESTEPS[i], NUM_PROMPTS, False) for i in steps]
    for row, stream in enumerate(generators()):
        latents = torch.randn(1, *SHAPE, generator=stream)
        for k, i in enumerate(steps):
            trunk = ode_steps(latents, range(i), row)
            noise = torch.randn(NUM_BRANCHES, *SHAPE, generator=stream)
            traced = result.trace[k]
            torch.testing.assert_close(traced.latents[row], trunk[0])
            for j in range(NUM_BRANCHES):
                step = noisy_step(trunk, i, row, noise[j : j + 1])
                outcome = row * NUM_BRANCHES + j
                torch.testing.assert_close(traced.step.log_prob[outcome], step.log_prob[0])
                torch.testing.assert_close(traced.step.prev_sample[outcome], step.prev_sample[0])
                image = ode_steps(step.prev_sample, range(i + 1, NUM_STEPS), row)
                torch.testing.assert_close(result.latents[row, k, j], image[0])


def test_finished_trunks_and_branches_are_freed_without_a_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        denoised(range(1, 4), num_branches=NUM_BRANCHES)
        assert [thing for thing in gc.get_objects() if isinstance(thing, Request)] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("ode_rows", [1, 5, NUM_PROMPTS * NUM_BRANCHES])
def test_the_rows_of_a_forward_change_nothing_but_the_calls_of_which_one_at_most_is_not_full(ode_rows):
    steps = range(NUM_STEPS - 1)
    result = denoised(steps, NUM_BRANCHES, ode_rows)
    expected = denoised(steps, NUM_BRANCHES)
    torch.testing.assert_close(result.latents, expected.latents, rtol=0, atol=1e-6)
    for traced, other in zip(result.trace, expected.trace, strict=True):
        assert torch.equal(traced.step.log_prob, other.step.log_prob)
    assert result.num_rows == expected.num_rows
    branch_forwards = sorted(forward.num_rows for forward in result.forwards if forward.is_fast)
    assert branch_forwards[1:] == [ode_rows] * (len(branch_forwards) - 1)


@pytest.mark.parametrize("ode_rows", [1, 1000])
@pytest.mark.parametrize("window", [range(2), range(2, 4), range(3, NUM_STEPS - 1)])
def test_a_shared_prefix_is_denoised_once_and_makes_the_same_images(window, ode_rows):
    groups = [7, 3, 7]
    prompts = [0, 1, 0]
    result = denoised(window, ode_rows=ode_rows, groups=groups, prompts=prompts)
    assert result.num_rows == len(set(groups)) * window.start + NUM_PROMPTS * (NUM_STEPS - window.start)
    expected = denoised(window, prompts=prompts)
    torch.testing.assert_close(result.latents, expected.latents)
    for traced, other in zip(result.trace, expected.trace, strict=True):
        torch.testing.assert_close(traced.latents, other.latents)
        torch.testing.assert_close(traced.step.log_prob, other.step.log_prob)
    assert (result.latents[0] - result.latents[2]).abs().max() > 0.01


@pytest.mark.parametrize("window", [range(0), range(1), range(2, 4), range(4, 5), range(NUM_STEPS - 1)])
def test_solvers_take_their_share_of_the_forwards_and_all_that_extrapolation_can_ask_for_are_eulers(window):
    left = NUM_STEPS - window.stop
    for solver, rounded in (("dpm", int), ("extrapolate", round)):
        for ratio in (0.4, 0.5, 1.0):
            result = denoised(window, flash_ratio=ratio, flash_solver=solver)
            assert len(result.forwards) == window.stop + max(1, rounded(left * ratio))
            assert result.latents.isfinite().all()
    torch.testing.assert_close(result.latents, denoised(window).latents)
    sigmas = DPMSolver(SCHEDULER, window.stop, 0.4).scheduler.sigmas
    assert sigmas[0] == SIGMAS[window.stop]
    assert sigmas[-1] == 0


def test_a_share_of_forwards_that_is_a_whole_number_is_not_rounded_down():
    sigmas = torch.linspace(1, 0, 51)
    timesteps = DPMSolver(SimpleNamespace(sigmas=sigmas, timesteps=1000 * sigmas[:-1]), 0, 0.58).timesteps
    assert len(timesteps) == 29
    assert timesteps[1] == 1000 * sigmas[2], "the nearest to 50 / 29 steps"


def test_extrapolation_leaves_out_every_second_step_from_the_last_then_more():
    assert asked_steps(1, 10, 1.0) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert asked_steps(1, 10, 0.7) == [1, 2, 3, 4, 6, 8]
    assert asked_steps(1, 10, 0.5) == [1, 3, 5, 7]
    assert asked_steps(1, 10, 0.3) == [1, 3, 6]
    assert asked_steps(8, 10, 0.5) == asked_steps(8, 10, 0.1) == [8]
    assert asked_steps(9, 10, 0.1) == [9]


@pytest.mark.parametrize("start_step", [0, 1, 3])
def test_extrapolation_is_exact_where_the_velocity_is_linear_in_sigma(start_step):
    """Then what it extrapolates is what a forward would have said, but for the first gap, which has one velocity."""
    scheduler = SimpleNamespace(timesteps=torch.linspace(1000, 100, 10), sigmas=torch.linspace(1, 0, 11) ** 1.5)
    slope, offset, x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    velocities = scheduler.sigmas[:-1, None] * slope + offset

    def extrapolated(ratio):
        solver = Extrapolation(scheduler, start_step, ratio)
        steps = asked_steps(start_step, 10, ratio)
        assert torch.equal(solver.timesteps, scheduler.timesteps[steps])
        latents = x
        memory = None
        for index, step in enumerate(steps):
            latents, memory = solver.step(velocities[step], index, latents, memory)
        return latents

    euler = x + (scheduler.sigmas.diff()[start_step:, None] * velocities[start_step:]).sum(0)
    torch.testing.assert_close(extrapolated(1.0), euler)
    torch.testing.assert_close(extrapolated(0.9), euler)
    torch.testing.assert_close(extrapolated(0.7), euler)
    assert (extrapolated(0.3) - euler).abs().max() < (extrapolated(0.1) - euler).abs().max()
