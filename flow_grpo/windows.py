"""Which denoising steps of an image are sampled with noise and trained: the SDE window, and how it moves.

A schedule is a pure function of the number of optimizer steps taken, so that a resumed run needs no cursor, and every
image of a batch has the same window on whatever rank it is.
"""

import math

import torch

from flow_grpo import rng

SCHEDULES = ("random", "progressive", "decay", "exp_decay")


def window_at(sample, seed: int, epoch: int, block: int, updates: int) -> range:
    """The noisy steps of a block of images (prompts.Batch), in an epoch that began after `updates` optimizer steps.

    Args:
        sample: config.sample, checked by checks.check_window.
    """
    if sample.sde_window_size == 0:
        return range(sample.num_steps - 1)
    first, last = sample.sde_window_range
    if sample.sde_window_schedule == "random":
        return draw_window(seed, epoch, block, sample.sde_window_size, (first, last))
    dwell = dwells(sample.sde_window_schedule, range(first, last, sample.sde_window_stride), sample.sde_window_interval)
    start = position(updates, dwell)
    return range(start, min(start + sample.sde_window_size, last))


def draw_window(seed: int, epoch: int, block: int, size: int, window_range: tuple[int, int]) -> range:
    """`size` consecutive steps inside [first, last), each start as likely (MixGRPO, "random"; Flow-GRPO-Fast).

    A block holds whole groups and does not depend on the number of ranks.

    Raises:
        ValueError: the window does not fit.
    """
    first, last = window_range
    if not 0 < size <= last - first:
        raise ValueError(f"an SDE window of {size} steps does not fit into steps [{first}, {last})")
    start = torch.randint(first, last - size + 1, (), generator=rng.generator(seed, "window", epoch, block))
    return range(int(start), int(start) + size)


def dwells(schedule: str, starts: range, interval: int) -> dict[int, int]:
    """How many updates the window stays at each of its `starts` (MixGRPO, arXiv:2507.21802, section 3.2).

    "progressive": `interval` everywhere. "decay": falls linearly from `interval` at the first start to 1 at the last.
    "exp_decay": `interval` up to step 13, from there exp(-0.1) times less at each step, rounded up.
    """
    if schedule == "progressive":
        return dict.fromkeys(starts, interval)
    if schedule == "decay":
        share = {c: (c - starts[0]) / max(starts[-1] - starts[0], 1) for c in starts}
        return {c: max(1, int(interval * (1 - part) + part)) for c, part in share.items()}
    if schedule == "exp_decay":
        return {c: math.ceil(interval * math.exp(-0.1 * max(0, c - 13))) for c in starts}
    raise ValueError(f"sample.sde_window_schedule is {schedule!r}; there are: {', '.join(SCHEDULES)}")


def position(updates: int, dwell: dict[int, int]) -> int:
    """The window's start after `updates` optimizer steps; from the last start it goes back to the first."""
    left = updates % sum(dwell.values())
    for start, stay in dwell.items():
        if left < stay:
            return start
        left -= stay
    raise AssertionError(f"{updates} updates are outside {dwell}")
