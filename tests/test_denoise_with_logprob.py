"""Denoising against loops written out by hand, with a velocity that is a formula."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from flow_grpo.base import rng
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.denoise_with_logprob import Batching, denoise, joined
from flow_grpo.diffusers_patch.request import Request
from flow_grpo.diffusers_patch.sample_with_logprob import shared_prefixes
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.diffusers_patch.solvers import DPMSolver, Extrapolation, asked_steps

T, B, J, SHAPE = 6, 3, 4, (5, 2)
SIGMAS = torch.tensor([1.0, 0.9, 0.75, 0.6, 0.4, 0.15, 0.0])


class Scheduler(SimpleNamespace):
    __hash__ = object.__hash__  # as diffusers' schedulers, which solvers are kept by


SCHEDULER = Scheduler(sigmas=SIGMAS, timesteps=1000 * SIGMAS[:-1])
PROMPTS = torch.tensor([0.3, -0.5, 0.8]).view(-1, 1, 1)  # what the velocity makes of each row's prompt
HOW = dict(noise_level=0.7, sde_type="sde")


def formula(x, t, rows):
    return torch.tanh(2 * x) * PROMPTS[rows] + 0.3 * x - (t / 1000).view(-1, 1, 1)


def generators():
    return [rng.generator(0, "noise", b) for b in range(B)]


def denoised(noisy, num_branches=1, ode_rows=1000, prompts=range(B), groups=None, **flash):
    """Latents and trace of B rows, and of each call of the velocity: timestep, rows, whether in the fast context."""
    streams, calls, inside = generators(), [], []
    latents, params = rng.normal(SHAPE, streams)[list(prompts)], SamplingParams(T, 1.0, **HOW, **flash)

    @contextmanager
    def fast():
        inside.append(True)
        yield
        inside.clear()

    def velocity(x, t, condition, guidance_scale, size):
        assert (guidance_scale, size) == (1.0, Size(64, 96))
        calls.append((t[0].item(), len(x), bool(inside)))
        return formula(x, t, condition.text_embeds[:, 0, 0].long())

    conditions = [Condition(torch.full((1, 1, 1), float(prompt))) for prompt in prompts]
    kind, asked = dict(noisy_steps=noisy, num_branches=num_branches), (Size(64, 96), SCHEDULER, params)
    requests = [
        Request(b, condition, latents[b : b + 1], *asked, generator=streams[b], **kind)
        for b, condition in enumerate(conditions)
    ]
    requests = shared_prefixes(requests, groups) if groups else requests
    finished = denoise(velocity, requests, Batching(B, ode_rows, filled=False), fast=fast)
    return *joined(sorted(finished, key=lambda request: request.name)), calls


def num_rows(calls):
    return sum(rows for _, rows, _ in calls)


def noisy_step(x, i, b, noise):
    t = SCHEDULER.timesteps[i : i + 1]
    return sde_step_with_logprob(SCHEDULER, formula(x, t, slice(b, b + 1)), t, x, noise=noise, **HOW)


def ode_steps(x, steps, b):
    for i in steps:
        x = x + formula(x, SCHEDULER.timesteps[i : i + 1], slice(b, b + 1)) * (SIGMAS[i + 1] - SIGMAS[i])
    return x


@pytest.mark.parametrize("window", [range(0), range(2), range(2, 4), range(T - 1)])
def test_a_window_is_the_loop_one_would_write_whose_log_probs_are_outside_the_fast_context(window):
    found, trace, calls = denoised(window)
    assert [step.timestep.tolist() for step in trace] == [[SCHEDULER.timesteps[i].item()] * B for i in window]
    assert calls == [(SCHEDULER.timesteps[i].item(), B, i not in window) for i in range(T)]
    for b, stream in enumerate(generators()):
        x = torch.randn(1, *SHAPE, generator=stream)
        for i in range(T):
            if i not in window:
                x = ode_steps(x, [i], b)
                continue
            step, traced = noisy_step(x, i, b, torch.randn(1, *SHAPE, generator=stream)), trace[i - window.start]
            torch.testing.assert_close(traced.latents[b], x[0])
            torch.testing.assert_close(traced.step.log_prob[b], step.log_prob[0])
            torch.testing.assert_close(traced.step.prev_sample[b], step.prev_sample[0])
            x = step.prev_sample
        torch.testing.assert_close(found[b], x[0])


@pytest.mark.parametrize("steps", [range(T - 1), range(3), range(1, 4)])
def test_branches_are_what_one_gets_one_at_a_time_without_a_forward_too_many(steps):
    found, trace, calls = denoised(steps, J)
    assert found.shape == (B, len(steps), J, *SHAPE)
    assert num_rows(calls) == B * steps.stop + B * J * sum(T - 1 - i for i in steps)
    assert [call for call in calls if not call[2]] == [(SCHEDULER.timesteps[i].item(), B, False) for i in steps]
    for b, stream in enumerate(generators()):
        latents = torch.randn(1, *SHAPE, generator=stream)
        for k, i in enumerate(steps):
            trunk, noise = ode_steps(latents, range(i), b), torch.randn(J, *SHAPE, generator=stream)
            torch.testing.assert_close(trace[k].latents[b], trunk[0])
            for j in range(J):
                step, row = noisy_step(trunk, i, b, noise[j : j + 1]), b * J + j
                torch.testing.assert_close(trace[k].step.log_prob[row], step.log_prob[0])
                torch.testing.assert_close(trace[k].step.prev_sample[row], step.prev_sample[0])
                torch.testing.assert_close(found[b, k, j], ode_steps(step.prev_sample, range(i + 1, T), b)[0])


@pytest.mark.parametrize("ode_rows", [1, 5, B * J])
def test_the_rows_of_a_forward_change_nothing_but_the_calls_of_which_one_at_most_is_not_full(ode_rows):
    found, trace, calls = denoised(range(T - 1), J, ode_rows)
    expected, expected_trace, expected_calls = denoised(range(T - 1), J)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for traced, other in zip(trace, expected_trace, strict=True):
        assert torch.equal(traced.step.log_prob, other.step.log_prob)
    assert num_rows(calls) == num_rows(expected_calls)
    branches = [rows for *_, rows, fast in calls if fast]
    assert sorted(branches)[1:] == [ode_rows] * (len(branches) - 1)


@pytest.mark.parametrize("ode_rows", [1, 1000])
@pytest.mark.parametrize("window", [range(2), range(2, 4), range(3, T - 1)])
def test_a_shared_prefix_is_denoised_once_and_makes_the_same_images(window, ode_rows):
    groups, prompts = [7, 3, 7], [0, 1, 0]
    found, trace, calls = denoised(window, ode_rows=ode_rows, groups=groups, prompts=prompts)
    assert num_rows(calls) == len(set(groups)) * window.start + B * (T - window.start)
    expected, expected_trace, _ = denoised(window, prompts=prompts)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(trace, expected_trace, strict=True):
        torch.testing.assert_close(ours.latents, theirs.latents)
        torch.testing.assert_close(ours.step.log_prob, theirs.step.log_prob)
    assert (found[0] - found[2]).abs().max() > 0.01


@pytest.mark.parametrize("window", [range(0), range(1), range(2, 4), range(4, 5), range(T - 1)])
def test_solvers_take_their_share_of_the_forwards_and_all_that_extrapolation_can_ask_for_are_eulers(window):
    left = T - window.stop
    for solver, share in (("dpm", int), ("extrapolate", round)):
        for ratio in (0.4, 0.5, 1.0):
            found, _, calls = denoised(window, flash_ratio=ratio, flash_solver=solver)
            assert len(calls) == window.stop + max(1, share(left * ratio))
            assert found.isfinite().all()
    torch.testing.assert_close(found, denoised(window)[0])
    sigmas = DPMSolver(SCHEDULER, window.stop, 0.4).scheduler.sigmas
    assert (sigmas[0], sigmas[-1]) == (SIGMAS[window.stop], 0)


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
        solver, latents, memory = Extrapolation(scheduler, start_step, ratio), x, None
        steps = asked_steps(start_step, 10, ratio)
        assert torch.equal(solver.timesteps, scheduler.timesteps[steps])
        for index, step in enumerate(steps):
            latents, memory = solver.step(velocities[step], index, latents, memory)
        return latents

    euler = x + (scheduler.sigmas.diff()[start_step:, None] * velocities[start_step:]).sum(0)
    torch.testing.assert_close(extrapolated(1.0), euler)
    torch.testing.assert_close(extrapolated(0.9), euler)
    torch.testing.assert_close(extrapolated(0.7), euler)
    assert (extrapolated(0.3) - euler).abs().max() < (extrapolated(0.1) - euler).abs().max()
