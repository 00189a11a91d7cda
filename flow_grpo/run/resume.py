"""Folder of a run, and resuming from its own newest checkpoint or, as a branch, from one of another run."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flow_grpo.base import distributed, folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, quoted
from flow_grpo.checkpoints import best, checkpoints
from flow_grpo.command_line import checks
from flow_grpo.data.prompts import PromptFile
from flow_grpo.monitoring import dashboard, provenance
from flow_grpo.monitoring.plots import read_metrics
from flow_grpo.run import input_files
from flow_grpo.run.input_files import Inputs
from flow_grpo.run.run import Run
from flow_grpo.run.save import best_candidate, load_state, save
from flow_grpo.settings import stored_config, table
from flow_grpo.settings.sections import Config


class Place(NamedTuple):
    """Folder that a run writes into, and the checkpoint that it goes on from."""

    folder: Path
    checkpoint: Path | None
    parent: Path | None  # folder of the run that this one branches off
    inputs: Inputs  # of a new run without those of its model's folder
    changed: dict[str, tuple]  # a branch's settings that differ from its parent's: key -> (there, here)
    kept_settings: dict[str, Any]  # those of the checkpoint that a resumed run goes on with, whatever its config says
    has_other_rewards: bool = False  # than the checkpoint's run: other settings that decide scores, or other files

    def absolute(self) -> "Place":
        """Return the same place by absolute paths: rewards may change the working directory."""
        return self._replace(
            folder=self.folder.absolute(),
            checkpoint=self.checkpoint.absolute() if self.checkpoint else None,
            parent=self.parent.absolute() if self.parent else None,
        )


class StartingPoint(NamedTuple):
    """Folder that a run writes into, and what it goes on from, as config.resume_from names them."""

    folder: Path
    path: Path | None = None  # a checkpoint, or a folder of them; None = a new run
    parent: Path | None = None  # folder of another run, whose checkpoint it is


def take_folder(config: Config, prompt_files: Sequence[PromptFile] = ()) -> Place:
    """Choose the folder that this run writes into, lock it, and choose the checkpoint that it goes on from.

    A run never writes into the folder of another one: a run that goes on from another run's checkpoint is a branch, in
    a folder of its own.

    Args:
        prompt_files: opened files of config.dataset, to be compared with those that the checkpoint's run read.

    Raises:
        UserError: another run is writing into the folder, or it cannot be made; the checkpoint is not there, is
            damaged, or does not fit this config. No other folder has been touched then.
    """
    first = Path(config.output_dir, config.run_name or config.name)
    point = _find_starting_point(first, config.resume_from)
    dashboard.say(folders.lock(point.folder))

    # Until the lock was ours, another process may have written a newer checkpoint here.
    if config.resume_from == "latest":
        point = _latest_starting_point(point.folder)
    with folders.released_on_error(point.folder):
        if point.path is None:
            return _begin(config, point.folder, prompt_files)
        return _go_on(config, point.folder, point.path, point.parent, prompt_files)


def _begin(config: Config, folder: Path, prompt_files: Sequence[PromptFile]) -> Place:
    """Begin a new run. There is nothing to compare its model's files with, so their digests can wait until it is
    loaded."""
    checks.check_step_weight(config)
    inputs = input_files.current_inputs(config, folder, prompt_files, reads_model=False)
    dashboard.say(f"the run begins in {folder}")
    return Place(folder, checkpoint=None, parent=None, inputs=inputs, changed={}, kept_settings={})


def _go_on(config: Config, folder: Path, path: Path, parent: Path | None, prompt_files: Sequence[PromptFile]) -> Place:
    """Find the checkpoint at `path` that the run goes on from, or a branch of `parent` begins with. Note in the run's
    folder the digests of what it reads. Raise UserError for a checkpoint that does not fit this config."""
    if parent:
        # At once, so that `latest` knows a branch that is killed while its files are compared.
        _write_parent(folder, parent, path)
    checkpoint, lines = checkpoints.choose(path)
    if checkpoint is None:
        raise UserError(f"config.resume_from: {path} no longer exists: another run has removed it")
    epoch = checkpoints.read_progress(checkpoint).epoch

    # Settings first, then files.
    changes = _changes_since(checkpoint, config, parent)
    lines += changes.sentences(config)
    if parent:
        _check_inherited(checkpoint, changes.changed)
        lines.append(_write_parent(folder, parent, checkpoint, epoch, changes.changed | changes.rescheduled))
    else:
        _check_same_run(folder, path, checkpoint, changes.changed)
    inputs, notices, changed_rewards = _compared_inputs(config, folder, parent, prompt_files, epoch)
    if changes.changed:
        # Health compares no rewards of other settings.
        inputs = inputs._replace(rewards_since=epoch)
    input_files.write_inputs(folder, inputs)

    if changes.rescheduled:
        notices.append(f"{_arrows(changes.rescheduled)} changes the learning rate, which falls over all epochs")
    begins = "begins" if parent else f"goes on from {checkpoint.name}"
    for line in [*lines, f"the run {begins} in {folder}", *notices]:
        dashboard.say(line)
    has_other_rewards = bool(changed_rewards) or any(map(table.decides_scores, changes.changed))
    return Place(folder, checkpoint, parent, inputs, changes.changed, changes.kept_settings, has_other_rewards)


class _Changes(NamedTuple):
    """Settings in which a config differs from that of the checkpoint it goes on from, by dotted name."""

    changed: dict[str, tuple]  # (there, here), without those of the other two
    kept_settings: dict[str, Any]  # the checkpoint's values, with which a resumed run goes on
    rescheduled: dict[str, tuple]  # (there, here), where it moves the learning rate of each epoch

    def sentences(self, config: Config) -> list[str]:
        """Say which settings a resumed run keeps."""
        sentences = []
        for key, before in self.kept_settings.items():
            now = table.value_of(config, key)
            sentences.append(
                f"goes on with config.{key} {before!r}, with which the run began; a new run of this config has {now!r}"
            )
        return sentences


def _changes_since(checkpoint: Path, config: Config, parent: Path | None) -> _Changes:
    """Compare a config with a checkpoint's. Raises UserError if the weight of branching steps is chosen neither by the
    config nor by a checkpoint of this run."""
    file = checkpoint / "config.json"
    stored = folders.read_json(file)
    # Before `changes`, which fills what older settings lack into `stored`.
    rescheduled = _rescheduled(stored, config)
    differing = stored_config.changes(stored, config.to_dict(), file)
    kept_settings = {} if parent else stored_config.kept_settings(differing)
    if "train.step_weight" not in kept_settings:
        checks.check_step_weight(config)
    changed = {key: pair for key, pair in differing.items() if key not in kept_settings}
    return _Changes(changed, kept_settings, rescheduled)


def _check_same_run(folder: Path, path: Path, checkpoint: Path, changed: dict[str, tuple]) -> None:
    """Raise UserError if a run could not go on in its folder from its checkpoint at `path`."""
    _check_links(folder)
    _check_writable(folder)
    _check_unchanged(checkpoint, changed)
    _check_newest(folder, path, checkpoint)


def _rescheduled(stored: dict[str, Any], config: Config) -> dict[str, tuple]:
    """Return num_epochs before and now, by its key, if another number changes the learning rate of each epoch."""
    if config.train.learning_rate_schedule == "constant":
        return {}
    before = stored.get("num_epochs")
    if before == config.num_epochs:
        return {}
    return {"num_epochs": (before, config.num_epochs)}


def _compared_inputs(
    config: Config, folder: Path, parent: Path | None, prompt_files: Sequence[PromptFile], epoch: int
) -> tuple[Inputs, list[str], list[str]]:
    """Return what the run reads, compared with what it or its parent has read, notices for the user, and the rewards
    whose files have changed."""
    current = input_files.current_inputs(config, folder, prompt_files)
    stored = input_files.stored_inputs(parent or folder)
    inputs, notices = input_files.compare_inputs(
        stored, current, epoch, config.accept_changes, is_branch=parent is not None
    )
    return inputs, notices, input_files.changed_rewards(stored, current)


def check_places(config: Config) -> None:
    """Raise UserError where a run could not make its folder or its cache, or not find the checkpoint that it is to go
    on from. Makes and locks nothing."""
    run_folder = Path(config.output_dir, config.run_name or config.name)
    places = {"output_dir": run_folder.parent, "cache_dir": Path(config.cache_dir)}
    if config.compile:
        places["compile_cache"] = Path(config.compile_cache)
    for key, wanted in places.items():
        value = getattr(config, key)
        folder = wanted.absolute()
        while not os.path.lexists(folder):
            folder = folder.parent
        if not folder.is_dir():
            raise UserError(f"config.{key} {quoted(value)}: {folder} is no folder")
    if config.resume_from not in ("", "latest"):
        _check_has_checkpoint(Path(os.path.realpath(config.resume_from)))


def _check_has_checkpoint(path: Path) -> None:
    if checkpoints.find_newest(path) is None:
        expected = "a folder like epoch_000010, or one that holds such folders"
        raise UserError(f"config.resume_from: no checkpoint at {path}: expected {expected}")


def _find_starting_point(first: Path, resume_from: str) -> StartingPoint:
    """Find what config.resume_from names, and find or make the folder of this run.

    Raises UserError unless resume_from is "", "latest", or a path in a folder of this run or of another.

    Args:
        first: the first folder of a run of this name; further ones have numbers.
    """
    if not resume_from:
        return StartingPoint(folders.make_new_folder(first))
    if resume_from == "latest":
        return StartingPoint(_latest_folder(first))
    path = Path(os.path.realpath(resume_from))
    _check_has_checkpoint(path)
    for folder in folders.numbered_folders(first):
        if _run_name(folder) == first.name and _holds(folder, path):
            return StartingPoint(folder, path)
    for folder in path.parents[:3]:
        if _run_name(folder) and _holds(folder, path):
            return StartingPoint(folders.make_new_folder(first), path, folder)
    raise UserError(f"config.resume_from: {path} is in no folder that a run has written")


def _latest_folder(first: Path) -> Path:
    """Find the newest folder of the run that has a checkpoint; otherwise the newest without one, or make one."""
    numbered = [folder for folder in folders.numbered_folders(first) if folder.is_dir()]
    of_this_run = [folder for folder in numbered if _run_name(folder) == first.name]
    if not of_this_run and checkpoints.find_newest(first / "checkpoints"):
        raise UserError(
            f"config.resume_from: {first} is of the run {_run_name(first) or 'of an unknown name'}, not of "
            f"{first.name}: correct config.run_name, or copy config.json from a checkpoint of the run"
        )
    with_checkpoint = [folder for folder in of_this_run if checkpoints.find_newest(folder / "checkpoints")]
    unused = [folder for folder in numbered if folders.is_unused(folder)]
    for choices in (with_checkpoint, of_this_run, unused):
        if choices:
            return choices[-1]
    return folders.make_new_folder(first)


def _latest_starting_point(folder: Path) -> StartingPoint:
    """Find the checkpoints of a run's own folder. A branch without a checkpoint begins again from its parent."""
    path = folder / "checkpoints"
    if os.path.lexists(path) and not path.is_dir():
        raise UserError(f"config.resume_from: {path} is no folder; put the run's checkpoints there")
    if checkpoints.find_newest(path):
        return StartingPoint(folder, path)
    parent = provenance.parent(folder)
    if parent is None:
        return StartingPoint(folder)
    checkpoint = Path(parent.checkpoint)
    if checkpoints.find_newest(checkpoint) is None:
        raise UserError(
            f"{folder} is a branch that never began, and its checkpoint {checkpoint} no longer exists; delete the "
            "folder, and branch off from another checkpoint"
        )
    return StartingPoint(folder, checkpoint, Path(parent.folder))


def _holds(folder: Path, path: Path) -> bool:
    """Return whether a path without links is one of the folder's checkpoints, or a folder of them."""
    for place in (folder / "checkpoints", folder / best.NAME / best.STATE):
        real_place = Path(os.path.realpath(place))
        if real_place in (path, path.parent):
            return True
    return False


def _check_links(folder: Path) -> None:
    """Raise UserError if the run would write through a link into another run's folder."""
    for name in ("checkpoints", best.NAME, "images", "transformer"):
        path = folder / name
        target = path.resolve()
        for other in (target, *target.parents[:2]):
            if not folder.resolve().is_relative_to(other) and _run_name(other):
                raise UserError(f"config.resume_from: {path} is a link into another run's folder, {other}; remove it")


def _check_writable(folder: Path) -> None:
    """Raise UserError if the run could not save, for example into a folder of another owner: now, and not after epochs
    that would be lost."""
    for name in ("checkpoints", "images", provenance.SOURCE):
        path = folder / name
        if path.is_dir():
            folders.check_writable(path)


def _run_name(folder: Path) -> str:
    """Name of the run that wrote a folder's config.json; "" if no run has."""
    try:
        stored = folders.read_json(folder / "config.json")
    except UserError:
        return ""
    if "output_dir" not in stored:
        return ""
    return Path(str(stored.get("run_name") or stored.get("name"))).name


def _arrows(changed: dict[str, tuple]) -> str:
    """Write changed settings as "key: before -> after"."""
    arrows = []
    for key, (before, after) in changed.items():
        today = after if stored_config.is_setting(key) else "no setting any more"
        arrows.append(f"{key}: {before} -> {today}")
    return ", ".join(arrows)


def _check_unchanged(checkpoint: Path, changed: dict[str, tuple]) -> None:
    """Raise UserError if a resumed run has changed settings."""
    if changed:
        can_be_restored = all(map(stored_config.is_setting, changed))
        way_out = "restore these" if can_be_restored else "go on with the version that wrote it"
        raise UserError(
            f"{checkpoint} comes from another config ({_arrows(changed)}); {way_out}, or branch off: another "
            f"--config.run_name with --config.resume_from={checkpoint}"
        )


def _check_inherited(checkpoint: Path, changed: dict[str, tuple]) -> None:
    """Raise UserError if a branch has changed settings that it inherits."""
    fixed = {key: pair for key, pair in changed.items() if key in input_files.INHERITED}
    if fixed:
        raise UserError(
            f"a branch trains the weights of {checkpoint} with their base and adapter, so these cannot change: "
            f"{_arrows(fixed)}; restore them, or start a new run, for example from a LoRA by config.lora.path"
        )


def _check_newest(folder: Path, path: Path, checkpoint: Path) -> None:
    """Raise UserError if config.resume_from names an older checkpoint: later ones would be destroyed."""
    newest = checkpoints.find_newest(folder / "checkpoints")
    if newest and newest.name > checkpoint.name and path.resolve() != newest.parent.resolve():
        raise UserError(
            f"config.resume_from: {folder} has a later checkpoint than {path}: {newest.name}; with another "
            "--config.run_name the same command branches off there"
        )


def _write_parent(folder: Path, parent: Path, checkpoint: Path, epoch: int = 0, changed: dict | None = None) -> str:
    """Note in its folder where a branch comes from. Returns the sentence for the user."""
    provenance.write_parent(folder, provenance.Parent(str(parent), str(checkpoint), epoch, changed or {}))
    sentence = f"a branch of {parent} after {counted(epoch, 'epochs')}"
    if changed:
        sentence += f", with {_arrows(changed)}"
    return sentence


def resume(run: Run, place: Place, checkpoint: Path) -> None:
    """Go on from a checkpoint as an unbroken run would. Random draws are named by their epoch, so weights and counters
    are all that has to be restored."""
    progress = load_state(run, checkpoint, exact=place.parent is None)
    run.epoch = run.saved_epoch = progress.epoch
    run.step = run.first_step = progress.step
    if "train.learning_rate" not in place.changed:
        run.learning_rate_factor = progress.learning_rate_factor
    run.num_roll_backs = progress.num_roll_backs
    run.evaluations_since = progress.evaluations_since
    # What was seen of a prompt does not count under other rewards.
    if run.prompt_signal and progress.prompt_signals and not place.has_other_rewards:
        run.prompt_signal.signals = dict(progress.prompt_signals)
    if run.config.evaluates:
        wanted = best_candidate(run, run.epoch, {})
        before = None
        if progress.evaluation:
            before = best.from_settings(progress.evaluation, checkpoint / "progress.json")
        restored = best.restore_best(run.folder, checkpoint, wanted, before)
        run.best_evaluation, run.evaluations_since, notice = restored
        run.board.say(notice)
    if place.parent:
        distributed.on_main(_copy_metrics, place, place.parent, run.evaluations_since)

        # From now on the branch resumes without its parent.
        save(run)


def _copy_metrics(place: Place, parent: Path, since: int) -> None:
    """Copy the metrics of a branch's parent, but for those that the branch's cannot be compared with: evaluations
    before epoch `since`, and losses on other pairs."""
    inputs = input_files.stored_inputs(parent)
    same_pairs = inputs is None or inputs.preferences_path == place.inputs.preferences_path
    text = ""
    for line in read_metrics(parent):
        if line["kind"] == "validation":
            is_comparable = same_pairs
        else:
            is_comparable = line["kind"] in ("update", "epoch") or line["epoch"] >= since
        if is_comparable:
            text += json.dumps(line) + "\n"
    folders.write_text(place.folder / "metrics.jsonl", text)
