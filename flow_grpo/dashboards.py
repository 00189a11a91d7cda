"""Where a run's numbers, images and progress go. The only module that talks to wandb, and the only one that prints.

A run folder holds config.json, metrics.jsonl, images/ and wandb/, and after `finish` reward.png and samples.png, which
`plot_reward` and `plot_samples` redraw from the folder alone.
"""

import errno
import functools
import json
import math
import os
import sys
import time
import uuid
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import wandb
from PIL import Image
from tqdm import tqdm

from flow_grpo.metrics import check_name
from flow_grpo.pictures import contact_sheet, fit, keep_panel, plot_reward, plot_samples, read_metrics
from flow_grpo.pixels import to_uint8
from flow_grpo.quoting import quoted


def on_main(method):
    """Run a Dashboard's method on the main rank only, and say what to do when its disk is full."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs) if self.is_main else None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            advice = "free some and start the run again: it continues from its last checkpoint"
            raise OSError(error.errno, f"no space left for the run folder {self.run_dir}; {advice}") from error

    return call


def check_project(name: str) -> None:
    """Raises ValueError for a name that wandb refuses."""
    try:
        wandb.Settings(project=name)
    except (wandb.errors.UsageError, ValueError) as error:
        raise ValueError(f"config.project is {quoted(name)}; wandb says: {error}") from error


class Dashboard:
    """A run's wandb run, metrics.jsonl, pictures and progress. On other ranks than the main one nothing happens.

    Args:
        config: has at least project and num_epochs.
        synchronize: waits for the device before a phase is timed, such as torch.cuda.synchronize; None on a CPU.
    """

    def __init__(self, run_dir, config, name: str, is_main: bool, synchronize=None):
        self.run_dir, self.config, self.is_main = Path(run_dir), config, is_main
        self.synchronize = synchronize or (lambda: None)
        self.seconds, self.epoch_start, self.epochs_s = defaultdict(float), None, []
        self.since_epoch = []  # records logged after the last one of kind "epoch"
        self._open(name)

    @on_main
    def _open(self, name):
        (self.run_dir / "images").mkdir(parents=True, exist_ok=True)
        config = plain(self.config.to_dict())
        (self.run_dir / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
        id_file = self.run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        self.wandb_run = wandb.init(
            project=self.config.project,
            name=name,
            dir=self.run_dir,
            id=id_file.read_text(),
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
            reinit="finish_previous",
        )
        self.wandb_run.define_metric("*", step_metric="step")
        self._recall()

    def _recall(self):
        records = read_metrics(self.run_dir)
        self.lines = len(records)  # wandb's own step, so that a resumed run goes on where it was
        self.latest = {name: value for record in records for name, value in record.items()}

    def history(self) -> list[dict[str, float]]:
        """The lines so far; [] on other ranks than the main one."""
        return read_metrics(self.run_dir) if self.is_main else []

    @on_main
    def say(self, text: str) -> None:
        """Print a line above the progress bars."""
        tqdm.write(text, file=sys.stdout)

    @on_main
    def truncate(self, epoch: int) -> None:
        """Before the first log: forget the lines from `epoch` on, and a last line that a kill cut short."""
        records = [record for record in read_metrics(self.run_dir) if record["epoch"] < epoch]
        scratch = self.run_dir / "metrics.jsonl.tmp"
        scratch.write_text("".join(json.dumps(plain(record)) + "\n" for record in records))
        scratch.replace(self.run_dir / "metrics.jsonl")
        self._recall()

    @on_main
    def log(self, kind: str, values: dict[str, float], *, epoch: int, step: int) -> None:
        """Log one line of kind "update", "epoch" (which adds its phases' times), "eval", "test" or "validation"."""
        assert kind in ("update", "epoch", "eval", "test", "validation"), kind
        record = {"epoch": epoch, "step": step} | {name: float(value) for name, value in values.items()}
        if kind == "epoch":
            record |= self._pop_times(record.get("images"))
        for name in record:
            check_name(name)
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(plain({"kind": kind, **record})) + "\n")
        self.wandb_run.log(record, step=self.lines)
        self.lines += 1
        self.latest |= record
        self.since_epoch = [] if kind == "epoch" else [*self.since_epoch, {"kind": kind, **record}]
        if kind != "update":
            tqdm.write(self._summary(kind, epoch, values), file=sys.stdout)
            sys.stdout.flush()

    @contextmanager
    def timed(self, phase: str):
        """Add the seconds spent inside to time/<phase>_s of the next "epoch" line."""
        check_name(f"time/{phase}_s")
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

    def _summary(self, kind, epoch, values):
        evals = sorted(name for name in self.latest if name.startswith("eval/"))
        held_out = ["validation/implicit_accuracy", "validation/winner_error_gap", "validation/loser_error_gap"]
        tests = sorted(name for name in values if name.count("/") == 1)  # categories would make the line too long
        names = {"eval": evals, "test": tests, "validation": held_out}.get(
            kind, ["reward/avg", *evals, held_out[0], "loss", "grad_norm"]
        )
        figures = [f"{name} {self.latest[name]:.4g}" for name in names if name in self.latest]
        if kind != "epoch":
            return "  ".join([f"{kind.replace('eval', 'evaluation')} after {epoch} epochs", *figures])
        total = self.config.num_epochs
        if self.epochs_s:
            figures.append(f"{self.epochs_s[-1]:.3g} s/epoch")
            left = (total - epoch - 1) * sum(self.epochs_s) / len(self.epochs_s)
            figures.append(f"ETA {tqdm.format_interval(left)}")
        return "  ".join([f"epoch {epoch + 1:>{len(str(total))}}/{total}", *figures])

    def bar(self, iterable, desc: str, total: int | None = None) -> tqdm:
        """Iterate under a progress bar (`set_postfix` adds figures); silent where there is no terminal."""
        silent = not (self.is_main and sys.stderr.isatty())
        return tqdm(iterable, desc=desc, total=total, leave=False, dynamic_ncols=True, disable=silent)

    @on_main
    def log_images(self, images, captions, rewards, *, epoch: int, step: int) -> None:
        """Show an evaluation's images [N, 3, H, W] in [0, 1], their N prompts and N rewards in wandb and as
        images/eval_<epoch>.png. Those of the first and the last evaluation are kept for samples.png.
        """
        pixels = to_uint8(images)
        pictures, rewards = [Image.fromarray(p) for p in pixels], [float(r) for r in rewards]
        file_type = "png" if max(pictures[0].size) <= 256 else "jpg"
        labels = [f"{caption} | {reward:.3f}" for caption, reward in zip(captions, rewards, strict=True)]
        shown = [wandb.Image(p, caption=c, file_type=file_type) for p, c in zip(pictures, labels, strict=True)]
        self.wandb_run.log({"images/eval": shown, "epoch": epoch, "step": step}, step=self.lines)
        pictures = [fit(picture) for picture in pictures]
        sheet = contact_sheet(pictures, captions, rewards)
        sheet.save(self.run_dir / "images" / f"eval_{epoch:06d}.png")
        keep_panel(self.run_dir, pictures, captions, rewards, epoch)

    @on_main
    def finish(self) -> None:
        """Draw reward.png and samples.png, and close the wandb run."""
        plot_reward(self.run_dir)
        plot_samples(self.run_dir)
        self.wandb_run.finish()


def plain(value):
    """The same value as valid JSON: NaN and infinities become the strings "nan", "inf", "-inf", which float() reads."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
