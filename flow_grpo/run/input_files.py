"""Files that a run reads: digests of its data set, base, adapters, pairs and local rewards, kept in inputs.json.

A resumed run compares them. Reward servers, and weights that a reward loads, are not compared.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import try_to_load_from_cache

from flow_grpo import rewards
from flow_grpo.base import checksums, folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.data import captioned_images, preferences
from flow_grpo.data.prompts import PromptFile
from flow_grpo.monitoring import provenance
from flow_grpo.settings.sections import Config, Reward
from flow_grpo.weights import lora_files

# Files of a pipeline's folder.
PARTS = ("model_index.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors", "*/*.bin")

# Part of a run's inputs that may not change -> where the config names it.
PLACES = {
    "dataset": "config.dataset",
    "model": "config.model",
    "lora_path": "config.lora.path",
    "lora_base": "config.lora.base",
    "preferences_path": "config.preferences.path",
    "train_teachers": "config.train.teachers",
    "train_data": "config.train.data",
    "sources": "sources of config.dataset",
}
# Settings that a branch cannot change. Files that other settings name may be others in a branch, too.
INHERITED = "model", "model_class", "lora.rank", "lora.alpha", "lora.base", "lora.path", "lora.targets"

# Shipped reward -> digests of the texts that its file has had and that all score alike, from the oldest to today's.
REWARD_TEXTS = locations.PACKAGE / "assets" / "reward_texts.json"


class Inputs(NamedTuple):
    """Digests of the files of each part by their names; {} where there is nothing to compare."""

    dataset: dict[str, str]
    model: dict[str, str]  # of a hub id, "commit" alone
    lora_path: dict[str, str]
    preferences_path: dict[str, str]
    rewards: dict[str, str]  # name of a reward -> digest of its file; "NAME (FILE)" -> of what it may have imported
    rewards_since: int = 0  # epochs completed when any of these files, or a branch's settings, changed last
    train_teachers: dict[str, str] = {}  # noqa: RUF012  by folder and file; nothing writes to it
    train_data: dict[str, str] = {}  # noqa: RUF012  of images and captions
    lora_base: dict[str, str] = {}  # noqa: RUF012
    sources: dict[str, str] | None = None  # pictures to be edited that the data set names; None = not known
    evaluated_sources: dict[str, str] | None = None  # those that prompts name that are not trained on

    def of_figures(self) -> dict[str, str]:
        """Return digests of what an evaluation's figures depend on beside the policy, by name; those of all prompts and
        sources are for comparisons with older evaluations."""
        parts = {name: getattr(self, name) for name in ("dataset", "model", "lora_base", "sources")}
        parts["evaluated prompts"] = {name: self.dataset[name] for name in self.dataset if not _is_of_training(name)}
        parts["evaluated sources"] = self.evaluated_sources
        digests = {}
        for name, part in parts.items():
            if part:
                digests[name] = hashlib.blake2b(json.dumps(part).encode(), digest_size=16).hexdigest()
        return digests | self.rewards


def current_inputs(
    config: Config, run_folder: Path, prompt_files: Sequence[PromptFile] = (), *, reads_model: bool = True
) -> Inputs:
    """Return digests of the files that a run of this config reads now.

    Args:
        prompt_files: files of its data set that it has opened.
        reads_model: False = without those of the model's folder, which `later_model` computes.
    """
    digests_file = digests_file_of(config, run_folder)
    teachers = {}
    for folder in config.train.teachers:
        for name, digest in _adapter_digests(folder, digests_file).items():
            teachers[f"{folder}/{name}"] = digest
    sources = checksums.file_digests(_sources_of(prompt_files), digests_file)
    evaluated_files = [file for file in prompt_files if not _is_of_training(file.path.name)]
    return Inputs(
        dataset=checksums.file_digests({file.path.name: file.path for file in prompt_files}, digests_file),
        model=model_digests(config, digests_file) if reads_model else _commit(config),
        lora_path=_adapter_digests(config.lora.path, digests_file),
        lora_base=_adapter_digests(config.lora.base, digests_file),
        preferences_path=_pair_digests(config.preferences.path, digests_file),
        rewards=reward_digests({*config.reward_fn, *config.eval.rewards}, config.reward, digests_file),
        train_teachers=teachers,
        train_data=_image_digests(config.train.data, digests_file),
        sources=sources,
        evaluated_sources={name: sources[name] for name in _sources_of(evaluated_files)},
    )


def later_model(config: Config, run_folder: Path) -> checksums.LaterDigests:
    """Begin to compute the digests of the model's files, which take as long as the disk takes to read the model, while
    it is loaded from the same files."""
    return checksums.LaterDigests(_model_files(config), digests_file_of(config, run_folder))


def write_with_model(run_folder: Path, inputs: Inputs, digests: checksums.LaterDigests) -> Inputs:
    """Store the digests of a new run as soon as those of its model's files are computed, and return them all."""
    inputs = inputs._replace(model=inputs.model | digests.result())
    write_inputs(run_folder, inputs)
    return inputs


def digests_file_of(config: Config, folder: Path) -> Path:
    """Return the file that remembers digests: in the cache, or else in the folder of a run or of pairs."""
    has_cache = config.cache_dir and Path(config.cache_dir).is_dir()
    return Path(config.cache_dir if has_cache else folder, folders.DIGESTS)


def model_digests(config: Config, digests_file: Path | None) -> dict[str, str]:
    """Return digests of the files of a model's folder, by their paths there, or the commit of a hub id's."""
    return checksums.file_digests(_model_files(config), digests_file) | _commit(config)


def _reward_files(names: Iterable[str], settings: Reward) -> dict[str, Path]:
    """Files of the rewards that are no servers, by the rewards' names, then those beside them that they may import."""
    files = {}
    scored_here = {*names} - {*rewards.served(settings.args)}
    for name in sorted(scored_here):
        file = rewards.reward_file(name)
        if file:
            # As modules beside it are named: a reward may be a link to its file.
            files[name] = file.resolve()
    imported = {}
    for name, file in files.items():
        for place, path in provenance.modules_beside(file).items():
            if path not in files.values():
                imported[f"{name} ({place})"] = path
    return files | imported


def reward_digests(names: Iterable[str], settings: Reward, digests_file: Path | None) -> dict[str, str]:
    """Return digests of the files of rewards. A shipped file whose comments or names alone have changed since has the
    digest of its oldest text, so that scores from before are compared."""
    digests = checksums.file_digests(_reward_files(names, settings), digests_file)
    for name, texts in json.loads(REWARD_TEXTS.read_text(encoding="utf-8")).items():
        if digests.get(name) in texts:
            digests[name] = texts[0]
    return digests


def compare_inputs(
    stored: Inputs | None, current: Inputs, epoch: int, accepts: bool, is_branch: bool = False
) -> tuple[Inputs, list[str]]:
    """Compare what a run reads with what it has read until `epoch`. Returns what to store from now on, and notices for
    the user.

    Args:
        stored: None = not known.
        accepts: config.accept_changes.
        is_branch: a branch may read other files than its parent, but for those of INHERITED settings.

    Raises:
        UserError: the run would learn from other files than before, and does not accept that.
    """
    if stored is None:
        return current, []
    stored = _without_unopened(stored, current)
    any_differs = False
    changed = []  # of the parts that this run or branch may not change
    for part, place in PLACES.items():
        names = differing(getattr(stored, part), getattr(current, part))
        any_differs = any_differs or bool(names)
        may_differ = is_branch and place.removeprefix("config.") not in INHERITED
        if names and not may_differ:
            changed.append(f"{place}: {', '.join(names[:3])}")
    if changed and not accepts:
        raise UserError(
            f"what the run reads is not what it was ({'; '.join(changed)}): restore these files, or start a new run; "
            "--config.accept_changes=True goes on with other ones"
        )
    notices = []
    if changed:
        notices.append(f"goes on with other files than before ({'; '.join(changed)})")
    reward_names = changed_rewards(stored, current)
    if reward_names:
        notices.append(
            f"the file of reward {', '.join(reward_names)} has changed: scores from before cannot be compared"
        )
    rewards_since = epoch if reward_names or any_differs else stored.rewards_since
    return current._replace(rewards_since=rewards_since), notices


def changed_rewards(stored: Inputs | None, current: Inputs) -> list[str]:
    """Return the names of the rewards whose files have changed; what is not known, or new, has not."""
    return differing_rewards(stored.rewards, current.rewards) if stored else []


def differing_rewards(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the names of the rewards whose digests, of `reward_digests`, differ."""
    common = before.keys() & now.keys()
    return [name for name in sorted(common) if before[name] != now[name]]


def _without_unopened(stored: Inputs, current: Inputs) -> Inputs:
    """A record without the training prompts of a run on pairs, which never opens them: older versions list them."""
    if not current.preferences_path:
        return stored
    opened = {}
    for name, digest in stored.dataset.items():
        if name in current.dataset or not _is_of_training(name):
            opened[name] = digest
    return stored._replace(dataset=opened)


def _is_of_training(file_name: str) -> bool:
    """Return whether a file of a data set has prompts that are trained on."""
    return file_name.startswith("train")


def differing(before: dict[str, str] | None, now: dict[str, str] | None) -> list[str]:
    """Return the names of files that have changed, come or gone. Parts that are not known, or not opened, are not
    compared."""
    if not before or not now:
        return []
    return [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]


def _sources_of(prompt_files: Sequence[PromptFile]) -> dict[str, Path]:
    """Pictures to be edited that files of prompts name, by their paths from the files' folder."""
    sources = {}
    for file in prompt_files:
        for prompt in file.prompts:
            for source in prompt.sources:
                if isinstance(source, Path):
                    sources[os.path.relpath(source, file.path.parent)] = source
    return sources


def stored_inputs(run_folder: Path) -> Inputs | None:
    """Return what a run has stored, or None if it has no record. Raises UserError for a damaged one."""
    file = run_folder / folders.INPUTS
    if not file.exists():
        return None
    return folders.read_record(Inputs, file)


def write_inputs(run_folder: Path, inputs: Inputs) -> None:
    """Store the digests beside config.json."""
    folders.write_text(run_folder / folders.INPUTS, json.dumps(inputs._asdict(), indent=1))


def _pair_digests(folder: str, digests_file: Path) -> dict[str, str]:
    """Digests of a folder's files of pairs."""
    if not folder:
        return {}
    paths = {}
    for files in preferences.files_of(folder).values():
        paths |= {path.name: path for path in files}
    return checksums.file_digests(paths, digests_file)


def _image_digests(folder: str, digests_file: Path) -> dict[str, str]:
    """Digests of a folder's images and of their captions."""
    if not folder:
        return {}
    paths = {captioned_images.METADATA: Path(folder, captioned_images.METADATA)}
    for image in captioned_images.open_folder(folder, "config.train.data"):
        paths[image.prompt.metadata["file_name"]] = image.path
    return checksums.file_digests(paths, digests_file)


def _adapter_digests(path: str, digests_file: Path) -> dict[str, str]:
    """Digests of the files that are read of a LoRA."""
    if not path:
        return {}
    return checksums.file_digests({file.name: file for file in lora_files.files_of(path)}, digests_file)


def _model_files(config: Config) -> dict[str, Path]:
    """Files of a pipeline in a folder, those of text encoders before the transformer's; {} of a hub id."""
    folder = Path(locations.resolve(config.model))
    return checksums.files_in(folder, PARTS) if folder.is_dir() else {}


def _commit(config: Config) -> dict[str, str]:
    """Commit of a hub id's files; {} of a folder."""
    folder = locations.resolve(config.model)
    if Path(folder).is_dir():
        return {}
    index = try_to_load_from_cache(folder, "model_index.json")
    if not isinstance(index, str):
        return {}
    return {"commit": Path(index).parent.name}
