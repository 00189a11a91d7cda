"""The walk of a batch in lockstep against loops written out by hand, with a velocity that is a formula."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from flow_grpo.base import rng
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.denoise_with_logprob import Batching, Request, denoise, joined
from flow_grpo.diffusers_patch.sample_with_logprob import split_shared_prefix
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


def start():
    """Latents, the walk's noise function, and a velocity that writes down the rows of its calls."""
    streams, calls = generators(), []

    def velocity(x, t, condition, guidance_scale, size):
        calls.append(len(x))
        assert (guidance_scale, size) == (1.0, Size(64, 96))
        return formula(x, t, condition.text[:, 0, 0].long())

    latents = rng.normal(SHAPE, streams)
    return latents, lambda num: rng.normal((num, *SHAPE), streams).flatten(0, 1), velocity, calls


def walked(started, noisy, num_branches=0, ode_rows=1000, groups=None, prompts=None, fast=nullcontext, **flash):
    """Latents and trace of B rows in lockstep; prompts = the numbers of their prompts."""
    latents, noise, velocity, _ = started
    condition = Condition(torch.tensor(prompts or range(B)).float().view(-1, 1, 1))
    params, own = SamplingParams(T, 1.0, **HOW, **flash), dict(noisy=noisy, num_branches=num_branches, noise=noise)
    request = Request("", condition, latents, Size(64, 96), SCHEDULER, params, **own)
    request = request if groups is None else split_shared_prefix(request, groups)
    return joined(list(denoise(velocity, [request], Batching(B, ode_rows, filled=False), fast=fast)))


def noisy_step(x, i, b, noise):
    t = SCHEDULER.timesteps[i : i + 1]
    return sde_step_with_logprob(SCHEDULER, formula(x, t, slice(b, b + 1)), t, x, noise=noise, **HOW)


def ode_steps(x, steps, b):
    for i in steps:
        x = x + formula(x, SCHEDULER.timesteps[i : i + 1], slice(b, b + 1)) * (SIGMAS[i + 1] - SIGMAS[i])
    return x


@pytest.mark.parametrize("window", [range(0), range(2), range(2, 4), range(T - 1)])
def test_a_window_walk_is_the_loop_one_would_write(window):
    started = start()
    found, trace = walked(started, window)
    calls = started[-1]
    assert [step.timestep.tolist() for step in trace] == [[SCHEDULER.timesteps[i].item()] * B for i in window]
    assert calls == [B] * T
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


def branched(steps, ode_rows=1000):
    started = start()
    return *walked(started, steps, J, ode_rows), started[-1]


@pytest.mark.parametrize("steps", [range(T - 1), range(3), range(1, 4)])
def test_branches_are_what_one_gets_one_at_a_time(steps):
    found, trace, _ = branched(steps)
    assert found.shape == (B, len(steps), J, *SHAPE)
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


@pytest.mark.parametrize("steps", [range(T - 1), range(3)])
def test_no_forward_is_made_twice_and_none_for_nothing(steps):
    _, _, calls = branched(steps)
    assert sum(calls) == B * len(steps) + B * J * sum(T - 1 - i for i in steps)


@pytest.mark.parametrize("ode_rows", [1, 5, B * J])
def test_the_rows_of_a_forward_change_nothing_but_the_calls(ode_rows):
    found, trace, calls = branched(range(T - 1), ode_rows)
    expected, expected_trace, expected_calls = branched(range(T - 1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for traced, other in zip(trace, expected_trace, strict=True):
        assert torch.equal(traced.step.log_prob, other.step.log_prob)
    assert max(calls) == max(ode_rows, B)
    assert sum(calls) == sum(expected_calls)


GROUPS = [7, 3, 7]


@pytest.mark.parametrize("window", [range(2), range(2, 4), range(3, T - 1)])
def test_a_shared_prefix_is_walked_once_and_makes_the_same_images(window):
    started, again = start(), start()
    for latents, *_ in (started, again):
        latents[2] = latents[0]  # as sample.same_latent has it
    found, trace = walked(started, window, groups=GROUPS, prompts=[0, 1, 0])
    assert sum(started[-1]) == len(set(GROUPS)) * window.start + B * (T - window.start)
    expected, expected_trace = walked(again, window, prompts=[0, 1, 0])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(trace[0].latents, expected_trace[0].latents)
    assert (found[0] - found[2]).abs().max() > 0.01


@pytest.mark.parametrize("window", [range(0), range(1), range(2, 4), range(4, 5), range(T - 1)])
@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_flash_walks_the_rest_in_fewer_steps_and_ends_at_sigma_0(window, ratio):
    started = start()
    found, _ = walked(started, window, flash_ratio=ratio)
    assert len(started[-1]) == window.stop + max(1, int((T - window.stop) * ratio))
    sigmas = DPMSolver(SCHEDULER, window.stop, ratio).scheduler.sigmas
    assert sigmas[-1] == 0
    assert sigmas[0] == SIGMAS[window.stop]
    assert found.isfinite().all()


def test_a_share_of_forwards_that_is_a_whole_number_is_not_rounded_down():
    sigmas = torch.linspace(1, 0, 51)
    timesteps = DPMSolver(SimpleNamespace(sigmas=sigmas, timesteps=1000 * sigmas[:-1]), 0, 0.58).timesteps
    assert len(timesteps) == 29
    assert timesteps[1] == 1000 * sigmas[2], "the nearest to 50 / 29 steps"


def test_extrapolation_leaves_out_every_second_step_from_the_last_then_more():
    assert asked_steps(1, 10, 1.0) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert asked_steps(1, 10, 0.9) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert asked_steps(1, 10, 0.8) == [1, 2, 3, 4, 5, 6, 8]
    assert asked_steps(1, 10, 0.7) == [1, 2, 3, 4, 6, 8]
    assert asked_steps(1, 10, 0.6) == [1, 2, 4, 6, 8]
    assert asked_steps(1, 10, 0.5) == [1, 3, 5, 7]
    assert asked_steps(2, 10, 0.5) == [2, 4, 6, 8]
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


@pytest.mark.parametrize("window", [range(0), range(2, 4), range(T - 1)])
def test_extrapolation_asks_for_a_share_of_the_velocities_and_all_of_them_are_eulers(window):
    def drawn(**flash):
        started = start()
        return walked(started, window, **flash)[0], started[-1]

    plain, _ = drawn()
    whole, calls = drawn(flash_ratio=1.0, flash_solver="extrapolate")
    torch.testing.assert_close(whole, plain)
    half, fewer = drawn(flash_ratio=0.5, flash_solver="extrapolate")
    assert len(fewer) - window.stop == max(1, round((T - window.stop) * 0.5)) <= len(calls) - window.stop
    assert half.isfinite().all()


@pytest.mark.parametrize("steps", [range(T - 1), range(3)])
def test_flash_branches_take_their_share_of_the_steps(steps):
    started = start()
    found, _ = walked(started, steps, J, flash_ratio=0.5)
    assert found.shape == (B, len(steps), J, *SHAPE)
    assert sum(started[-1]) == B * len(steps) + B * J * sum(max(1, (T - 1 - i) // 2) for i in steps)


def test_forwards_of_a_log_prob_and_only_these_are_outside_the_fast_context():
    inside, seen = [False], []

    @contextmanager
    def fast():
        inside[0] = True
        yield
        inside[0] = False

    def watched():
        latents, noise, velocity, calls = start()

        def watch(x, t, *others):
            seen.append((t[0].item(), len(x), inside[0]))
            return velocity(x, t, *others)

        return latents, noise, watch, calls

    walked(watched(), range(2, 4), fast=fast)
    assert [fast for *_, fast in seen] == [i not in (2, 3) for i in range(T)]
    seen.clear()
    walked(watched(), range(3), J, fast=fast)
    assert all(fast == (rows > B) for _, rows, fast in seen)
    assert sum(not fast for *_, fast in seen) == 3
