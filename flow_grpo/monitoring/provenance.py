"""What made a run: run.json in its folder, with an entry for each start, and in source/ copies of
the user's own files as they were at each start.

Nothing of it is published but the commit, the versions, the kind of GPU and the duration, which a model card names.
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
from ml_collections import ConfigDict

from flow_grpo import rewards
from flow_grpo.base import folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.command_line import overrides

FILE, SOURCE = "run.json", "source"
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")
MOST_DIFF = 2**20  # characters of changes.diff


class Start(NamedTuple):
    """What a model card names of an entry of run.json; another version may have noted less."""

    commit: str = ""
    changed_files: list[str] = []  # noqa: RUF012  nothing writes to it
    versions: dict[str, str] = {}  # noqa: RUF012
    gpus: list[str] = []  # noqa: RUF012
    ranks: int = 1


class Parent(NamedTuple):
    """Where a branch comes from."""

    folder: str  # the parent's
    checkpoint: str = ""
    epoch: int = 0  # epochs completed there
    changed: dict[str, list] = {}  # noqa: RUF012  setting -> [there, here]; nothing writes to it


def _git(*words: str) -> str:
    """What git says of the checkout that is running; "" where it says nothing."""
    command = ["git", "-C", str(locations.PACKAGE.parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def now() -> str:
    """The time, as run.json and metrics.jsonl have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def note_start(run_folder: Path, config: ConfigDict, world_size: int, epoch: int) -> None:
    """Note a start after `epoch` epochs, and copy the config file and reward files that are no part of the package,
    into a folder of this epoch: files may be edited before a run goes on."""
    start = {
        "start": now(),
        "epoch": epoch,
        "command": [re.sub(r"\?[^\s'\"]*", "", word) for word in sys.argv],  # a query of an address may be a secret
        "host": socket.gethostname(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "ranks": world_size,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "HEAD").strip(),
        "changed_files": _git("status", "--porcelain", "--untracked-files=no").splitlines(),
    }
    folders.write_text(run_folder / FILE, json.dumps({"starts": [*starts(run_folder), start]}))
    source = run_folder / SOURCE / f"epoch_{epoch:06d}"
    source.mkdir(parents=True, exist_ok=True)
    for name, file in _own_files(config).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, source / name)
    if diff := _git("diff", "HEAD"):
        (source / "changes.diff").write_text(diff[:MOST_DIFF])


def note_end(run_folder: Path) -> None:
    """Note the end of the last start."""
    if entries := starts(run_folder):
        entries[-1]["end"] = now()
        folders.write_text(run_folder / FILE, json.dumps({"starts": entries}))


def starts(run_folder: Path) -> list[dict[str, Any]]:
    """The entries of run.json, oldest first; [] where there is none that can be read."""
    try:
        entries = folders.read_json(run_folder / FILE).get("starts")
    except UserError:
        return []
    is_whole = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    return entries if is_whole else []


def last_start(run_folder: Path) -> Start | None:
    """The last entry of run.json; None where there is none. Raises UserError for a damaged one."""
    entries = starts(run_folder)
    if not entries:
        return None
    fields = {name: entries[-1][name] for name in Start._fields if name in entries[-1]}
    return folders.record_of(Start, fields, run_folder / FILE)


def parent(run_folder: Path) -> Parent | None:
    """Where a branch comes from; None for any other run. Raises UserError for a damaged record."""
    file = run_folder / folders.PARENT
    return folders.read_record(Parent, file) if file.exists() else None


def write_parent(run_folder: Path, parent: Parent) -> None:
    """Note where a branch comes from."""
    folders.write_text(run_folder / folders.PARENT, json.dumps(parent._asdict(), indent=1))


def modules_beside(file: Path) -> dict[str, Path]:
    """Return what a user's file may depend on: modules that this process has imported from the file's folder, by their
    paths there, without the file itself, the running script and what is installed."""
    file = file.resolve()
    installed = tuple(f"{folder}{os.sep}" for folder in _installed_folders())
    modules = {}
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        # Thousands of modules are installed: they are told by their names, before a path of theirs is resolved.
        if name == "__main__" or not place or str(place).startswith(installed) or not Path(place).is_absolute():
            continue
        path = Path(place).resolve()
        if path.is_file() and path != file and path.is_relative_to(file.parent) and not str(path).startswith(installed):
            modules[str(path.relative_to(file.parent))] = path
    return dict(sorted(modules.items(), key=lambda entry: entry[1]))


def _installed_folders() -> list[str | Path]:
    """Return the folders of Python, of installed packages and of this package."""
    return [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), locations.PACKAGE]


def _own_files(config: ConfigDict) -> dict[str, Path]:
    """What made a run and lies outside of the package, by its name in source/: the script, the config file, the model's
    class, the files of local rewards, and what was imported from the folders of all these."""
    files = [file for name in {*config.reward_fn, *config.eval.rewards} if (file := rewards.reward_file(name))]
    files.append(Path(overrides.split(sys.argv[1:], "")[0].partition(":")[0]))
    model_class = sys.modules.get(config.model_class.partition(":")[0])
    files += [Path(sys.argv[0]), *([Path(model_class.__file__)] if model_class else [])]
    named = {}
    for file in (file.resolve() for file in files if file.is_file()):
        for name, path in {file.name: file, **modules_beside(file)}.items():
            if locations.PACKAGE not in path.parents and named.setdefault(name, path) != path:
                named[f"{path.parent.name}/{path.name}"] = path  # of another folder
    return named
