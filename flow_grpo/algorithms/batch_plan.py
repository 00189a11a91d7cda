"""From what an experiment says (prompts, images per prompt, updates) to what one GPU does."""

import copy
import math
from dataclasses import dataclass

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import gpus
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES
from flow_grpo.settings.table import MAX_BATCH_SIZE


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

    @property
    def num_images(self) -> int:
        """Scored images of an epoch, over all ranks; trunks are not."""
        steps = self.num_trained_steps if self.num_branches > 1 else 1
        return self.num_groups * self.group_size * self.num_branches * steps


def num_trained_steps(config) -> int:
    """Denoising steps of an image that are trained: the window's, or `timestep_fraction` of all, never the last."""
    sample = config.sample
    if sample.num_branches == 1 and sample.sde_window_size > 0:
        return sample.sde_window_size
    steps = int(sample.num_steps * config.train.timestep_fraction + 1e-9)  # 50 * 0.58 is 28.99...
    return min(steps, sample.num_steps - 1)


def plan_batches(config, world_size: int) -> BatchPlan:
    """Divide the experiment over the GPUs. Raises UserError, with numbers that would do, where it does not divide."""
    sample, steps = config.sample, num_trained_steps(config)
    if steps < 1:
        share = config.train.timestep_fraction
        raise UserError(f"timestep_fraction {share} leaves no denoising step to train of num_steps {sample.num_steps}")
    whole_groups = FORWARD_OBJECTIVES[config.train.forward_objective].whole_groups
    together = sample.num_images_per_prompt if whole_groups else 1
    _check_images(config, world_size, together)
    _check_updates(config, together)
    return BatchPlan(
        num_groups=sample.num_prompts_per_epoch,
        group_size=sample.num_images_per_prompt,
        batch_size=sample.batch_size,
        batches_per_epoch=_num_images(config) // (sample.batch_size * world_size),
        num_trained_steps=steps,
        num_branches=sample.num_branches,
        updates_per_epoch=config.train.updates_per_epoch,
        images_together=together,
    )


def _check_images(config, world_size: int, together: int) -> None:
    """Raises UserError, with what would do, unless an epoch's images divide over the GPUs and their batches."""
    sample, images = config.sample, _num_images(config)
    if images % (sample.batch_size * world_size) == 0:
        return
    sizes = _divisors(images // world_size) if images % world_size == 0 else []
    sizes = [size for size in sizes if size <= MAX_BATCH_SIZE and _splits(config, size, together)]
    is_batch = images % sample.batch_size == 0 and _splits(config, sample.batch_size, together)
    counts = _divisors(images // sample.batch_size) if is_batch else []
    raise UserError(
        f"{sample.num_prompts_per_epoch} prompts x {sample.num_images_per_prompt} images = {images} "
        f"(num_prompts_per_epoch, num_images_per_prompt) do not divide over {gpus(world_size)} x sample.batch_size "
        f"{sample.batch_size} = {sample.batch_size * world_size}; batch sizes that do: {sizes or 'none'}; numbers "
        f"of GPUs that do with {sample.batch_size}: {counts or 'none'}"
    )


def _check_updates(config, together: int) -> None:
    """Raises UserError, with what would do, unless a batch's rows divide into the updates."""
    size, steps, updates = config.sample.batch_size, _fewest_steps(config), config.train.updates_per_epoch
    if _splits(config, size, together):
        return
    rows = size * steps
    what = ""
    if together > 1:
        what = f" of whole groups of {together}"
    elif _moves(config):
        what = " where the window is cut off"
    would_do = [number for number in _divisors(rows // together) if _loss_takes(config, number)]
    raise UserError(
        f"a batch of {size} images x {steps} trained steps = {rows} rows{what} (batch_size, num_steps, "
        f"sde_window_size, timestep_fraction) do not divide into updates_per_epoch {updates}; those that do: "
        f"{would_do or 'none, take a larger batch_size'}"
    )


def _loss_takes(config, updates: int) -> bool:
    """Whether the chosen loss can be trained with so many updates of an epoch."""
    check = FORWARD_OBJECTIVES[config.train.forward_objective].check
    if check is None:
        return True
    changed = copy.deepcopy(config)
    changed.train.updates_per_epoch = updates
    try:
        check(changed)
    except UserError:
        return False
    return True


def _splits(config, batch_size: int, together: int) -> bool:
    """Whether each update gets as many rows of a batch, `together` neighbours at a time."""
    rows = batch_size // together * _fewest_steps(config)
    return batch_size % together == 0 and rows % config.train.updates_per_epoch == 0


def _num_images(config) -> int:
    return config.sample.num_prompts_per_epoch * config.sample.num_images_per_prompt


def _moves(config) -> bool:
    """Whether the window moves on, and is cut off at the end of its range."""
    sample = config.sample
    return sample.num_branches == 1 and sample.sde_window_size > 1 and sample.sde_window_interval > 0


def _fewest_steps(config) -> int:
    """Trained steps of an image in an epoch that has the fewest."""
    return 1 if _moves(config) else num_trained_steps(config)


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
