"""The forward process of a flow: from an image to noise on a straight line, x_sigma = (1 - sigma) x_0 + sigma noise."""

import torch
from torch import Tensor


def noised(x_0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """Return x_sigma of B images [B, ...]; timesteps [B] in scheduler units (1000 sigma)."""
    sigma = (timesteps / 1000).view(-1, *[1] * (x_0.ndim - 1))
    return (1 - sigma) * x_0 + sigma * noise


def logit_normal_timesteps(levels: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Draw one of `levels` [T] per generator, [B]: its index is T times the sigmoid of a standard normal
    (arXiv:2403.03206, section 3.1)."""
    normals = torch.stack([torch.randn((), generator=generator) for generator in generators])
    index = (normals.sigmoid() * len(levels)).long()
    return levels[index.to(levels.device)]


def stratified_timesteps(levels: Tensor, number: int, generators: list[torch.Generator]) -> Tensor:
    """Draw `number` of `levels` [T] per generator, [B, number]: one from each of `number` equal shares of the levels,
    in their order."""
    # Share i holds the levels edges[i] .. edges[i + 1] - 1.
    edges = torch.arange(number + 1) * len(levels) // number
    uniform = torch.stack([torch.rand(number, generator=generator) for generator in generators])
    index = edges[:-1] + (uniform * edges.diff()).long()
    return levels[index.to(levels.device)]


def velocity_error(velocity: Tensor, x_0: Tensor, noise: Tensor) -> Tensor:
    """Mean squared distance of a predicted velocity to the line's own, noise - x_0, [B]. All [B, ...]."""
    return (velocity - (noise - x_0)).square().flatten(1).mean(1)
