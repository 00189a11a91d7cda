"""Where a run writes, and what it goes on from."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.checkpoints import best, checkpoints
from flow_grpo.evaluation.evaluation import evaluates
from flow_grpo.monitoring import dashboard
from flow_grpo.run import fingerprint, health_actions
from flow_grpo.run.fingerprint import Inputs
from flow_grpo.run.run import Run
from flow_grpo.run.save import best_candidate, load_state, save
from flow_grpo.settings import older, table


class Place(NamedTuple):
    """Where a run writes and what it goes on from."""

    folder: Path
    checkpoint: Path | None
    rewinds: bool  # whether epochs that have checkpoints are given up
    inputs: Inputs


class Source(NamedTuple):
    """What config.resume_from means."""

    folder: Path  # the run's
    path: Path | None  # a checkpoint, or a folder of them; None = a new run


def take_folder(config: ConfigDict) -> Place:
    """Where this run writes, locked, and what it resumes from. A new run never writes into the folder of an older one.

    Raises UserError for a folder that another run is writing to or that cannot be made, and for a checkpoint that is
    not there, is damaged, or is of another config or another run. No other folder has been touched then.
    """
    first = Path(config.output_dir, config.run_name or config.name)
    folder, path = _source(first, config.resume_from)
    notice = folders.lock(folder)
    folders.own_files(folder)
    checkpoint, lines = checkpoints.choose(path) if path else (None, [])
    if path and not checkpoint:
        raise UserError(f"config.resume_from: {path} is there no more: another run has removed it")
    later, stored, epoch = [], None, 0
    if checkpoint:
        _check_name(checkpoint / "config.json", first)
        compare_configs(checkpoint, config)
        stored, epoch = fingerprint.read(folder), checkpoints.read_progress(checkpoint).epoch
        later = _later(folder, path, epoch)
    read_now, changes = fingerprint.compare(stored, fingerprint.of(config, folder), epoch, config.accept_changes)
    fingerprint.write(folder, read_now)
    lines.append(f"the run {f'goes on from {checkpoint.name}' if checkpoint else 'begins'} in {folder}")
    if later:
        names = ", ".join(path.name for path in later)
        lines.append(f"what came after {checkpoint.name} is given up: {names} and these epochs' lines of metrics.jsonl")
    for line in [notice, *lines, *changes]:
        dashboard.say(line)
    return Place(folder, checkpoint, bool(later), read_now)


def _source(first: Path, resume_from: str) -> Source:
    """Raises UserError unless config.resume_from is "", "latest", or a path in a folder of this very run."""
    if not resume_from:
        return Source(folders.take(first), None)
    for folder in folders.family(first):
        if not folder.is_dir():
            raise UserError(f"config.resume_from: {folder} is no folder")
        _check_links(folder)
    if resume_from == "latest":
        return _latest(first)
    path = Path(os.path.realpath(resume_from))
    if checkpoints.find(path) is None:
        expected = "a folder like epoch_000010, or one that holds such folders"
        raise UserError(f"config.resume_from: no checkpoint at {path}: expected {expected}")
    for folder in folders.family(first):
        if _holds(folder, path):
            _check_name(folder / "config.json", first)
            return Source(folder, path)
    raise UserError(f"config.resume_from: {path} is {_description(path)}, but this run writes to {first}")


def _latest(first: Path) -> Source:
    """The newest folder of the run that has a checkpoint; otherwise the newest without one, or a new one."""
    family = {folder: _name(folder / "config.json") for folder in folders.family(first)}
    begun = [folder for folder in family if checkpoints.find(folder / "checkpoints")]
    for folder in begun:
        if folder == first or not family[folder]:
            _check_name(folder / "config.json", first)
    if own := [folder for folder in begun if family[folder] == first.name]:
        return Source(own[-1], own[-1] / "checkpoints")
    others = [folder for folder in family if folder not in begun]
    own = [folder for folder in others if family[folder] == first.name]
    own = own or [folder for folder in others if folders.is_unused(folder)]
    return Source(own[-1] if own else folders.take(first), None)


def _holds(folder: Path, path: Path) -> bool:
    """Whether a path without links is where a run of this folder keeps its checkpoints, or is one of these."""
    places = [Path(os.path.realpath(place)) for place in (folder / "checkpoints", folder / best.NAME / best.STATE)]
    return path in places or path.parent in places


def _check_links(folder: Path) -> None:
    """Raises UserError where a run would read what is no folder, or write through a link into another run's."""
    own = folder.resolve()
    for path in (folder / name for name in ("checkpoints", *folders.FOLDERS)):
        if path.name == "checkpoints" and os.path.lexists(path) and not path.is_dir():
            raise UserError(f"{path} is no folder, so there is nothing to go on from; put the run's checkpoints there")
        target = Path(os.path.realpath(path))
        for other in (target, *target.parents[:2]):
            if not own.is_relative_to(other) and _name(other / "config.json"):
                raise UserError(f"{path} is a link into another run's folder, {other}; remove the link")


def _name(config_file: Path) -> str:
    """Of the run that wrote a config.json; "" where no run has."""
    try:
        stored = folders.read_json(config_file)
    except ValueError:
        return ""
    name = stored.get("run_name") or stored.get("name") if "output_dir" in stored else ""
    return Path(name).name if isinstance(name, str) else ""


def _check_name(config_file: Path, first: Path) -> None:
    """Raises UserError unless a config.json in a run's folder is of a run of the same name."""
    if name := _name(config_file):
        if name != first.name:
            raise UserError(
                f"config.resume_from: {config_file.parent} is of the run {name}, and this one is {first.name}; "
                f"--config.run_name={name} goes on with it, or begin a run from its weights by config.lora.path"
            )
    else:
        raise UserError(
            f"config.resume_from: {config_file} is no run's config, so {config_file.parent} may be anybody's; if it is "
            "this run's folder, copy config.json from a checkpoint of it"
        )


def _description(path: Path) -> str:
    """Of what is in no folder of this run, with the way to go on from it, if there is one."""
    for folder in path.parents[:3]:
        if (name := _name(folder / "config.json")) and _holds(folder, path):
            if folder in folders.family(folder.with_name(name)):
                flags = f"--config.output_dir={folder.parent} --config.run_name={name}"
                return f"of the run in {folder}, with which {flags} goes on"
            return f"of the run {name}, whose folder was renamed to {folder}"
    return "in no folder that a run has written"


def _later(folder: Path, path: Path, epoch: int) -> list[Path]:
    """Checkpoints after the one that config.resume_from names; none where it leaves the choice."""
    if os.path.realpath(path) == os.path.realpath(folder / "checkpoints"):
        return []
    return checkpoints.later(folder / "checkpoints", epoch)


def compare_configs(checkpoint: Path, config: ConfigDict) -> None:
    """Raises UserError with the keys in which a checkpoint's config differs, of those that must not. Settings that are
    younger than the checkpoint had their defaults."""
    file = checkpoint / "config.json"
    stored = table.flat(ConfigDict(older.with_defaults(folders.read_json(file), file)))
    current = table.flat(ConfigDict(json.loads(json.dumps(config.to_dict()))))
    keys = [key for key in sorted(stored.keys() | current.keys()) if stored.get(key, ...) != current.get(key, ...)]
    if keys := [key for key in keys if table.is_fixed(key)]:
        changes = ", ".join(f"{key}: {stored.get(key, 'absent')} -> {current.get(key, 'absent')}" for key in keys)
        advice = "restore these, or start a new run, for example from this run's LoRA by config.lora.path"
        raise UserError(f"{checkpoint} comes from another config ({changes}); {advice}")


def resume(run: Run, place: Place) -> None:
    """Go on as if nothing had happened: randomness is named by epoch, so weights and counters are all there is."""
    progress = load_state(run, place.checkpoint)
    run.epoch, run.step, run.saved_epoch = progress.epoch, progress.step, progress.epoch
    run.learning_rate_factor = progress.learning_rate_factor
    run.num_roll_backs = progress.num_roll_backs
    if evaluates(run.config):
        restored = best.restore(run.folder, place.checkpoint, best_candidate(run, run.epoch, {}), place.rewinds)
        run.best_evaluation, run.evaluations_since = restored.best, restored.since
        run.board.say(restored.notice)
    health_actions.resume(run)
    if place.rewinds:
        save(run)  # the newest checkpoint; those of later epochs go with it
