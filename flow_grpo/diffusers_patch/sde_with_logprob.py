"""One reverse step of the flow as a stochastic transition, and the log-density of the step it took.

Notation: sigma in [0, 1] is the share of noise in x = (1 - sigma) x_0 + sigma eps, velocity v = eps - x_0,
dt = sigma_next - sigma < 0, and eta = `noise_level` scales the noise that a step adds. All is float32 whatever the
model's dtype, and rows may stand at different timesteps.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.diffusers_patch.sampling_params import SDE_TYPES


class Schedule(Protocol):
    """Schedule of a walk from noise to the image, such as a scheduler of diffusers whose timesteps are set."""

    timesteps: Tensor  # [T] f32, descending, 1000 * sigma
    sigmas: Tensor  # [T + 1] f32, the last is 0


class SDEStep(NamedTuple):
    """One step of B rows. The names are those of diffusers, whose previous sample is the next one of the walk."""

    prev_sample: Tensor  # [B, ...] f32, one step closer to the image
    log_prob: Tensor  # [B] f32, mean over the latent's elements, nats per element; 0 for an ODE step
    prev_sample_mean: Tensor  # [B, ...] f32
    std_dev_t: Tensor  # [B, 1...] f32, diffusion coefficient, per sqrt(time)
    transition_std: Tensor  # [B, 1...] f32, standard deviation of the step itself
    dt: Tensor  # [B, 1...] f32, sigma_next - sigma, negative


class Transition(NamedTuple):
    """The Gaussian that a noisy step draws from."""

    mean: Tensor  # [B, ...] f32
    std_dev_t: Tensor  # [B, 1...] f32, diffusion coefficient, per sqrt(time)
    std: Tensor  # [B, 1...] f32


def sde_step_with_logprob(
    scheduler: Schedule,
    model_output: Tensor,
    timestep: Tensor,
    sample: Tensor,
    *,
    noise_level: float,
    sde_type: str = "sde",
    prev_sample: Tensor | None = None,
    noise: Tensor | None = None,
) -> SDEStep:
    """Take, or score, one step from `sample` to the scheduler's next sigma. Arguments are named as in diffusers.
    Raises UserError for an unknown `sde_type`, and for a noisy step with neither `noise` nor `prev_sample`.

    Args:
        scheduler: anything with `sigmas` [T + 1] and `timesteps` [T], descending; read, never written.
        model_output: velocity, [B, ...].
        timestep: [B], values of `scheduler.timesteps`; each row its own.
        sample: x at `timestep`, [B, ...].
        noise_level: eta; 0 is the plain ODE step, whatever `sde_type`.
        sde_type: "sde" Flow-GRPO (arXiv:2505.05470), "dance" DanceGRPO (arXiv:2505.07818), "cps" Flow-CPS
            (arXiv:2509.05952; its log_prob is the published -(x' - mean)^2, no Gaussian density), "cps_gaussian" the
            same step with its Gaussian log_prob.
        prev_sample: score these next latents instead of drawing them.
        noise: standard normal draw, [B, ...]; needed when drawing a noisy step.
    """
    if sde_type not in SDE_TYPES:
        raise UserError(f"sde_type is {sde_type!r}; there are: {', '.join(SDE_TYPES)}")
    x = sample.float()
    v = model_output.float()
    sigma, sigma_next = _sigmas_at(scheduler, timestep, x)
    if noise_level == 0:
        return _ode_step(x, v, sigma, sigma_next)
    second_sigma = scheduler.sigmas[1].to(x)
    transition = _TRANSITIONS[sde_type](x, v, sigma, sigma_next, second_sigma, noise_level)
    if prev_sample is None:
        prev_sample = _draw(transition, noise, noise_level)
    prev_sample = prev_sample.float()
    log_prob = _log_prob(prev_sample, transition, sde_type)
    return SDEStep(prev_sample, log_prob, transition.mean, transition.std_dev_t, transition.std, sigma_next - sigma)


def velocity_slope(step: SDEStep, sigma: Tensor) -> Tensor:
    """Derivative of a step's mean with respect to its velocity, [B, 1...] negative, for the types "sde" and "dance".

    Args:
        sigma: [B], before the step.
    """
    sigma = sigma.view_as(step.dt)
    correction = step.std_dev_t**2 / (2 * sigma)
    return (1 + correction * (1 - sigma)) * step.dt


def _ode_step(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> SDEStep:
    """Take a step of Euler's method, x + v dt, which has no noise and no log-prob."""
    dt = sigma_next - sigma
    mean = x + v * dt
    no_std = torch.zeros_like(sigma)
    return SDEStep(mean, mean.new_zeros(len(mean)), mean, no_std, no_std, dt)


def _draw(transition: Transition, noise: Tensor | None, noise_level: float) -> Tensor:
    """Return the outcome [B, ...] of a noisy step, from a standard normal draw."""
    if noise is None:
        raise UserError(f"a noisy step (noise_level {noise_level}) needs `noise` to draw or `prev_sample` to score")
    return transition.mean + transition.std * noise.float()


def _log_prob(prev_sample: Tensor, transition: Transition, sde_type: str) -> Tensor:
    """Log-density of the outcomes [B, ...] of a noisy step, mean over their elements, [B] f32."""
    # The outcome is data: a gradient reaches the log-prob through the mean alone.
    squared_error = (prev_sample.detach() - transition.mean) ** 2
    if sde_type == "cps":
        log_density = -squared_error
    else:
        std = transition.std
        log_density = -squared_error / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)

    # A sum in float64, rounded once, does not depend on the order of its terms.
    return log_density.flatten(1).mean(1, dtype=torch.float64).float()


def _sigmas_at(scheduler: Schedule, timestep: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the present and the next sigma of each row, [B, 1...], so that they multiply x [B, ...]."""
    timesteps = scheduler.timesteps.to(x)
    sigmas = scheduler.sigmas.to(x)

    # The nearest timestep is found on the device: a search in Python would wait for it in every step.
    index = (timestep.to(x)[:, None] - timesteps).abs().argmin(dim=1)
    column = (-1,) + (1,) * (x.ndim - 1)
    return sigmas[index].view(column), sigmas[index + 1].view(column)


def _sde_transition(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, second_sigma: Tensor, eta: float
) -> Transition:
    """Flow-GRPO eq. 9: mean x + (v + c (x + (1 - sigma) v)) dt and standard deviation g sqrt(-dt), with
    g = eta sqrt(sigma / (1 - sigma)) and c = g^2 / (2 sigma)."""
    # At sigma = 1 the 1 - sigma below the root would be 0: there alone the second sigma is used.
    finite_sigma = torch.where(sigma == 1, second_sigma, sigma)
    std_dev_t = eta * torch.sqrt(sigma / (1 - finite_sigma))
    dt = sigma_next - sigma
    correction = std_dev_t**2 / (2 * sigma)
    mean = x * (1 + correction * dt) + v * (1 + correction * (1 - sigma)) * dt
    return Transition(mean, std_dev_t, std_dev_t * torch.sqrt(-dt))


def _dance_transition(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, second_sigma: Tensor, eta: float
) -> Transition:
    """DanceGRPO: constant diffusion coefficient eta, drift v - eta^2 / 2 * score, where the score of x given x_0 is
    -(x - (1 - sigma) x_0) / sigma^2."""
    std_dev_t = torch.full_like(sigma, eta)
    dt = sigma_next - sigma
    x_0 = x - sigma * v
    mean = x + (v + 0.5 * eta**2 * (x - (1 - sigma) * x_0) / sigma**2) * dt
    return Transition(mean, std_dev_t, std_dev_t * torch.sqrt(-dt))


def _cps_transition(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, second_sigma: Tensor, eta: float
) -> Transition:
    """Flow-CPS: rotate part of the remaining noise into fresh noise, so that the marginal at sigma_next is kept."""
    std_dev_t = sigma_next * math.sin(eta * math.pi / 2)
    x_0 = x - sigma * v
    x_1 = x + (1 - sigma) * v
    mean = (1 - sigma_next) * x_0 + x_1 * torch.sqrt(sigma_next**2 - std_dev_t**2)
    return Transition(mean, std_dev_t, std_dev_t)


_TRANSITIONS = {
    "sde": _sde_transition,
    "dance": _dance_transition,
    "cps": _cps_transition,
    "cps_gaussian": _cps_transition,
}
