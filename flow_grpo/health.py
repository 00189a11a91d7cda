"""The health of a run: what is measured on the sampled latents, what its own history says, and the alarms.

An alarm compares the run with itself: with its best reward, its first epochs, its reference policy, its clip range. The
functions are pure; they read an `Epoch` for every epoch so far, which `summarize` makes of records of metrics.jsonl.
A figure that an algorithm does not log is skipped.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

LATENT_SIGNS = ("latent_rms", "high_frequency", "diversity")
WINDOW = 5  # epochs in a smoothed figure: a single epoch's reward is mostly the luck of its prompts
PAUSE = 2 * WINDOW  # epochs between two actions: WINDOW until smoothed figures forget what was before, WINDOW to judge
USUAL_UPDATES = 20  # before an epoch, whose median gradient norm is the usual one


class Alarm(NamedTuple):
    """A figure that is beyond its limit."""

    name: str  # of the limit in config.health, or "not_finite"
    value: float
    limit: float
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
    latent_rms: float | None = None
    high_frequency: float | None = None
    diversity: float | None = None
    grad_norms: tuple[float, ...] = ()  # of the updates
    loss: float | None = None  # policy_loss, mean of the updates; None where ratios are clipped: that loss stays near 0
    distance: float | None = None  # reference_distance or kl_reference, mean of the updates
    update_size: float | None = None  # ratio_std of the epoch's last update, in clip ranges
    evaluation: float | None = None  # of config.eval.best_by, before the epoch
    evaluation_error: float | None = None  # its standard error
    acted: bool = False  # whether config.health.action was taken


class Verdict(NamedTuple):
    """What an epoch amounts to."""

    figures: dict[str, float]  # by the limit's name in config.health
    alarms: list[Alarm]
    act: bool  # whether it is time for config.health.action


@torch.no_grad()
def measure(latents: Tensor, groups: Tensor) -> Tensor:
    """Signs of M images, [M, 3] float64 on their device, in the order of LATENT_SIGNS.

    Args:
        latents: [M, c, h, w] float32, as the VAE sees them but for its normalisation.
        groups: [M] int64, images that compete; only neighbours within this batch are compared.
    """
    flat = latents.flatten(1).double()
    rms = flat.square().mean(1).sqrt()
    _, group = groups.to(flat.device).unique(return_inverse=True)
    count = torch.bincount(group)[:, None]
    mean = flat.new_zeros(len(count), flat.shape[1]).index_add(0, group, flat) / count
    spread = (flat - mean[group]).square().mean(1).sqrt()
    return torch.stack([rms, high_frequency_share(latents), spread / rms], 1)


def high_frequency_share(latents: Tensor) -> Tensor:
    """Share of each image's energy, mean apart, above half the Nyquist frequency in either direction, [M] float64."""
    height, width = latents.shape[-2:]
    energy = torch.fft.fft2(latents.double()).abs().square().sum(1)
    energy[:, 0, 0] = 0
    rows, columns = (torch.fft.fftfreq(size, device=latents.device).abs() > 0.25 for size in (height, width))
    high = energy * (rows[:, None] | columns)
    return high.sum((1, 2)) / energy.sum((1, 2)).clamp(min=1e-30)


def by_epoch(records: list[dict], config) -> list[Epoch]:
    """The epochs of a metrics.jsonl; records after the last line of kind "epoch" belong to none."""
    epochs = [list(lines) for _, lines in groupby(records, key=lambda record: record["epoch"])]
    return [summarize(lines, config) for lines in epochs if any(line["kind"] == "epoch" for line in lines)]


def summarize(records: list[dict], config) -> Epoch:
    """One epoch of the records of its evaluation, its updates and its own line, of which the last is needed."""
    epoch = next(record for record in records if record["kind"] == "epoch")
    updates = [record for record in records if record["kind"] == "update"]
    evaluation = next((record for record in records if record["kind"] == "eval"), {})
    losses = [] if any("ratio_std" in update for update in updates) else _values(updates, "policy_loss")
    distances = _values(updates, "reference_distance") or _values(updates, "kl_reference")
    grad_norms = _values(updates, "grad_norm")
    flat = bool(grad_norms) and not any(grad_norms) and not any(_values(updates, "loss"))
    return Epoch(
        number=int(epoch["epoch"]),
        reward=epoch.get("reward/avg"),
        no_signal=flat or epoch.get("reward/zero_std_share", 0.0) >= 1,
        **{sign: epoch.get(f"health/{sign}") for sign in LATENT_SIGNS},
        grad_norms=tuple(grad_norms),
        loss=statistics.fmean(losses) if losses else None,
        distance=statistics.fmean(distances) if distances else None,
        update_size=_update_size(updates, config.train),
        evaluation=evaluation.get(f"eval/{config.eval.get('best_by', 'avg')}"),
        evaluation_error=evaluation.get("eval/std_error"),
        acted=bool(epoch.get("health/action_taken", 0.0)),
    )


def _values(updates: list[dict], name: str) -> list[float]:
    return [update[name] for update in updates if name in update]


def _update_size(updates: list[dict], train) -> float | None:
    """The last update's: the farthest from the rollout. Guard clips another ratio than the one that is logged."""
    spreads = _values(updates, "ratio_std")
    return spreads[-1] / train.clip_range if spreads and train.clip_range and train.objective == "clip" else None


def judge(epochs: list[Epoch], limits) -> Verdict:
    """What the last epoch amounts to, after those before it.

    Args:
        limits: config.health; 0 = no limit.
    """
    signs = {name: sign(epochs) for name, sign in SIGNS.items()}
    signs = {name: sign for name, sign in signs.items() if sign is not None}
    alarms = [
        Alarm(name, sign.value, limits[name], f"{sign.sentence} (limit {limits[name]:g}, config.health.{name})")
        for name, sign in signs.items()
        if limits[name] and not sign.value <= limits[name]  # NaN is beyond any limit
    ]
    alarms = not_finite(epochs[-1]) + alarms
    paused = any(epoch.acted for epoch in epochs[:-1][-PAUSE + 1 :])
    return Verdict({name: sign.value for name, sign in signs.items()}, alarms, bool(alarms) and not paused)


def not_finite(epoch: Epoch) -> list[Alarm]:
    """An alarm for each figure of an epoch that is NaN or infinite, whatever the limits: no comparison would see it."""
    figures = epoch._asdict() | {"grad_norm": sum(epoch.grad_norms)}
    return [
        Alarm("not_finite", value, 0.0, f"{name.replace('_', ' ')} is {value}, which is no finite number")
        for name, value in figures.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]


def _series(epochs: Iterable[Epoch], field: str) -> Iterator[tuple[int, float]]:
    """(number of the epoch, figure) of every epoch that has a finite one; read no farther than it is asked for."""
    values = ((epoch.number, getattr(epoch, field)) for epoch in epochs)
    return ((number, value) for number, value in values if value is not None and math.isfinite(value))


def _mean_of_first(epochs: Iterable[Epoch], field: str) -> float | None:
    """Mean of the first WINDOW figures; None for fewer. Of reversed epochs, of the last ones: the sum is exact."""
    values = [value for _, value in islice(_series(epochs, field), WINDOW)]
    return statistics.fmean(values) if len(values) == WINDOW else None


def reward_drop(epochs: list[Epoch]) -> Sign | None:
    """Standard errors by which the last WINDOW epochs' mean reward lies below the best such mean, less what is luck.

    With s the standard deviation of an epoch's reward about its trend, of successive differences (whose variance is
    2 s^2), a difference of two means of W epochs has the standard error s sqrt(2 / W). The best of m = n / W
    independent means of mere noise exceeds the true mean by about sqrt(2 ln m) s / sqrt(W), that is sqrt(ln m) standard
    errors, and these do not count. None before 2 W epochs.
    """
    rewards = [value for _, value in _series(epochs, "reward")]
    if len(rewards) < 2 * WINDOW:
        return None
    means = [math.fsum(rewards[i : i + WINDOW]) / WINDOW for i in range(len(rewards) - WINDOW + 1)]
    steps = [after - before for before, after in pairwise(rewards)]
    noise = math.sqrt(math.fsum([step**2 for step in steps]) / len(steps) / 2)
    drop = (max(means) - means[-1]) / max(noise * math.sqrt(2 / WINDOW), 1e-30)
    value = max(drop - math.sqrt(math.log(len(rewards) / WINDOW)), 0.0)
    return Sign(
        value,
        f"the training reward has fallen to {means[-1]:.4g} from its best {max(means):.4g} (means of {WINDOW} epochs), "
        f"{value:.3g} standard errors more than chance explains",
    )


def eval_drop(epochs: list[Epoch]) -> Sign | None:
    """Standard errors of the difference by which the last evaluation lies below the best one."""
    evaluations = [e for e in epochs if e.evaluation is not None and math.isfinite(e.evaluation)]
    evaluations = [e for e in evaluations if e.evaluation_error]
    if len(evaluations) < 2:
        return None
    best, last = max(evaluations, key=lambda e: e.evaluation), evaluations[-1]
    value = (best.evaluation - last.evaluation) / math.hypot(best.evaluation_error, last.evaluation_error)
    return Sign(
        value,
        f"the evaluation has fallen to {last.evaluation:.4g} from its best {best.evaluation:.4g} after {best.number} "
        f"epochs, by {value:.3g} standard errors",
    )


def reference_distance(epochs: list[Epoch]) -> Sign | None:
    """Mean distance to the reference over WINDOW epochs, as the algorithm measures it."""
    if (mean := _mean_of_first(reversed(epochs), "distance")) is None:
        return None
    return Sign(mean, f"the policy is {mean:.3g} away from the reference (mean of {WINDOW} epochs)")


def loss_rise(epochs: list[Epoch]) -> Sign | None:
    """Mean loss of WINDOW epochs over the first WINDOW's."""
    first, last = _mean_of_first(epochs, "loss"), _mean_of_first(reversed(epochs), "loss")
    if first is None or first <= 0:
        return None
    value = last / first
    return Sign(value, f"the loss has risen to {last:.3g}, {value:.3g} times that of the first {WINDOW} epochs")


def update_size(epochs: list[Epoch]) -> Sign | None:
    """Spread of the ratios in an epoch's last update over the clip range, mean of WINDOW epochs.

    The first WINDOW epochs do not count: Adam's first steps are larger than those that follow.
    """
    if (mean := _mean_of_first(reversed(epochs[WINDOW:]), "update_size")) is None:
        return None
    return Sign(
        mean,
        f"by an epoch's last update the ratios have spread by {mean:.3g} clip ranges (mean of {WINDOW} epochs): "
        "updates are too large or too many",
    )


def epochs_without_signal(epochs: list[Epoch]) -> Sign:
    """Epochs in a row, up to now, in which nothing could be learned."""
    count = next((i for i, epoch in enumerate(reversed(epochs)) if not epoch.no_signal), len(epochs))
    return Sign(count, f"for {count} epochs nothing was learned: all images of a group score alike, or no gradient")


def grad_norm_spike(epochs: list[Epoch]) -> Sign | None:
    """The largest gradient norm of the epoch over the median of up to USUAL_UPDATES before it."""
    before = [norm for epoch in epochs[:-1][-USUAL_UPDATES:] for norm in epoch.grad_norms if math.isfinite(norm)]
    now = [norm for norm in epochs[-1].grad_norms if math.isfinite(norm)]
    if not now:
        return None
    usual = statistics.median(before[-USUAL_UPDATES:]) if before else 0.0
    value = max(now) / usual if usual else 1.0
    return Sign(value, f"a gradient norm was {value:.3g} times the usual one")


def latent_change(field: str, factor_of: Callable[[float], float], sentence: str) -> Callable:
    """A sign: the factor by which a figure of the latents has changed since the first epoch, or None."""

    def sign(epochs: list[Epoch]) -> Sign | None:
        now = next((value for _, value in _series(epochs[-1:], field)), None)
        if now is None:
            return None
        _, first = next(_series(epochs, field))
        factor = factor_of(max(now, 1e-30) / max(first, 1e-30))
        return Sign(factor, f"{sentence} by a factor {factor:.3g} since the first epoch, to {now:.3g}")

    return sign


SIGNS = {  # by the limit's name in config.health
    "reward_drop": reward_drop,
    "eval_drop": eval_drop,
    "reference_distance": reference_distance,
    "loss_rise": loss_rise,
    "update_size": update_size,
    "epochs_without_signal": epochs_without_signal,
    "latent_rms_change": latent_change("latent_rms", lambda f: max(f, 1 / f), "the latents' size has changed"),
    "high_frequency_change": latent_change("high_frequency", lambda f: f, "the latents' high frequencies have grown"),
    "diversity_change": latent_change("diversity", lambda f: 1 / f, "the spread within a group has shrunk"),
    "grad_norm_spike": grad_norm_spike,
}
