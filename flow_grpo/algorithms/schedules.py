"""Schedules: numbers of the algorithms that change with the count of updates, as pure functions of it."""

import math

from flow_grpo.base.errors import UserError


def learning_rate_share(update: int, num_updates: int, schedule: str, warmup_updates: int) -> float:
    """Share of the configured learning rate that update `update` (from 0) of `num_updates` takes, above 0.

    Args:
        schedule: "constant" = 1; "linear" and "cosine" fall from 1 before the first update to 0 after the last.
        warmup_updates: during this many updates the share also grows in equal parts.
    """
    progress = min(update / num_updates, 1.0)
    warmup = min((update + 1) / (warmup_updates + 1), 1.0)
    if schedule == "linear":
        return (1 - progress) * warmup
    if schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2 * warmup
    assert schedule == "constant", schedule
    return warmup


def old_policy_decay(step: int, schedule: float) -> float:
    """Share of itself that the old policy, or the one that samples, keeps after `step` optimizer steps (DiffusionNFT,
    arXiv:2509.16117, sec. 4).

    Args:
        schedule: below 1 = always this share; 1 = slowly up to one half; 2 = none for 75 steps, then up to 0.999; 3 =
            from a quarter up to 0.999 (CRD, arXiv:2603.14128).

    Raises:
        UserError: another schedule.
    """
    if 0 <= schedule < 1:
        return schedule
    if schedule == 1:
        return min(0.001 * step, 0.5)
    if schedule == 2:
        return 0.0 if step < 75 else min(0.0075 * (step - 75), 0.999)
    if schedule == 3:
        return min(0.25 + 0.005 * step, 0.999)
    raise UserError(f"train.old_decay_schedule is {schedule}; it may be 1, 2, 3, or a fixed decay from 0 to below 1")
