"""Where a run writes, and what it goes on from."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ml_collections import ConfigDict

from flow_grpo import best, checkpoints, dashboards, folders, settings, watching
from flow_grpo.evaluation import evaluates
from flow_grpo.saving import best_candidate, state

if TYPE_CHECKING:
    from flow_grpo.run import Run


class Place(NamedTuple):
    """Where a run writes and what it goes on from."""

    folder: Path
    checkpoint: Path | None


def take_folder(config: ConfigDict) -> Place:
    """Where this run writes, locked, and what it resumes from. A new run never writes into the folder of an older one.

    Raises ValueError for a folder that another run is writing to or that cannot be made, and for a checkpoint that is
    not there, is damaged, or is of another config.
    """
    first, which = Path(config.output_dir, config.run_name or config.name), config.resume_from
    if which in ("", "latest"):
        folder = folders.newest(first) if which else folders.take(first)
        if folder is None and not folders.make(folder := first):
            raise ValueError(f"config.resume_from: {first} is no folder")
        which = which and folder / "checkpoints"
    else:
        folder = _folder_of(_named(first, which))
    notices = [folders.lock(folder), *folders.clear_the_way(folder)]
    stored = folder / "checkpoints"
    if os.path.lexists(stored) and not stored.is_dir():
        raise ValueError(f"{stored} is no folder, so there is nothing to go on from; put the run's checkpoints there")
    checkpoint, damaged = checkpoints.choose(which) if which and Path(which).is_dir() else (None, [])
    if checkpoint:
        compare_configs(checkpoint, config)
    goes_on = f"goes on from {checkpoint.name}" if checkpoint else "begins"
    for line in [*notices, *damaged, f"the run {goes_on} in {folder}"]:
        dashboards.say(line)
    return Place(folder, checkpoint)


def compare_configs(checkpoint: Path, config: ConfigDict) -> None:
    """Raises ValueError with the keys in which a checkpoint's config differs, of those that must not. Settings that are
    younger than the checkpoint had their defaults."""
    file = checkpoint / "config.json"
    stored = settings.flat(ConfigDict(settings.with_defaults(folders.read_json(file), file)))
    current = settings.flat(ConfigDict(json.loads(json.dumps(config.to_dict()))))
    keys = [key for key in sorted(stored.keys() | current.keys()) if stored.get(key, ...) != current.get(key, ...)]
    keys = [key for key in keys if not any(key == k or key.startswith(k + ".") for k in settings.may_differ())]
    if keys:
        changes = ", ".join(f"{key}: {stored.get(key, 'absent')} -> {current.get(key, 'absent')}" for key in keys)
        advice = "restore these, or start a new run, for example from this run's LoRA by config.lora.path"
        raise ValueError(f"{checkpoint} comes from another config ({changes}); {advice}")


def _named(first: Path, which: str) -> Path:
    """The checkpoint that config.resume_from names."""
    try:
        return checkpoints.find(first, which)
    except ValueError as error:
        raise ValueError(f"config.resume_from: {error}") from error


def _folder_of(checkpoint: Path) -> Path:
    """The run's, whose "checkpoints", or best evaluation's state, a checkpoint lies in."""
    folder = checkpoint.parents[1]
    return folder.parent if folder.name == best.NAME else folder


def resume(run: "Run", checkpoint: Path) -> None:
    """Go on as if nothing had happened: randomness is named by epoch, so weights and counters are all there is."""
    progress = checkpoints.load(checkpoint, state(run))
    run.epoch, run.step, run.saved_epoch = progress.epoch, progress.step, progress.epoch
    run.learning_rate_factor, run.learning_rate_ceiling = progress.learning_rate_factor, progress.learning_rate_ceiling
    run.num_roll_backs = progress.num_roll_backs
    if evaluates(run.config):
        candidate = best_candidate(run, run.epoch, {})
        run.best_evaluation, notice = best.restore(run.folder, checkpoint, candidate)
        if notice:
            run.board.say(notice)
    watching.resume(run)
