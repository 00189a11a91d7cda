"""The alarms of flow_grpo/health.py on recorded runs whose end is known.

    python tools/recorded_runs.py build FOLDER FILE  # FOLDER/NAME.jsonl, the metrics.jsonl of each run
    python tools/recorded_runs.py table [FILE]  # what the alarms say, as benchmarks/health_*.md has it
    python tools/recorded_runs.py leave_one_out  # limits chosen without each run in turn

Kept are the figures that the alarms read, and the accuracies by which a run is judged.
"""

import gzip
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from flow_grpo import health
from flow_grpo.settings import default_config

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests/data/recorded_runs.json.gz"  # by which one limit was chosen
LATER = ROOT / "tests/data/later_runs.json.gz"  # recorded when the limits stood
LOST = 0.05  # of strict accuracy on 272 prompts, whose standard error is 0.03: no longer what the run had at its best
RUINED = 0.10  # lost for certain: more than two standard errors of a difference
RENAMED = {"trouble/x0_norm": "health/latent_rms"} | {f"trouble/{n}": f"health/{n}" for n in health.LATENT_SIGNS[1:]}
FIELDS = {
    "epoch": ("reward/avg", "reward/shapes_accuracy", "reward/zero_std_share", *RENAMED),
    "update": ("policy_loss", "loss", "grad_norm", "reference_distance", "ratio_std"),
    "eval": ("eval/avg", "eval/shapes_accuracy"),
}


class Run(NamedTuple):
    """A recorded run."""

    name: str
    clip_range: float
    ema_decay: float
    records: list[dict]  # of metrics.jsonl


class Story(NamedTuple):
    """What became of a run, and when the alarms said so."""

    name: str
    outcome: str  # "holds", "declines" or "collapses"
    best: tuple[int, float]  # epochs trained, strict accuracy
    last: tuple[int, float]
    lost_after: float | None  # epochs trained when LOST is gone, on a line between two evaluations
    seen_after: int | None  # epochs trained at the first evaluation that shows it
    alarm_after: int | None  # epochs trained at the first alarm
    alarms: list[health.Alarm]  # the first
    maxima: dict[str, tuple[float, float]]  # sign -> its largest values up to the best evaluation, and in the whole run
    at_alarm: dict[str, float]  # the signs at the first alarm


def build(folder: str, file: str = str(DATA)) -> None:
    """Write the figures of the runs in a folder to a file."""
    runs = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        decay = 0.95 if "nft" in path.stem else 0.93 if records[-1].get("slot_use") else 0.9
        clip_range = 1e-3 if "clip1e-3" in path.stem else 1e-4
        runs.append(dict(name=path.stem, clip_range=clip_range, ema_decay=decay, kinds=_columns(records)))
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_bytes(gzip.compress(json.dumps(runs, separators=(",", ":")).encode(), 9, mtime=0))


def _columns(records: list[dict]) -> dict[str, dict[str, list]]:
    kinds = {}
    for kind, fields in FIELDS.items():
        lines = [record for record in records if record["kind"] == kind]
        present = [field for field in fields if field in lines[0]]
        figures = {RENAMED.get(f, f): [float(f"{float(line[f]):.5g}") for line in lines] for f in present}
        kinds[kind] = {"epoch": [line["epoch"] for line in lines]} | figures
    return kinds


def load(file: Path | str = DATA) -> list[Run]:
    """Recorded runs."""
    return [
        Run(run["name"], run["clip_range"], run["ema_decay"], _records(run["kinds"]))
        for run in json.loads(gzip.decompress(Path(file).read_bytes()))
    ]


def _records(kinds: dict[str, dict[str, list]]) -> list[dict]:
    order = ["eval", "update", "epoch"]
    records = [
        {"kind": kind} | dict(zip(columns, row)) for kind, columns in kinds.items() for row in zip(*columns.values())
    ]
    for record in records:
        if record["kind"] == "eval":  # the recorded runs did not log it; a reward in [0, 1] has at most this one
            record["eval/std_error"] = math.sqrt(record["eval/avg"] * (1 - record["eval/avg"]) / 272)
    return sorted(records, key=lambda record: (record["epoch"], order.index(record["kind"])))


def verdicts(run: Run, limits) -> list[health.Verdict]:
    """What each epoch amounted to."""
    config = ConfigDict(dict(train=dict(clip_range=run.clip_range, objective="clip"), eval={}))
    epochs = health.by_epoch(run.records, config)
    return [health.judge(epochs[: i + 1], limits) for i in range(len(epochs))]


def tell(run: Run, limits) -> Story:
    """What became of a run, and when the alarms said so."""
    evaluations, judged = accuracies(run), verdicts(run, limits)
    best = max(evaluations, key=lambda pair: pair[1])
    first = next((i for i, verdict in enumerate(judged) if verdict.alarms), None)
    signs = {name: [v.figures.get(name, 0.0) for v in judged] for name in health.SIGNS if name in judged[-1].figures}
    before = max(best[0], 1)
    return Story(
        name=run.name,
        outcome=outcome(run),
        best=best,
        last=evaluations[-1],
        lost_after=lost_after(evaluations),
        seen_after=next((n for n, value in evaluations if n > best[0] and value < best[1] - LOST), None),
        alarm_after=None if first is None else first + 1,
        alarms=[] if first is None else judged[first].alarms,
        maxima={name: (max(values[:before]), max(values)) for name, values in signs.items()},
        at_alarm={} if first is None else judged[first].figures,
    )


def accuracies(run: Run) -> list[tuple[int, float]]:
    """(epochs trained, strict accuracy of the averaged weights on held-out prompts) of each evaluation."""
    return [(r["epoch"], r["eval/shapes_accuracy"]) for r in run.records if r["kind"] == "eval"]


def outcome(run: Run) -> str:
    """By how far the last evaluation, or the training accuracy after it, lies below its best."""
    values = [value for _, value in accuracies(run)]
    training = [r["reward/shapes_accuracy"] for r in run.records if r["kind"] == "epoch"]
    means = [sum(training[i : i + 10]) / 10 for i in range(len(training) - 9)]
    lost, lost_in_training = max(values) - values[-1], max(means) - means[-1]
    if max(lost, lost_in_training) > RUINED:
        return "collapses"
    return "declines" if lost > LOST else "holds"


def lost_after(evaluations: list[tuple[int, float]]) -> float | None:
    """Epochs trained when LOST of the best accuracy is gone, on a straight line between two evaluations."""
    best_epoch, best = max(evaluations, key=lambda pair: pair[1])
    for (start, high), (end, low) in pairwise(evaluations):
        if start >= best_epoch and low < best - LOST:
            return start + (end - start) * (high - best + LOST) / (high - low)
    return None


def accuracy_at(run: Run, epoch: int, *, along_training: bool) -> float:
    """Held-out accuracy after `epoch` epochs, between two evaluations: on a straight line, or along the training
    accuracy, averaged over epochs as the evaluated weights are. After the last evaluation, the last."""
    evaluations = accuracies(run)
    course = _averaged_training_accuracy(run) if along_training else list(range(10**4))
    for (start, high), (end, low) in pairwise(evaluations):
        if start <= epoch <= end:
            way = course[end] - course[start]
            share = (course[epoch] - course[start]) / way if way else 0.0
            return high + (low - high) * min(max(share, 0.0), 1.0)
    return evaluations[-1][1]


def _averaged_training_accuracy(run: Run) -> list[float]:
    """[number of epochs + 1], the first twice."""
    training = [r["reward/shapes_accuracy"] for r in run.records if r["kind"] == "epoch"]
    updates = sum(r["kind"] == "update" for r in run.records) // len(training)
    averaged, decay = training[:1], run.ema_decay**updates
    for value in training:
        averaged.append(averaged[-1] * decay + value * (1 - decay))
    return averaged


def default_limits():
    """config.health."""
    return default_config().health


def table(file: str = str(DATA)) -> None:
    """Print the stories, when each sign exceeded its limit, and the margins."""
    limits, runs = default_limits(), load(file)
    stories = [tell(run, limits) for run in runs]
    for run, story in zip(runs, stories):
        print(_row(run, story))
    print(f"\n| run | {' | '.join(health.SIGNS)} |")
    for run, story in zip(runs, stories):
        if story.alarms:
            judged = verdicts(run, limits)
            print(f"| {story.name} | {' | '.join(_first_alarm(judged, name) for name in health.SIGNS)} |")
    print(f"\n| run | {' | '.join(health.SIGNS)} |")
    for story in stories:
        print(f"| {story.name} | {' | '.join(_margin(story, name) for name in health.SIGNS)} |")


def _first_alarm(judged: list[health.Verdict], name: str) -> str:
    return next((str(i + 1) for i, v in enumerate(judged) if name in {alarm.name for alarm in v.alarms}), "")


def leave_one_out() -> None:
    """Print the limit of update_size that a rule chooses without each run in turn, and what it says of that run.

    The rule: the geometric mean of the largest value of a run that holds, and of the smallest value that a losing run,
    which the reward does not announce in time, had reached when LOST was gone. Runs below every run that holds, which
    no limit would announce, do not count. The other limits were not chosen by these runs.
    """
    runs = load()
    stories = {run.name: tell(run, default_limits()) for run in runs}
    sizes, drops = ({run.name: _values_of(run, sign) for run in runs} for sign in ("update_size", "reward_drop"))
    sizes = {name: values for name, values in sizes.items() if any(values)}
    print(f"from all: {_chosen(stories, sizes, drops):.2f}")
    for left_out in sizes:
        limit = _chosen(stories, {name: values for name, values in sizes.items() if name != left_out}, drops)
        first = next((i + 1 for i, value in enumerate(sizes[left_out]) if value > limit), None)
        lost = stories[left_out].lost_after
        print(f"without {left_out}: {limit:.2f}; alarm after {first}, {LOST} lost after {lost and round(lost, 1)}")


def _values_of(run: Run, sign: str) -> list[float]:
    return [verdict.figures.get(sign, 0.0) for verdict in verdicts(run, default_limits())]


def _chosen(stories: dict[str, Story], sizes: dict[str, list[float]], drops: dict[str, list[float]]) -> float:
    lost = {name: stories[name].lost_after for name in sizes}
    holding = max(max(values) for name, values in sizes.items() if lost[name] is None)
    silent = [name for name in sizes if lost[name] and max(drops[name][: int(lost[name])]) <= 3]
    losing = [max(sizes[name][: int(lost[name])]) for name in silent]
    return math.sqrt(holding * min(value for value in losing if value > holding))


def _row(run: Run, story: Story) -> str:
    if story.alarm_after is None:
        alarm, at = "none", "| "
    else:
        alarm = f"{story.alarm_after}: {', '.join(alarm.name for alarm in story.alarms)}"
        line, course = (accuracy_at(run, story.alarm_after, along_training=along) for along in (False, True))
        at = f"{line:.3f} | {course:.3f}"
    lost = "" if story.lost_after is None else f"{story.lost_after:.1f}; {story.seen_after}"
    best, last = (f"{value:.3f} at {epoch}" for epoch, value in (story.best, story.last))
    return f"| {story.name} | {story.outcome} | {best} | {last} | {lost} | {alarm} | {at} |"


def _margin(story: Story, name: str) -> str:
    if name not in story.maxima:
        return ""
    before, whole = story.maxima[name]
    return f"{before:.2f} / {story.at_alarm.get(name, 0.0):.2f} / {whole:.2f}" if story.at_alarm else f"{whole:.2f}"


if __name__ == "__main__":
    {"build": build, "table": table, "leave_one_out": leave_one_out}[sys.argv[1]](*sys.argv[2:])
