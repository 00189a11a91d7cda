"""One reverse step of the flow as a stochastic transition, and the log-density of the step it took.

Notation: sigma in [0, 1] is the noise level, x = (1 - sigma) x_0 + sigma eps, velocity v = eps - x_0,
eta = `noise_level`, dt = sigma_next - sigma < 0. All is float32 whatever the model's dtype, and rows may stand at
different timesteps.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.diffusers_patch.sampling_params import SDE_TYPES


class SDEStep(NamedTuple):
    next_latents: Tensor  # [B, ...] f32, one step closer to the image
    log_prob: Tensor  # [B] f32, mean over the latent's elements, nats per element; 0 for an ODE step
    mean: Tensor  # [B, ...] f32
    std_dev_t: Tensor  # [B, 1...] f32, diffusion coefficient, per sqrt(time)
    transition_std: Tensor  # [B, 1...] f32, standard deviation of the step itself
    dt: Tensor  # [B, 1...] f32, sigma_next - sigma, negative

    prev_sample = property(lambda step: step.next_latents)  # by their published names
    prev_sample_mean = property(lambda step: step.mean)


def sde_step_with_logprob(
    scheduler, model_output, timestep, sample, *, noise_level, sde_type="sde", prev_sample=None, noise=None
) -> SDEStep:
    """Take, or score, one step from `sample` to the scheduler's next sigma. Arguments are named as in diffusers.

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

    Raises:
        UserError: unknown `sde_type`, or neither `prev_sample` nor `noise` for a noisy step.
    """
    if sde_type not in SDE_TYPES:
        raise UserError(f"sde_type is {sde_type!r}; there are: {', '.join(SDE_TYPES)}")
    x, v = sample.float(), model_output.float()
    sigma, sigma_next = _sigmas_at(scheduler, timestep, x)
    if noise_level == 0:
        mean, std_dev_t = x + v * (sigma_next - sigma), torch.zeros_like(sigma)
        return SDEStep(mean, mean.new_zeros(len(mean)), mean, std_dev_t, std_dev_t, sigma_next - sigma)
    if prev_sample is None and noise is None:
        raise UserError(f"a noisy step (noise_level {noise_level}) needs `noise` to draw or `prev_sample` to score")

    second_sigma = scheduler.sigmas[1].to(x)
    mean, std_dev_t, transition_std = _MOMENTS[sde_type](x, v, sigma, sigma_next, second_sigma, noise_level)
    prev_sample = mean + transition_std * noise.float() if prev_sample is None else prev_sample.float()
    error = (prev_sample.detach() - mean) ** 2
    if sde_type == "cps":
        log_density = -error
    else:
        log_density = -error / (2 * transition_std**2) - torch.log(transition_std) - 0.5 * math.log(2 * math.pi)
    log_prob = log_density.flatten(1).mean(1, dtype=torch.float64).float()  # float64 hides the order of the terms
    return SDEStep(prev_sample, log_prob, mean, std_dev_t, transition_std, sigma_next - sigma)


def _sigmas_at(scheduler, timestep: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """This and the next sigma of each row, [B, 1...]: one gather on the device, no index search in Python."""
    timesteps, sigmas = scheduler.timesteps.to(like), scheduler.sigmas.to(like)
    index = (timestep.to(like)[:, None] - timesteps).abs().argmin(dim=1)
    rows = (-1,) + (1,) * (like.ndim - 1)
    return sigmas[index].view(rows), sigmas[index + 1].view(rows)


def _sde_moments(x, v, sigma, sigma_next, second_sigma, eta):
    """Flow-GRPO eq. 9; at sigma = 1 its diffusion coefficient is infinite, so the second sigma stands in."""
    dt = sigma_next - sigma
    std_dev_t = eta * torch.sqrt(sigma / (1 - torch.where(sigma == 1, second_sigma, sigma)))
    half_g2 = std_dev_t**2 / (2 * sigma)
    mean = x * (1 + half_g2 * dt) + v * (1 + half_g2 * (1 - sigma)) * dt
    return mean, std_dev_t, std_dev_t * torch.sqrt(-dt)


def _dance_moments(x, v, sigma, sigma_next, second_sigma, eta):
    """DanceGRPO: constant diffusion coefficient, drift corrected by the score (x - (1 - sigma) x_0) / sigma^2."""
    dt, std_dev_t = sigma_next - sigma, torch.full_like(sigma, eta)
    mean = x + (v + 0.5 * eta**2 * (x - (1 - sigma) * (x - sigma * v)) / sigma**2) * dt
    return mean, std_dev_t, std_dev_t * torch.sqrt(-dt)


def _cps_moments(x, v, sigma, sigma_next, second_sigma, eta):
    """Flow-CPS: rotate part of the remaining noise into fresh noise, so that the marginal at sigma_next is kept."""
    std_dev_t = sigma_next * math.sin(eta * math.pi / 2)
    x_0, x_1 = x - sigma * v, x + (1 - sigma) * v
    mean = (1 - sigma_next) * x_0 + x_1 * torch.sqrt(sigma_next**2 - std_dev_t**2)
    return mean, std_dev_t, std_dev_t


_MOMENTS = {"sde": _sde_moments, "dance": _dance_moments, "cps": _cps_moments, "cps_gaussian": _cps_moments}
