"""What sampling leaves behind for the update, and how the update's minibatches are drawn from it.

B images of a batch, K trained steps of each, J outcomes of each step (1 in a window, num_branches otherwise), N tokens,
C channels, R rows of a minibatch; L text tokens, D text width, P prompts, G images per group.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from flow_grpo import losses, rng


@dataclass
class Rollout:
    """The images of one rank. A row of the update is one (image, step) with its J outcomes, which share a velocity."""

    latents: Tensor  # [B, K, N, C] f32, before each trained step
    next_latents: Tensor  # [B, K, J, N, C] f32, what the step drew
    timesteps: Tensor  # [B, K] f32, scheduler units (1000 * sigma)
    log_probs: Tensor  # [B, K, J] f32, under the policy that drew the step
    weights: Tensor  # [B, K] f32, loss weight of the step
    advantages: Tensor  # [B, K, J] f32, set once every rank has its rewards
    embeds: Any  # the model's prompt embeddings, B rows
    images: Tensor  # [B] int64, their global numbers within the epoch


@dataclass
class Minibatch:
    """R rows of a rollout, in random order."""

    latents: Tensor  # [R, N, C] f32
    next_latents: Tensor  # [R * J, N, C] f32, the J outcomes of a row are neighbours
    timesteps: Tensor  # [R] f32
    log_probs: Tensor  # [R * J] f32
    weights: Tensor  # [R * J] f32
    advantages: Tensor  # [R * J] f32
    embeds: Any  # R rows
    where: Tensor  # [R, 2] int64 on the CPU, (global image, trained step): names a row in an error


def from_trace(trace, embeds, images: range, *, num_trained_steps: int, step_weight: str) -> Rollout:
    """From the TracedSteps of a walk, of which the first `num_trained_steps` are kept."""
    trace = trace[:num_trained_steps]
    num_images = len(images)
    log_probs = torch.stack([t.step.log_prob.unflatten(0, (num_images, -1)) for t in trace], 1)
    std = torch.stack([t.step.transition_std.flatten()[0] for t in trace])  # a walk's rows share their sigmas
    return Rollout(
        latents=torch.stack([t.latents for t in trace], 1),
        next_latents=torch.stack([t.step.prev_sample.unflatten(0, (num_images, -1)) for t in trace], 1),
        timesteps=torch.stack([t.timestep for t in trace], 1),
        log_probs=log_probs,
        weights=losses.step_weights(std, step_weight).expand(num_images, -1),
        advantages=torch.zeros_like(log_probs),
        embeds=embeds,
        images=torch.tensor(images),
    )


def concat(rollouts: list[Rollout]) -> Rollout:
    """Join along B."""
    names = [field.name for field in fields(Rollout) if field.name != "embeds"]
    joined = {name: torch.cat([getattr(r, name) for r in rollouts]) for name in names}
    return Rollout(**joined, embeds=rollouts[0].embeds.concat([r.embeds for r in rollouts]))


def minibatches(rollout: Rollout, plan, seed: int, *where: int) -> Iterator[list[Minibatch]]:
    """Per optimizer step of one inner epoch, its minibatches of `plan.batch_size` rows.

    Each batch of the rollout gives an equal, randomly drawn share of its rows to every optimizer step: the draw depends
    on the batch's global number and `where` (epoch, inner epoch), so a step trains the same rows on any number of GPUs.
    """
    num_rows = plan.batch_size * plan.num_trained_steps
    shares = []  # per batch: [updates, rows], numbers of (image, step) rows
    for i, first_image in enumerate(rollout.images[:: plan.batch_size].tolist()):
        order = torch.randperm(
            num_rows, generator=rng.generator(seed, "shuffle", *where, first_image // plan.batch_size)
        )
        shares.append((i * num_rows + order).view(plan.updates_per_epoch, -1))
    for rows in torch.cat(shares, dim=1):
        yield [_take(rollout, part) for part in rows.split(plan.batch_size)]


def _take(rollout: Rollout, rows: Tensor) -> Minibatch:
    """rows [R] int64 on the CPU: image * K + step."""
    num_steps, outcomes = rollout.log_probs.shape[1:]
    image, step = rows // num_steps, rows % num_steps
    here = rows.to(rollout.latents.device, non_blocking=True)
    take = {name: getattr(rollout, name).flatten(0, 1)[here] for name in _ROW_FIELDS}
    return Minibatch(
        latents=take["latents"],
        next_latents=take["next_latents"].flatten(0, 1),
        timesteps=take["timesteps"],
        log_probs=take["log_probs"].flatten(),
        weights=take["weights"].repeat_interleave(outcomes),
        advantages=take["advantages"].flatten(),
        embeds=rollout.embeds.take(here // num_steps),
        where=torch.stack([rollout.images[image], step], 1),
    )


_ROW_FIELDS = ("latents", "next_latents", "timesteps", "log_probs", "weights", "advantages")
