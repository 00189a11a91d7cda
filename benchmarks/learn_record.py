"""The table of a study, from the folders of its runs."""

import json
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from flow_grpo.base.formatting import counted, markdown_table
from flow_grpo.monitoring import provenance, report, run_history
from flow_grpo.monitoring.plots import read_metrics

FIGURE = "shapes_accuracy"  # strict accuracy
TEST = f"test/{FIGURE}"
BEST = f"test_best/{FIGURE}"
VARIETY = "test/variety"
PHASES = ("time/rollout_s", "time/reward_s", "time/update_s")  # training, without evaluation and saving
HEAD = ["run", "seeds", "last", "best by validation", "highest", "variety", "images", "forwards", "training s"]


class Seed(NamedTuple):
    """Summary of one run."""

    finished: bool
    num_epochs: int
    accuracies: list[float]  # of its tests
    best: float | None  # test accuracy of the weights that the validation prompts chose; None where they chose none
    variety: list[float]  # of its tests, over the base's
    images: float
    forwards: float
    seconds: float


def write_pairs_line(folder: Path, report_file: Path, seconds: float) -> None:
    """Write the preparation of pairs as a metrics.jsonl of one line: an epoch without a test."""
    report_fields = json.loads(report_file.read_text())
    num_groups = sum(report_fields["pairs"].values()) + len(report_fields["dropped"])
    images = num_groups * report_fields["made_by"]["sample"]["num_images_per_prompt"]
    line = {"kind": "epoch", "epoch": 0, "step": 0, "images": images, "time/rollout_s": seconds}
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def draw(out: Path, runs: list[tuple[str, str]], seeds: tuple[int, ...]) -> str:
    """Write OUT/table.md and, with the curves of all runs, OUT/report.html; return the table."""
    text = table(out, runs, seeds)
    (out / "table.md").write_text(text)
    folders = []
    for name, _ in runs:
        for seed in seeds:
            folder = out / f"{name}_seed{seed}"
            if (folder / "config.json").exists():
                folders.append(folder)
    report.write_page(folders, out / "report.html")
    return text


def seed_of(folder: Path) -> Seed:
    """Return the summary of the run in a folder, which may not have begun."""
    lines = read_metrics(folder)
    accuracy_after = {}
    variety = []
    num_epochs = 0
    images = 0.0
    forwards = 0.0
    seconds = 0.0
    for line in lines:
        if line["kind"] == "test":
            if TEST in line:
                accuracy_after[line["epoch"]] = line[TEST]
            if VARIETY in line:
                variety.append(line[VARIETY])
        if line["kind"] == "epoch":
            num_epochs += 1
            # Images are logged as the number so far, forwards as those of the epoch.
            images = max(images, line.get("images", 0.0))
            forwards += line.get("forwards", 0.0)
            for phase in PHASES:
                seconds += line.get(phase, 0.0)
    return Seed(
        finished=provenance.has_ended(folder),
        num_epochs=num_epochs,
        accuracies=[accuracy for _, accuracy in sorted(accuracy_after.items())],
        best=_chosen_accuracy(folder, lines, accuracy_after),
        variety=variety,
        images=images,
        forwards=forwards,
        seconds=seconds,
    )


def _chosen_accuracy(folder: Path, lines: list[dict], accuracy_after: dict[int, float]) -> float | None:
    """Return the test of the best weights at the run's end, or else that in the epoch of the best policy so far."""
    at_end = [line[BEST] for line in lines if BEST in line]
    if at_end:
        return at_end[-1]
    # The preparation of pairs, and a run that has not been tested yet, has no policy to choose.
    if not accuracy_after:
        return None
    best = run_history.scores(run_history.read_run(folder, folder.name)).best
    return accuracy_after.get(best.epoch) if best else None


def table(out: Path, runs: list[tuple[str, str]], seeds: tuple[int, ...]) -> str:
    """Return a table with a row for each run, by name and title, and one for the pairs."""
    rows = []
    for name, title in runs:
        summaries = {seed: seed_of(out / f"{name}_seed{seed}") for seed in seeds}
        rows.append(_run_row(title, summaries))
    pairs = seed_of(out / "pairs")
    if pairs.num_epochs:
        totals = [f"{pairs.images:,.0f}", "-", f"{pairs.seconds:,.0f}"]
        rows.append(["pairs for offline DPO, made once", *"-----", *totals])
    caption = (
        "Strict accuracy on the test prompts, without guidance, averaged weights: mean over seeds (lowest to highest)."
    )
    return f"{caption}\n\n{markdown_table(HEAD, rows)}\n"


def _run_row(title: str, seeds: dict[int, Seed]) -> list[str]:
    """Return the cells of HEAD for one run."""
    tested = [seed for seed in seeds.values() if seed.accuracies]
    return [
        title,
        _state(seeds),
        _mean_and_range([seed.accuracies[-1] for seed in tested]),
        _mean_and_range([seed.best for seed in tested if seed.best is not None]),
        _mean_and_range([max(seed.accuracies) for seed in tested]),
        _mean_and_range([seed.variety[-1] for seed in tested if seed.variety]),
        _mean([seed.images for seed in tested]),
        _mean([seed.forwards for seed in tested]),
        _mean([seed.seconds for seed in tested]),
    ]


def _mean_and_range(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _mean(values: list[float]) -> str:
    return f"{fmean(values):,.0f}" if values else "-"


def _state(seeds: dict[int, Seed]) -> str:
    """Return how many seeds have finished, how far each other one has come, and which have no best policy."""
    num_finished = sum(seed.finished for seed in seeds.values())
    state = [f"{num_finished} of {len(seeds)}"]
    for number, seed in seeds.items():
        if seed.finished:
            # No evaluation had the variety of eval.min_variety, say. Means are over the other seeds.
            if seed.best is None:
                state.append(f"seed {number} without a best policy")
            continue
        if seed.num_epochs or seed.accuracies:
            state.append(f"seed {number} ended early, after {counted(seed.num_epochs, 'epochs')}")
        else:
            state.append(f"seed {number} missing")
    return "; ".join(state)
