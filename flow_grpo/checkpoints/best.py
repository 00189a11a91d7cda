"""The folder of a run's best evaluation: the averaged weights as they were evaluated, and evaluation.json.

It is replaced as a whole: a kill at any moment leaves the old one or the new one, which `find` knows.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from flow_grpo.base import checksums, distributed, folders
from flow_grpo.base.errors import UserError
from flow_grpo.checkpoints import checkpoints

NAME, FILE = "best", "evaluation.json"
STATE = "checkpoint"  # folder of the training state, where config.health.action is roll_back


@dataclass(frozen=True)
class Evaluation:
    """What evaluation.json holds."""

    epoch: int  # epochs completed
    step: int  # optimizer steps taken
    split: str  # "validation", or "test" where the data set has no validation prompts
    num_prompts: int
    noises_per_prompt: int
    num_steps: int
    guidance_scale: float
    best_by: str  # name of the figure that chooses
    value: float  # of that figure
    figures: dict[str, float]  # name -> mean
    height: int = 0  # pixels; 0 = not known, as in older files
    width: int = 0  # pixels; 0 = not known
    vae_precision: str = ""  # "" = not known
    since: int = 0  # epochs completed at the first evaluation that can be compared with this one
    inputs: dict[str, str] = field(default_factory=dict)  # digests of what else decides figures, as far as is known

    def comparable(self, other: "Evaluation") -> bool:
        """Whether values of the two were measured alike, as far as is known."""
        same = ("split", "num_prompts", "noises_per_prompt", "num_steps", "guidance_scale", "best_by")
        known = ("height", "width", "vae_precision")
        known = [key for key in known if getattr(self, key) and getattr(other, key)]
        alike = all(self.inputs[key] == other.inputs[key] for key in self.inputs.keys() & other.inputs.keys())
        return alike and all(getattr(self, key) == getattr(other, key) for key in (*same, *known))


class Restored(NamedTuple):
    """What a resumed run begins with."""

    best: Evaluation | None
    since: int  # epochs completed at the first evaluation that can be compared with those to come
    notice: str  # for the user, "" for nothing


def improves(evaluation: Evaluation, best: Evaluation | None) -> bool:
    """Whether it is the best so far. The first of equals stays; NaN and infinities never are."""
    return math.isfinite(evaluation.value) and (best is None or evaluation.value > best.value)


def find(run_folder: Path) -> Path | None:
    """The best evaluation's folder, whole; None if there is none."""
    paths = run_folder / NAME, run_folder / f".old-{NAME}"  # set aside while the new one comes
    return next((path for path in paths if (path / FILE).is_file()), None)


def read(run_folder: Path) -> Evaluation | None:
    """What was evaluated; None if there is none. Raises UserError for a file that no run has written."""
    if (folder := find(run_folder)) is None:
        return None
    return read_file(folder / FILE)


def write(run_folder: Path, evaluation: Evaluation, fill: Callable[[Path], None]) -> None:
    """Replace the folder, all ranks together.

    Args:
        fill: puts the weights into the folder that it is given; every rank calls it.
    Raises:
        OSError: it could not be written, e.g. the disk is full. The old one is intact.
    """
    tmp = run_folder / f".tmp-{NAME}"
    distributed.on_main(_start, run_folder, tmp)
    try:
        fill(tmp)
        distributed.on_main(_publish, run_folder, tmp, evaluation)
    except Exception:
        distributed.on_main(shutil.rmtree, tmp, True)
        raise


def restore(run_folder: Path, checkpoint: Path, wanted: Evaluation, rewinds: bool) -> Restored:
    """Make the folder fit a checkpoint. A best of later epochs goes: the resumed run evaluates these epochs again.

    Where the checkpoint's copy is damaged, the run is without a best evaluation until the next one.

    Args:
        wanted: an evaluation of the resumed run; a best one that was measured otherwise cannot be compared with it.
        rewinds: whether the user gives up later epochs; then a best of theirs is kept under another name.
    """
    best, notice = distributed.on_main(_restore, run_folder, checkpoint, wanted.epoch, rewinds)
    if best is None or best.comparable(wanted):
        return Restored(best, best.since if best else 0, notice)
    aside = distributed.on_main(_set_aside, run_folder, f"{NAME}_epoch_{best.epoch:06d}")
    notice = f"the best policy so far was evaluated in another way than config.eval asks for; it is now in {aside}"
    return Restored(None, wanted.epoch, notice)


def link(run_folder: Path, folder: Path) -> None:
    """Put the present best into a checkpoint, without a copy of its bytes; the main rank's work."""
    if best := find(run_folder):
        _copy(best, folder / NAME)


def _copy(source: Path, target: Path) -> None:
    """By hard links where the disk has them: a file in there is never written again."""

    def link_or_copy(file: str, copy: str) -> None:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)

    shutil.copytree(source, target, copy_function=link_or_copy, symlinks=True)


def _start(run_folder: Path, tmp: Path) -> None:
    """Clear what a kill left behind."""
    best, old = run_folder / NAME, run_folder / f".old-{NAME}"
    if old.is_dir() and not best.exists():
        old.rename(best)
    for leftover in (tmp, old):
        folders.remove(leftover)
    tmp.mkdir(parents=True)


def _publish(run_folder: Path, tmp: Path, evaluation: Evaluation) -> None:
    (tmp / FILE).write_text(json.dumps(asdict(evaluation), indent=2) + "\n")
    checksums.write(tmp, {})
    checkpoints.publish(tmp)
    shutil.rmtree(run_folder / f".old-{NAME}", ignore_errors=True)


def _restore(run_folder: Path, checkpoint: Path, epoch: int, rewinds: bool) -> tuple[Evaluation | None, str]:
    """The best evaluation, and what to tell the user."""
    folder, tmp, stored = run_folder / NAME, run_folder / f".tmp-{NAME}", checkpoint / NAME
    _start(run_folder, tmp)
    tmp.rmdir()
    notice, (best, damage) = "", _look(folder)
    of_best = checkpoint.resolve().is_relative_to(folder.resolve())
    if of_best or (best and best.epoch <= epoch):  # of the checkpoint's own weights, or of earlier ones
        stored = folder
    else:
        if best and rewinds:
            aside = _set_aside(run_folder, f"{NAME}_epoch_{best.epoch:06d}")
            notice = f"the best policy, of later epochs than the run goes on from, is now in {aside}"
        best, damage = _look(stored)
        if not damage:
            _replace(run_folder, tmp, stored)
    if not damage:
        return best, notice
    aside = f"; {folder} is now {_set_aside(run_folder, f'{NAME}_damaged')}" if folder.exists() else ""
    return None, "; ".join(filter(None, [notice, f"{stored} is damaged: {damage}{aside}"]))


def _look(folder: Path) -> tuple[Evaluation | None, str]:
    """The evaluation in a folder, None without the folder; and what is wrong with the folder, "" for nothing."""
    if not os.path.lexists(folder):
        return None, ""
    if damage := checksums.damage(folder):
        return None, damage
    try:
        return read_file(folder / FILE), ""
    except ValueError as error:
        return None, str(error)


def read_file(file: Path) -> Evaluation:
    """Raises UserError for a file that no run has written."""
    stored = folders.read_json(file)
    kinds = {"epoch": int, "value": int | float, "figures": dict, "since": int, "inputs": dict}
    required = {part.name for part in fields(Evaluation) if part.default is part.default_factory is MISSING}
    alike = all(isinstance(stored[name], kind) for name, kind in kinds.items() if name in stored)
    if not required <= {*stored} <= {*Evaluation.__annotations__} or not alike:
        raise UserError(f"{file} is no record of an evaluation")
    return Evaluation(**stored)


def _replace(run_folder: Path, tmp: Path, stored: Path) -> None:
    if stored.is_dir():
        _copy(stored, tmp)
        checkpoints.publish(tmp)
    elif (run_folder / NAME).exists():
        (run_folder / NAME).rename(tmp)  # half removed, it must not look whole
    for leftover in (tmp, run_folder / f".old-{NAME}"):
        folders.remove(leftover)


def _set_aside(run_folder: Path, name: str) -> Path:
    """Give the folder another name; what has this name already is renamed, unless it is the same."""
    folder, aside = run_folder / NAME, run_folder / name
    if os.path.lexists(aside):
        sums = [path / checksums.FILE for path in (folder, aside)]
        same = all(file.is_file() for file in sums) and sums[0].read_bytes() == sums[1].read_bytes()
        (folders.remove if same else folders.set_aside)(aside)
    return folder.rename(aside)
