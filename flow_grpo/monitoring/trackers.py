"""Trackers of a run's curves, chosen by config.logger: wandb, tensorboard. Each is imported when a run asks for it."""

import atexit
import importlib.util
import json
import os
import textwrap
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.command_line import alerts
from flow_grpo.monitoring import provenance
from flow_grpo.monitoring.sheets import Sheet
from flow_grpo.settings.sections import Config

# Axes of curves, which have no group.
AXES = ("epoch", "step")
# Values of WANDB_MODE.
SENDING = ("online", "shared", "run")
NOT_SENDING = ("offline", "disabled", "dryrun")
# Of a histogram in wandb.
NUM_BINS = 64


def grouped(record: dict[str, float]) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl as trackers show them: those without a group under train/."""
    figures = {}
    for name, value in record.items():
        has_group = "/" in name or name in AXES
        shown_name = name if has_group else f"train/{name}"
        figures[shown_name] = value
    return figures


class Wandb:
    """Run in wandb, offline unless WANDB_MODE says otherwise."""

    def __init__(self, run_dir: Path, settings: dict[str, Any]):
        import wandb

        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            folders.write_text(id_file, uuid.uuid4().hex[:8])
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "flow_grpo"),
            name=run_dir.name,
            group=origin(run_dir),
            dir=run_dir,
            id=id_file.read_text(),
            resume="allow",
            mode=_wandb_mode(),
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
            reinit="finish_previous",
        )
        self.run.define_metric("*", step_metric="step")
        alerts.senders["wandb"] = partial(self.run.alert, run_dir.name)

    def log(self, record: dict[str, float], line: int) -> None:
        """Log the record of a line of metrics.jsonl; its number keeps a resumed run where it was."""
        self.run.log(grouped(record), step=line)

    def log_images(self, name: str, pictures: list[Image.Image], sheet: Sheet, at: dict, line: int) -> None:
        """Show pictures under images/<name>, each with its caption and reward."""
        import wandb

        # Small pictures lose nothing; a strip of small frames is wide, but not high.
        file_type = "png" if min(pictures[0].size) <= 256 else "jpg"
        shown = []
        for picture, cell in zip(pictures, sheet.cells, strict=True):
            label = " | ".join(filter(None, (cell.caption, cell.reward)))
            shown.append(wandb.Image(picture, caption=label, file_type=file_type))
        self.run.log({f"images/{name}": shown, **at}, step=line)

    def log_page(self, name: str, page: Image.Image, at: dict, line: int) -> None:
        """Show a page of pictures under images/<name>."""
        import wandb

        self.run.log({f"images/{name}": wandb.Image(page), **at}, step=line)

    def log_histogram(self, name: str, values: np.ndarray, at: dict, line: int) -> None:
        """Show the distribution of values [N] under histograms/<name>."""
        import wandb

        self.run.log({f"histograms/{name}": wandb.Histogram(values.tolist(), num_bins=NUM_BINS), **at}, step=line)

    def close(self) -> None:
        """End the run in wandb."""
        alerts.senders.pop("wandb", None)
        self.run.finish()

    def abandon(self) -> None:
        """Finish the run when the process ends, before wandb's own exit handlers: they would print a traceback if
        wandb's service has died."""
        atexit.register(self._leave)

    def _leave(self) -> None:
        import wandb

        try:
            self.run.finish()
        except Exception:
            # The service has died, and nothing is left to be sent.
            with suppress(Exception):
                wandb.teardown()


class TensorBoard:
    """Event files in the run's folder tensorboard/. The horizontal axis is the number of updates."""

    def __init__(self, run_dir: Path, settings: dict[str, Any]):
        self.folder = run_dir / "tensorboard"
        self.settings = json.dumps(settings, indent=4, default=str)
        self.writer: Any = None

    def _opened(self, step: int) -> Any:
        """Return the writer, opened at the first figure of this process, after `step` updates."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Hide the figures of later steps, which are those of an abandoned future of a resumed run.
            purge_step = step + 1 if self.folder.exists() else None
            self.writer = SummaryWriter(self.folder, purge_step=purge_step)
            # Markdown shows indented text as code.
            self.writer.add_text("config", textwrap.indent(self.settings, " " * 4), step)
        return self.writer

    def log(self, record: dict[str, float], line: int) -> None:
        """Log the record of a line of metrics.jsonl."""
        step = int(record["step"])
        writer = self._opened(step)
        for name, value in grouped(record).items():
            if name != "step":
                writer.add_scalar(name, value, step)

    def log_images(self, name: str, pictures: list[Image.Image], sheet: Sheet, at: dict, line: int) -> None:
        """Show the sheet, which has prompts and rewards in it, under images/<name>."""
        self.log_page(name, sheet.page, at, line)

    def log_page(self, name: str, page: Image.Image, at: dict, line: int) -> None:
        """Show a page of pictures under images/<name>."""
        writer = self._opened(at["step"])
        writer.add_image(f"images/{name}", np.asarray(page), at["step"], dataformats="HWC")

    def log_histogram(self, name: str, values: np.ndarray, at: dict, line: int) -> None:
        """Show the distribution of values [N] under histograms/<name>."""
        self._opened(at["step"]).add_histogram(f"histograms/{name}", values, at["step"])

    def close(self) -> None:
        """Close the event files."""
        if self.writer is not None:
            self.writer.close()

    def abandon(self) -> None:
        """Do nothing: its thread has ended with the error."""


KINDS: dict[str, type[Wandb] | type[TensorBoard]] = {"wandb": Wandb, "tensorboard": TensorBoard}


def origin(run_dir: Path) -> str:
    """Return the name of the run that a branch, or a branch of a branch, comes from; any other run's own name.

    Folders that were renamed may seem to come from each other: the search ends at one that it has visited.
    """
    visited = set()
    while run_dir not in visited:
        visited.add(run_dir)
        parent = provenance.parent(run_dir)
        if parent:
            run_dir = Path(parent.folder)
    return run_dir.name


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A folder of its name, such as a run's wandb/, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_logger(logger: str) -> None:
    """Raise UserError if the package of config.logger is missing, or if wandb is to send a run and cannot."""
    if logger in KINDS and not is_installed(logger):
        raise UserError(f"config.logger is {logger!r}, but {logger} is not installed: pip install {logger}")
    if logger == "wandb":
        _check_wandb(_wandb_mode())


def _wandb_mode() -> Any:
    """Return the text of WANDB_MODE, of which `_check_wandb` accepts more values than wandb's annotations name."""
    return os.environ.get("WANDB_MODE") or "offline"


def _check_wandb(mode: str) -> None:
    """Raise UserError if wandb has no key. Without this check it would ask for one after all weights are loaded."""
    if mode not in (*SENDING, *NOT_SENDING):
        raise UserError(f"WANDB_MODE is {quoted(mode)}; it may be {', '.join((*SENDING, *NOT_SENDING))}")
    if mode in NOT_SENDING:
        return
    import wandb

    problem = ""
    try:
        if not wandb.login(prompt=False, verify=False):
            problem = "wandb has no key"
    except wandb.Error as error:
        problem = in_one_line(error)
    if problem:
        raise UserError(
            f"WANDB_MODE is {mode!r}, but {problem}: run `wandb login`, set WANDB_API_KEY, or take WANDB_MODE=offline, "
            "whose runs `wandb sync` sends later"
        )


def notice(logger: str, run_dir: Path) -> str:
    """Return a sentence if nothing is sent to wandb although its key is set; "" otherwise."""
    if logger != "wandb" or "WANDB_MODE" in os.environ or not os.environ.get("WANDB_API_KEY"):
        return ""
    return (
        "WANDB_API_KEY is set, but wandb is offline: WANDB_MODE=online sends a run as it goes, "
        f"`wandb sync {run_dir}/wandb/offline-run-*` sends this one later"
    )


def open_all(run_dir: Path, config: Config) -> list[Wandb | TensorBoard]:
    """Open the tracker of config.logger, if it names one."""
    if config.logger not in KINDS:
        return []
    # Trackers do not get config.alert, which may hold a token.
    settings = config.to_dict()
    del settings["alert"]
    return [KINDS[config.logger](run_dir, settings)]
