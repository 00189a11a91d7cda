"""Where else a run's curves go, as config.logger says: wandb, tensorboard. Each is imported when a run asks for it."""

import atexit
import importlib.util
import json
import os
import textwrap
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from flow_grpo.base import alerts, folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.monitoring import provenance
from flow_grpo.monitoring.plots import Sheet

AXES = ("epoch", "step")  # of curves, without a group
SENDING, NOT_SENDING = ("online", "shared", "run"), ("offline", "disabled", "dryrun")  # values of WANDB_MODE


def grouped(record: dict[str, float]) -> dict[str, float]:
    """Numbers of a line of metrics.jsonl as trackers show them: those without a group under train/."""
    return {name if "/" in name or name in AXES else f"train/{name}": value for name, value in record.items()}


def public(config: ConfigDict) -> dict[str, Any]:
    """The config as trackers get it: config.alert may hold a token."""
    return {key: value for key, value in config.to_dict().items() if key != "alert"}


class Wandb:
    """The run in wandb, offline unless WANDB_MODE says otherwise."""

    def __init__(self, run_dir: Path, config: ConfigDict):
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
            config=public(config),
            settings=wandb.Settings(silent=True, console="off"),
            reinit="finish_previous",
        )
        self.run.define_metric("*", step_metric="step")
        alerts.senders["wandb"] = lambda text: self.run.alert(run_dir.name, text)

    def log(self, record: dict[str, float], line: int) -> None:
        """Log the record of a line of metrics.jsonl; its number keeps a resumed run where it was."""
        self.run.log(grouped(record), step=line)

    def log_images(self, name: str, pictures: list[Image.Image], sheet: Sheet, at: dict, line: int) -> None:
        """Show pictures under images/<name>, each with its caption and reward."""
        import wandb

        labels = [" | ".join(filter(None, (cell["caption"], cell["reward"]))) for cell in sheet.cells]
        kind = "png" if max(pictures[0].size) <= 256 else "jpg"
        shown = [wandb.Image(p, caption=label, file_type=kind) for p, label in zip(pictures, labels, strict=True)]
        self.run.log({f"images/{name}": shown, **at}, step=line)

    def close(self) -> None:
        alerts.senders.pop("wandb", None)
        self.run.finish()

    def abandon(self) -> None:
        """Take leave of a run that could not be told something, when the process ends: later exit handlers, which are
        wandb's, would show a traceback where its service has died."""
        atexit.register(self._leave)

    def _leave(self) -> None:
        import wandb

        try:
            self.run.finish()
        except Exception:  # the service has died, and nothing is left to be sent
            with suppress(Exception):
                wandb.teardown()


class TensorBoard:
    """Event files in the run's folder tensorboard/. The horizontal axis is the number of updates."""

    def __init__(self, run_dir: Path, config: ConfigDict):
        self.folder, self.writer = run_dir / "tensorboard", None
        self.config = json.dumps(public(config), indent=4, default=str)

    def _opened(self, step: int):
        """Open at the first figure: what an abandoned future of a resumed run has written after it is to be hidden."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder, purge_step=step + 1 if self.folder.exists() else None)
            self.writer.add_text("config", textwrap.indent(self.config, " " * 4), step)  # as Markdown shows code
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
        self._opened(at["step"]).add_image(f"images/{name}", np.asarray(sheet.page), at["step"], dataformats="HWC")

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def abandon(self) -> None:
        """Do nothing: its thread has ended with the error."""


KINDS = {"wandb": Wandb, "tensorboard": TensorBoard}


def origin(run_dir: Path) -> str:
    """Name of the run that a branch, or a branch of a branch, comes from; of any other run its own. Folders that were
    renamed may seem to come from each other: the search ends at one that it has visited."""
    visited = set()
    while run_dir not in visited:
        visited.add(run_dir)
        parent = provenance.parent(run_dir)
        if parent:
            run_dir = Path(parent.folder)
    return run_dir.name


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of its name, such as a run's wandb/, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check(logger: str) -> None:
    """Raises UserError where the package of config.logger is missing, or wandb could not send what it is to send."""
    if logger in KINDS and not is_installed(logger):
        raise UserError(f"config.logger is {logger!r}, but {logger} is not installed: pip install {logger}")
    if logger == "wandb":
        _check_wandb(_wandb_mode())


def _wandb_mode() -> str:
    return os.environ.get("WANDB_MODE") or "offline"


def _check_wandb(mode: str) -> None:
    """Asks nothing, and nobody: wandb would ask for its key when all weights are loaded."""
    if mode not in (*SENDING, *NOT_SENDING):
        raise UserError(f"WANDB_MODE is {quoted(mode)}; it may be {', '.join((*SENDING, *NOT_SENDING))}")
    if mode in NOT_SENDING:
        return
    import wandb

    try:
        problem = "" if wandb.login(prompt=False, verify=False) else "wandb has no key"
    except wandb.Error as error:
        problem = in_one_line(error)
    if problem:
        raise UserError(
            f"WANDB_MODE is {mode!r}, but {problem}: run `wandb login`, set WANDB_API_KEY, or take WANDB_MODE=offline, "
            "whose runs `wandb sync` sends later"
        )


def notice(logger: str, run_dir: Path) -> str:
    """Say that nothing is sent to wandb, although its key is set; "" where that is no surprise."""
    if logger != "wandb" or "WANDB_MODE" in os.environ or not os.environ.get("WANDB_API_KEY"):
        return ""
    return (
        "WANDB_API_KEY is set, but wandb is offline: WANDB_MODE=online sends a run as it goes, "
        f"`wandb sync {run_dir}/wandb/offline-run-*` sends this one later"
    )


def open_all(run_dir: Path, config: ConfigDict) -> list[Wandb | TensorBoard]:
    """The tracker of config.logger; none for "none"."""
    return [KINDS[config.logger](run_dir, config)] if config.logger in KINDS else []
