"""From what an experiment says (prompts, images per prompt, updates) to what one GPU does."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from flow_grpo.algorithms.objectives import FORWARD_OBJECTIVES
from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import gpus


@dataclass(frozen=True)
class BatchPlan:
    """One epoch of one rank. A row is one (image, step); a group's images are neighbours in the global order."""

    num_groups: int  # prompts per epoch, over all ranks
    group_size: int  # images (window) or trunks (branches) of one prompt
    batch_size: int  # rows per forward, in rollout and update
    batches_per_epoch: int  # rollout batches of one rank
    num_trained_steps: int  # denoising steps of an image that are trained
    num_branches: int  # scored outcomes per row; 1 without branching
    updates_per_epoch: int  # optimizer steps per inner epoch
    images_together: int = 1  # neighbours whose rows of a step share a minibatch: a group's, where a loss needs them


def num_trained_steps(config) -> int:
    """Denoising steps of an image that are trained: the window's, or `timestep_fraction` of all, never the last."""
    sample = config.sample
    if sample.num_branches == 1 and sample.sde_window_size > 0:
        return sample.sde_window_size
    steps = int(sample.num_steps * config.train.timestep_fraction + 1e-9)  # 50 * 0.58 is 28.99...
    return min(steps, sample.num_steps - 1)


def plan_batches(config, world_size: int) -> BatchPlan:
    """Divide the experiment over the GPUs. Raises UserError, with numbers that would do, where it does not divide."""
    sample, updates, steps = config.sample, config.train.updates_per_epoch, num_trained_steps(config)
    if steps < 1:
        share = config.train.timestep_fraction
        raise UserError(f"timestep_fraction {share} leaves no denoising step to train of num_steps {sample.num_steps}")
    images = sample.num_prompts_per_epoch * sample.num_images_per_prompt
    if images % (sample.batch_size * world_size):
        ways_out = _ways_out(images, sample.batch_size, world_size, lambda size: size * steps % updates == 0)
        raise UserError(
            f"{sample.num_prompts_per_epoch} prompts x {sample.num_images_per_prompt} images = {images} "
            f"(num_prompts_per_epoch, num_images_per_prompt) do not divide over {gpus(world_size)} x sample.batch_size "
            f"{sample.batch_size} = {sample.batch_size * world_size}; {ways_out}"
        )
    moves = sample.num_branches == 1 and sample.sde_window_size > 1 and sample.sde_window_interval > 0
    if moves and sample.batch_size % updates:
        raise UserError(
            f"a window that moves on every {sample.sde_window_interval} updates is cut off at the end of its range, so "
            f"each number of trained steps up to {steps} must divide: sample.batch_size {sample.batch_size} is no "
            f"multiple of train.updates_per_epoch {updates}; updates that do: {_divisors(sample.batch_size)}"
        )
    whole_groups = FORWARD_OBJECTIVES[config.train.forward_objective].whole_groups
    together = sample.num_images_per_prompt if whole_groups else 1
    if (rows := sample.batch_size * steps) // together % updates:
        of_groups = f" of whole groups of {together}" if whole_groups else ""
        raise UserError(
            f"a batch of {sample.batch_size} images x {steps} trained steps = {rows} rows (batch_size, num_steps, "
            f"sde_window_size, timestep_fraction){of_groups} do not divide into updates_per_epoch {updates}; those "
            f"that do: {_divisors(rows // together)}"
        )
    return BatchPlan(
        num_groups=sample.num_prompts_per_epoch,
        group_size=sample.num_images_per_prompt,
        batch_size=sample.batch_size,
        batches_per_epoch=images // (sample.batch_size * world_size),
        num_trained_steps=steps,
        num_branches=sample.num_branches,
        updates_per_epoch=updates,
        images_together=together,
    )


def _ways_out(images: int, batch_size: int, world_size: int, fits: Callable[[int], bool]) -> str:
    """Batch sizes, of those whose batches `fits` accepts, and numbers of GPUs that divide an epoch."""
    sizes = list(filter(fits, _divisors(images // world_size))) if images % world_size == 0 else []
    counts = _divisors(images // batch_size) if images % batch_size == 0 else []
    return f"batch sizes that do: {sizes or 'none'}; numbers of GPUs that do with {batch_size}: {counts or 'none'}"


def plan_pairs(config, world_size: int) -> BatchPlan:
    """The same for preference pairs, one per prompt, of which a forward holds sample.batch_size // 2.

    A batch is pairs to be read (preferences.path), or images that are sampled together: then whole groups, so that a
    pair never lies on two ranks.
    """
    sample, updates, stored = config.sample, config.train.updates_per_epoch, config.preferences.path
    group, batch = (1, sample.batch_size // 2) if stored else (sample.num_images_per_prompt, sample.batch_size)
    if sample.batch_size % 2 or batch % group:
        need = "even, two images to a pair" if stored else f"even and a multiple of num_images_per_prompt = {group}"
        raise UserError(f"config.sample.batch_size is {sample.batch_size}; it must be {need}")
    batches, rest = divmod(sample.num_prompts_per_epoch * group, batch * world_size * updates)
    if rest or not batches:
        raise UserError(
            f"{sample.num_prompts_per_epoch} pairs an epoch (config.sample.num_prompts_per_epoch) do not divide over "
            f"{gpus(world_size)} x {batch // group} pairs a batch (of sample.batch_size {sample.batch_size}) x "
            f"train.updates_per_epoch {updates} = {(unit := world_size * batch // group * updates)}; "
            f"{max(unit, sample.num_prompts_per_epoch // unit * unit)} do"
        )
    return BatchPlan(sample.num_prompts_per_epoch, group, batch, batches * updates, 1, 1, updates)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor**2 != number]
