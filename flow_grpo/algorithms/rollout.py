"""What sampling leaves behind for the update, noisy steps with their log-probs or finished images alone, and how the
update's minibatches are drawn from it.

B images of a batch, K trained steps of each, J outcomes of each step (1 in a window, num_branches otherwise), N tokens,
C channels, R rows of a minibatch; L text tokens, D text width, P prompts, G images per group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.base import rng


@dataclass
class Rollout:
    """The images of one rank. A row of the update is one (image, step) with its J outcomes, which share a velocity."""

    latents: Tensor  # [B, K, N, C] f32, before each trained step
    next_latents: Tensor  # [B, K, J, N, C] f32, what the step drew
    timesteps: Tensor  # [B, K] f32, scheduler units (1000 * sigma)
    log_probs: Tensor  # [B, K, J] f32, under the policy that drew the step
    weights: Tensor  # [B, K] f32, loss weight of the step
    advantages: Tensor  # [B, K, J] f32, 0 until `credit`
    loss_weight: Tensor  # [B, K, J] f32, averages to 1; filtered or masked images have 0, the rest more
    means: Tensor | None  # [B, K, N, C] f32, of the Gaussians that the steps were drawn from; None = not needed
    embeds: Any  # the model's prompt embeddings, B rows
    images: Tensor  # [B] int64, their global numbers within the epoch

    @property
    def shape(self) -> tuple[int, int]:
        """K and J."""
        return tuple(self.log_probs.shape[1:])

    def take(self, rows: Tensor, num_rows: int) -> "Minibatch":
        """rows [R] int64 on the CPU: image * K + step; num_rows of the whole update."""
        image, step = rows // self.shape[0], rows % self.shape[0]
        image_index, step_index = (index.to(self.latents.device, non_blocking=True) for index in (image, step))
        outcomes = self.shape[1]
        return Minibatch(
            latents=self.latents[image_index, step_index],
            next_latents=self.next_latents[image_index, step_index].flatten(0, 1),
            timesteps=self.timesteps[image_index, step_index],
            log_probs=self.log_probs[image_index, step_index].flatten(),
            weights=self.weights[image_index, step_index].repeat_interleave(outcomes),
            advantages=self.advantages[image_index, step_index].flatten(),
            loss_weight=self.loss_weight[image_index, step_index].flatten(),
            means=None if self.means is None else self.means[image_index, step_index].repeat_interleave(outcomes, 0),
            embeds=self.embeds.take(image_index),
            num_rows=num_rows,
            where=torch.stack([self.images[image], step], 1),
        )


@dataclass
class Minibatch:
    """R rows of a rollout, in random order."""

    latents: Tensor  # [R, N, C] f32
    next_latents: Tensor  # [R * J, N, C] f32, the J outcomes of a row are neighbours
    timesteps: Tensor  # [R] f32
    log_probs: Tensor  # [R * J] f32
    weights: Tensor  # [R * J] f32
    advantages: Tensor  # [R * J] f32
    loss_weight: Tensor  # [R * J] f32
    means: Tensor | None  # [R * J, N, C] f32
    embeds: Any  # R rows
    num_rows: int  # of the whole update, on this rank
    where: Tensor  # [R, 2] int64 on the CPU, (global image, trained step): names a row in an error


class TrainedRows(NamedTuple):
    """What a minibatch leaves behind until the optimizer step, to name the row that is wrong."""

    loss: Tensor  # [R * J], weighted
    where: Tensor  # [R, 2] int64 on the CPU, as in Minibatch
    log_ratios: Tensor | None  # [R * J]; None where nothing has a ratio

    def where_of(self, outcome: Tensor) -> tuple[int, int]:
        """The global image and the trained step of an outcome, [] int64 below R * J."""
        return tuple(self.where[int(outcome) // (len(self.loss) // len(self.where))].tolist())


@dataclass
class Finished:
    """The images of one rank that were sampled without noise (DiffusionNFT). A row is one (image, timestep)."""

    latents: Tensor  # [B, N, C] f32, of the images
    timesteps: Tensor  # [B, K] f32, where each is to be noised and trained, scheduler units
    advantages: Tensor  # [B, 1, 1] f32, 0 until `credit`
    loss_weight: Tensor  # [B, 1, 1] f32, as in Rollout
    embeds: Any  # B rows
    images: Tensor  # [B] int64, their global numbers within the epoch

    @property
    def shape(self) -> tuple[int, int]:
        """K and the scored outcomes of a row."""
        return self.timesteps.shape[1], 1

    def take(self, rows: Tensor, num_rows: int) -> "CleanMinibatch":
        """rows [R] int64 on the CPU: image * K + timestep; num_rows of the whole update."""
        image, step = rows // self.shape[0], rows % self.shape[0]
        image_index, step_index = (index.to(self.latents.device, non_blocking=True) for index in (image, step))
        return CleanMinibatch(
            latents=self.latents[image_index],
            timesteps=self.timesteps[image_index, step_index],
            advantages=self.advantages[image_index].flatten(),
            loss_weight=self.loss_weight[image_index].flatten(),
            embeds=self.embeds.take(image_index),
            num_rows=num_rows,
            where=torch.stack([self.images[image], step], 1),
        )


@dataclass
class CleanMinibatch:
    """R rows of finished images, in random order."""

    latents: Tensor  # [R, N, C] f32, x_0
    timesteps: Tensor  # [R] f32
    advantages: Tensor  # [R] f32
    loss_weight: Tensor  # [R] f32
    embeds: Any  # R rows
    num_rows: int  # of the whole update, on this rank
    where: Tensor  # [R, 2] int64 on the CPU, (global image, timestep's place)


def from_trace(
    trace, embeds, images: Sequence[int], *, num_trained_steps: int, step_weight: str, keep_means: bool = False
) -> Rollout:
    """From the TracedSteps of a walk, of which the first `num_trained_steps` are kept."""
    trace = trace[:num_trained_steps]
    num_images = len(images)
    log_probs = torch.stack([t.step.log_prob.unflatten(0, (num_images, -1)) for t in trace], 1)
    std = torch.stack([t.step.transition_std.view(num_images, -1)[:, 0] for t in trace], 1)  # outcomes share theirs
    return Rollout(
        latents=torch.stack([t.latents for t in trace], 1),
        next_latents=torch.stack([t.step.prev_sample.unflatten(0, (num_images, -1)) for t in trace], 1),
        timesteps=torch.stack([t.timestep for t in trace], 1),
        log_probs=log_probs,
        weights=losses.step_weights(std, step_weight),
        advantages=torch.zeros_like(log_probs),
        loss_weight=torch.ones_like(log_probs),
        means=torch.stack([t.step.prev_sample_mean.unflatten(0, (num_images, -1))[:, 0] for t in trace], 1)
        if keep_means
        else None,
        embeds=embeds,
        images=torch.tensor(images),
    )


def concat(rollouts: list[Rollout] | list[Finished]) -> Rollout | Finished:
    """Join along B, in the order of their images' numbers."""
    columns = {field.name: [getattr(r, field.name) for r in rollouts] for field in fields(rollouts[0])}
    embeds = columns.pop("embeds")
    joined = {name: None if values[0] is None else torch.cat(values) for name, values in columns.items()}
    embeds, order = embeds[0].concat(embeds), joined["images"].argsort()
    if not torch.equal(order, torch.arange(len(order))):  # batches come in order, requests as they are finished
        rows = order.to(joined["latents"].device)
        joined = {name: None if whole is None else whole[order.to(whole.device)] for name, whole in joined.items()}
        embeds = embeds.take(rows)
    return type(rollouts[0])(**joined, embeds=embeds)


def credit(rollout: Rollout | Finished, advantages: Tensor, loss_weight: Tensor) -> None:
    """Enter this rank's advantages and loss weights: one per image, or one per outcome of each step."""
    shape = (len(rollout.images), -1, rollout.shape[1])
    rollout.advantages += advantages.view(shape).to(rollout.advantages)
    rollout.loss_weight *= loss_weight.view(shape).to(rollout.loss_weight)


def minibatches(rollout: Rollout | Finished, plan: BatchPlan, seed: int, epoch: int, inner: int) -> Iterator[list]:
    """Per optimizer step of one inner epoch, its minibatches of `plan.batch_size` rows.

    Each batch of the rollout gives an equal, randomly drawn share of its rows to every optimizer step: the draw depends
    on the batch's global number, the epoch and the inner epoch, so a step trains the same rows on any number of GPUs.
    """
    num_rows = plan.batch_size * rollout.shape[0]  # a moving window may be cut off at its end
    shares = []  # per batch: [updates, rows], numbers of (image, step) rows
    for i, first_image in enumerate(rollout.images[:: plan.batch_size].tolist()):
        generator = rng.generator(seed, "shuffle", epoch, inner, first_image // plan.batch_size)
        order = torch.randperm(num_rows, generator=generator)
        shares.append((i * num_rows + order).view(plan.updates_per_epoch, -1))
    for rows in torch.cat(shares, dim=1):
        yield [rollout.take(part, len(rows)) for part in rows.split(plan.batch_size)]
