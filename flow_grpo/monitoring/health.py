"""The health of a run: signs of trouble in its history, and the alarms.

An alarm compares the run with itself: with its best reward and its best evaluation. The functions are pure; they read
an `Epoch` for every epoch so far, which `summarize` makes from the records of metrics.jsonl. A metric that an algorithm
does not log is skipped.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import NamedTuple

from flow_grpo.base.formatting import counted
from flow_grpo.settings.sections import COMPARED, Config, Health

# Figures that must be finite in any run.
FINITE = (
    "reward/avg",
    "health/latent_rms",
    "health/diversity",
    "grad_norm",
    "policy_loss",
    "reference_distance",
    "kl_reference",
)
# Epochs in a smoothed figure: a single epoch's reward depends mostly on the luck of its prompts.
WINDOW = 5
# Epochs between two actions: WINDOW until smoothed figures forget what was before, and WINDOW to judge.
PAUSE = 2 * WINDOW


class Alarm(NamedTuple):
    """Message about a figure that is beyond its limit."""

    name: str  # of the limit in config.health, or "not_finite"
    sentence: str  # for the user


class Sign(NamedTuple):
    """Distance of a run from its own healthy state."""

    value: float  # 0 or 1 where nothing has changed, larger the worse it is
    sentence: str


class Score(NamedTuple):
    """Mean score of an evaluation."""

    value: float
    error: float  # its standard error


class Epoch(NamedTuple):
    """Summary of one epoch's records; None where the algorithm does not log a figure."""

    number: int
    reward: float | None = None  # reward/avg
    no_signal: bool = False  # all groups score alike, or no update had a gradient
    evaluation: float | None = None  # of config.eval.best_by, before the epoch
    evaluation_error: float | None = None  # its standard error; None for a single prompt
    # Of "avg" and the rewards that are evaluated and not trained on, in a run that has such.
    scores: Mapping[str, Score] = MappingProxyType({})
    not_finite: Mapping[str, float] = MappingProxyType({})  # figures that are NaN or infinite
    acted: bool = False  # whether config.health.action was taken


class Evaluation(NamedTuple):
    """Evaluation before an epoch."""

    epoch: int
    score: Score


class Verdict(NamedTuple):
    """Judgement on an epoch."""

    figures: dict[str, float]  # by the limit's name in config.health
    alarms: list[Alarm]
    act: bool  # whether it is time for config.health.action


def by_epoch(records: Sequence[dict], config: Config) -> list[Epoch]:
    """Return the epochs of a metrics.jsonl. Records after the last line of kind "epoch" belong to none."""
    epochs = []
    for _, group in groupby(records, key=lambda record: record["epoch"]):
        lines = list(group)
        if any(line["kind"] == "epoch" for line in lines):
            epochs.append(summarize(lines, config))
    return epochs


def summarize(records: Sequence[dict], config: Config) -> Epoch:
    """Return one epoch from the records of its evaluation, its updates and its own line, which alone must be there."""
    epoch = next(record for record in records if record["kind"] == "epoch")
    evaluation = next((record for record in records if record["kind"] == "eval"), {})
    chosen_by = f"eval/{config.eval.best_by}"
    error = evaluation.get("eval/std_error", math.nan)
    grad_norms = []
    bad_figures = {}
    for record in records:
        if record["kind"] == "update" and "grad_norm" in record:
            grad_norms.append(record["grad_norm"])
        for name in (*FINITE, chosen_by):
            if not math.isfinite(record.get(name, 0.0)):
                bad_figures[name] = record[name]
    has_no_gradient = bool(grad_norms) and not any(grad_norms)
    return Epoch(
        number=int(epoch["epoch"]),
        reward=epoch.get("reward/avg"),
        no_signal=has_no_gradient or teaches_nothing(epoch, config),
        evaluation=evaluation.get(chosen_by),
        evaluation_error=error if math.isfinite(error) else None,
        scores=_scores_of(evaluation, ["avg", *config.watched_rewards]),
        not_finite=bad_figures,
        acted=bool(epoch.get("health/action_taken", 0.0)),
    )


def _scores_of(evaluation: Mapping[str, float], names: Sequence[str]) -> dict[str, Score]:
    """Return those scores of an evaluation whose mean and standard error are there and finite."""
    scores = {}
    for name in names:
        score = Score(evaluation.get(f"eval/{name}", math.nan), evaluation.get(f"eval/{name}_std_error", math.nan))
        if math.isfinite(score.value) and math.isfinite(score.error):
            scores[name] = score
    return scores


def teaches_nothing(epoch: Mapping[str, float], config: Config) -> bool:
    """Return whether nothing that an epoch trains on tells images of a group apart.

    If diversity counts, too, equal rewards leave something to learn; and not every algorithm compares images.
    """
    if config.algorithm not in COMPARED:
        return False
    return epoch.get("reward/zero_std_share", 0.0) >= 1 and not config.train.diversity_weight


def judge(epochs: Sequence[Epoch], limits: Health) -> Verdict:
    """Return the verdict on the last epoch, given those before it. `limits` is config.health; 0 = no limit."""
    # The action on the last epoch is decided here, so that whatever is noted of it does not count.
    epochs = [*epochs[:-1], epochs[-1]._replace(acted=False)]
    figures = {}
    alarms = not_finite(epochs[-1])
    for name, sign_of in SIGNS.items():
        sign = sign_of(epochs)
        if sign is None:
            continue
        figures[name] = sign.value
        limit = limit_of(limits, name)
        if is_beyond(sign.value, limit):
            alarms.append(Alarm(name, f"{sign.sentence} (limit {limit:g}, config.health.{name})"))
    # The epochs before this one that are less than PAUSE ago.
    recent_epochs = epochs[-PAUSE:-1]
    is_paused = any(epoch.acted for epoch in recent_epochs)
    return Verdict(figures, alarms, act=bool(alarms) and not is_paused)


def limit_of(limits: Health, name: str) -> float:
    """Return the limit of a sign of SIGNS in config.health; 0, which is none, for any other figure."""
    return getattr(limits, name) if name in SIGNS else 0.0


def is_beyond(value: float, limit: float) -> bool:
    """Return whether a sign's value is beyond its limit in config.health, where 0 is none. NaN is beyond any limit."""
    return bool(limit) and not value <= limit


def not_finite(epoch: Epoch) -> list[Alarm]:
    """Return an alarm for each figure of an epoch that is NaN or infinite, which no limit would find."""
    alarms = []
    for name, value in epoch.not_finite.items():
        alarms.append(Alarm("not_finite", f"{name} is {value}, no finite number"))
    return alarms


def reward_drop(epochs: Sequence[Epoch]) -> Sign | None:
    """Return by how many standard errors the last WINDOW epochs' mean reward is below the best such mean, less luck.

    Let s be the standard deviation of an epoch's reward about its trend, from successive differences (whose variance is
    2 s^2). A difference of two means of W epochs then has the standard error s sqrt(2 / W). Of m = n / W independent
    means of mere noise the best is above the true mean by about sqrt(2 ln m) s / sqrt(W), that is sqrt(ln m) standard
    errors, and the worst as far below. The latest mean is compared after every epoch, so that a run meets both, and
    2 sqrt(ln m) standard errors do not count. None before 2 W epochs.
    """
    rewards = [epoch.reward for epoch in epochs if epoch.reward is not None and math.isfinite(epoch.reward)]
    if len(rewards) < 2 * WINDOW:
        return None
    means = _window_means(rewards)
    # Equal rewards have no spread: any drop then counts as huge.
    standard_error = max(_std_about_trend(rewards) * math.sqrt(2 / WINDOW), 1e-30)
    drop = (max(means) - means[-1]) / standard_error
    luck = 2 * math.sqrt(math.log(len(rewards) / WINDOW))
    value = max(drop - luck, 0.0)
    return Sign(
        value,
        f"the training reward has fallen to {means[-1]:.4g} from its best {max(means):.4g} (means of {WINDOW} epochs), "
        f"{value:.3g} standard errors more than chance explains",
    )


def _window_means(rewards: Sequence[float]) -> list[float]:
    """Return the mean of each WINDOW rewards in a row, the latest at the end."""
    means = []
    for start in range(len(rewards) - WINDOW + 1):
        means.append(math.fsum(rewards[start : start + WINDOW]) / WINDOW)
    return means


def _std_about_trend(rewards: Sequence[float]) -> float:
    """Return the standard deviation of rewards about their trend, from successive differences."""
    squares = [(after - before) ** 2 for before, after in pairwise(rewards)]
    return math.sqrt(math.fsum(squares) / len(squares) / 2)


def eval_drop(epochs: Sequence[Epoch]) -> Sign | None:
    """Return by how many standard errors of the difference the last evaluation is below the best one.

    None if the last evaluation was already acted upon, or has no standard error (a single prompt). A standard error of
    0 is valid: all prompts score alike, as after a collapse.
    """
    evaluations = []
    for epoch in epochs:
        if epoch.evaluation is not None and epoch.evaluation_error is not None and math.isfinite(epoch.evaluation):
            evaluations.append(Evaluation(epoch.number, Score(epoch.evaluation, epoch.evaluation_error)))
    if len(evaluations) < 2 or evaluations[-1].epoch <= _last_action(epochs):
        return None
    best = max(evaluations, key=lambda evaluation: evaluation.score.value)
    last = evaluations[-1]
    fall = _rise_in_errors(last.score, best.score)
    return Sign(
        fall,
        f"the evaluation has fallen to {last.score.value:.4g} from its best {best.score.value:.4g} after "
        f"{counted(best.epoch, 'epochs')}, by {fall:.3g} standard errors",
    )


def watched_drop(epochs: Sequence[Epoch]) -> Sign | None:
    """Return by how many standard errors a watched reward is below its best while the trained one has risen since then.

    The smaller of the two, each in standard errors of the difference of two evaluations as if they were independent.
    They are of the same prompts and noises, so that the true errors are smaller. Of several watched rewards the worst
    counts. None if nothing is watched, or the last evaluation was already acted upon.
    """
    evaluated = [epoch for epoch in epochs if "avg" in epoch.scores]
    if not evaluated or evaluated[-1].number <= _last_action(epochs):
        return None
    last = evaluated[-1]
    trained = last.scores["avg"]
    signs = []
    for name in last.scores.keys() - {"avg"}:
        score = last.scores[name]
        best = max((epoch for epoch in evaluated if name in epoch.scores), key=lambda epoch: epoch.scores[name].value)
        best_score = best.scores[name]
        trained_then = best.scores["avg"]
        fall = _rise_in_errors(score, best_score)
        rise = _rise_in_errors(trained_then, trained)
        sentence = (
            f"{name}, which is watched and not trained on, has fallen from its best {best_score.value:.4g} after "
            f"{counted(best.number, 'epochs')} to {score.value:.4g}, by {fall:.3g} standard errors, while the trained "
            f"reward rose from {trained_then.value:.4g} to {trained.value:.4g}, by {rise:.3g}: it may be hacked"
        )
        signs.append(Sign(max(min(fall, rise), 0.0), sentence))
    return max(signs, key=lambda sign: sign.value, default=None)


def _rise_in_errors(before: Score, after: Score) -> float:
    """Return the rise from one score to another in standard errors of the difference."""
    return (after.value - before.value) / max(math.hypot(before.error, after.error), 1e-30)


def _last_action(epochs: Sequence[Epoch]) -> int:
    """Return the number of the last epoch after which config.health.action was taken, -1 if there is none."""
    return max((epoch.number for epoch in epochs if epoch.acted), default=-1)


def epochs_without_signal(epochs: Sequence[Epoch]) -> Sign:
    """Return the number of epochs in a row, up to now, in which nothing could be learned."""
    count = 0
    for epoch in reversed(epochs):
        if not epoch.no_signal:
            break
        count += 1
    return Sign(
        count, f"for {counted(count, 'epochs')} nothing was learned: all images of a group score alike, or no gradient"
    )


# Signs by the names of their limits in config.health.
SIGNS: dict[str, Callable[[Sequence[Epoch]], Sign | None]] = {
    "reward_drop": reward_drop,
    "eval_drop": eval_drop,
    "watched_drop": watched_drop,
    "epochs_without_signal": epochs_without_signal,
}
