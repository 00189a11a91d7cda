"""Where a run's numbers, images and progress go. Only it and progress.py print."""

import functools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from flow_grpo.base import folders
from flow_grpo.base.errors import WriteFailed
from flow_grpo.base.formatting import in_one_line
from flow_grpo.base.pixels import to_pictures
from flow_grpo.monitoring import progress, provenance, report, trackers
from flow_grpo.monitoring.plots import Sheet, contact_sheet, evaluations, plot_reward, plot_samples, read_metrics


@contextmanager
def explained(run_dir: Path) -> Iterator[None]:
    """What cannot be written is a WriteFailed that says how to go on."""
    try:
        yield
    except Exception as error:
        if isinstance(error, WriteFailed) or not (isinstance(error, OSError) or "(os error" in str(error)):
            raise  # "(os error" is of safetensors
        advice = "free some space; " if folders.is_disk_full(error) else ""
        raise WriteFailed(f"{run_dir} cannot be written: {error}; {advice}{folders.resume_hint(run_dir)}") from error


def problem_of(what: str, action: Callable[[], object]) -> str:
    """Do what only informs about a run, for which none ends; why it failed, "" where it did not."""
    try:
        action()
    except Exception as error:
        return f"{what}: {in_one_line(repr(error))}"
    return ""


def on_main(method):
    """Run a Dashboard's method on the main rank only."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if self.is_main:
            method(self, *args, **kwargs)

    return call


def say(text: str) -> None:
    """Print a line above the progress bars; nothing for ""."""
    if text:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


class Dashboard:
    """A run's trackers, metrics.jsonl, pictures and progress. On other ranks than the main one nothing happens.
    `synchronize` waits for the device before a phase is timed, such as torch.cuda.synchronize; None on a CPU.
    """

    def __init__(self, run_dir, config, is_main: bool, synchronize=None):
        self.run_dir, self.config, self.is_main = Path(run_dir), config, is_main
        self.synchronize = synchronize or (lambda: None)
        self.seconds, self.epoch_start, self.epochs_s = defaultdict(float), None, []
        self.trackers, self.history = [], []  # the lines of metrics.jsonl, on the main rank
        self.latest = {}  # the last value of each name in them
        self._open()

    @on_main
    def _open(self):
        config = plain(self.config.to_dict())
        with explained(self.run_dir):
            folders.write_text(self.run_dir / "config.json", json.dumps(config, indent=2, default=str) + "\n")
            self.trackers = trackers.open_all(self.run_dir, self.config)
            self._recall()

    def _recall(self):
        self.history = read_metrics(self.run_dir)
        self.latest = {name: value for record in self.history for name, value in record.items()}

    @on_main
    def say(self, text: str) -> None:
        """Print a line above the progress bars."""
        say(text)

    @on_main
    def truncate(self, epoch: int, kinds: Collection[str] = ()) -> None:
        """Before the first log: forget the lines from `epoch` on, but for `kinds` of this very epoch, what a kill cut
        short, and images of other evaluations than are left."""
        stays = lambda line: line["epoch"] == epoch and line["kind"] in kinds and "best_epoch" not in line  # noqa: E731
        records = [line for line in read_metrics(self.run_dir) if line["epoch"] < epoch or stays(line)]
        text = "".join(json.dumps(plain(record)) + "\n" for record in records)
        with explained(self.run_dir):
            folders.write_text(self.run_dir / "metrics.jsonl", text)
            for epochs, sheet in evaluations(self.run_dir).items():
                if epochs > epoch or (epochs == epoch and "eval" not in kinds):
                    sheet.unlink()
            self._recall()

    @on_main
    def log(
        self,
        kind: str,
        values: dict[str, float],
        *,
        epoch: int,
        step: int,
        seconds_left: float = math.inf,
        alarms: Sequence[str] = (),
    ) -> None:
        """Log one line of kind "update", "epoch" (which adds its phases' times), "eval", "test" or "validation". The
        run ends with the epoch in which `seconds_left` end, for an epoch's ETA. Sentences of `alarms` are kept in
        metrics.jsonl alone."""
        assert kind in ("update", "epoch", "eval", "test", "validation"), kind
        record = {"epoch": epoch, "step": step} | {name: float(value) for name, value in values.items()}
        if kind == "epoch":
            record |= self._pop_times(record.get("images"))
        line = {"kind": kind, "written_at": provenance.now(), **record}
        if alarms:
            line["alarms"] = "\n".join(alarms)
        with explained(self.run_dir), (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(plain(line)) + "\n")
        self._track(lambda tracker: tracker.log(record, len(self.history)))
        self.history.append(line)
        self.latest |= record
        if kind != "update":
            say(self._summary(kind, epoch, values, seconds_left))

    def _track(self, call: Callable[[trackers.Wandb | trackers.TensorBoard], None]) -> None:
        """Tell the trackers. One that fails is told nothing more: its service may have died."""
        for tracker in [*self.trackers]:
            if problem := problem_of(self.config.logger, lambda tracker=tracker: call(tracker)):
                self.trackers.remove(tracker)
                tracker.abandon()
                say(f"{problem}; it is told nothing more of this run, and {self.run_dir / 'metrics.jsonl'} holds all")

    @contextmanager
    def timed(self, phase: str):
        """Add the seconds spent inside to time/<phase>_s of the next "epoch" line."""
        self.synchronize()
        start = time.perf_counter()
        self.epoch_start = start if self.epoch_start is None else self.epoch_start
        yield
        self.synchronize()
        self.seconds[phase] += time.perf_counter() - start

    def _pop_times(self, images):
        if self.epoch_start is None:
            return {}
        epoch_s = time.perf_counter() - self.epoch_start
        times = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()} | {"time/epoch_s": epoch_s}
        if images is not None:
            training_s = epoch_s - self.seconds["eval"] - self.seconds["save"]
            times["images_per_s"] = (images - self.latest.get("images", 0)) / training_s
        self.seconds.clear()
        self.epoch_start = None
        self.epochs_s.append(epoch_s)
        return times

    def _summary(self, kind, epoch, values, seconds_left):
        names = sorted(name for name in values if name.count("/") == 1)  # categories would make the line too long
        if kind == "epoch":
            evals = sorted(name for name in self.latest if name.startswith("eval/"))
            names = ["reward/avg", *evals, "validation/implicit_accuracy", "loss", "implicit_accuracy", "grad_norm"]
        figures = [f"{name} {self.latest[name]:.4g}" for name in names if name in self.latest]
        if kind != "epoch":
            return "  ".join([f"{kind.replace('eval', 'evaluation')} after {epoch} epochs", *figures])
        total = self.config.num_epochs
        if self.epochs_s:
            figures.append(f"{self.epochs_s[-1]:.3g} s/epoch")
            mean_s = sum(self.epochs_s) / len(self.epochs_s)
            epochs_left = math.ceil(min(total - epoch - 1, max(seconds_left, 0) / mean_s))
            figures.append(f"ETA {tqdm.format_interval(epochs_left * mean_s)}")
        return "  ".join([f"epoch {epoch + 1:>{len(str(total))}}/{total}", *figures])

    def bar(self, iterable: Iterable, desc: str, total: int | None = None) -> Iterable:
        """The same under a progress bar; where there is no terminal, with a line a minute."""
        return progress.shown(iterable, desc, total, say=self.say if self.is_main else None)

    @on_main
    def log_images(self, images, captions, rewards=None, *, epoch: int, step: int, name: str = "eval"):
        """Show images [N, 3, H, W] in [0, 1] with their N captions and N rewards in the trackers and as
        images/<name>_<epoch>.png, with a .json of the same name that says what is where."""
        sheet = contact_sheet(images, captions, rewards)
        at = {"epoch": epoch, "step": step}
        self._track(lambda tracker: tracker.log_images(name, to_pictures(images), sheet, at, len(self.history)))
        picture = f"images/{name}_{epoch:06d}.png"
        self._draw(picture, lambda folder: write_sheet(sheet, folder / picture))
        if name == "eval":
            self._draw_report()

    def _draw_report(self):
        if not self.trackers:
            self._draw("report.html", lambda folder: report.write([folder], folder / "report.html"))

    def _draw(self, name: str, draw: Callable[[Path], object]):
        say(problem_of(f"{self.run_dir / name} could not be drawn", lambda: draw(self.run_dir)))

    @on_main
    def finish(self, since: int = 0) -> None:
        """Draw reward.png, and samples.png of evaluations from epoch `since` on; close the trackers."""
        self._draw("reward.png", lambda folder: plot_reward(self.history, self.config, folder / "reward.png"))
        self._draw("samples.png", lambda folder: plot_samples(folder, since))
        self._draw_report()
        self._track(lambda tracker: tracker.close())


def write_sheet(sheet: Sheet, file: Path) -> None:
    """Write a contact sheet, and a .json of the same name that says what is where."""
    file.parent.mkdir(exist_ok=True)
    folders.write_text(file.with_suffix(".json"), json.dumps({"cells": sheet.cells}))
    with folders.published(file) as scratch:
        sheet.page.save(scratch, "png")


def plain(value):
    """The same value as valid JSON: NaN and infinities become the strings "nan", "inf", "-inf", which float() reads."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
