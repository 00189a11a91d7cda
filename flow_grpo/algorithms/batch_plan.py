"""The plan of an epoch: how the prompts, images and updates of an experiment divide over GPUs and their batches."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES, OBJECTIVES
from flow_grpo.settings.sections import Config, Sample, Train
from flow_grpo.settings.table import BY_KEY, MAX_BATCH_SIZE


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
    pairs_are_stored: bool = False  # whether groups are pairs of images on a disk, so that none is drawn

    @property
    def num_images(self) -> int:
        """Images of an epoch, over all ranks: those that are scored, which trunks are not, or those of stored pairs."""
        if self.pairs_are_stored:
            return 2 * self.num_groups
        steps = self.num_trained_steps if self.num_branches > 1 else 1
        return self.num_groups * self.group_size * self.num_branches * steps


class Division(NamedTuple):
    """How the rows of a batch divide into the updates of an epoch."""

    fewest_steps: int  # trained steps of an image in the epoch that has the fewest
    images_together: int  # as in BatchPlan
    updates: int

    def takes(self, batch_size: int) -> bool:
        """Return whether every update gets equally many rows of a batch, `images_together` neighbours at a time."""
        blocks, rest = divmod(batch_size, self.images_together)
        return rest == 0 and blocks * self.fewest_steps % self.updates == 0


def num_trained_steps(sample: Sample, train: Train) -> int:
    """Denoising steps of an image that are trained: the window's, or `timestep_fraction` of all, never the last."""
    if sample.num_branches == 1 and sample.sde_window_size > 0:
        return sample.sde_window_size

    # Floating point makes 28.99... of 50 * 0.58.
    steps = int(sample.num_steps * train.timestep_fraction + 1e-9)
    return min(steps, sample.num_steps - 1)


def loss_of_whole_groups(train: Train) -> str:
    """Return a loss that compares the images of a group, in words such as "objective 'fdfo'"; "" for any other.

    The minibatches of such a loss must hold whole groups. Raises UserError for a loss that does not exist, since
    variants of a config call this before the config is checked.
    """
    # No script reads both settings: the one that it does not read has its default, which needs no whole groups.
    for key, records in (("objective", OBJECTIVES), ("forward_objective", FORWARD_OBJECTIVES)):
        loss = getattr(train, key)
        BY_KEY[f"train.{key}"].check(loss, f"train.{key}")
        if records[loss].whole_groups:
            return f"{key} {loss!r}"
    return ""


def plan_batches(config: Config, world_size: int) -> BatchPlan:
    """Divide an epoch of images over the GPUs. Raises UserError, with numbers that do, if it does not divide."""
    sample = config.sample
    train = config.train
    steps = num_trained_steps(sample, train)
    if steps < 1:
        raise UserError(
            f"timestep_fraction {train.timestep_fraction} of num_steps {sample.num_steps} leaves no denoising step to "
            "train, since the last one never is; raise one of the two"
        )
    division = _division(sample, train, steps)
    num_images = sample.num_prompts_per_epoch * sample.num_images_per_prompt
    _check_images(sample, num_images, world_size, division)
    _check_updates(config, division)
    return BatchPlan(
        num_groups=sample.num_prompts_per_epoch,
        group_size=sample.num_images_per_prompt,
        batch_size=sample.batch_size,
        batches_per_epoch=num_images // (sample.batch_size * world_size),
        num_trained_steps=steps,
        num_branches=sample.num_branches,
        updates_per_epoch=train.updates_per_epoch,
        images_together=division.images_together,
    )


def _division(sample: Sample, train: Train, steps: int) -> Division:
    """Return how the rows of a batch divide into updates, where `steps` of each image are trained."""
    images_together = 1
    if loss_of_whole_groups(train):
        images_together = sample.num_images_per_prompt
    fewest_steps = 1 if _window_is_cut_off(sample) else steps
    return Division(fewest_steps, images_together, train.updates_per_epoch)


def smaller_batch(sample: Sample, train: Train, most: float) -> int:
    """Return the largest batch size of at most `most` rows that sample.batch_size could be replaced by, or the smallest
    one if all have more rows.

    It divides sample.batch_size, so that it divides the epoch as that does, and its rows divide into the updates.
    """
    division = _division(sample, train, num_trained_steps(sample, train))
    sizes = [size for size in _divisors(sample.batch_size) if division.takes(size)]
    fitting = [size for size in sizes if size <= most]
    if fitting:
        return fitting[-1]
    return sizes[0] if sizes else sample.batch_size


def _images_of_epoch(sample: Sample) -> str:
    """Return the number of an epoch's images in words, with the settings that it follows from."""
    prompts = counted(sample.num_prompts_per_epoch, "prompts")
    images = counted(sample.num_images_per_prompt, "images")
    num_images = sample.num_prompts_per_epoch * sample.num_images_per_prompt
    return f"{prompts} x {images} = {num_images:,} (num_prompts_per_epoch, num_images_per_prompt)"


def _check_images(sample: Sample, num_images: int, world_size: int, division: Division) -> None:
    """Raise UserError, with numbers that do, unless an epoch's images divide over the GPUs and their batches."""
    if num_images % (sample.batch_size * world_size) == 0:
        return
    batch_sizes = []
    if num_images % world_size == 0:
        divisors = [size for size in _divisors(num_images // world_size) if size <= MAX_BATCH_SIZE]
        batch_sizes = [size for size in divisors if division.takes(size)]
    gpu_counts = []
    if num_images % sample.batch_size == 0 and division.takes(sample.batch_size):
        gpu_counts = _divisors(num_images // sample.batch_size)
    raise UserError(
        f"{_images_of_epoch(sample)} do not divide over {counted(world_size, 'GPUs')} x sample.batch_size "
        f"{sample.batch_size} = {sample.batch_size * world_size}; batch sizes that do: {batch_sizes or 'none'}; "
        f"numbers of GPUs that do with {sample.batch_size}: {gpu_counts or 'none'}"
    )


def _check_updates(config: Config, division: Division) -> None:
    """Raise UserError, with numbers that do, unless a batch's rows divide into the updates."""
    batch_size = config.sample.batch_size
    if division.takes(batch_size):
        return
    rows = batch_size * division.fewest_steps
    condition = ""
    if division.images_together > 1:
        loss = loss_of_whole_groups(config.train)
        condition = f" of whole groups of {division.images_together}, as {loss} takes them,"
    elif _window_is_cut_off(config.sample):
        condition = " where the window is cut off"
    divisors = _divisors(rows // division.images_together)
    update_counts = [count for count in divisors if _objective_takes_updates(config, count)]
    raise UserError(
        f"a batch of {counted(batch_size, 'images')} x {counted(division.fewest_steps, 'trained steps')} = "
        f"{counted(rows, 'rows')}{condition} (batch_size, num_steps, sde_window_size, timestep_fraction) do not divide "
        f"into updates_per_epoch {division.updates}; "
        f"those that do: {update_counts or 'none, take a larger batch_size'}"
    )


def _objective_takes_updates(config: Config, updates_per_epoch: int) -> bool:
    """Return whether the chosen loss can be trained with this many updates of an epoch."""
    check = FORWARD_OBJECTIVES[config.train.forward_objective].check
    if check is None:
        return True
    changed = replace(config, train=replace(config.train, updates_per_epoch=updates_per_epoch))
    try:
        check(changed)
    except UserError:
        return False
    return True


def _window_is_cut_off(sample: Sample) -> bool:
    """Return whether the window moves on, so that the end of its range cuts it off."""
    return sample.num_branches == 1 and sample.sde_window_size > 1 and sample.sde_window_interval > 0


def plan_pairs(config: Config, world_size: int) -> BatchPlan:
    """Divide an epoch of preference pairs, one per prompt, over the GPUs; a forward holds sample.batch_size // 2 pairs.

    A batch is pairs to be read (preferences.path), or images that are sampled together: then whole groups, so that a
    pair never lies on two ranks. Raises UserError, with numbers that do, if the pairs do not divide.
    """
    sample = config.sample
    updates = config.train.updates_per_epoch
    if config.preferences.path:
        group_size = 1
        batch_size = sample.batch_size // 2
        need = "even, two images to a pair"
    else:
        group_size = sample.num_images_per_prompt
        batch_size = sample.batch_size
        need = f"even and a multiple of num_images_per_prompt = {group_size}"
    if sample.batch_size % 2 or batch_size % group_size:
        raise UserError(f"config.sample.batch_size is {sample.batch_size}; it must be {need}")
    num_pairs = sample.num_prompts_per_epoch
    pairs_per_batch = batch_size // group_size
    unit = pairs_per_batch * world_size * updates
    if num_pairs == 0 or num_pairs % unit:
        raise UserError(
            f"{counted(num_pairs, 'pairs')} an epoch (config.sample.num_prompts_per_epoch) do not divide over "
            f"{counted(world_size, 'GPUs')} x {counted(pairs_per_batch, 'pairs')} a batch (of sample.batch_size "
            f"{sample.batch_size}) x train.updates_per_epoch {updates} = {unit}; "
            f"{max(unit, num_pairs // unit * unit)} do"
        )
    return BatchPlan(
        num_groups=num_pairs,
        group_size=group_size,
        batch_size=batch_size,
        batches_per_epoch=num_pairs // unit * updates,
        num_trained_steps=1,
        num_branches=1,
        updates_per_epoch=updates,
        pairs_are_stored=bool(config.preferences.path),
    )


def plan_whole_batches(config: Config, world_size: int) -> BatchPlan:
    """Divide an epoch of images over the GPUs, for updates that draw whole batches of their own. Raises UserError, with
    numbers that do, if it does not divide."""
    sample = config.sample
    train = config.train
    num_images = sample.num_prompts_per_epoch * sample.num_images_per_prompt
    num_parts = world_size * train.updates_per_epoch
    unit = sample.batch_size * num_parts
    if num_images % unit:
        batch_sizes = []
        if num_images % num_parts == 0:
            batch_sizes = [size for size in _divisors(num_images // num_parts) if size <= MAX_BATCH_SIZE]
        raise UserError(
            f"{_images_of_epoch(sample)} do not divide over {counted(world_size, 'GPUs')} x "
            f"train.updates_per_epoch {train.updates_per_epoch} x sample.batch_size {sample.batch_size} = {unit}; "
            f"batch sizes that do: {batch_sizes or 'none'}"
        )
    return BatchPlan(
        num_groups=sample.num_prompts_per_epoch,
        group_size=sample.num_images_per_prompt,
        batch_size=sample.batch_size,
        batches_per_epoch=num_images // (sample.batch_size * world_size),
        num_trained_steps=num_gradient_steps(train) + train.gradient_noisings,
        num_branches=1,
        updates_per_epoch=train.updates_per_epoch,
    )


def num_gradient_steps(train: Train) -> int:
    """Velocities of a walk that the gradients of a reward go through."""
    if train.gradient_path == "refl":
        return 1
    if train.gradient_path == "leap":
        return 2
    return train.gradient_steps


def _divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor**2 != number]
    return small + large
