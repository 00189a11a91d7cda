"""The folder of a run's best evaluation: the averaged weights as they were evaluated, and evaluation.json.

It is replaced as a whole: a kill at any moment leaves the old folder or the new one, and `find_best` returns that one.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flow_grpo.base import checksums, distributed, folders
from flow_grpo.checkpoints import checkpoints

NAME = folders.BEST
FILE = "evaluation.json"
# Folder of the training state, if config.health.action is roll_back.
STATE = "checkpoint"
# Figure: how different a prompt's images are, as a share of that before training.
VARIETY = "variety"
# Outcome of an evaluation; its other fields say how and when it was made.
RESULTS = ("value", "figures")
# Fields that two evaluations must share for their values to be compared.
MEASURED_BY = (
    "split",
    "num_prompts",
    "noises_per_prompt",
    "num_steps",
    "guidance_scale",
    "best_by",
    "height",
    "width",
    "frames",
    "vae_precision",
    "weights",
    "solver",
)

# Inputs of older files that hold more than what decides figures -> the input that is compared in their place where both
# evaluations name it.
REPLACED_INPUTS = {
    "dataset": "evaluated prompts",
    "sources": "evaluated sources",
    "reward.args": "options of rewards",
}


@dataclass(frozen=True)
class Evaluation:
    """Content of evaluation.json."""

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
    frames: int = 1  # of a video; 1 = images
    vae_precision: str = ""
    weights: str = "exact"  # as sample.rollout_weights; those of older files were exact
    solver: str = ""  # of its shortcuts; "" = a forward for each step
    since: int = 0  # epochs completed at the first evaluation that can be compared with this one
    inputs: dict[str, str] = field(default_factory=dict)  # digests of what else decides figures, as far as is known

    def comparable(self, other: "Evaluation") -> bool:
        """Return whether the two values were measured alike, as far as is known."""
        for name in MEASURED_BY:
            if getattr(self, name) != getattr(other, name):
                return False
        # An older file names fewer inputs. What only one of the two names cannot be compared.
        common = self.inputs.keys() & other.inputs.keys()
        for name in common:
            is_replaced = REPLACED_INPUTS.get(name) in common
            if not is_replaced and self.inputs[name] != other.inputs[name]:
                return False
        return True


class Restored(NamedTuple):
    """State of the best evaluation of a run that resumes."""

    best: Evaluation | None
    since: int  # epochs completed at the first evaluation that can be compared with those to come
    notice: str  # for the user; "" = nothing to say


def settings_of(evaluation: Evaluation) -> dict[str, Any]:
    """Return how evaluations are made, for a checkpoint: its run may have no best one when it resumes."""
    return {name: value for name, value in asdict(evaluation).items() if name not in RESULTS}


def from_settings(settings: dict[str, Any], path: Path) -> Evaluation:
    """Return an evaluation without results from the fields of `settings_of`.

    Raises UserError, which names the file at `path`, where the fields are not those of an evaluation.
    """
    return folders.record_of(Evaluation, settings | {"value": math.nan, "figures": {}}, path)


def improves(evaluation: Evaluation, best: Evaluation | None, min_variety: float = 0.0) -> bool:
    """Return whether an evaluation is the best so far. A tie keeps the earlier one; NaN and infinities never win.

    Args:
        min_variety: as config.eval.min_variety. A best evaluation with less, which a resumed run has from before the
            setting was changed, gives way to any that has enough.
    """
    if not math.isfinite(evaluation.value) or not is_varied(evaluation.figures.get(VARIETY), min_variety):
        return False
    if best is None or not is_varied(best.figures.get(VARIETY), min_variety):
        return True
    return evaluation.value > best.value


def is_varied(variety: float | None, min_variety: float) -> bool:
    """Return whether an evaluation has the variety that config.eval.min_variety asks for; None = none was measured."""
    if not min_variety:
        return True
    return variety is not None and variety >= min_variety


def find_best(run_folder: Path) -> Path | None:
    """Return the complete folder of the best evaluation, or None if there is none."""
    folder = run_folder / NAME
    for path in (folder, folders.replaced_at(folder)):
        if (path / FILE).is_file():
            return path
    return None


def read_best(run_folder: Path) -> Evaluation | None:
    """Return the best evaluation, or None if there is none. Raises UserError for a file that no run has written."""
    folder = find_best(run_folder)
    if folder is None:
        return None
    return folders.read_record(Evaluation, folder / FILE)


def caution(weights: Path) -> str:
    """Return a sentence if a folder is best/ of a run in which nothing was better than before training; else ""."""
    if weights.name != NAME or not (weights / FILE).is_file():
        return ""
    evaluation = folders.read_record(Evaluation, weights / FILE)
    if evaluation.epoch:
        return ""
    return f"{weights} holds the weights from before training: no later evaluation of its run was better"


def write_best(run_folder: Path, evaluation: Evaluation, save_weights: Callable[[Path], None]) -> None:
    """Replace the folder; every rank calls, and `save_weights` writes the weights into the folder that it is given.

    A failure leaves the old folder intact.
    """
    with checkpoints.replaced(run_folder / NAME) as scratch:
        save_weights(scratch)
        distributed.on_main(_write_evaluation, scratch, evaluation)


def restore_best(run_folder: Path, checkpoint: Path, wanted: Evaluation, before: Evaluation | None = None) -> Restored:
    """Make the folder fit a checkpoint. A best evaluation of later epochs goes: the resumed run makes them again.

    If the checkpoint's copy is damaged, the run has no best evaluation until the next one. A best evaluation that was
    measured otherwise than `wanted`, an evaluation of the resumed run, is set aside. `wanted.since` comes from the
    checkpoint; a best evaluation in the folder may be of an older version, whose checkpoints did not store it.

    Args:
        before: how evaluations were made until the checkpoint, whether or not a best one is there; None where an
            older version wrote the checkpoint.
    """
    best, notice = distributed.on_main(_fit, run_folder, checkpoint, wanted.epoch)
    since = wanted.since
    if before and not before.comparable(wanted):
        since = wanted.epoch
    elif best:
        since = max(since, best.since)
    if best is None or best.comparable(wanted):
        return Restored(best, since, notice)
    aside = distributed.on_main(_set_aside, run_folder, f"{NAME}_epoch_{best.epoch:06d}")
    notice = f"the best policy so far was evaluated in another way than config.eval asks for; it is now in {aside}"
    return Restored(None, wanted.epoch, notice)


def link_best(run_folder: Path, checkpoint: Path) -> None:
    """Put the present best into a checkpoint, without a copy of its bytes; called on the main rank."""
    best = find_best(run_folder)
    if best is not None:
        _copy(best, checkpoint / NAME)


def _copy(source: Path, target: Path) -> None:
    """Copy a folder by hard links where the disk has them: the weights in it are never written again."""

    def link_or_copy(file: str, copy: str) -> None:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)

    shutil.copytree(source, target, copy_function=link_or_copy, symlinks=True, dirs_exist_ok=True)


def _write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Write evaluation.json, and the checksums of all files in a folder."""
    (folder / FILE).write_text(json.dumps(asdict(evaluation), indent=2) + "\n")
    checksums.write_checksums(folder)


def _fit(run_folder: Path, checkpoint: Path, epoch: int) -> tuple[Evaluation | None, str]:
    """Make the folder fit a checkpoint of `epoch`; return its evaluation and a sentence for the user."""
    folder = run_folder / NAME
    stored = checkpoint / NAME
    folders.recover(folder)
    present, damage = _inspect(folder)
    if present and present.epoch <= epoch:
        return present, ""
    best, damage_of_stored = _inspect(stored)
    if best:
        with folders.published(folder, replaces=True) as scratch:
            _copy(stored, scratch)
        return best, ""
    if damage_of_stored:
        sentence = f"{stored} is damaged: {damage_of_stored}"
    elif damage:
        sentence = f"{folder} is damaged: {damage}"
    else:
        # Until the checkpoint nothing was evaluated; what is there is of a later epoch.
        folders.remove(folder)
        return None, ""
    # Damaged weights may still be of use to their owner, so they are set aside and not removed.
    if folder.exists():
        sentence += f"; {folder} is now {_set_aside(run_folder, f'{NAME}_damaged')}"
    return None, sentence


def _inspect(folder: Path) -> tuple[Evaluation | None, str]:
    """Return the evaluation in a folder, None if there is none or it is damaged, and the damage, "" for none."""
    if not folder.exists():
        return None, ""
    damage = checksums.damage(folder)
    if damage:
        return None, damage
    return folders.read_record(Evaluation, folder / FILE), ""


def _set_aside(run_folder: Path, name: str) -> Path:
    """Rename the folder to `name`, or to name-2, name-3 and so on if that is taken; return its new path."""
    new_folder = folders.make_new_folder(run_folder / name)
    return (run_folder / NAME).replace(new_folder)
