"""The table and the figure of a study, from the metrics.jsonl of its runs."""

import json
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from flow_grpo.base.quoting import markdown_table
from flow_grpo.monitoring.plots import BLUE, GREY, INK, STYLE, read_metrics

FIGURE = "shapes_accuracy"  # strict accuracy
TEST, EVAL, BEST = f"test/{FIGURE}", f"eval/{FIGURE}", f"test_best/{FIGURE}"
PHASES = ("time/rollout_s", "time/reward_s", "time/update_s")  # training, without evaluation and saving
AXES = {"seconds": "training seconds", "images": "images", "forwards": "transformer rows"}
HEAD = ("run", "seeds", "last", "best by validation", "highest", "images", "forwards", "training s")


class Point(NamedTuple):
    """A test during a run: where it was, and the accuracy."""

    epoch: int
    accuracy: float
    images: float
    forwards: float
    seconds: float  # of training


class Seed(NamedTuple):
    """What the lines of one run say. Figures are None where there is no line for them."""

    finished: bool
    num_epochs: int
    points: list[Point]
    best: float | None  # test accuracy of the weights that the validation prompts chose
    images: float
    forwards: float
    seconds: float


def is_finished(lines: list[dict]) -> bool:
    """Whether they end with the test of a run's best weights."""
    return bool(lines) and lines[-1]["kind"] == "test" and "best_epoch" in lines[-1]


def write_pairs_line(folder: Path, report: Path, seconds: float) -> None:
    """The preparation of pairs as a line of metrics.jsonl: one epoch without a test."""
    report_fields = json.loads(report.read_text())
    num_groups = sum(report_fields["pairs"].values()) + len(report_fields["dropped"])
    images = num_groups * report_fields["made_by"]["sample"]["num_images_per_prompt"]
    line = {"kind": "epoch", "epoch": 0, "step": 0, "images": images, "time/rollout_s": seconds}
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def read(out: Path, runs: list[tuple[str, str]], seeds: tuple[int, ...]) -> dict:
    """The lines of every run of a study, by name and title, and of the preparation of its pairs."""
    rows = [
        {"title": title, "seeds": {str(seed): read_metrics(out / f"{name}_seed{seed}") for seed in seeds}}
        for name, title in runs
    ]
    return {"runs": rows, "pairs": read_metrics(out / "pairs")}


def draw(out: Path, runs: list[tuple[str, str]], seeds: tuple[int, ...]) -> str:
    """Write OUT/table.md and OUT/curves.png; the table."""
    study = read(out, runs, seeds)
    text = f"{table(study)}\n"
    (out / "table.md").write_text(text)
    plot(study, out / "curves.png")
    return text


def seed_of(lines: list[dict]) -> Seed:
    """What the lines of one run come to."""
    epochs = {line["epoch"]: line for line in lines if line["kind"] == "epoch"}
    tests = {line["epoch"]: line for line in lines if line["kind"] == "test" and TEST in line}
    points = [_point(int(epoch), line[TEST], epochs) for epoch, line in sorted(tests.items())]
    whole = _point(len(epochs), 0.0, epochs)
    return Seed(
        finished=is_finished(lines),
        num_epochs=len(epochs),
        points=points,
        best=_best(lines, tests),
        images=whole.images,
        forwards=whole.forwards,
        seconds=whole.seconds,
    )


def _point(epoch: int, accuracy: float, epochs: dict[int, dict]) -> Point:
    before = [line for number, line in epochs.items() if number < epoch]
    seconds = sum(line.get(phase, 0.0) for line in before for phase in PHASES)
    images = max((line.get("images", 0.0) for line in before), default=0.0)
    return Point(epoch, accuracy, images, sum(line.get("forwards", 0.0) for line in before), seconds)


def _best(lines: list[dict], tests: dict[int, dict]) -> float | None:
    """As the run measured it at its end, or else the test in the epoch of the best validation so far."""
    if measured := [line[BEST] for line in lines if BEST in line]:
        return measured[-1]
    chosen = max(
        (line for line in lines if EVAL in line and line["epoch"] in tests), key=lambda x: x[EVAL], default=None
    )
    return tests[chosen["epoch"]][TEST] if chosen else None


def table(study: dict) -> str:
    """A row for each run, and one for the pairs."""
    rows = [_run_row(run) for run in study["runs"]]
    if study["pairs"]:
        pairs = seed_of(study["pairs"])
        rows.append(["pairs for offline DPO, made once", *"----", f"{pairs.images:,.0f}", "-", f"{pairs.seconds:,.0f}"])
    return (
        "Strict accuracy on the test prompts, without guidance, averaged weights: mean over seeds (lowest to "
        "highest).\n\n" + markdown_table(HEAD, rows)
    )


def _run_row(run: dict) -> list[str]:
    seeds = [seed_of(lines) for lines in run["seeds"].values()]
    tested = [seed for seed in seeds if seed.points]
    columns = [
        [seed.points[-1].accuracy for seed in tested],
        [seed.best for seed in tested if seed.best is not None],
        [max(point.accuracy for point in seed.points) for seed in tested],
    ]
    totals = [[seed.images for seed in tested], [seed.forwards for seed in tested], [seed.seconds for seed in tested]]
    return [run["title"], _state(run), *map(_spread, columns), *(f"{fmean(t):,.0f}" if t else "-" for t in totals)]


def _state(run: dict) -> str:
    """How many seeds are finished, and what became of the others."""
    seeds = {name: seed_of(lines) for name, lines in run["seeds"].items()}
    others = [
        f"seed {name} ended early, after {seed.num_epochs} epochs" if run["seeds"][name] else f"seed {name} missing"
        for name, seed in seeds.items()
        if not seed.finished
    ]
    count = f"{sum(seed.finished for seed in seeds.values())} of {len(seeds)}"
    return "; ".join([count, *others])


def _spread(values: list[float]) -> str:
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "-"


def band(seeds: list[Seed], axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where the seeds were tested, up to the end of the shortest, and the mean, lowest and highest accuracy there, each
    seed interpolated between its tests."""
    curves = [np.array([(getattr(p, axis), p.accuracy) for p in seed.points]).T for seed in seeds if seed.points]
    if not curves:
        return (np.zeros(0),) * 4
    places = np.unique(np.concatenate([x for x, _ in curves]))
    places = places[places <= min(x[-1] for x, _ in curves)]
    heights = np.stack([np.interp(places, x, y) for x, y in curves])
    return places, heights.mean(0), heights.min(0), heights.max(0)


def plot(study: dict, path: Path) -> None:
    """A row of panels for each run: its mean and band over each axis, the other runs behind it in grey."""
    runs = [(run["title"], [seed_of(lines) for lines in run["seeds"].values()]) for run in study["runs"]]
    bands = {(title, axis): band(seeds, axis) for title, seeds in runs for axis in AXES}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 1.9 * len(runs) + 0.5), dpi=110, layout="constrained")
        panels = figure.subplots(len(runs), len(AXES), sharex="col", sharey=True, squeeze=False)
        for row, (title, _) in zip(panels, runs):
            row[0].set_title(title, loc="left", fontweight="bold", color=INK)
            for panel, axis in zip(row, AXES):
                _panel(panel, bands, title, axis)
        for panel, label in zip(panels[-1], AXES.values()):
            panel.set_xlabel(label)
        panels[0][0].legend(frameon=False, fontsize=7, loc="best")
        figure.supylabel("strict accuracy on test prompts", fontsize=9)
        figure.savefig(path)


def _panel(panel, bands: dict, title: str, axis: str) -> None:
    for (other, name), (x, mean, _, _) in bands.items():
        if name == axis and other != title:
            panel.plot(x, mean, color="#d8d8d8", linewidth=0.8)
    x, mean, low, high = bands[title, axis]
    panel.fill_between(x, low, high, color=BLUE, alpha=0.25, linewidth=0)
    panel.plot(x, mean, color=BLUE, linewidth=1.8, marker="o", markersize=2.5, label="mean; band: all seeds")
    if not len(x):
        panel.text(0.5, 0.2, "no test", transform=panel.transAxes, ha="center", color=GREY)
    panel.tick_params(colors=GREY, labelsize=7)
    panel.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
