"""What a rollout stores for the update, and how the update's minibatches are drawn from it.

B images of a rank, K trained steps of each, J outcomes of each step (1 in a window, num_branches otherwise), N tokens,
C channels, R rows of a minibatch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.base import rng
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.request import TracedStep


@dataclass
class Rollout:
    """The images of one rank: noisy steps and their outcomes, or finished images (x_0) that the update noises itself. A
    row of the update is one (image, step); the outcomes of a step share its velocity."""

    image_numbers: Tensor  # [B] int64 on the CPU, global within the epoch
    condition: Condition  # B rows
    timesteps: Tensor  # [B, K] f32, scheduler units (1000 * sigma)
    x_0: Tensor | None = None  # [B, N, C] f32, finished images
    latents: Tensor | None = None  # [B, K, N, C] f32, before each trained step
    next_latents: Tensor | None = None  # [B, K, J, N, C] f32, the outcomes of the step
    means: Tensor | None = None  # [B, K, N, C] f32, of the Gaussians that the outcomes were drawn from
    log_probs: Tensor | None = None  # [B, K, J] f32, under the policy that drew the outcomes
    step_weights: Tensor | None = None  # [B, K] f32, loss weight of the step
    advantages: Tensor | None = None  # [B] of an image or [B, K, J] of an outcome, f32; None until rewards are there
    loss_weight: Tensor | None = None  # like advantages, mean 1 over all ranks; 0 for what is masked or filtered

    @property
    def num_steps(self) -> int:
        """K."""
        return self.timesteps.shape[1]

    @property
    def num_outcomes(self) -> int:
        """J."""
        return 1 if self.log_probs is None else self.log_probs.shape[2]

    def take(self, rows: Tensor, num_rows: int, inner_epoch: int = 0) -> "Minibatch":
        """rows [R] int64 on the CPU: image * K + step; num_rows of the whole update."""
        image, step = rows // self.num_steps, rows % self.num_steps
        device = self.timesteps.device
        image_index, step_index = (index.to(device, non_blocking=True) for index in (image, step))

        def of_outcomes(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return (values[image_index] if values.ndim == 1 else values[image_index, step_index]).flatten()

        def of_steps(values: Tensor | None, repeats: int = 1) -> Tensor | None:
            return None if values is None else values[image_index, step_index].repeat_interleave(repeats, 0)

        return Minibatch(
            row_ids=torch.stack([self.image_numbers[image], step], 1),
            num_rows=num_rows,
            inner_epoch=inner_epoch,
            condition=self.condition.take(image_index),
            timesteps=of_steps(self.timesteps),
            x_0=None if self.x_0 is None else self.x_0[image_index],
            latents=of_steps(self.latents),
            next_latents=None if self.next_latents is None else of_steps(self.next_latents).flatten(0, 1),
            means=of_steps(self.means, self.num_outcomes),
            log_probs=of_outcomes(self.log_probs),
            step_weights=of_steps(self.step_weights, self.num_outcomes),
            advantages=of_outcomes(self.advantages),
            loss_weight=of_outcomes(self.loss_weight),
        )


@dataclass
class Minibatch:
    """R rows of a rollout, in random order. What the rollout does not have is None."""

    row_ids: Tensor  # [R, 2] int64 on the CPU, (global image, trained step): names a row in an error
    num_rows: int  # of the whole update, on this rank
    inner_epoch: int  # passes over this rollout before this one
    condition: Condition  # R rows
    timesteps: Tensor  # [R] f32
    x_0: Tensor | None  # [R, N, C] f32
    latents: Tensor | None  # [R, N, C] f32
    next_latents: Tensor | None  # [R * J, N, C] f32, the J outcomes of a row are neighbours
    means: Tensor | None  # [R * J, N, C] f32
    log_probs: Tensor | None  # [R * J] f32
    step_weights: Tensor | None  # [R * J] f32
    advantages: Tensor | None  # [R * J] f32
    loss_weight: Tensor | None  # [R * J] f32


class TrainedRows(NamedTuple):
    """What a minibatch leaves behind until the optimizer step, to name the row that is wrong."""

    loss: Tensor  # [R * J], weighted
    row_ids: Tensor  # [R, 2] int64 on the CPU, as in Minibatch

    def row_id(self, outcome: Tensor) -> tuple[int, int]:
        """The global image and the trained step of an outcome, [] int64 below R * J."""
        return tuple(self.row_ids[int(outcome) // (len(self.loss) // len(self.row_ids))].tolist())


def from_trace(
    trace: list[TracedStep], condition: Condition, image_numbers: list[int], *, num_trained_steps: int, step_weight: str
) -> Rollout:
    """From the noisy steps of B images, of which the first `num_trained_steps` are kept."""
    trace, num_images = trace[:num_trained_steps], len(image_numbers)
    std = torch.stack([t.step.transition_std.view(num_images, -1)[:, 0] for t in trace], 1)  # outcomes share theirs
    return Rollout(
        image_numbers=torch.tensor(image_numbers),
        condition=condition,
        timesteps=torch.stack([t.timestep for t in trace], 1),
        latents=torch.stack([t.latents for t in trace], 1),
        next_latents=torch.stack([t.step.prev_sample.unflatten(0, (num_images, -1)) for t in trace], 1),
        means=torch.stack([t.step.prev_sample_mean.unflatten(0, (num_images, -1))[:, 0] for t in trace], 1),
        log_probs=torch.stack([t.step.log_prob.unflatten(0, (num_images, -1)) for t in trace], 1),
        step_weights=losses.step_weights(std, step_weight),
    )


def concat(rollouts: list[Rollout]) -> Rollout:
    """Join along B, in the order of their images' numbers."""
    columns = {field.name: [getattr(rollout, field.name) for rollout in rollouts] for field in fields(Rollout)}
    condition = Condition.concat(columns.pop("condition"))
    joined = {name: None if values[0] is None else torch.cat(values) for name, values in columns.items()}
    order = joined["image_numbers"].argsort()
    if not torch.equal(order, torch.arange(len(order))):  # images come as they are finished
        joined = {name: None if whole is None else whole[order.to(whole.device)] for name, whole in joined.items()}
        condition = condition.take(order.to(joined["timesteps"].device))
    return Rollout(**joined, condition=condition)


def shuffled_updates(
    rollout: Rollout, plan: BatchPlan, seed: int, epoch: int, inner_epoch: int
) -> Iterator[list[Minibatch]]:
    """Per optimizer step of one inner epoch, its minibatches of `plan.batch_size` rows.

    Each batch of the rollout gives an equal, randomly drawn part of its rows to every optimizer step: the draw depends
    on the batch's global number, the epoch and the inner epoch, so a step trains the same rows on any number of GPUs.
    Of `plan.images_together` neighbours the rows of a step stay together.
    """
    rows_per_batch = plan.batch_size * rollout.num_steps  # a moving window may be cut off at its end
    parts = []  # per batch: [updates, rows], numbers of (image, step) rows
    for i, first_image in enumerate(rollout.image_numbers[:: plan.batch_size].tolist()):
        generator = rng.generator(seed, "shuffle", epoch, inner_epoch, first_image // plan.batch_size)
        order = torch.randperm(rows_per_batch // plan.images_together, generator=generator)
        first = order // rollout.num_steps * plan.images_together * rollout.num_steps + order % rollout.num_steps
        order = first[:, None] + torch.arange(plan.images_together) * rollout.num_steps
        parts.append((i * rows_per_batch + order).view(plan.updates_per_epoch, -1))
    for rows in torch.cat(parts, dim=1):
        yield [rollout.take(part, len(rows), inner_epoch) for part in rows.split(plan.batch_size)]
