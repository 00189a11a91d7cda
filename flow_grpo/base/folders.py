"""A run's folder: one run takes it and holds it until its process ends. The only module that locks files.

What a run that goes on finds there may be anything: `clear_the_way` renames what no run can have written.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from flow_grpo.base.errors import UserError

LOCK, INPUTS, DIGESTS = ".lock", "inputs.json", "digests.json"
FILES = (  # at the top of a run's folder
    *("config.json", INPUTS, DIGESTS),
    *("metrics.jsonl", "metrics.jsonl.tmp", "metrics.damaged.jsonl", "wandb_id"),
    *("report.html", "report.tmp", "reward.png", "samples.png", "README.md"),
    *("pytorch_lora_weights.safetensors", "adapter_config.json", "adapter_model.safetensors", "model_index.json"),
)
FOLDERS = ("images", "wandb", "tensorboard", "best", "transformer")
FOLDERS_OF_FILES = ("images", "transformer")
ASIDE = "aside"  # in the names of what was renamed
WAIT_S = 10.0  # for a killed holder, whose lock stays until the system has taken back all of its memory
SCRATCH = ".scratch-"  # in the names of what is being written
LEFTOVER_S = 3600.0  # without a write, then nobody is writing it any more
FULL = errno.ENOSPC, errno.EDQUOT

_held: dict[Path, TextIO] = {}  # the system takes a lock back when its file is closed, at the latest by its end


def as_any_new_file(file: Path) -> None:
    """Give a file the permissions that the user's umask asks for: safetensors lets nobody but its owner read it."""
    umask = os.umask(0o077)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def write_text(file: Path, text: str) -> None:
    """Write a file, which appears whole or not at all. Another file takes the old one's place, so that hard links to
    the old one, such as those of a backup, keep what they had."""
    scratch = scratch_beside(file)
    try:
        scratch.write_text(text)
        as_any_new_file(scratch)
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def scratch_beside(path: Path) -> Path:
    """Where to write what shall be at a path: a name that no other process of any machine has."""
    return path.with_name(f"{path.stem}{SCRATCH}{uuid4().hex}")


def publish(scratch: Path, path: Path) -> None:
    """Make a file or a folder durable, then visible at its path. Raises OSError where a folder is there already."""
    for part in [*scratch.rglob("*"), scratch]:
        sync(part)
    scratch.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of `scratch_beside`: what was written last over an hour ago. Where that cannot
    be done, it stays."""
    with suppress(OSError):
        for leftover in [*folder.glob(f"*{SCRATCH}*")]:
            written = max(path.stat().st_mtime for path in [leftover, *leftover.rglob("*")])
            if time.time() - written > LEFTOVER_S:
                remove(leftover)


def family(first: Path) -> list[Path]:
    """What there is of `first`, NAME-2, NAME-3 and so on, the lowest number first, whatever lies there."""
    pattern = re.compile(rf"{re.escape(first.name)}(?:-([1-9]\d*))?")
    try:
        matches = [(pattern.fullmatch(path.name), path) for path in first.parent.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = {path: int(match[1] or 1) for match, path in matches if match}
    return sorted((path for path in numbers if path == first or numbers[path] > 1), key=numbers.get)


def take(first: Path) -> Path:
    """Make a folder that was not there: `first`, or NAME-2, NAME-3, and so on, above all numbers that there are. Two
    runs never get the same one."""
    taken = family(first)
    number = 1 + int(taken[-1].name.removeprefix(first.name)[1:] or 1) if taken else 1
    while not make(folder := first if number == 1 else first.with_name(f"{first.name}-{number}")):
        number += 1
    return folder


def make(folder: Path, setting: str = "output_dir") -> bool:
    """Make a folder; False if it is there already.

    Args:
        setting: of the config, which names it.

    Raises:
        UserError: it cannot be made.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError as error:
        if folder.parent.is_dir():
            return False
        raise UserError(f"config.{setting}: {folder.parent} is no folder") from error
    except OSError as error:
        raise UserError(f"config.{setting}: {folder} cannot be made: {error.strerror}") from error
    return True


def lock(folder: Path) -> str:
    """Keep other processes out of a folder until this one ends or calls `release`.

    Returns:
        What to tell the user: "", that this file system has no locks, or what lay in the place of the lock.

    Raises:
        UserError: another process holds it, or held it and went on writing; with its host and its process id.
    """
    folder = folder.resolve()
    release(folder)  # one process never writes two runs into one folder
    try:
        notice = _in_the_way(folder / LOCK, Path.is_file)
        file = _lock_file(folder) or _wait_for_lock(folder)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise UserError(f"{folder} cannot be written: {error.strerror}") from error
        if error.errno in FULL:
            raise UserError(f"disk full: no space left for {folder}; free some and start again") from error
        return f"{folder}: its file system has no locks ({error.strerror}): see that no other run writes there"
    _held[folder] = file
    return notice


def _wait_for_lock(folder: Path) -> TextIO:
    """For a holder that was killed. One that is alive is refused, at the latest once it has ended."""
    end, before, refusal = time.monotonic() + WAIT_S, _written(folder), _refusal(folder)
    while (file := _lock_file(folder)) is None:
        if time.monotonic() > end:
            raise UserError(refusal)
        time.sleep(0.1)
    if _written(folder) != before:
        file.close()
        raise UserError(f"{refusal}. It has ended by now, so start again to go on from what it has saved")
    return file


def _lock_file(folder: Path) -> TextIO | None:
    """A new lock file, locked, in the place of the old one, which may have hard links; None while another process has
    locked the old one."""
    path, scratch = folder / LOCK, folder / f".tmp-{LOCK}"
    with path.open("a+") as old:
        if not _locks(old) or not _is_at(old, path):
            return None
        file = scratch.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
            file.flush()
            scratch.replace(path)
        except OSError:
            file.close()
            scratch.unlink(missing_ok=True)
            raise
    return file


def _locks(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _written(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of what a run writes as it goes on."""
    found = {}
    for path in [*folder.glob("[!.]*"), *folder.glob("checkpoints/*")]:
        with suppress(FileNotFoundError):
            found[str(path)] = path.lstat().st_size, path.lstat().st_mtime_ns
    return found


def _refusal(folder: Path) -> str:
    try:
        holder = json.loads((folder / LOCK).read_text())
        who, host = f"process {holder['pid']} on {holder['host']}", holder["host"]
    except (OSError, ValueError, KeyError, TypeError):
        who, host = "another process", socket.gethostname()
    away = "" if host == socket.gethostname() else f". If that machine is gone, remove {folder / LOCK}"
    return f"{who} is writing to {folder}: stop it or wait for its end, or choose another folder{away}"


def held() -> list[Path]:
    """The folders that this process keeps others out of, the one that it took last in the end."""
    return list(_held)


def release(folder: Path) -> None:
    """Let other processes in."""
    if file := _held.pop(folder.resolve(), None):
        file.close()


def clear_the_way(folder: Path) -> list[str]:
    """Rename what a run cannot use in the place of its files and folders, such as a folder called metrics.jsonl, or a
    link that leads nowhere; a sentence for each. Links to files and folders stay. Files with hard links, such as those
    of a backup, are copied, so that the backup stays what it is."""
    notices = [_in_the_way(folder / name, _is_usable_folder) for name in FOLDERS]
    files = [folder / name for name in FILES]
    for name in FOLDERS_OF_FILES:
        if (folder / name).is_dir():
            files += [path for path in sorted((folder / name).iterdir()) if f".{ASIDE}-" not in path.name]
    notices += [_in_the_way(path, _is_usable_file) for path in files]
    for path in files:
        own(path)
    return [notice for notice in notices if notice]


def _is_usable_file(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK | os.W_OK)


def _is_usable_folder(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.R_OK | os.W_OK | os.X_OK)


def own(file: Path) -> None:
    """Give a file that has hard links bytes of its own: a run writes some of its files in place."""
    if file.is_file() and not file.is_symlink() and file.stat().st_nlink > 1:
        shutil.copy2(file, scratch := file.with_name(f".tmp-{file.name}"))
        scratch.replace(file)


def _in_the_way(path: Path, fits: Callable[[Path], bool]) -> str:
    """Rename what is there and does not fit; a sentence, "" for nothing."""
    if fits(path) or not os.path.lexists(path):
        return ""
    return f"{path} cannot be used, and is now {set_aside(path)}: the run goes on without it"


def set_aside(path: Path) -> Path:
    """Give what lies at a path another name, which is free: NAME.aside-1, NAME.aside-2, and so on."""
    names = (path.with_name(f"{path.name}.{ASIDE}-{number}") for number in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    return path.rename(aside)


def remove(path: Path) -> None:
    """A folder with all in it, or whatever lies in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError for a file that does not hold one JSON object."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise UserError(f"{path} holds no JSON object")
    return stored


def is_unused(folder: Path) -> bool:
    """Whether a folder holds no more than a run writes before it loads anything."""
    return {path.name for path in folder.iterdir()} <= {LOCK, INPUTS, DIGESTS}


@contextmanager
def given_back(folder: Path) -> Iterator[None]:
    """If the block fails: release the folder that this process holds. If it is unused, it is removed, and so is the
    folder around it, where that is empty then."""
    try:
        yield
    except BaseException:
        if folder.resolve() in _held and is_unused(folder):
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
            with suppress(OSError):
                folder.parent.rmdir()
        release(folder)
        raise


def is_full(error: Exception) -> bool:
    """Whether a disk is full, or a user's share of it; safetensors says so in words alone."""
    return bool(re.search(rf"(Errno|os error) ({'|'.join(map(str, FULL))})\b", str(error)))


def how_to_go_on(run_folder: Path) -> str:
    """The flag that continues a run that ended, as part of a sentence."""
    folder = run_folder / "checkpoints"
    if any(folder.glob("epoch_*")):
        return f"the same command with --config.resume_from={folder} goes on from its last checkpoint"
    return "it has no checkpoint yet, so the same command starts anew"
