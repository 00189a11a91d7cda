"""The folder of a run's best evaluation: the averaged weights as they were evaluated, and evaluation.json.

It is replaced as a whole: a kill at any moment leaves the old one or the new one, which `find` knows.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from flow_grpo import checkpoints, checksums, distributed, folders

NAME, FILE = "best", "evaluation.json"
STATE = "checkpoint"  # folder of the training state, where config.eval.keep_state asks for it


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

    def comparable(self, other: "Evaluation") -> bool:
        """Whether values of the two were measured alike."""
        same = ("split", "num_prompts", "noises_per_prompt", "num_steps", "guidance_scale", "best_by")
        return all(getattr(self, key) == getattr(other, key) for key in same)


def improves(evaluation: Evaluation, best: Evaluation | None) -> bool:
    """Whether it is the best so far. The first of equals stays; NaN and infinities never are."""
    return math.isfinite(evaluation.value) and (best is None or evaluation.value > best.value)


def find(run_folder: Path) -> Path | None:
    """The best evaluation's folder, whole; None if there is none."""
    paths = run_folder / NAME, run_folder / f".old-{NAME}"  # set aside while the new one comes
    return next((path for path in paths if (path / FILE).is_file()), None)


def read(run_folder: Path) -> Evaluation | None:
    """What was evaluated; None if there is none. Raises ValueError for a file that no run has written."""
    if (folder := find(run_folder)) is None:
        return None
    stored = folders.read_json(folder / FILE)
    kinds = {"epoch": int, "value": int | float, "figures": dict}
    if {*stored} != {*Evaluation.__annotations__} or not all(isinstance(stored[name], kinds[name]) for name in kinds):
        raise ValueError(f"{folder / FILE} is no record of an evaluation")
    return Evaluation(**stored)


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


def restore(run_folder: Path, checkpoint: Path, wanted: Evaluation) -> tuple[Evaluation | None, str]:
    """Make the folder what it was when a checkpoint was written: evaluations of an abandoned future go. Where the
    checkpoint's copy is damaged, the run is without a best evaluation until the next one.

    Args:
        wanted: an evaluation of the resumed run; a best one that was measured otherwise cannot be compared with it.

    Returns:
        The best evaluation; and what to tell the user, if anything.
    """
    problem, best = distributed.on_main(_restore, run_folder, checkpoint)
    if problem or best is None or best.comparable(wanted):
        return best, problem
    aside = run_folder / f"{NAME}_epoch_{best.epoch:06d}"
    distributed.on_main(_set_aside, run_folder, aside)
    return None, f"other settings of config.eval than before: the best policy so far is now in {aside}"


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


def _restore(run_folder: Path, checkpoint: Path) -> tuple[str, Evaluation | None]:
    """What is wrong with the checkpoint's copy, "" for nothing; the best evaluation."""
    tmp, stored = run_folder / f".tmp-{NAME}", checkpoint / NAME
    _start(run_folder, tmp)
    tmp.rmdir()
    of_best = checkpoint.resolve().is_relative_to((run_folder / NAME).resolve())
    source = run_folder / NAME if of_best else stored
    damage = checksums.damage(source) if os.path.lexists(source) else ""
    if not damage and not of_best:
        _replace(run_folder, tmp, stored)
    try:
        best = None if damage else read(run_folder)
    except ValueError as error:
        damage = str(error)
    if not damage:
        return "", best
    _set_aside(run_folder, aside := run_folder / f"{NAME}_damaged")
    return f"{source} is damaged: {damage}; {run_folder / NAME} is now {aside}", None


def _replace(run_folder: Path, tmp: Path, stored: Path) -> None:
    if stored.is_dir():
        _copy(stored, tmp)
        checkpoints.publish(tmp)
    elif (run_folder / NAME).exists():
        (run_folder / NAME).rename(tmp)  # half removed, it must not look whole
    for leftover in (tmp, run_folder / f".old-{NAME}"):
        folders.remove(leftover)


def _set_aside(run_folder: Path, aside: Path) -> None:
    folders.remove(aside)
    if (run_folder / NAME).exists():
        (run_folder / NAME).rename(aside)
