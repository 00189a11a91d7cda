"""Which denoising steps of an image are sampled with noise and trained: the SDE window, and how it moves, as a function
of the number of optimizer steps taken, so that a resumed run needs no cursor.
"""

import torch

from flow_grpo.base import rng


def window_at(sample, seed: int, epoch: int, block: int, updates: int) -> range:
    """The noisy steps of a block of images (prompts.Batch), in an epoch that began after `updates` optimizer steps."""
    if sample.sde_window_size == 0:
        return range(sample.num_steps - 1)
    first, last = sample.sde_window_range
    if not sample.sde_window_interval:
        assert block is not None, "a batch of finished images has no window of its own"
        return draw_window(seed, epoch, block, sample.sde_window_size, (first, last))
    start = first + updates // sample.sde_window_interval % (last - first)  # MixGRPO, "progressive"
    return range(start, min(start + sample.sde_window_size, last))


def draw_window(seed: int, epoch: int, block: int, size: int, window_range: tuple[int, int]) -> range:
    """`size` consecutive steps inside [first, last), each start as likely (MixGRPO, "random"; Flow-GRPO-Fast).

    A block holds whole groups and does not depend on the number of ranks.
    """
    first, last = window_range
    start = torch.randint(first, last - size + 1, (), generator=rng.generator(seed, "window", epoch, block))
    return range(int(start), int(start) + size)
