"""Files that a run reads: digests of its data set, base, adapters, pairs and local rewards, kept in inputs.json.

A resumed run compares them. Reward servers, and weights that a reward loads, are not compared.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import try_to_load_from_cache
from ml_collections import ConfigDict

from flow_grpo import rewards
from flow_grpo.base import checksums, folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.data import preferences
from flow_grpo.data.prompts import PromptFile
from flow_grpo.monitoring import provenance
from flow_grpo.weights import lora_files

PARTS = ("model_index.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors", "*/*.bin")  # of a pipeline's folder

PLACES = {  # part of a run's inputs that may not change -> where the config names it
    "dataset": "config.dataset",
    "model": "config.model",
    "lora_path": "config.lora.path",
    "preferences_path": "config.preferences.path",
    "train_teachers": "config.train.teachers",
    "sources": "sources of config.dataset",
}
FREE_IN_BRANCH = "dataset", "preferences_path", "sources"


class Inputs(NamedTuple):
    """Name of a file -> digest of what it holds; {} where there is nothing to compare."""

    dataset: dict[str, str]
    model: dict[str, str]  # of a hub id, "commit" alone
    lora_path: dict[str, str]
    preferences_path: dict[str, str]
    rewards: dict[str, str]  # name of a reward -> digest of its file; "NAME (FILE)" -> of what it may have imported
    rewards_since: int = 0  # epochs completed when any of these files, or a branch's settings, changed last
    train_teachers: dict[str, str] = {}  # noqa: RUF012  by folder and file; nothing writes to it
    sources: dict[str, str] | None = None  # pictures to be edited that the data set names; None = not known

    def of_figures(self) -> dict[str, str]:
        """What decides the figures of an evaluation, but for the policy: name -> digest."""
        parts = {"dataset": self.dataset, "model": self.model, "sources": self.sources}
        digests = {
            name: hashlib.blake2b(json.dumps(part).encode(), digest_size=16) for name, part in parts.items() if part
        }
        return {name: digest.hexdigest() for name, digest in digests.items()} | self.rewards


def current_inputs(config: ConfigDict, run_folder: Path, prompt_files: Sequence[PromptFile] = ()) -> Inputs:
    """Return digests of what a run of this config reads now. `prompt_files`: those of its data set that it opened."""
    has_cache = config.cache_dir and Path(config.cache_dir).is_dir()
    memory = Path(config.cache_dir if has_cache else run_folder, folders.DIGESTS)
    served = [name for name, args in config.reward.args.items() if args.get("url")]
    sources = {name: rewards.reward_file(name) for name in {*config.reward_fn, *config.eval.rewards} - {*served}}
    sources = {name: file for name, file in sorted(sources.items()) if file}
    neighbours = {
        f"{name} ({place})": path
        for name, file in sources.items()
        for place, path in provenance.modules_beside(file).items()
        if path not in sources.values()
    }
    return Inputs(
        dataset=checksums.file_digests({file.path.name: file.path for file in prompt_files}, memory),
        model=_model(locations.resolve(config.model), memory),
        lora_path=_adapter(config.lora.path, memory),
        preferences_path=_pairs(config.preferences.path, memory),
        rewards=checksums.file_digests(sources | neighbours, memory),
        train_teachers={
            f"{folder}/{name}": digest
            for folder in config.train.teachers
            for name, digest in _adapter(folder, memory).items()
        },
        sources=checksums.file_digests(_sources_of(prompt_files), memory),
    )


def compare_inputs(
    stored: Inputs | None, current: Inputs, epoch: int, accepts: bool, is_branch: bool = False
) -> tuple[Inputs, list[str]]:
    """What to store from now on, and what to tell the user of a run that goes on from an epoch. `stored`: None = not
    known. Raises UserError where the run learns from other files than before, unless config.accept_changes `accepts`.
    A branch may read other prompts and pairs than its parent.
    """
    if stored is None:
        return current, []
    stored = _without_unopened(stored, current)
    changed, differs = [], False
    for part, place in PLACES.items():
        names = _differing(getattr(stored, part), getattr(current, part))
        differs = differs or bool(names)
        if names and not (is_branch and part in FREE_IN_BRANCH):
            changed.append(f"{place}: {', '.join(names[:3])}")
    if changed and not accepts:
        raise UserError(
            f"what the run reads is not what it was ({'; '.join(changed)}): restore these files, or start a new run; "
            "--config.accept_changes=True goes on with other ones"
        )
    notices = [f"goes on with other files than before ({'; '.join(changed)})"] if changed else []
    common = stored.rewards.keys() & current.rewards.keys()
    if others := [name for name in sorted(common) if stored.rewards[name] != current.rewards[name]]:
        notices.append(f"the file of reward {', '.join(others)} has changed: scores from before cannot be compared")
    return current._replace(rewards_since=epoch if others or differs else stored.rewards_since), notices


def _without_unopened(stored: Inputs, current: Inputs) -> Inputs:
    """A record without the training prompts of a run on pairs, which never opens them: older versions list them."""
    if not current.preferences_path:
        return stored
    unopened = {name for name in stored.dataset if name.startswith("train")} - {*current.dataset}
    return stored._replace(dataset={name: stored.dataset[name] for name in stored.dataset if name not in unopened})


def _differing(before: dict[str, str] | None, now: dict[str, str] | None) -> list[str]:
    """Names of files that are not what they were; none where it is not known what they were."""
    if not before or not now:  # what is not opened, or not known, is not compared
        return []
    return [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]


def _sources_of(prompt_files: Sequence[PromptFile]) -> dict[str, Path]:
    """The pictures to be edited that files of prompts name, by their paths from the files' folder."""
    return {
        os.path.relpath(source, file.path.parent): source
        for file in prompt_files
        for prompt in file.prompts
        for source in prompt.sources
    }


def stored_inputs(run_folder: Path) -> Inputs | None:
    """Return what a run has stored, or None if it has no record. Raises UserError for a damaged one."""
    file = run_folder / folders.INPUTS
    return folders.read_record(Inputs, file) if file.exists() else None


def write_inputs(run_folder: Path, inputs: Inputs) -> None:
    """Store the digests beside config.json."""
    folders.write_text(run_folder / folders.INPUTS, json.dumps(inputs._asdict(), indent=1))


def _pairs(folder: str, memory: Path) -> dict[str, str]:
    """Digests of a folder's files of pairs."""
    if not folder:
        return {}
    paths = [path for files in preferences.files_of(folder).values() for path in files]
    return checksums.file_digests({path.name: path for path in paths}, memory)


def _adapter(path: str, memory: Path) -> dict[str, str]:
    """Of the files that are read of a LoRA."""
    return checksums.file_digests({file.name: file for file in lora_files.files_of(path)}, memory) if path else {}


def _model(folder: str, memory: Path) -> dict[str, str]:
    """Of a pipeline: its files in a folder, or the commit of a hub id."""
    if Path(folder).is_dir():
        return checksums.digests_in(Path(folder), PARTS, memory)
    index = try_to_load_from_cache(folder, "model_index.json")
    return {"commit": Path(index).parent.name} if isinstance(index, str) else {}
