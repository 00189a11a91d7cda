"""True score against the score that is trained on, of runs on `shapes_proxy`: a table and a figure.

    python benchmarks/proxy.py benchmarks/proxy_20261128.csv runs/leap_1 runs/leap_2 ...    store the tests of runs
    python benchmarks/proxy.py benchmarks/proxy_20261128.csv                                rebuild table and figure

Runs are called ALGORITHM_SEED. The figure lies beside the file, as PNG.
"""

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from flow_grpo.base.formatting import markdown_table
from flow_grpo.command_line import command_line
from flow_grpo.monitoring.plots import LINES, STYLE, read_metrics

COLUMNS = ("run", "seed", "epoch", "images", "forwards", "proxy", "shapes", "accuracy", "variety")
METRICS = {
    "proxy": "test/shapes_proxy",
    "shapes": "test/shapes",
    "accuracy": "test/shapes_accuracy",
    "variety": "test/variety",
}
# True score whose forwards the table names.
REACHED = 0.80


class Test(NamedTuple):
    """Test of a run's averaged weights. `forwards` are rows of the transformer on all ranks."""

    epoch: int
    images: float
    forwards: float
    proxy: float
    shapes: float
    accuracy: float
    variety: float


Runs = dict[str, dict[int, list[Test]]]  # algorithm -> seed -> its tests


def tests_of(folder: Path) -> list[Test]:
    """Return the tests of a run's last weights, with what had been drawn and computed before each."""
    tests = []
    forwards = 0.0
    images = 0.0
    for line in read_metrics(folder):
        if line["kind"] == "epoch":
            forwards += line["forwards"]
            images = line["images"]
        if METRICS["proxy"] in line:
            scores = {name: line[metric] for name, metric in METRICS.items()}
            tests.append(Test(epoch=int(line["epoch"]), images=images, forwards=forwards, **scores))
    return tests


def write(file: Path, folders: list[Path]) -> None:
    """Store the tests of runs."""
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        for folder in folders:
            name, _, seed = folder.name.rpartition("_")
            for test in tests_of(folder):
                scores = [f"{score:.4f}" for score in test[3:]]
                writer.writerow([name, seed, test.epoch, f"{test.images:g}", f"{test.forwards:g}", *scores])


def read(file: Path) -> Runs:
    """Return what `write` has stored."""
    runs: Runs = defaultdict(lambda: defaultdict(list))
    with file.open() as stream:
        for row in csv.DictReader(stream):
            numbers = {name: float(row[name]) for name in Test._fields}
            runs[row["run"]][int(row["seed"])].append(Test(**numbers))
    return runs


def mean_of_seeds(seeds: dict[int, list[Test]]) -> list[Test]:
    """Return the means over seeds of the tests that all of them have, in their order."""
    means = []
    for tests in zip(*seeds.values()):
        means.append(Test(*(fmean(column) for column in zip(*tests))))
    return means


def table(runs: Runs) -> str:
    """Return a row for each algorithm: where it ends, and what the true score REACHED has cost."""
    head = ["run", "seeds", "accuracy, last", "true score", "proxy", "less true", "variety", "images", "forwards"]
    rows = []
    for name, seeds in runs.items():
        last = mean_of_seeds({seed: tests[-1:] for seed, tests in seeds.items()})[0]
        cells = [f"{last.accuracy:.3f}", f"{last.shapes:.3f}", f"{last.proxy:.3f}", f"{last.proxy - last.shapes:+.3f}"]
        cells += [f"{last.variety:.2f}", f"{last.images:,.0f}", f"{last.forwards:,.0f}"]
        reached = []
        for tests in seeds.values():
            first = next((test for test in tests if test.shapes >= REACHED), None)
            reached.append("never" if first is None else f"{first.forwards:,.0f}")
        rows.append([name, str(len(seeds)), *cells, "; ".join(reached)])
    return markdown_table([*head, f"forwards to {REACHED:.2f}, by seed"], rows)


def draw(runs: Runs, file: Path) -> None:
    """Draw the true score against the proxy's, and against forwards; means over seeds."""
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4), dpi=120)
        by_proxy, by_forwards = figure.subplots(1, 2)
        for (name, seeds), style in zip(runs.items(), LINES):
            tests = mean_of_seeds(seeds)
            look = {"color": style.colour, "linestyle": style.dashes, "marker": style.marker, "markersize": 3}
            shapes = [test.shapes for test in tests]
            by_proxy.plot([test.proxy for test in tests], shapes, label=name, **look)
            by_forwards.plot([test.forwards for test in tests[1:]], shapes[1:], **look)
        by_proxy.axline((0.6, 0.6), slope=1, color="#bbbbbb", linewidth=0.8)
        by_proxy.set_xlabel("score of the proxy, which is trained on")
        by_forwards.set_xlabel("rows of the transformer")
        by_forwards.set_xscale("log")
        by_forwards.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        by_forwards.xaxis.set_major_formatter("{x:,.0f}")
        by_forwards.xaxis.set_minor_formatter(NullFormatter())
        for axes in (by_proxy, by_forwards):
            axes.set_ylabel("true score")
            axes.grid(color="#e8e8e8")
        by_proxy.legend(frameon=False, fontsize=7)
        figure.tight_layout()
        figure.savefig(file)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_line.parser(__doc__)
    parser.add_argument("file", type=Path, help="CSV file of tests")
    parser.add_argument("runs", type=Path, nargs="*", help="folders of runs, to be stored in it")
    return parser


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.runs:
        write(args.file, args.runs)
    runs = read(args.file)
    sys.stdout.write(table(runs) + "\n")
    several_seeds = {name: seeds for name, seeds in runs.items() if len(seeds) > 1}
    draw(several_seeds, args.file.with_suffix(".png"))


if __name__ == "__main__":
    main(command_line.arguments(parser()))
