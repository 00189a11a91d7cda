"""The forward process of a flow: from an image to noise on a straight line, x_sigma = (1 - sigma) x_0 + sigma noise."""

import torch
from torch import Tensor


def noised(x_0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """x_sigma of B images [B, ...]; timesteps [B] in scheduler units (1000 sigma)."""
    sigma = (timesteps / 1000).view(-1, *[1] * (x_0.ndim - 1))
    return (1 - sigma) * x_0 + sigma * noise


def logit_normal_timesteps(levels: Tensor, generators: list[torch.Generator]) -> Tensor:
    """One of `levels` [T] per generator, [B]: its place is the sigmoid of a standard normal (arXiv:2403.03206, 3.1)."""
    places = torch.stack([torch.randn((), generator=g) for g in generators]).sigmoid()
    return levels[(places * len(levels)).long().to(levels.device)]


def stratified_timesteps(levels: Tensor, number: int, generators: list[torch.Generator]) -> Tensor:
    """`number` of `levels` [T] per generator, one of each equal share of them, in their order. -> [B, number]."""
    edges = torch.arange(number + 1) * len(levels) // number
    places = edges[:-1] + (torch.stack([torch.rand(number, generator=g) for g in generators]) * edges.diff()).long()
    return levels[places.to(levels.device)]


def velocity_error(velocity: Tensor, x_0: Tensor, noise: Tensor) -> Tensor:
    """Mean squared distance of a predicted velocity to the line's own, noise - x_0, [B]. All [B, ...]."""
    return (velocity - (noise - x_0)).square().flatten(1).mean(1)
