"""A run of thousands of epochs: memory, open files, threads and seconds per epoch, and how much each of them grows.

    python benchmarks/soak.py --epochs 2000 --record benchmarks/soak_cpu_20261122

The run is the smallest one of faults_runs.py, as a command of its own, with an evaluation and a checkpoint every 20
epochs and wandb offline. The record is a table (.md) and a plot (.png). A slope is a least-squares line through the
epochs after the first tenth; its standard error takes their deviations from the line as independent.

CPU seconds depend on what else the machine does: a busy sibling core makes the same work slower. So this process does
the same piece of work at every epoch, and the run's CPU seconds are also given in units of that piece's.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from faults_commands import ROOT
from faults_runs import Bench
from matplotlib.figure import Figure

from flow_grpo.pictures import BLUE, GREY, STYLE

TICKS_S = os.sysconf("SC_CLK_TCK")
EVERY = 20  # epochs between evaluations and between checkpoints
PAUSE_S = 0.02
UNITS = {
    "rss_mib": "MiB",
    "files": "files",
    "threads": "threads",
    "cpu_s": "CPU s per epoch",
    "yardstick_s": "CPU s of the yardstick",
    "relative": "epoch / yardstick",
}
YARDSTICK_SIZE = 32  # tokens, channels, and times that the piece of work is repeated


class Epoch(NamedTuple):
    """What /proc says of the run's process when an epoch's line is written."""

    epoch: int
    rss_mib: float
    files: int
    threads: int
    cpu_s: float  # since the epoch before
    clock_s: float  # since the start
    yardstick_s: float  # CPU seconds of the same piece of work, at the end of every epoch
    relative: float  # cpu_s / yardstick_s


class Slope(NamedTuple):
    mean: float
    per_1000: float  # epochs
    error: float  # its standard error


def measure(pid: int) -> tuple[float, int, int, float]:
    """Resident MiB, open files, threads and CPU seconds so far of a process."""
    process = Path(f"/proc/{pid}")
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    pages = int((process / "statm").read_text().split()[1])
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_S
    files = sum(1 for _ in (process / "fd").iterdir())
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, int(fields[17]), cpu_s


def yardstick(layer: torch.nn.Module, tokens: torch.Tensor) -> float:
    """CPU seconds of a piece of work that is always the same and like the run's: many small tensors."""
    start = time.thread_time()
    with torch.no_grad():
        for _ in range(YARDSTICK_SIZE):
            layer(tokens)
    return time.thread_time() - start


def watch(process: subprocess.Popen, metrics: Path) -> list[Epoch]:
    """Measure the run whenever it has ended an epoch, until it ends. Its file may be read while it is written."""
    epochs, count, before_s, start, text = [], 0, 0.0, time.monotonic(), b""
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(YARDSTICK_SIZE, 4).eval()
    tokens = torch.zeros(YARDSTICK_SIZE, 1, YARDSTICK_SIZE)
    while process.poll() is None:
        time.sleep(PAUSE_S)
        if not metrics.exists():
            continue
        with metrics.open("rb") as file:
            file.seek(len(text))
            text += file.read()
        lines = text.count(b'"kind": "epoch"')
        if lines > count:
            try:
                rss, files, threads, cpu_s = measure(process.pid)
            except (FileNotFoundError, ProcessLookupError):
                break
            clock_s, piece_s = time.monotonic() - start, yardstick(layer, tokens)
            each_s = (cpu_s - before_s) / (lines - count)
            epochs.append(Epoch(lines, rss, files, threads, each_s, clock_s, piece_s, each_s / piece_s))
            count, before_s = lines, cpu_s
    return epochs


def slope_of(epochs: list[Epoch], key: str) -> Slope:
    """Of a least-squares line through a figure."""
    x = np.array([epoch.epoch for epoch in epochs], dtype=float)
    y = np.array([getattr(epoch, key) for epoch in epochs], dtype=float)
    centred = x - x.mean()
    slope = (centred * y).sum() / (centred**2).sum()
    rest = y - y.mean() - slope * centred
    error = np.sqrt((rest**2).sum() / (len(x) - 2) / (centred**2).sum())
    return Slope(float(y.mean()), float(slope * 1000), float(error * 1000))


def table(epochs: list[Epoch], command: list[str]) -> str:
    """The record."""
    settled = epochs[len(epochs) // 10 :]
    rows = [(key, unit, slope_of(settled, key)) for key, unit in UNITS.items()]
    lines = [f"# A run of {epochs[-1].epoch} epochs\n"]
    lines += [f"PyTorch {torch.__version__}, {epochs[-1].clock_s / 60:.0f} minutes on shared CPU cores, one thread.\n"]
    lines += [
        f"    {' '.join(command)}\n",
        "| figure | mean | change in 1,000 epochs | standard error |",
        "|---|---|---|---|",
    ]
    lines += [f"| {unit} | {s.mean:.4g} | {s.per_1000:+.4g} | {s.error:.2g} |" for _, unit, s in rows]
    first, last = settled[0], epochs[-1]
    lines += [
        f"\nFrom epoch {first.epoch} to {last.epoch}: {first.rss_mib:.0f} MiB to {last.rss_mib:.0f} MiB resident, "
    ]
    lines[-1] += f"{first.files} to {last.files} files, {first.threads} to {last.threads} threads."
    return "\n".join(lines) + "\n"


def draw(epochs: list[Epoch]) -> Figure:
    """A panel for each figure, with its line."""
    figure, settled = Figure((9, 8), layout="constrained"), epochs[len(epochs) // 10 :]
    for axes, (key, unit) in zip(figure.subplots(3, 2).flat, UNITS.items()):
        slope = slope_of(settled, key)
        after_start = epochs[1:]  # the first one's CPU time is that of the imports
        x = np.array([epoch.epoch for epoch in after_start])
        axes.plot(x, [getattr(epoch, key) for epoch in after_start], color=GREY, linewidth=0.6)
        middle = np.mean([epoch.epoch for epoch in settled])
        ends = np.array([settled[0].epoch, settled[-1].epoch])
        axes.plot(ends, slope.mean + (ends - middle) * slope.per_1000 / 1000, color=BLUE)
        axes.set(
            xlabel="epochs", ylabel=unit, title=f"{slope.per_1000:+.3g} ± {slope.error:.2g} in 1,000 epochs", ylim=0
        )
    return figure


def main(args: argparse.Namespace) -> int:
    """The run's exit status."""
    bench = Bench(args.out)
    flags = {"num_epochs": args.epochs, "eval_freq": EVERY, "save_freq": EVERY, "run_name": "soak"}
    command = [sys.executable, *bench.words("grpo", args.out / "runs", **flags)]
    env = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)} | os.environ
    with (args.out / "soak.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        epochs = watch(process, args.out / "runs" / "soak" / "metrics.jsonl")
    (args.out / "epochs.jsonl").write_text("".join(json.dumps(epoch._asdict()) + "\n" for epoch in epochs))
    said = ["python", *(word.replace(f"{ROOT}/", "").replace(f"{args.out}/", "OUT/") for word in command[1:])]
    args.record.with_suffix(".md").write_text(table(epochs, said))
    with matplotlib.rc_context(STYLE):
        draw(epochs).savefig(args.record.with_suffix(".png"), dpi=80)
    print(table(epochs, said))
    return process.returncode


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2000)
    parser.add_argument("--out", type=lambda text: Path(text).resolve(), default=Path("runs/soak").resolve())
    parser.add_argument("--record", type=Path, default=Path("runs/soak/record"), help="path without its suffix")
    return parser


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
