"""Provenance of a run: each start in run.json, copies of the user's own code in source/, a branch's parent.

The digests of the files that a run reads are those of run/input_files.py, with which it is compared when it resumes.
Only the commit, the versions, the kind of GPU and the duration are published, by a model card.
"""

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flow_grpo import rewards
from flow_grpo.base import folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.command_line import overrides
from flow_grpo.settings import config_files
from flow_grpo.settings.sections import Config

FILE = "run.json"
SOURCE = "source"
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")
# Characters of changes.diff.
MOST_DIFF = 2**20


class Start(NamedTuple):
    """Part of an entry of run.json that a model card names; another version may have noted less."""

    commit: str = ""
    changed_files: list[str] = []  # noqa: RUF012  nothing writes to it
    versions: dict[str, str] = {}  # noqa: RUF012
    gpus: list[str] = []  # noqa: RUF012
    ranks: int = 1


class Parent(NamedTuple):
    """Origin of a branch."""

    folder: str  # the parent's
    checkpoint: str = ""
    epoch: int = 0  # epochs completed there
    changed: dict[str, list] = {}  # noqa: RUF012  setting -> [there, here]; nothing writes to it


def _git(*arguments: str) -> str:
    """Return what git prints about the checkout that is running, "" if it fails."""
    command = ["git", "-C", str(locations.PACKAGE.parent), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if process.returncode != 0:
        return ""
    return process.stdout


def now() -> str:
    """Return the time as run.json and metrics.jsonl have it: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def note_start(run_folder: Path, config: Config, world_size: int, epoch: int) -> None:
    """Note a start after `epoch` epochs, and copy the user's own code to a folder of this epoch.

    Each start has copies of its own, since files may be edited before a run goes on.
    """
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    start = {
        "start": now(),
        "epoch": epoch,
        "command": without_queries(sys.argv),
        "host": socket.gethostname(),
        "gpus": gpus,
        "ranks": world_size,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "HEAD").strip(),
        "changed_files": _git("status", "--porcelain", "--untracked-files=no").splitlines(),
    }
    folders.write_text(run_folder / FILE, json.dumps({"starts": [*starts(run_folder), start]}))
    _copy_source(run_folder / SOURCE / f"epoch_{epoch:06d}", config)


def _copy_source(source: Path, config: Config) -> None:
    """Copy the user's own code to a folder, with what was changed in the checkout since its commit."""
    source.mkdir(parents=True, exist_ok=True)
    for name, file in _own_files(config).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, source / name)
    diff = _git("diff", "HEAD")
    if diff:
        (source / "changes.diff").write_text(diff[:MOST_DIFF])


def without_queries(arguments: list[str]) -> list[str]:
    """Return the arguments of a command without the queries of addresses, which may be secrets."""
    return [re.sub(r"\?[^\s'\"]*", "", argument) for argument in arguments]


def note_end(run_folder: Path) -> None:
    """Note the end of the last start."""
    entries = starts(run_folder)
    if entries:
        entries[-1]["end"] = now()
        folders.write_text(run_folder / FILE, json.dumps({"starts": entries}))


def starts(run_folder: Path) -> list[dict[str, Any]]:
    """Return the entries of run.json, oldest first; [] if there is none that can be read."""
    try:
        entries = folders.read_json(run_folder / FILE).get("starts")
    except UserError:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return []
    return entries


def has_ended(run_folder: Path) -> bool:
    """Return whether a run has come to its end."""
    entries = starts(run_folder)
    return bool(entries) and "end" in entries[-1]


def last_start(run_folder: Path) -> Start | None:
    """Return the last entry of run.json; None if there is none. Raises UserError for a damaged one."""
    entries = starts(run_folder)
    if not entries:
        return None
    return folders.record_within(Start, entries[-1], run_folder / FILE)


def parent(run_folder: Path) -> Parent | None:
    """Return the origin of a branch; None for any other run. Raises UserError for a damaged record."""
    file = run_folder / folders.PARENT
    return folders.read_record(Parent, file) if file.exists() else None


def write_parent(run_folder: Path, parent: Parent) -> None:
    """Note the origin of a branch."""
    folders.write_text(run_folder / folders.PARENT, json.dumps(parent._asdict(), indent=1))


def modules_beside(file: Path) -> dict[str, Path]:
    """Return what a user's file may depend on: modules that this process has imported from the file's folder, by their
    paths there, itself among them if it was imported, without the running script and what is installed."""
    file = file.resolve()
    installed = _installed_folders()
    modules = {}
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        if name == "__main__" or not place:
            continue
        # Thousands of modules are installed: they are told by their names, before a path of theirs is resolved.
        if str(place).startswith(installed) or not Path(place).is_absolute():
            continue
        path = Path(place).resolve()
        is_installed = str(path).startswith(installed)
        is_beside = path.is_relative_to(file.parent)
        if is_beside and not is_installed and path.is_file():
            modules[str(path.relative_to(file.parent))] = path
    by_path = sorted(modules.items(), key=lambda entry: entry[1])
    return dict(by_path)


def _installed_folders() -> tuple[str, ...]:
    """Return how paths begin in the folders of Python, of installed packages and of this package."""
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(f"{folder}{os.sep}" for folder in (*installed, locations.PACKAGE))


def _own_files(config: Config) -> dict[str, Path]:
    """Return the code of a run outside of the package by its names in source/: its files, and what was imported from
    their folders."""
    named: dict[str, Path] = {}
    for file in _files_of_run(config):
        for name, path in {file.name: file, **modules_beside(file)}.items():
            if locations.PACKAGE in path.parents:
                continue
            # A file of the same name from another folder has its folder's name in front.
            is_taken = named.get(name, path) != path
            unique_name = f"{path.parent.name}/{path.name}" if is_taken else name
            named[unique_name] = path
    return named


def _files_of_run(config: Config) -> list[Path]:
    """Return the files of a run's rewards, its config file, its script and the file of its model's class."""
    candidates = [rewards.reward_file(name) for name in {*config.reward_fn, *config.eval.rewards}]
    file_and_names, _ = overrides.split(sys.argv[1:], "")
    config_file, _ = config_files.parts(file_and_names)
    candidates += [Path(config_file), Path(sys.argv[0])]
    model_module, _, _ = config.model_class.partition(":")
    if model_module in sys.modules:
        candidates.append(Path(sys.modules[model_module].__file__ or ""))
    files = []
    for candidate in candidates:
        if candidate is not None and candidate.is_file():
            files.append(candidate.resolve())
    return files
