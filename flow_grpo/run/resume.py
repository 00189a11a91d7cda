"""Where a run writes, and what it goes on from: its own newest checkpoint, or, as a branch, one of another run."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from flow_grpo.base import distributed, folders
from flow_grpo.base.errors import UserError
from flow_grpo.checkpoints import best, checkpoints
from flow_grpo.command_line import checks
from flow_grpo.command_line.checks import evaluates
from flow_grpo.data.prompts import PromptFile
from flow_grpo.monitoring import dashboard, provenance
from flow_grpo.monitoring.plots import read_metrics
from flow_grpo.run import input_files
from flow_grpo.run.input_files import Inputs
from flow_grpo.run.run import Run
from flow_grpo.run.save import best_candidate, load_state, save
from flow_grpo.settings import stored_config, table


class Place(NamedTuple):
    """Where a run writes and what it goes on from."""

    folder: Path
    checkpoint: Path | None
    parent: Path | None  # folder of the run that this one branches off
    inputs: Inputs
    changed: dict[str, tuple]  # a branch's settings that differ from its parent's: key -> (there, here)
    kept: dict[str, Any]  # settings of the checkpoint that a resumed run goes on with, whatever its config says

    def absolute(self) -> "Place":
        """The same place, which is found whatever the working directory is then: rewards may change it."""
        paths = {name: path.absolute() for name, path in self._asdict().items() if isinstance(path, Path)}
        return self._replace(**paths)


class Source(NamedTuple):
    """What config.resume_from means."""

    folder: Path  # the run's
    path: Path | None = None  # a checkpoint, or a folder of them; None = a new run
    parent: Path | None = None  # folder of another run, whose checkpoint it is


# Settings that a branch cannot change.
INHERITED = "model", "model_class", "lora.rank", "lora.alpha", "lora.path", "lora.targets"


def take_folder(config: ConfigDict, prompt_files: Sequence[PromptFile] = ()) -> Place:
    """Where this run writes, locked, and what it goes on from. A run never writes into the folder of another one: what
    goes on from another run's checkpoint is a branch, with a folder of its own.

    Args:
        prompt_files: those of config.dataset that the run has opened.

    Raises UserError for a folder that another run is writing to or that cannot be made, and for a checkpoint that is
    not there, is damaged, or does not fit this config. No other folder has been touched then.
    """
    first = Path(config.output_dir, config.run_name or config.name)
    source = _source(first, config.resume_from)
    dashboard.say(folders.lock(source.folder))
    if config.resume_from == "latest":
        source = _latest(source.folder)
    with folders.released_on_error(source.folder):
        return _check_source(config, source, prompt_files)


def _check_source(config: ConfigDict, source: Source, prompt_files: Sequence[PromptFile]) -> Place:
    """Raises UserError unless the run can go on from its source; notes in its folder what it reads."""
    folder, path, parent = source
    if parent:  # at once: `latest` shall know a branch that is killed while files are compared
        _write_parent(folder, parent, path)
    checkpoint, lines = checkpoints.choose(path) if path else (None, [])
    if path and not checkpoint:
        raise UserError(f"config.resume_from: {path} is there no more: another run has removed it")
    epoch, changed, rescheduled = _changes(checkpoint, config)
    kept = _kept(config, source, changed)
    changed = {key: pair for key, pair in changed.items() if key not in kept}
    lines += [_kept_sentence(key, before, table.value_of(config, key)) for key, before in kept.items()]
    if parent:
        _check_inherited(checkpoint, changed)
        lines.append(_write_parent(folder, parent, checkpoint, epoch, changed | rescheduled))
    elif checkpoint:
        _check_links(folder)
        _check_writable(folder)
        _check_unchanged(checkpoint, changed)
        _check_newest(folder, path, checkpoint)
    inputs, notices = _inputs(config, source, prompt_files, epoch)
    if changed:  # so that health compares no rewards of other settings
        inputs = inputs._replace(rewards_since=epoch)
    input_files.write_inputs(folder, inputs)
    begins = f"goes on from {checkpoint.name}" if checkpoint and not parent else "begins"
    if rescheduled:
        notices.append(f"{_words(rescheduled)} changes the learning rate, which falls over all epochs")
    for line in [*lines, f"the run {begins} in {folder}", *notices]:
        dashboard.say(line)
    return Place(folder, checkpoint, parent, inputs, changed, kept)


def _kept(config: ConfigDict, source: Source, changed: dict[str, tuple]) -> dict[str, Any]:
    """The settings that a resumed run keeps as its checkpoint has them. Raises UserError where the weight of branching
    steps is chosen neither by the config nor by a checkpoint of this run."""
    kept = {} if source.parent else stored_config.kept(changed)
    if "train.step_weight" not in kept:
        checks.check_step_weight(config)
    return kept


def _kept_sentence(key: str, before: Any, now: Any) -> str:
    return f"goes on with config.{key} {before!r}, with which the run began; a new run of this config has {now!r}"


def _changes(checkpoint: Path | None, config: ConfigDict) -> tuple[int, dict[str, tuple], dict[str, tuple]]:
    """Epochs completed at a checkpoint, `stored_config.changes`, and num_epochs where another number changes the
    learning rate."""
    if checkpoint is None:
        return 0, {}, {}
    stored = folders.read_json(file := checkpoint / "config.json")
    before, now = stored.get("num_epochs"), config.num_epochs
    falls = config.train.learning_rate_schedule != "constant"
    rescheduled = {"num_epochs": (before, now)} if falls and before != now else {}
    changed = stored_config.changes(stored, config.to_dict(), file)
    return checkpoints.read_progress(checkpoint).epoch, changed, rescheduled


def _inputs(
    config: ConfigDict, source: Source, prompt_files: Sequence[PromptFile], epoch: int
) -> tuple[Inputs, list[str]]:
    """Return what the run reads, and what to tell the user."""
    current = input_files.current_inputs(config, source.folder, prompt_files)
    stored = input_files.stored_inputs(source.parent or source.folder) if source.path else None
    return input_files.compare_inputs(
        stored, current, epoch, config.accept_changes, is_branch=source.parent is not None
    )


def _source(first: Path, resume_from: str) -> Source:
    """Raises UserError unless config.resume_from is "", "latest", or a path in a folder of this run or of another."""
    if not resume_from:
        return Source(folders.make_new_folder(first))
    if resume_from == "latest":
        return Source(_latest_folder(first))
    path = Path(os.path.realpath(resume_from))
    if checkpoints.find_newest(path) is None:
        expected = "a folder like epoch_000010, or one that holds such folders"
        raise UserError(f"config.resume_from: no checkpoint at {path}: expected {expected}")
    for folder in folders.numbered_folders(first):
        if _name(folder) == first.name and _holds(folder, path):
            return Source(folder, path)
    for folder in path.parents[:3]:
        if _name(folder) and _holds(folder, path):
            return Source(folders.make_new_folder(first), path, folder)
    raise UserError(f"config.resume_from: {path} is in no folder that a run has written")


def _latest_folder(first: Path) -> Path:
    """The newest folder of the run that has a checkpoint; otherwise the newest without one, or a new one."""
    family = [folder for folder in folders.numbered_folders(first) if folder.is_dir()]
    own = [folder for folder in family if _name(folder) == first.name]
    begun = [folder for folder in own if checkpoints.find_newest(folder / "checkpoints")]
    if not own and checkpoints.find_newest(first / "checkpoints"):
        raise UserError(
            f"config.resume_from: {first} is of the run {_name(first) or 'of an unknown name'}, not of {first.name}: "
            "correct config.run_name, or copy config.json from a checkpoint of the run"
        )
    unused = [folder for folder in family if folders.is_unused(folder)]
    return (begun or own or unused or [folders.make_new_folder(first)])[-1]


def _latest(folder: Path) -> Source:
    """What a run's own folder has to go on from. A branch without a checkpoint begins again from its parent."""
    path = folder / "checkpoints"
    if os.path.lexists(path) and not path.is_dir():
        raise UserError(f"config.resume_from: {path} is no folder; put the run's checkpoints there")
    if checkpoints.find_newest(path):
        return Source(folder, path)
    parent = provenance.parent(folder)
    if parent is None:
        return Source(folder)
    checkpoint = Path(parent.checkpoint)
    if checkpoints.find_newest(checkpoint) is None:
        raise UserError(f"{folder} is a branch that never began, and its checkpoint {checkpoint} is there no more")
    return Source(folder, checkpoint, Path(parent.folder))


def _holds(folder: Path, path: Path) -> bool:
    """Whether a path without links is where a run of this folder keeps its checkpoints, or is one of these."""
    places = [Path(os.path.realpath(place)) for place in (folder / "checkpoints", folder / best.NAME / best.STATE)]
    return path in places or path.parent in places


def _check_links(folder: Path) -> None:
    """Raises UserError where a run would write through a link into another run's folder."""
    for path in (folder / name for name in ("checkpoints", best.NAME, "images", "transformer")):
        target = path.resolve()
        for other in (target, *target.parents[:2]):
            if not folder.resolve().is_relative_to(other) and _name(other):
                raise UserError(f"config.resume_from: {path} is a link into another run's folder, {other}; remove it")


def _check_writable(folder: Path) -> None:
    """Raises UserError where the run could not save, such as in a folder of another owner: now, not after the epochs
    that would then be lost."""
    for path in (folder / name for name in ("checkpoints", "images", provenance.SOURCE)):
        if path.is_dir():
            folders.check_writable(path)


def _name(folder: Path) -> str:
    """Of the run that wrote a folder's config.json; "" where no run has."""
    try:
        stored = folders.read_json(folder / "config.json")
    except UserError:
        return ""
    return Path(str(stored.get("run_name") or stored.get("name"))).name if "output_dir" in stored else ""


def _words(changed: dict[str, tuple]) -> str:
    return ", ".join(f"{key}: {before} -> {after}" for key, (before, after) in changed.items())


def _check_unchanged(checkpoint: Path, changed: dict[str, tuple]) -> None:
    if changed:
        raise UserError(
            f"{checkpoint} comes from another config ({_words(changed)}); restore these, or branch off: another "
            f"--config.run_name with --config.resume_from={checkpoint}"
        )


def _check_inherited(checkpoint: Path, changed: dict[str, tuple]) -> None:
    if fixed := {key: pair for key, pair in changed.items() if key in INHERITED}:
        raise UserError(
            f"a branch trains the weights of {checkpoint} with their base and adapter, so these cannot change: "
            f"{_words(fixed)}; restore them, or start a new run, for example from a LoRA by config.lora.path"
        )


def _check_newest(folder: Path, path: Path, checkpoint: Path) -> None:
    """Raises UserError where config.resume_from names an older checkpoint: what came later would be destroyed."""
    newest = checkpoints.find_newest(folder / "checkpoints")
    if newest and newest.name > checkpoint.name and path.resolve() != newest.parent.resolve():
        raise UserError(
            f"config.resume_from: {folder} has a later checkpoint than {path}: {newest.name}; with another "
            "--config.run_name the same command branches off there"
        )


def _write_parent(folder: Path, parent: Path, checkpoint: Path, epoch: int = 0, changed: dict | None = None) -> str:
    """Note where a branch comes from; the sentence for the user."""
    provenance.write_parent(folder, provenance.Parent(str(parent), str(checkpoint), epoch, changed or {}))
    return f"a branch of {parent} after {epoch} epochs" + (f", with {_words(changed)}" if changed else "")


def resume(run: Run, place: Place) -> None:
    """Go on as if nothing had happened: randomness is named by epoch, so weights and counters are all there is."""
    progress = load_state(run, place.checkpoint, exact=place.parent is None)
    run.epoch = run.saved_epoch = progress.epoch
    run.step = run.first_step = progress.step
    if "train.learning_rate" not in place.changed:
        run.learning_rate_factor = progress.learning_rate_factor
    run.num_roll_backs = progress.num_roll_backs
    run.evaluations_since = progress.evaluations_since
    if evaluates(run.config):
        wanted = best_candidate(run, run.epoch, {})
        before = None
        if progress.evaluation:
            before = best.from_settings(progress.evaluation, place.checkpoint / "progress.json")
        restored = best.restore_best(run.folder, place.checkpoint, wanted, before)
        run.best_evaluation, run.evaluations_since, notice = restored
        run.board.say(notice)
    if place.parent:
        distributed.on_main(_copy_metrics, place, run.evaluations_since)
        save(run)  # so that from now on the branch resumes without its parent


def _copy_metrics(place: Place, since: int) -> None:
    """Those of a branch's parent, but for figures that the branch's cannot be compared with: evaluations of before
    `since`, and losses on other pairs."""
    parent = input_files.stored_inputs(place.parent)
    same_pairs = parent is None or parent.preferences_path == place.inputs.preferences_path
    lines = []
    for line in read_metrics(place.parent):
        if line["kind"] == "validation":
            stays = same_pairs
        else:
            stays = line["kind"] in ("update", "epoch") or line["epoch"] >= since
        if stays:
            lines.append(line)
    folders.write_text(place.folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
