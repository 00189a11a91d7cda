"""The health of a run: what is measured on the sampled latents, what its own history says, and the alarms.

An alarm compares the run with itself: with its best reward and its best evaluation. The functions are pure; they read
an `Epoch` for every epoch so far, which `summarize` makes of records of metrics.jsonl. A metric that an algorithm does
not log is skipped.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.settings import table

LATENT_SIGNS = ("latent_rms", "diversity")
FINITE = "reward/avg", "grad_norm", "policy_loss", "reference_distance", "kl_reference"  # what must be so in any run
FINITE = *FINITE, *(f"health/{sign}" for sign in LATENT_SIGNS)
WINDOW = 5  # epochs in a smoothed figure: a single epoch's reward is mostly the luck of its prompts
PAUSE = 2 * WINDOW  # epochs between two actions: WINDOW until smoothed figures forget what was before, WINDOW to judge


class Alarm(NamedTuple):
    """A figure that is beyond its limit."""

    name: str  # of the limit in config.health, or "not_finite"
    sentence: str  # for the user


class Sign(NamedTuple):
    """How far a run is from its own healthy state."""

    value: float  # 0 or 1 where nothing has changed, larger the worse it is
    sentence: str


class Epoch(NamedTuple):
    """What one epoch's records say; None where the algorithm does not log it."""

    number: int
    reward: float | None = None  # reward/avg
    no_signal: bool = False  # all groups score alike, or no update had a gradient
    evaluation: float | None = None  # of config.eval.best_by, before the epoch
    evaluation_error: float | None = None  # its standard error; None for a single prompt
    not_finite: Mapping[str, float] = MappingProxyType({})  # figures that are NaN or infinite
    acted: bool = False  # whether config.health.action was taken


class Verdict(NamedTuple):
    """What an epoch amounts to."""

    figures: dict[str, float]  # by the limit's name in config.health
    alarms: list[Alarm]
    act: bool  # whether it is time for config.health.action


@torch.no_grad()
def measure(latents: Tensor, groups: Tensor, split: Iterable[int] = (), over_ranks: Callable | None = None) -> Tensor:
    """Signs of this rank's M images of an epoch, [M, 2] float64 on their device, in the order of LATENT_SIGNS.

    Args:
        latents: [M, c, h, w] float32, as the VAE sees them but for its normalisation.
        groups: [M] int64 on the CPU, images that compete.
        split: groups with images on several ranks, the same on each; `over_ranks` adds up sums [S, D + 1] over them.
    """
    split = torch.tensor(sorted(split), dtype=torch.int64)
    numbers = torch.cat([groups, split]).unique()
    group = torch.searchsorted(numbers, groups)
    flat = latents.flatten(1).double()
    counts, order = torch.bincount(group, minlength=len(numbers)), group.argsort(stable=True).to(flat.device)
    rows = torch.cat([flat, torch.ones_like(flat[:, :1])], 1)[order]
    total = torch.stack([of_group.sum(0) for of_group in rows.split(counts.tolist())])  # [G, D + 1], last the number
    if len(split):
        shared = torch.isin(numbers, split).to(total.device)
        total[shared] = over_ranks(total[shared])
    mean = total[:, :-1] / total[:, -1:]
    rms, spread = (part.square().mean(1).sqrt() for part in (flat, flat - mean[group.to(flat.device)]))
    return torch.stack([rms, spread / rms], 1)


def by_epoch(records: list[dict], config) -> list[Epoch]:
    """The epochs of a metrics.jsonl; records after the last line of kind "epoch" belong to none."""
    epochs = [list(lines) for _, lines in groupby(records, key=lambda record: record["epoch"])]
    return [summarize(lines, config) for lines in epochs if any(line["kind"] == "epoch" for line in lines)]


def summarize(records: list[dict], config) -> Epoch:
    """One epoch of the records of its evaluation, its updates and its own line, of which the last is needed."""
    epoch = next(record for record in records if record["kind"] == "epoch")
    updates = [record for record in records if record["kind"] == "update"]
    evaluation = next((record for record in records if record["kind"] == "eval"), {})
    chosen_by, error = f"eval/{config.eval.get('best_by', 'avg')}", evaluation.get("eval/std_error", math.nan)
    grad_norms = [update["grad_norm"] for update in updates if "grad_norm" in update]
    flat = bool(grad_norms) and not any(grad_norms)
    watched = [(name, record[name]) for record in records for name in (*FINITE, chosen_by) if name in record]
    return Epoch(
        number=int(epoch["epoch"]),
        reward=epoch.get("reward/avg"),
        no_signal=flat or teaches_nothing(epoch, config),
        evaluation=evaluation.get(chosen_by),
        evaluation_error=error if math.isfinite(error) else None,
        not_finite={name: value for name, value in watched if not math.isfinite(value)},
        acted=bool(epoch.get("health/action_taken", 0.0)),
    )


def teaches_nothing(epoch: Mapping[str, float], config) -> bool:
    """Whether nothing that an epoch trains on tells images of a group apart. Where diversity counts, too, rewards that
    are all alike leave something to learn, and distillation learns from its teachers."""
    if config.get("algorithm") == table.DISTILL:
        return False
    return epoch.get("reward/zero_std_share", 0.0) >= 1 and not config.train.get("diversity_weight", 0.0)


def judge(epochs: list[Epoch], limits) -> Verdict:
    """What the last epoch amounts to, after those before it. `limits` is config.health; 0 = no limit."""
    epochs = [*epochs[:-1], epochs[-1]._replace(acted=False)]  # what is done about it comes after
    signs = {name: sign(epochs) for name, sign in SIGNS.items()}
    signs = {name: sign for name, sign in signs.items() if sign is not None}
    alarms = [
        Alarm(name, f"{sign.sentence} (limit {limits[name]:g}, config.health.{name})")
        for name, sign in signs.items()
        if is_beyond(sign.value, limits[name])
    ]
    alarms = not_finite(epochs[-1]) + alarms
    paused = any(epoch.acted for epoch in epochs[:-1][-PAUSE + 1 :])
    return Verdict({name: sign.value for name, sign in signs.items()}, alarms, bool(alarms) and not paused)


def is_beyond(value: float, limit: float) -> bool:
    """Whether a sign's value is beyond its limit in config.health, where 0 is none. NaN is beyond any limit."""
    return bool(limit) and not value <= limit


def not_finite(epoch: Epoch) -> list[Alarm]:
    """An alarm for each figure of an epoch that is NaN or infinite, whatever the limits: no comparison would see it."""
    return [Alarm("not_finite", f"{name} is {value}, no finite number") for name, value in epoch.not_finite.items()]


def reward_drop(epochs: list[Epoch]) -> Sign | None:
    """Standard errors by which the last WINDOW epochs' mean reward lies below the best such mean, less what is luck.

    With s the standard deviation of an epoch's reward about its trend, of successive differences (whose variance is
    2 s^2), a difference of two means of W epochs has the standard error s sqrt(2 / W). Of m = n / W independent means
    of mere noise the best lies above the true mean by about sqrt(2 ln m) s / sqrt(W), that is sqrt(ln m) standard
    errors, and the worst as far below. The latest mean is compared after every epoch, so that a run meets both, and
    2 sqrt(ln m) standard errors do not count. None before 2 W epochs.
    """
    rewards = [epoch.reward for epoch in epochs if epoch.reward is not None and math.isfinite(epoch.reward)]
    if len(rewards) < 2 * WINDOW:
        return None
    means = [math.fsum(rewards[i : i + WINDOW]) / WINDOW for i in range(len(rewards) - WINDOW + 1)]
    steps = [after - before for before, after in pairwise(rewards)]
    noise = math.sqrt(math.fsum([step**2 for step in steps]) / len(steps) / 2)
    drop = (max(means) - means[-1]) / max(noise * math.sqrt(2 / WINDOW), 1e-30)
    value = max(drop - 2 * math.sqrt(math.log(len(rewards) / WINDOW)), 0.0)
    return Sign(
        value,
        f"the training reward has fallen to {means[-1]:.4g} from its best {max(means):.4g} (means of {WINDOW} epochs), "
        f"{value:.3g} standard errors more than chance explains",
    )


def eval_drop(epochs: list[Epoch]) -> Sign | None:
    """Standard errors of the difference by which the last evaluation lies below the best one.

    None where the last evaluation was already acted upon, or has no error (a single prompt). An error of 0 is one: all
    prompts score alike, as after a collapse.
    """
    evaluations = [e for e in epochs if None not in (e.evaluation, e.evaluation_error) and math.isfinite(e.evaluation)]
    last_action = max((e.number for e in epochs if e.acted), default=-1)
    if len(evaluations) < 2 or evaluations[-1].number <= last_action:
        return None
    best, last = max(evaluations, key=lambda e: e.evaluation), evaluations[-1]
    error = max(math.hypot(best.evaluation_error, last.evaluation_error), 1e-30)
    value = (best.evaluation - last.evaluation) / error
    return Sign(
        value,
        f"the evaluation has fallen to {last.evaluation:.4g} from its best {best.evaluation:.4g} after {best.number} "
        f"epochs, by {value:.3g} standard errors",
    )


def epochs_without_signal(epochs: list[Epoch]) -> Sign:
    """Epochs in a row, up to now, in which nothing could be learned."""
    count = next((i for i, epoch in enumerate(reversed(epochs)) if not epoch.no_signal), len(epochs))
    return Sign(count, f"for {count} epochs nothing was learned: all images of a group score alike, or no gradient")


SIGNS = {  # by the limit's name in config.health
    "reward_drop": reward_drop,
    "eval_drop": eval_drop,
    "epochs_without_signal": epochs_without_signal,
}
