"""The table of a study, from the metrics.jsonl of its runs."""

import json
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from flow_grpo.base.formatting import markdown_table
from flow_grpo.monitoring import report
from flow_grpo.monitoring.plots import read_metrics

FIGURE = "shapes_accuracy"  # strict accuracy
TEST, EVAL, BEST = f"test/{FIGURE}", f"eval/{FIGURE}", f"test_best/{FIGURE}"
VARIETY = "test/variety"
PHASES = ("time/rollout_s", "time/reward_s", "time/update_s")  # training, without evaluation and saving
HEAD = ["run", "seeds", "last", "best by validation", "highest", "variety", "images", "forwards", "training s"]


class Seed(NamedTuple):
    """What the lines of one run say."""

    finished: bool
    num_epochs: int
    accuracies: list[float]  # of its tests
    best: float | None  # test accuracy of the weights that the validation prompts chose; None without a line for it
    variety: list[float]  # of its tests, over the base's
    images: float
    forwards: float
    seconds: float


def is_finished(lines: list[dict]) -> bool:
    """Whether they end with the test of a run's best weights."""
    return bool(lines) and lines[-1]["kind"] == "test" and "best_epoch" in lines[-1]


def write_pairs_line(folder: Path, report_file: Path, seconds: float) -> None:
    """The preparation of pairs as a line of metrics.jsonl: one epoch without a test."""
    report_fields = json.loads(report_file.read_text())
    num_groups = sum(report_fields["pairs"].values()) + len(report_fields["dropped"])
    images = num_groups * report_fields["made_by"]["sample"]["num_images_per_prompt"]
    line = {"kind": "epoch", "epoch": 0, "step": 0, "images": images, "time/rollout_s": seconds}
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def draw(out: Path, runs: list[tuple[str, str]], seeds: tuple[int, ...]) -> str:
    """Write OUT/table.md and, with the curves of all runs, OUT/report.html; the table."""
    (out / "table.md").write_text(text := table(out, runs, seeds))
    folders = [out / f"{name}_seed{seed}" for name, _ in runs for seed in seeds]
    report.write_page([folder for folder in folders if (folder / "config.json").exists()], out / "report.html")
    return text


def seed_of(folder: Path) -> Seed:
    """What the lines of one run come to."""
    lines = read_metrics(folder)
    epochs = [line for line in lines if line["kind"] == "epoch"]
    tests = {line["epoch"]: line[TEST] for line in lines if line["kind"] == "test" and TEST in line}
    return Seed(
        finished=is_finished(lines),
        num_epochs=len(epochs),
        accuracies=[accuracy for _, accuracy in sorted(tests.items())],
        best=_best(lines, tests),
        variety=[line[VARIETY] for line in lines if line["kind"] == "test" and VARIETY in line],
        images=max((line.get("images", 0.0) for line in epochs), default=0.0),
        forwards=sum(line.get("forwards", 0.0) for line in epochs),
        seconds=sum(line.get(phase, 0.0) for line in epochs for phase in PHASES),
    )


def _best(lines: list[dict], tests: dict[int, float]) -> float | None:
    """As the run measured it at its end, or else the test in the epoch of the best validation so far."""
    if measured := [line[BEST] for line in lines if BEST in line]:
        return measured[-1]
    evaluations = [line for line in lines if EVAL in line and line["epoch"] in tests]
    return tests[max(evaluations, key=lambda line: line[EVAL])["epoch"]] if evaluations else None


def table(out: Path, runs: list[tuple[str, str]], seeds: tuple[int, ...]) -> str:
    """A row for each run, by name and title, and one for the pairs."""
    rows = [_run_row(title, {seed: seed_of(out / f"{name}_seed{seed}") for seed in seeds}) for name, title in runs]
    pairs = seed_of(out / "pairs")
    if pairs.num_epochs:
        totals = f"{pairs.images:,.0f}", "-", f"{pairs.seconds:,.0f}"
        rows.append(["pairs for offline DPO, made once", *"-----", *totals])
    of_what = "Strict accuracy on the test prompts, without guidance, averaged weights: mean over seeds"
    return f"{of_what} (lowest to highest).\n\n{markdown_table(HEAD, rows)}\n"


def _run_row(title: str, seeds: dict[int, Seed]) -> list[str]:
    tested = [seed for seed in seeds.values() if seed.accuracies]
    columns = [
        [seed.accuracies[-1] for seed in tested],
        [seed.best for seed in tested if seed.best is not None],
        [max(seed.accuracies) for seed in tested],
        [seed.variety[-1] for seed in tested if seed.variety],
    ]
    spreads = [f"{fmean(c):.3f} ({min(c):.3f} to {max(c):.3f})" if c else "-" for c in columns]
    totals = [[seed.images for seed in tested], [seed.forwards for seed in tested], [seed.seconds for seed in tested]]
    state = [f"{sum(seed.finished for seed in seeds.values())} of {len(seeds)}"]
    for number, seed in seeds.items():
        if not seed.finished:
            ended_early = f"ended early, after {seed.num_epochs} epochs"
            state.append(f"seed {number} {ended_early if seed.num_epochs or seed.accuracies else 'missing'}")
    return [title, "; ".join(state), *spreads, *(f"{fmean(total):,.0f}" if total else "-" for total in totals)]
