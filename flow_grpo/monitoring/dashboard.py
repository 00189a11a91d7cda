"""Dashboard of a run: it logs numbers, images and progress. Only this module and progress.py print."""

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from tqdm import tqdm

from flow_grpo.base import folders
from flow_grpo.base.errors import WriteFailed
from flow_grpo.base.formatting import counted, in_one_line
from flow_grpo.base.metric_table import is_of_frame
from flow_grpo.base.pixels import film_strips, to_pictures
from flow_grpo.monitoring import progress, provenance, report, sheets, trackers
from flow_grpo.monitoring.plots import plot_reward, read_metrics
from flow_grpo.monitoring.sheets import (
    GroupRow,
    Sheet,
    contact_sheet,
    group_sheet,
    plot_samples,
    write_animation,
)
from flow_grpo.settings.sections import Config

# Drawing the report takes at most 1/REPORT_INTERVAL of a run's time.
REPORT_INTERVAL = 20


@contextmanager
def explained(run_dir: Path) -> Iterator[None]:
    """Raise WriteFailed, which says how to go on, for what cannot be written inside this block."""
    try:
        yield
    except Exception as error:
        if isinstance(error, WriteFailed) or not folders.is_of_the_system(error):
            raise
        advice = "free some space; " if folders.is_disk_full(error) else ""
        raise WriteFailed(f"{run_dir} cannot be written: {error}; {advice}{folders.resume_hint(run_dir)}") from error


def attempt(what: str, action: Callable[[], object]) -> str:
    """Call `action`, which only informs about a run and must not end it. Return "WHAT: ERROR", or "" on success."""
    try:
        action()
    except Exception as error:
        return f"{what}: {in_one_line(repr(error))}"
    return ""


def on_main(method):
    """Run a Dashboard's method on the main rank only."""

    @wraps(method)
    def call(self, *args, **kwargs):
        if self.is_main:
            method(self, *args, **kwargs)

    return call


def say(text: str) -> None:
    """Print a line above the progress bars, or nothing for ""."""
    if text:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


class Dashboard:
    """A run's trackers, metrics.jsonl, pictures and progress. On ranks other than the main one nothing happens.

    Args:
        synchronize: waits for the device before a phase is timed, such as torch.cuda.synchronize; None on a CPU.
    """

    def __init__(
        self, run_dir: Path | str, config: Config, is_main: bool, synchronize: Callable[[], object] | None = None
    ) -> None:
        self.run_dir = Path(run_dir)
        self.config = config
        self.is_main = is_main
        self.synchronize = synchronize
        self.seconds: dict[str, float] = defaultdict(float)  # of each phase of this epoch
        self.epoch_start: float | None = None
        self.epochs_s: list[float] = []  # duration of each epoch of this process
        self.trackers: list[trackers.Wandb | trackers.TensorBoard] = []
        self.history: list[dict] = []  # lines of metrics.jsonl, on the main rank
        self.latest: dict[str, float] = {}  # last value of each name in them
        self.report_due_s = 0.0  # the clock; an evaluation before then leaves the report as it is
        self._open()

    @on_main
    def _open(self) -> None:
        config = plain(self.config.to_dict())
        with explained(self.run_dir):
            folders.write_text(self.run_dir / "config.json", json.dumps(config, indent=2, default=str) + "\n")
            self.trackers = trackers.open_all(self.run_dir, self.config)
            self._recall()

    def _recall(self) -> None:
        self.history = read_metrics(self.run_dir)
        self.latest = {}
        for record in self.history:
            self.latest |= record

    @on_main
    def say(self, text: str) -> None:
        """Print a line above the progress bars."""
        say(text)

    @on_main
    def truncate(self, epoch: int, kinds: Collection[str] = ()) -> None:
        """Forget the lines from `epoch` on, but for `kinds` of this very epoch, a line that a kill cut short, and the
        images of forgotten evaluations. Called before the first `log`."""
        text = ""
        for line in read_metrics(self.run_dir):
            # A test of the best weights has "best_epoch": it was made at the end, whatever its epoch.
            stays = line["epoch"] == epoch and line["kind"] in kinds and "best_epoch" not in line
            if line["epoch"] < epoch or stays:
                text += json.dumps(plain(line)) + "\n"
        with explained(self.run_dir):
            folders.write_text(self.run_dir / "metrics.jsonl", text)
            sheets.forget(self.run_dir, epoch, keeps_evaluation="eval" in kinds)
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
        """Log one line.

        Args:
            kind: "update", "epoch" (which adds its phases' times), "eval", "test" or "validation".
            seconds_left: the run ends with the epoch in which they are over; for the ETA of an epoch's line.
            alarms: sentences, which only metrics.jsonl keeps.
        """
        assert kind in ("update", "epoch", "eval", "test", "validation"), kind
        record: dict[str, float] = {"epoch": epoch, "step": step}
        for name, value in values.items():
            record[name] = float(value)
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
            figures = self._epoch_figures(epoch, seconds_left) if kind == "epoch" else self._scores(kind, epoch, values)
            say("  ".join(figures))

    @on_main
    def log_histogram(self, name: str, values: Tensor, *, epoch: int, step: int) -> None:
        """Show the distribution of values of any shape in the trackers; those that are not finite are left out."""
        finite_values = values[values.isfinite()].float().cpu().numpy()
        if len(finite_values):
            at = {"epoch": epoch, "step": step}
            self._track(lambda tracker: tracker.log_histogram(name, finite_values, at, len(self.history)))

    def _track(self, call: Callable[[trackers.Wandb | trackers.TensorBoard], None]) -> None:
        """Make a call to each tracker, and drop those that fail: their service may have died."""
        for tracker in list(self.trackers):
            problem = attempt(self.config.logger, partial(call, tracker))
            if problem:
                self.trackers.remove(tracker)
                tracker.abandon()
                say(f"{problem}; it is told nothing more of this run, and {self.run_dir / 'metrics.jsonl'} holds all")

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds spent inside this block to time/<phase>_s of the next "epoch" line."""
        if self.synchronize is not None:
            self.synchronize()
        start = time.perf_counter()
        if self.epoch_start is None:
            self.epoch_start = start
        yield
        if self.synchronize is not None:
            self.synchronize()
        self.seconds[phase] += time.perf_counter() - start

    def _pop_times(self, images_so_far: float | None) -> dict[str, float]:
        """Return the epoch's times, and begin to time the next one."""
        if self.epoch_start is None:
            return {}
        epoch_s = time.perf_counter() - self.epoch_start
        times = {}
        for phase, seconds in self.seconds.items():
            times[f"time/{phase}_s"] = seconds
        times["time/epoch_s"] = epoch_s
        if images_so_far is not None:
            training_s = epoch_s - self.seconds["eval"] - self.seconds["save"]
            times["images_per_s"] = (images_so_far - self.latest.get("images", 0)) / training_s
        self.seconds.clear()
        self.epoch_start = None
        self.epochs_s.append(epoch_s)
        return times

    def _scores(self, kind: str, epoch: int, values: dict[str, float]) -> list[str]:
        """Return the parts of the line that is printed of an evaluation."""
        title = "evaluation" if kind == "eval" else kind
        # Figures of categories, of more than one "/", and of frames would make the line too long.
        names = sorted(name for name in values if name.count("/") == 1 and not is_of_frame(name))
        return [f"{title} after {counted(epoch, 'epochs')}", *self._figures(names)]

    def _epoch_figures(self, epoch: int, seconds_left: float) -> list[str]:
        """Return the parts of the line that is printed of an epoch; evaluations have lines of their own."""
        total = self.config.num_epochs
        number = str(epoch + 1).rjust(len(str(total)))
        parts = [f"epoch {number}/{total}", *self._figures(["reward/avg", "loss", "implicit_accuracy", "grad_norm"])]
        if self.epochs_s:
            mean_s = sum(self.epochs_s) / len(self.epochs_s)
            # An epoch that has begun when the time is over is completed.
            epochs_left = math.ceil(min(total - epoch - 1, max(seconds_left, 0) / mean_s))
            parts.append(f"{self.epochs_s[-1]:.3g} s/epoch")
            parts.append(f"ETA {tqdm.format_interval(epochs_left * mean_s)}")
        return parts

    def _figures(self, names: Iterable[str]) -> list[str]:
        """Return the last values of those names that were ever logged, in words."""
        figures = []
        for name in names:
            if name in self.latest:
                figures.append(f"{name} {self.latest[name]:.4g}")
        return figures

    def bar(self, iterable: Iterable, desc: str, total: int | None = None) -> Iterable:
        """Return the same things under a progress bar or, without a terminal, with a line a minute."""
        return progress.shown(iterable, desc, total, say=self.say if self.is_main else None)

    @on_main
    def log_images(
        self,
        images: Tensor,
        captions: list[str],
        rewards: Iterable[float] | None = None,
        *,
        epoch: int,
        step: int,
        name: str = "eval",
    ) -> None:
        """Show images [N, 3, H, W] in [0, 1] with their N captions and N rewards in the trackers and as
        images/<name>_<epoch>.png, with a .json of the same name that has each picture's box. Videos [N, f, 3, H, W]
        are shown as film strips, and move in images/<name>_<epoch>.webp."""
        rewards = None if rewards is None else list(rewards)
        sheet = contact_sheet(images, captions, rewards)
        pictures = to_pictures(film_strips(images))
        at = {"epoch": epoch, "step": step}
        self._track(lambda tracker: tracker.log_images(name, pictures, sheet, at, len(self.history)))
        picture = f"images/{name}_{epoch:06d}.png"
        self._draw(picture, lambda folder: write_sheet(sheet, folder / picture))
        if images.ndim == 5:
            animation = f"images/{name}_{epoch:06d}.webp"
            self._draw(animation, lambda folder: write_animation(images, captions, rewards, folder / animation))
        if name == "eval" and time.perf_counter() >= self.report_due_s:
            self._draw_report()

    @on_main
    def log_groups(self, rows: Sequence[GroupRow], *, epoch: int, step: int, name: str) -> None:
        """Show a row of pictures for each group in the trackers and as images/<name>_<epoch>.png."""
        at = {"epoch": epoch, "step": step}
        file = f"images/{name}_{epoch:06d}.png"

        def draw(folder: Path) -> None:
            page = group_sheet(rows)
            self._track(lambda tracker: tracker.log_page(name, page, at, len(self.history)))
            write_page(page, folder / file)

        self._draw(file, draw)

    def _draw_report(self) -> None:
        # A tracker shows the same curves, and its failure leaves none.
        if self.trackers:
            return
        start_s = time.perf_counter()
        self._draw("report.html", lambda folder: report.write_page([folder], folder / "report.html"))
        end_s = time.perf_counter()
        self.report_due_s = end_s + REPORT_INTERVAL * (end_s - start_s)

    def _draw(self, name: str, draw: Callable[[Path], object]) -> None:
        """Draw a file by draw(the run's folder); a failure is said and ends no run."""
        say(attempt(f"{self.run_dir / name} could not be drawn", partial(draw, self.run_dir)))

    @on_main
    def finish(self, since: int = 0) -> None:
        """Draw reward.png, and samples.png of evaluations from epoch `since` on; close the trackers."""
        self._draw("reward.png", lambda folder: plot_reward(self.history, self.config, folder / "reward.png"))
        self._draw("samples.png", lambda folder: plot_samples(folder, since))
        self._draw_report()
        self._track(lambda tracker: tracker.close())


def write_sheet(sheet: Sheet, file: Path) -> None:
    """Write a contact sheet, and a .json of the same name with caption, reward and box of each picture."""
    file.parent.mkdir(exist_ok=True)
    cells = [cell._asdict() for cell in sheet.cells]
    folders.write_text(file.with_suffix(".json"), json.dumps({"cells": cells}))
    write_page(sheet.page, file)


def write_page(page: Image.Image, file: Path) -> None:
    """Write a page as PNG, whole or not at all."""
    file.parent.mkdir(exist_ok=True)
    with folders.published(file) as scratch:
        page.save(scratch, "png")


def plain(value: Any) -> Any:
    """Return the same value as valid JSON: NaN and infinities become "nan", "inf" and "-inf", which float() reads."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
