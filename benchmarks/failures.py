"""A gallery of runs that fail: test accuracy, training accuracy, the first alarm, and pictures.

    PYTHONPATH=. python benchmarks/failures.py runs/gallery benchmarks/failures_h200_20261122.png

A row for each run folder in the first argument, by name. failures_h200_20261122.md says how the runs were made.
"""

import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from flow_grpo.pictures import BLUE, GREY, STYLE, read_metrics

PANEL = (10, 10, 430, 520)  # of samples.png: its left half, prompts with the picture before and the last one
ACCURACY = "test/shapes_accuracy"


def first_alarm(lines: list[dict]) -> int | None:
    """Epochs trained when a limit of config.health was first exceeded."""
    return next((line["epoch"] + 1 for line in lines if line.get("health/limits_exceeded")), None)


def draw_curves(axes, name: str, lines: list[dict]) -> None:
    """Accuracy on the test prompts and the training accuracy, and a line at the first alarm."""
    tests = [(line["epoch"], line[ACCURACY]) for line in lines if ACCURACY in line]
    training = [(line["epoch"], line["reward/shapes_accuracy"]) for line in lines if line["kind"] == "epoch"]
    axes.plot(*np.array(training).T, color=GREY, linewidth=0.6, label="training, strict accuracy")
    axes.plot(*np.array(tests).T, color=BLUE, marker=".", label="test, strict accuracy")
    if alarm := first_alarm(lines):
        axes.axvline(alarm, color="black", linestyle=":", label="first alarm")
    axes.set(title=name.replace("_", " "), ylim=(-0.02, 1), xlabel="epochs")
    axes.legend(loc="upper right")


def draw(folder: Path) -> Figure:
    """The gallery."""
    runs = [(run.name, read_metrics(run), run / "samples.png") for run in sorted(folder.iterdir())]
    figure = Figure((11, 4 * len(runs)), layout="constrained")
    rows = np.atleast_2d(figure.subplots(len(runs), 2, width_ratios=(3, 2)))
    for (curves, pictures), (name, lines, samples) in zip(rows, runs, strict=True):
        draw_curves(curves, name, lines)
        pictures.imshow(Image.open(samples).crop(PANEL))
        pictures.axis("off")
    return figure


if __name__ == "__main__":
    with matplotlib.rc_context(STYLE):
        draw(Path(sys.argv[1])).savefig(sys.argv[2], dpi=60)
