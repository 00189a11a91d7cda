"""The record that a rollout stores for the update, and the minibatches that the update draws from it.

B images of a rank, K trained steps of each, J outcomes of each step (1 in a window, num_branches otherwise), N tokens,
C channels, R rows of a minibatch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.base import rng
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.request import TracedStep


@dataclass
class Minibatch:
    """R rows of a rollout, in random order: `StepRows` or `ImageRows`."""

    row_ids: Tensor  # [R, 2] int64 on the CPU, (global image, trained step): names a row in an error
    num_update_rows: int  # rows of the whole update on this rank, over which the loss is a mean
    inner_epoch: int  # passes over this rollout before this one
    group_size: int  # rows of one step that are neighbours and compete; 1 = they lie anywhere
    condition: Condition  # R rows
    timesteps: Tensor  # [R] f32
    advantages: Tensor  # [R * J] f32
    loss_weight: Tensor  # [R * J] f32
    beta_gate: Tensor | None  # [R * J] f32, weight in the pull to the reference; None = 1

    @property
    def num_outcomes(self) -> int:
        """Outcomes of each row, J."""
        return 1


@dataclass
class StepRows(Minibatch):
    """R stored noisy steps; the J outcomes of a row are neighbours."""

    latents: Tensor  # [R, N, C] f32
    next_latents: Tensor  # [R * J, N, C] f32
    means: Tensor  # [R * J, N, C] f32
    log_probs: Tensor  # [R * J] f32
    step_weights: Tensor  # [R * J] f32
    x_0: Tensor | None  # [R, N, C] f32, of the finished images; None if the objective does not ask for them

    @property
    def num_outcomes(self) -> int:
        """Outcomes of each row, J."""
        return len(self.log_probs) // len(self.timesteps)


@dataclass
class ImageRows(Minibatch):
    """R finished images, each at one timestep; J is 1."""

    x_0: Tensor  # [R, N, C] f32


class RowIndex(NamedTuple):
    """Places of R rows in tensors [B, K, ...]."""

    images: Tensor  # [R] int64, below B
    steps: Tensor  # [R] int64, below K


Rows = TypeVar("Rows", bound=Minibatch)


@dataclass
class Rollout(ABC, Generic[Rows]):
    """Images of one rank: `StoredSteps`, or `FinishedImages` that the update noises itself.

    A row of the update is one (image, step); the outcomes of a step share its velocity.
    """

    image_numbers: Tensor  # [B] int64 on the CPU, global within the epoch
    condition: Condition  # B rows
    timesteps: Tensor  # [B, K] f32, scheduler units (1000 * sigma)
    advantages: Tensor = field(init=False)  # [B] of images or [B, K, J] of outcomes, f32; NaN until rewards are there
    loss_weight: Tensor = field(init=False)  # like advantages, mean 1 over all ranks; 0 for what is masked or filtered
    beta_gate: Tensor | None = field(init=False, default=None)  # like advantages; None without train.beta_gate

    def __post_init__(self) -> None:
        self.advantages = self.timesteps.new_full([len(self.timesteps)], math.nan)
        self.loss_weight = self.advantages.clone()

    @property
    def num_steps(self) -> int:
        """Trained steps of each image, K."""
        return self.timesteps.shape[1]

    def take(self, rows: Tensor, num_update_rows: int, inner_epoch: int = 0, group_size: int = 1) -> Rows:
        """Return a minibatch of rows.

        Args:
            rows: [R] int64 on the CPU, image * K + step, where `image` is a place in this rollout, below B.
            num_update_rows, inner_epoch, group_size: as in Minibatch.
        """
        images = rows // self.num_steps
        steps = rows % self.num_steps
        device = self.timesteps.device
        at = RowIndex(images.to(device, non_blocking=True), steps.to(device, non_blocking=True))
        return self._rows(
            at,
            row_ids=torch.stack([self.image_numbers[images], steps], 1),
            num_update_rows=num_update_rows,
            inner_epoch=inner_epoch,
            group_size=group_size,
            condition=self._condition(images, at),
            timesteps=self.timesteps[at.images, at.steps],
            advantages=_take_outcomes(self.advantages, at),
            loss_weight=_take_outcomes(self.loss_weight, at),
            beta_gate=None if self.beta_gate is None else _take_outcomes(self.beta_gate, at),
        )

    def _condition(self, images: Tensor, at: RowIndex) -> Condition:
        """Return the condition of a minibatch's rows.

        Args:
            images: at.images on the CPU.
        """
        return self.condition.take(at.images)

    @abstractmethod
    def _rows(self, at: RowIndex, **shared: Any) -> Rows:
        """Make a minibatch of the fields that every minibatch has, and of this rollout's own."""


@dataclass
class StoredSteps(Rollout[StepRows]):
    """Noisy steps of B images, and what came out of each."""

    latents: Tensor  # [B, K, N, C] f32, before each trained step
    next_latents: Tensor  # [B, K, J, N, C] f32, the outcomes of the step
    means: Tensor  # [B, K, N, C] f32, of the Gaussians that the outcomes were drawn from
    log_probs: Tensor  # [B, K, J] f32, under the policy that drew the outcomes
    step_weights: Tensor  # [B, K] f32, loss weight of the step
    x_0: Tensor | None = None  # [B, N, C] f32, of the finished images; None if the objective does not ask for them

    @property
    def num_outcomes(self) -> int:
        """Outcomes of each trained step, J."""
        return self.log_probs.shape[2]

    def _rows(self, at: RowIndex, **shared: Any) -> StepRows:
        # A row's outcomes share its mean and its weight.
        return StepRows(
            **shared,
            latents=self.latents[at.images, at.steps],
            next_latents=self.next_latents[at.images, at.steps].flatten(0, 1),
            means=self.means[at.images, at.steps].repeat_interleave(self.num_outcomes, 0),
            log_probs=_take_outcomes(self.log_probs, at),
            step_weights=self.step_weights[at.images, at.steps].repeat_interleave(self.num_outcomes, 0),
            x_0=None if self.x_0 is None else self.x_0[at.images],
        )


@dataclass
class FinishedImages(Rollout[ImageRows]):
    """B finished images, and the K timesteps at which each will be trained."""

    x_0: Tensor  # [B, N, C] f32
    text_widths: Tensor | None = None  # [B] int64 on the CPU, tokens from which on text is padding; None = not known

    def _condition(self, images: Tensor, at: RowIndex) -> Condition:
        # No log-prob is computed of these rows, so they need no more text than the longest has.
        condition = self.condition
        if self.text_widths is not None:
            condition = condition.cut(int(self.text_widths[images].max()))
        return condition.take(at.images)

    def _rows(self, at: RowIndex, **shared: Any) -> ImageRows:
        return ImageRows(**shared, x_0=self.x_0[at.images])


AnyRollout = TypeVar("AnyRollout", bound=Rollout)


def _take_outcomes(values: Tensor, at: RowIndex) -> Tensor:
    """Values of the rows' outcomes, [R * J], from [B, K, J], or from one of each image, [B], if J is 1."""
    if values.ndim == 1:
        return values[at.images]
    return values[at.images, at.steps].flatten()


class TrainedRows(NamedTuple):
    """Losses of a minibatch, kept until the optimizer step to name a row whose loss is not finite."""

    loss: Tensor  # [R * J], weighted
    row_ids: Tensor  # [R, 2] int64 on the CPU, as in Minibatch

    def row_id(self, outcome: Tensor) -> tuple[int, int]:
        """Return the global image and the trained step of an outcome, [] int64 below R * J."""
        num_outcomes = len(self.loss) // len(self.row_ids)
        image, step = self.row_ids[int(outcome) // num_outcomes].tolist()
        return image, step


def from_trace(
    trace: list[TracedStep], condition: Condition, image_numbers: list[int], *, num_trained_steps: int, step_weight: str
) -> StoredSteps:
    """Make a rollout of the noisy steps of B images, of which it keeps the first `num_trained_steps`.

    Args:
        step_weight: as train.step_weight.
    """
    trace = trace[:num_trained_steps]

    # A step has B * J rows; the outcomes of an image share its mean and its std.
    by_image = (len(image_numbers), -1)
    stds = [traced.step.transition_std.view(by_image)[:, 0] for traced in trace]
    return StoredSteps(
        image_numbers=torch.tensor(image_numbers),
        condition=condition,
        timesteps=torch.stack([traced.timestep for traced in trace], 1),
        latents=torch.stack([traced.latents for traced in trace], 1),
        next_latents=torch.stack([traced.step.prev_sample.unflatten(0, by_image) for traced in trace], 1),
        means=torch.stack([traced.step.prev_sample_mean.unflatten(0, by_image)[:, 0] for traced in trace], 1),
        log_probs=torch.stack([traced.step.log_prob.unflatten(0, by_image) for traced in trace], 1),
        step_weights=losses.step_weights(torch.stack(stds, 1), step_weight),
    )


def concat(rollouts: list[AnyRollout]) -> AnyRollout:
    """Join rollouts along B, before rewards are there, in the order of their images' numbers: they were stored in the
    order of completion."""
    image_numbers = torch.cat([rollout.image_numbers for rollout in rollouts])
    order = image_numbers.argsort()
    is_sorted = torch.equal(order, torch.arange(len(order)))
    condition = Condition.concat([rollout.condition for rollout in rollouts])
    if not is_sorted:
        condition = condition.take(order.to(rollouts[0].timesteps.device))
    tensors = {}
    for column in fields(rollouts[0]):
        # Fields without `init` are those that rewards fill; of the others some may be None.
        if column.name == "condition" or not column.init or getattr(rollouts[0], column.name) is None:
            continue
        joint = torch.cat([getattr(rollout, column.name) for rollout in rollouts])
        tensors[column.name] = joint if is_sorted else joint[order.to(joint.device)]
    return type(rollouts[0])(condition=condition, **tensors)


def shuffled_updates(
    rollout: Rollout[Rows], plan: BatchPlan, seed: int, epoch: int, inner_epoch: int
) -> Iterator[list[Rows]]:
    """Yield the minibatches of `plan.batch_size` rows of each optimizer step of one inner epoch.

    Each batch of the rollout gives an equal, randomly drawn part of its rows to every optimizer step: the draw depends
    on the batch's global number, the epoch and the inner epoch, so a step trains the same rows on any number of GPUs.
    Rows of one denoising step and of `plan.images_together` neighbours stay together.
    """
    num_steps = rollout.num_steps
    together = plan.images_together

    # The rollout's number of steps, not the plan's: a moving window may be cut off at its end.
    rows_per_batch = plan.batch_size * num_steps
    rows_of_batches = []
    for batch, first_image in enumerate(rollout.image_numbers[:: plan.batch_size].tolist()):
        generator = rng.generator(seed, "shuffle", epoch, inner_epoch, first_image // plan.batch_size)

        # What is shuffled are pairs of a block of neighbouring images and a step.
        order = torch.randperm(rows_per_batch // together, generator=generator)
        block = order // num_steps
        step = order % num_steps
        images = block[:, None] * together + torch.arange(together)
        rows = batch * rows_per_batch + images * num_steps + step[:, None]
        rows_of_batches.append(rows.view(plan.updates_per_epoch, -1))
    for rows in torch.cat(rows_of_batches, dim=1):
        yield [rollout.take(part, len(rows), inner_epoch, together) for part in rows.split(plan.batch_size)]
