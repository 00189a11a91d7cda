"""Schedules: numbers of the algorithms that change with the count of updates, as pure functions of it, or with what the
rewards of earlier epochs have shown."""

import math
from dataclasses import dataclass

from flow_grpo.algorithms.batch_plan import numbers_of_branches
from flow_grpo.base.errors import UserError

# What an epoch leaves of the mean spread before it.
SPREAD_DECAY = 0.5


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


@dataclass
class BranchSchedule:
    """Numbers of branches that leave each step, by a decaying mean of the spread of its rewards.

    A step has J = sample.num_branches branches or a divisor of J, at least 2. An epoch's spreads count when it is over.
    """

    num_branches: int  # most of a step, J
    spreads: tuple[float, ...] = ()  # of each step, over the completed epochs; () = no epoch has told it yet
    latest: tuple[float, ...] = ()  # of the epoch under way

    def branches_at(self, num_steps: int) -> tuple[int, ...]:
        """Return the numbers of branches that leave the steps of the next epoch: the allowed number that is nearest to
        J times the step's spread over the largest spread of a step, and the larger one of two that are as near."""
        most = max(self.spreads, default=0.0)
        if len(self.spreads) != num_steps or most == 0:
            return (self.num_branches,) * num_steps
        choices = numbers_of_branches(self.num_branches)
        numbers = []
        for spread in self.spreads:
            wanted = self.num_branches * spread / most
            nearest = min(choices, key=lambda number: (abs(number - wanted), -number))
            numbers.append(nearest)
        return tuple(numbers)

    def complete_epoch(self) -> None:
        """Let the epoch's spreads count, unless a step has none: then too few of its branches were scored."""
        latest = self.latest
        self.latest = ()
        if not latest or any(math.isnan(spread) for spread in latest):
            return
        if len(self.spreads) != len(latest):
            self.spreads = latest
            return
        means = []
        for before, spread in zip(self.spreads, latest, strict=True):
            means.append(SPREAD_DECAY * before + (1 - SPREAD_DECAY) * spread)
        self.spreads = tuple(means)
