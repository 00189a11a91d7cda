"""The step and its log-probability: golden numbers, torch's own densities, and what must never happen."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flow_grpo.diffusers_patch.sampling_params import SDE_TYPES
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep, sde_step_with_logprob, velocity_slope

GOLDEN = np.load(Path(__file__).parent / "golden" / "golden.npz")


def golden_steps():
    """Steps by group: step/SCHEDULE/SDE_TYPE/ETA has keys step/SCHEDULE/SDE_TYPE/ETA/INDEX/NAME."""
    steps = {}
    for key in sorted(GOLDEN.files):
        if key.startswith("step/"):
            step, _ = key.rsplit("/", 1)
            group, _ = step.rsplit("/", 1)
            steps.setdefault(group, {})[step] = True
    return {group: list(keys) for group, keys in steps.items()}


STEPS = golden_steps()


def golden(key):
    return torch.tensor(GOLDEN[key]).float()


def golden_of(steps, name):
    return torch.cat([golden(f"{step}/{name}") for step in steps])


def schedule(name):
    sigmas = golden(f"sigmas/{name}")
    return SimpleNamespace(sigmas=sigmas, timesteps=1000 * sigmas[:-1])


@pytest.mark.parametrize("group", sorted(STEPS))
def test_golden_steps_in_one_call_with_rows_at_different_timesteps(group):
    _, name, sde_type, eta = group.split("/")
    steps = STEPS[group]
    scheduler = schedule(name)
    num_rows = []
    indices = []
    for step in steps:
        count = len(golden(f"{step}/sample"))
        num_rows.append(count)
        indices += [int(step.rsplit("/", 1)[1])] * count
    drawn_step = sde_step_with_logprob(
        scheduler,
        golden_of(steps, "model_output"),
        scheduler.timesteps[indices],
        golden_of(steps, "sample"),
        noise_level=float(eta),
        sde_type=sde_type,
        prev_sample=golden_of(steps, "prev_sample"),
    )
    results = dict(
        mean=drawn_step.prev_sample_mean,
        log_prob=drawn_step.log_prob,
        std_dev_t=drawn_step.std_dev_t,
        noise_scale=drawn_step.transition_std,
    )
    for name, values in results.items():
        for step, part in zip(steps, values.split(num_rows), strict=True):
            expected = golden(f"{step}/{name}")
            if expected.ndim == 0:
                expected = expected.expand(len(part))
            torch.testing.assert_close(part.reshape(expected.shape), expected, atol=2e-5, rtol=0)


class DrawnStep(NamedTuple):
    """A step that was drawn, and what it was drawn from."""

    scheduler: Any
    velocity: Tensor
    timestep: Tensor
    sample: Tensor
    sde_type: str
    step: SDEStep

    def scored(self, prev_sample=None):
        """The same step, scored."""
        return sde_step_with_logprob(
            self.scheduler,
            self.velocity,
            self.timestep,
            self.sample,
            noise_level=0.7,
            sde_type=self.sde_type,
            prev_sample=prev_sample,
        )


def draw(sde_type, rows=2, dtype=torch.float32):
    scheduler = schedule("qwen512")
    sample, velocity, noise = torch.randn(3, rows, 4, 3, generator=torch.Generator().manual_seed(0))
    sample = sample.to(dtype)
    velocity = velocity.to(dtype).requires_grad_()
    timestep = scheduler.timesteps[3].expand(rows)
    step = sde_step_with_logprob(scheduler, velocity, timestep, sample, noise_level=0.7, sde_type=sde_type, noise=noise)
    return DrawnStep(scheduler, velocity, timestep, sample, sde_type, step)


@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps"])
def test_scoring_what_was_drawn_gives_the_same_bits(sde_type):
    drawn = draw(sde_type)
    replayed = drawn.scored(drawn.step.prev_sample.detach())
    assert torch.equal(replayed.log_prob, drawn.step.log_prob)
    (gradient,) = torch.autograd.grad(drawn.step.log_prob.sum(), drawn.velocity)
    (replayed_gradient,) = torch.autograd.grad(replayed.log_prob.sum(), drawn.velocity)
    assert torch.equal(replayed_gradient, gradient)


def test_no_order_of_a_latents_elements_shows_in_its_log_prob():
    drawn = draw("sde", rows=1000)
    flipped = drawn._replace(velocity=drawn.velocity.flip(1), sample=drawn.sample.flip(1))
    assert torch.equal(flipped.scored(drawn.step.prev_sample.flip(1)).log_prob, drawn.step.log_prob)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_noise_changes_the_path_not_the_marginal(sde_type):
    """With x_0 = 0, x_t = sigma * eps, and the exact velocity is x_t / sigma: the mean is linear in x, to which the
    step adds a noise of its own. Without the drift that makes up for it, variances are 5e-4 too large."""
    sigmas = torch.linspace(1, 0, 1001)
    scheduler = SimpleNamespace(sigmas=sigmas, timesteps=1000 * sigmas[:-1])
    middle = 500
    x = sigmas[middle].view(1, 1, 1)  # one standard deviation of it
    step = sde_step_with_logprob(
        scheduler,
        x / sigmas[middle],
        scheduler.timesteps[middle].view(1),
        x,
        noise_level=0.7,
        sde_type=sde_type,
        noise=torch.zeros(1, 1, 1),
    )
    # The bound leaves room for terms of dt^2, which the step leaves out.
    variance = step.prev_sample_mean.square() + step.transition_std.square()
    assert variance.item() == pytest.approx(sigmas[middle + 1].item() ** 2, abs=2e-5)


@pytest.mark.parametrize("sde_type", ["sde", "dance"])
def test_the_slope_of_a_steps_mean_is_its_derivative_by_the_velocity(sde_type):
    """The first step's too, at sigma 1."""
    scheduler = schedule("qwen512")
    x, v = torch.randn(2, 3, 4, 3, generator=torch.Generator().manual_seed(0))
    v.requires_grad_()
    timesteps = scheduler.timesteps[[0, 3, 8]]
    step = sde_step_with_logprob(scheduler, v, timesteps, x, noise_level=0.7, sde_type=sde_type, prev_sample=x)
    step.prev_sample_mean.sum().backward()
    slope = velocity_slope(step, timesteps / 1000)
    torch.testing.assert_close(slope.expand(3, 4, 3), v.grad)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_an_ode_step_reaches_the_end_with_log_prob_zero(sde_type):
    scheduler = schedule("qwen512")
    x, v = torch.randn(2, 2, 4, 3, generator=torch.Generator().manual_seed(0))
    last = scheduler.timesteps[-1:].expand(2)
    step = sde_step_with_logprob(scheduler, v, last, x, noise_level=0.0, sde_type=sde_type)
    torch.testing.assert_close(step.prev_sample, x - scheduler.sigmas[-2] * v)
    assert torch.equal(step.log_prob, torch.zeros(2))
    assert torch.equal(step.transition_std.flatten(), torch.zeros(2))


def test_bf16_inputs_are_stepped_in_float32():
    assert {part.dtype for part in draw("sde", dtype=torch.bfloat16).step} == {torch.float32}


class NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a tensor's value was read on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps"])
def test_no_host_sync(sde_type):
    drawn = draw(sde_type)
    with NoHostSync():
        drawn.scored(drawn.step.prev_sample)


def test_what_a_caller_can_get_wrong():
    drawn = draw("sde")
    with pytest.raises(ValueError, match=r"'sdee'.*sde, dance, cps, cps_gaussian$"):
        drawn._replace(sde_type="sdee").scored()
    with pytest.raises(ValueError, match="noise"):
        drawn.scored()
