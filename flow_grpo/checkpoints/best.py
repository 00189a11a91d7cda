"""The folder of a run's best evaluation: the averaged weights as they were evaluated, and evaluation.json.

It is replaced as a whole: a kill at any moment leaves the old one or the new one, which `find` knows.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flow_grpo.base import checksums, distributed, folders
from flow_grpo.checkpoints import checkpoints

NAME, FILE = "best", "evaluation.json"
STATE = "checkpoint"  # folder of the training state, where config.health.action is roll_back
RESULTS = "value", "figures"  # what an evaluation has come to; the rest says how and when it was made


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
    width: int = 0  # pixels
    vae_precision: str = ""
    since: int = 0  # epochs completed at the first evaluation that can be compared with this one
    inputs: dict[str, str] = field(default_factory=dict)  # digests of what else decides figures, as far as is known

    def comparable(self, other: "Evaluation") -> bool:
        """Whether values of the two were measured alike, as far as is known."""
        names = ("split", "num_prompts", "noises_per_prompt", "num_steps", "guidance_scale", "best_by")
        names += ("height", "width", "vae_precision")
        alike = all(self.inputs[key] == other.inputs[key] for key in self.inputs.keys() & other.inputs.keys())
        return alike and all(getattr(self, name) == getattr(other, name) for name in names)


def settings_of(evaluation: Evaluation) -> dict[str, Any]:
    """How evaluations are made, for a checkpoint, whose run may have no best one when it goes on."""
    return {name: value for name, value in asdict(evaluation).items() if name not in RESULTS}


def of_settings(settings: dict[str, Any], path: Path) -> Evaluation:
    """An evaluation without results that `settings_of` describes. Raises UserError, which names the file at `path`,
    for what is none."""
    return folders.record_of(Evaluation, settings | {"value": math.nan, "figures": {}}, path)


def improves(evaluation: Evaluation, best: Evaluation | None) -> bool:
    """Whether it is the best so far. The first of equals stays; NaN and infinities never are."""
    return math.isfinite(evaluation.value) and (best is None or evaluation.value > best.value)


def find(run_folder: Path) -> Path | None:
    """The best evaluation's folder, whole; None if there is none."""
    paths = run_folder / NAME, folders.replaced_at(run_folder / NAME)
    return next((path for path in paths if (path / FILE).is_file()), None)


def read(run_folder: Path) -> Evaluation | None:
    """What was evaluated; None if there is none. Raises UserError for a file that no run has written."""
    folder = find(run_folder)
    return folder and folders.read_record(Evaluation, folder / FILE)


def write(run_folder: Path, evaluation: Evaluation, fill: Callable[[Path], None]) -> None:
    """Replace the folder; every rank calls, and `fill` puts the weights in. A failure leaves the old one intact."""
    with checkpoints.replaced(run_folder / NAME) as tmp:
        fill(tmp)
        distributed.on_main(_describe, tmp, evaluation)


def restore(
    run_folder: Path, checkpoint: Path, wanted: Evaluation, before: Evaluation | None = None
) -> tuple[Evaluation | None, int, str]:
    """Make the folder fit a checkpoint. A best of later epochs goes: the resumed run evaluates these epochs again.

    Where the checkpoint's copy is damaged, the run is without a best evaluation until the next one. One that was
    measured otherwise than `wanted`, an evaluation of the resumed run, is set aside. `wanted.since` is what the
    checkpoint says; a best evaluation that is there may be of an older version, whose checkpoints did not say it.

    Args:
        before: how evaluations were made until the checkpoint, whether or not a best one is there; None where an
            older version wrote the checkpoint.

    Returns:
        The best, epochs completed at the first evaluation that can be compared with those to come, and what to tell
        the user, "" for nothing.
    """
    best, notice = distributed.on_main(_fit, run_folder, checkpoint, wanted.epoch)
    if before and not before.comparable(wanted):
        since = wanted.epoch
    else:
        since = max(wanted.since, best.since if best else 0)
    if best is None or best.comparable(wanted):
        return best, since, notice
    aside = distributed.on_main(_set_aside, run_folder, f"{NAME}_epoch_{best.epoch:06d}")
    notice = f"the best policy so far was evaluated in another way than config.eval asks for; it is now in {aside}"
    return None, wanted.epoch, notice


def link(run_folder: Path, folder: Path) -> None:
    """Put the present best into a checkpoint, without a copy of its bytes; the main rank's work."""
    if best := find(run_folder):
        _copy(best, folder / NAME)


def _copy(source: Path, target: Path) -> None:
    """By hard links where the disk has them: the weights in there are never written again."""

    def link_or_copy(file: str, copy: str) -> None:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)

    shutil.copytree(source, target, copy_function=link_or_copy, symlinks=True, dirs_exist_ok=True)


def _describe(tmp: Path, evaluation: Evaluation) -> None:
    (tmp / FILE).write_text(json.dumps(asdict(evaluation), indent=2) + "\n")
    checksums.write(tmp)


def _fit(run_folder: Path, checkpoint: Path, epoch: int) -> tuple[Evaluation | None, str]:
    """What the folder holds once it fits a checkpoint, and what to tell the user."""
    folder, stored = run_folder / NAME, checkpoint / NAME
    folders.recover(folder)
    best, damage = _look(folder)
    if best and best.epoch <= epoch:
        return best, ""
    best, damage_of_stored = _look(stored)
    if best:
        with folders.published(folder, replaces=True) as scratch:
            _copy(stored, scratch)
    elif damage or damage_of_stored:
        sentence = f"{stored if damage_of_stored else folder} is damaged: {damage_of_stored or damage}"
        aside = f"; {folder} is now {_set_aside(run_folder, f'{NAME}_damaged')}" if folder.exists() else ""
        return None, sentence + aside
    elif folder.exists():
        folders.remove(folder)
    return best, ""


def _look(folder: Path) -> tuple[Evaluation | None, str]:
    """The evaluation in a folder, None without the folder; and what is wrong with the folder, "" for nothing."""
    if not folder.exists():
        return None, ""
    damage = checksums.damage(folder)
    return (None, damage) if damage else (folders.read_record(Evaluation, folder / FILE), "")


def _set_aside(run_folder: Path, name: str) -> Path:
    """Give the folder another name: `name`, or name-2, and so on."""
    return (run_folder / NAME).replace(folders.take(run_folder / name))
