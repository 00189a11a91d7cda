"""The step and its log-probability: golden numbers, torch's own densities, and what must never happen."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flow_grpo.diffusers_patch.sampling_params import SDE_TYPES
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob

GOLDEN = np.load(Path(__file__).parent / "golden" / "golden.npz")
STEPS = sorted({key.rsplit("/", 1)[0] for key in GOLDEN.files if key.startswith("step/")})


def golden(key):
    return torch.tensor(GOLDEN[key]).float()


def schedule(name):
    sigmas = golden(f"sigmas/{name}")
    return SimpleNamespace(sigmas=sigmas, timesteps=1000 * sigmas[:-1])


@pytest.mark.parametrize("group", sorted({key.rsplit("/", 1)[0] for key in STEPS}))
def test_golden_steps_in_one_call_with_rows_at_different_timesteps(group):
    _, name, sde_type, eta = group.split("/")
    keys = [key for key in STEPS if key.rsplit("/", 1)[0] == group]
    scheduler = schedule(name)
    rows = [len(golden(f"{key}/sample")) for key in keys]
    index = torch.tensor([int(key.rsplit("/", 1)[1]) for key in keys]).repeat_interleave(torch.tensor(rows))
    x, v, after = (torch.cat([golden(f"{key}/{n}") for key in keys]) for n in ("sample", "model_output", "prev_sample"))
    how = dict(noise_level=float(eta), sde_type=sde_type)
    step = sde_step_with_logprob(scheduler, v, scheduler.timesteps[index], x, prev_sample=after, **how)
    found = dict(mean=step.mean, log_prob=step.log_prob)
    found |= dict(std_dev_t=step.std_dev_t, noise_scale=step.transition_std)
    assert step.prev_sample is step.next_latents
    assert step.prev_sample_mean is step.mean
    for name, values in found.items():
        for key, part in zip(keys, values.split(rows), strict=True):
            expected = golden(f"{key}/{name}")
            expected = expected.expand(len(part)) if expected.ndim == 0 else expected
            torch.testing.assert_close(part.reshape(expected.shape), expected, atol=2e-5, rtol=0)


def drawn(sde_type, index=3, rows=2, dtype=torch.float32):
    scheduler = schedule("qwen512")
    x, v, noise = torch.randn(3, rows, 4, 3, generator=torch.Generator().manual_seed(0))
    t = scheduler.timesteps[index].expand(rows)
    how = dict(noise_level=0.7, sde_type=sde_type)
    arguments = scheduler, v.to(dtype).requires_grad_(), t, x.to(dtype)
    return arguments, how, sde_step_with_logprob(*arguments, noise=noise, **how)


@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps"])
def test_scoring_what_was_drawn_gives_the_same_bits(sde_type):
    arguments, how, step = drawn(sde_type)
    replayed = sde_step_with_logprob(*arguments, prev_sample=step.next_latents.detach(), **how)
    assert torch.equal(replayed.log_prob, step.log_prob)
    assert torch.equal(*(torch.autograd.grad(one.log_prob.sum(), arguments[1])[0] for one in (replayed, step)))


def test_no_order_of_a_latents_elements_shows_in_its_log_prob():
    (scheduler, v, t, x), how, step = drawn("sde", rows=1000)
    turned = sde_step_with_logprob(scheduler, v.flip(1), t, x.flip(1), prev_sample=step.next_latents.flip(1), **how)
    assert torch.equal(turned.log_prob, step.log_prob)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_noise_changes_the_path_not_the_marginal(sde_type):
    """x_0 = 0, so x_t = sigma * eps, and the exact velocity is x_t / sigma: the mean is linear in x, to which the step
    adds a noise of its own. Without the drift that makes up for it, variances are 5e-4 too large."""
    sigmas = torch.linspace(1, 0, 1001)
    scheduler, n = SimpleNamespace(sigmas=sigmas, timesteps=1000 * sigmas[:-1]), 500
    x = sigmas[n].view(1, 1, 1)  # one standard deviation of it
    how = dict(noise_level=0.7, sde_type=sde_type, noise=torch.zeros(1, 1, 1))
    step = sde_step_with_logprob(scheduler, x / sigmas[n], scheduler.timesteps[n].view(1), x, **how)
    variance = step.mean.square() + step.transition_std.square()
    assert variance.item() == pytest.approx(sigmas[n + 1].item() ** 2, abs=2e-5)  # it leaves out terms of dt^2


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_an_ode_step_reaches_the_end_with_log_prob_zero(sde_type):
    scheduler = schedule("qwen512")
    x, v = torch.randn(2, 2, 4, 3, generator=torch.Generator().manual_seed(0))
    last = scheduler.timesteps[-1:].expand(2)
    step = sde_step_with_logprob(scheduler, v, last, x, noise_level=0.0, sde_type=sde_type)
    torch.testing.assert_close(step.next_latents, x - scheduler.sigmas[-2] * v)
    assert torch.equal(step.log_prob, torch.zeros(2))
    assert torch.equal(step.transition_std.flatten(), torch.zeros(2))


def test_bf16_inputs_are_stepped_in_float32():
    _, _, step = drawn("sde", dtype=torch.bfloat16)
    assert {part.dtype for part in step} == {torch.float32}


class NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a tensor's value was read on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sde_type", ["sde", "dance", "cps"])
def test_no_host_sync(sde_type):
    arguments, how, step = drawn(sde_type)
    with NoHostSync():
        sde_step_with_logprob(*arguments, prev_sample=step.next_latents, **how)


def test_what_a_caller_can_get_wrong():
    arguments, how, _ = drawn("sde")
    with pytest.raises(ValueError, match=r"'sdee'.*sde, dance, cps, cps_gaussian$"):
        sde_step_with_logprob(*arguments, noise_level=0.7, sde_type="sdee")
    with pytest.raises(ValueError, match="noise"):
        sde_step_with_logprob(*arguments, **how)
