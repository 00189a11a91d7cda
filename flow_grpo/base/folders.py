"""A run's folder: one run takes it and holds it until its process ends. The only module that locks files."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any, TextIO, TypeVar, get_args, get_origin, get_type_hints
from uuid import uuid4

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted

LOCK, INPUTS, DIGESTS, PARENT = ".lock", "inputs.json", "digests.json", "parent.json"
WAIT_S = 10.0  # for a killed holder, whose lock stays until the system has taken back all of its memory
SCRATCH = ".scratch-"  # in the names of what is being written
LEFTOVER_S = 3600.0  # without a write, then nobody is writing it any more
FULL = errno.ENOSPC, errno.EDQUOT
REFUSED = *FULL, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE
LFS_POINTER = b"version https://git-lfs"
LARGEST = 2**63 - 1  # whole number in a record
NO_WRITING = *FULL, errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP

Record = TypeVar("Record")

_held: dict[Path, TextIO] = {}  # the system takes a lock back when its file is closed, at the latest by its end


def apply_umask(file: Path) -> None:
    """Give a file the permissions that the user's umask asks for: safetensors lets nobody but its owner read it."""
    umask = os.umask(0o077)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def write_text(file: Path, text: str) -> None:
    """Write a file, which appears whole or not at all. Another file takes the old one's place, so that hard links to
    the old one, such as those of a backup, keep what they had."""
    with published(file) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def published(path: Path, replaces: bool = False) -> Iterator[Path]:
    """Where to write a file or a folder, which after the block is at `path`, as by `publish`, or not at all."""
    scratch = scratch_beside(path)
    try:
        yield scratch
        publish(scratch, path, replaces)
    finally:
        remove(scratch)


def scratch_beside(path: Path) -> Path:
    """Where to write what shall be at a path: a name that no other process of any machine has."""
    return path.with_name(f"{path.stem}{SCRATCH}{uuid4().hex}")


def publish(scratch: Path, path: Path, replaces: bool = False) -> None:
    """Make a file or a folder durable, then visible at its path. With `replaces` it may take the place of a folder: a
    kill leaves the old one, at `path` or at `replaced_at(path)`, or the new one.

    Raises OSError where a folder is at the path already, unless `replaces`.
    """
    for part in [*scratch.rglob("*"), scratch]:
        if part.is_file() and not part.is_symlink():
            apply_umask(part)
        if not part.is_symlink():
            sync(part)
    if replaces and path.exists():
        path.rename(replaced_at(path))  # since a folder cannot be renamed onto another
    scratch.replace(path)
    sync(path.parent)
    if replaces:
        shutil.rmtree(replaced_at(path), ignore_errors=True)


def replaced_at(path: Path) -> Path:
    """Where a folder is while another one takes its place."""
    return path.with_name(f"{path.stem}{SCRATCH}old")


def recover(path: Path) -> None:
    """Undo what a kill in `publish` left half done; no other process may be writing there."""
    if (old := replaced_at(path)).exists() and not path.exists():
        old.rename(path)
    remove_leftovers(path.parent, path.stem, age_s=0.0)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, stem: str = "*", age_s: float = LEFTOVER_S) -> None:
    """Remove what killed processes left of `scratch_beside`, but for what was written within `age_s`."""
    with suppress(OSError):
        for leftover in [*folder.glob(f"{stem}{SCRATCH}*")]:
            if time.time() - leftover.stat().st_mtime >= age_s:
                remove(leftover)


def numbered_folders(first: Path) -> list[Path]:
    """Return what exists of `first`, NAME-2, NAME-3 and so on, the lowest number first, whatever it is."""
    numbers = {path: _number_after(first, path) for path in first.parent.glob("*")}
    members = [path for path, number in numbers.items() if number]
    return sorted(members, key=numbers.get)


def _number_after(first: Path, path: Path) -> int | None:
    """Return 1 for `first`, N for NAME-N, and None for other names."""
    match = re.fullmatch(rf"{re.escape(first.name)}(?:-([2-9]|[1-9]\d+))?", path.name)
    return int(match[1] or 1) if match else None


def make_new_folder(first: Path, key: str = "config.output_dir") -> Path:
    """Make a folder that was not there: `first`, or NAME-2, NAME-3, and so on. Two runs never get the same one."""
    taken = numbered_folders(first)
    number = _number_after(first, taken[-1]) + 1 if taken else 1
    # Another process may make the same folder in between: only the one that makes it has it.
    while True:
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        if make_folder(folder, key):
            return folder
        number += 1


def make_folder(folder: Path, key: str) -> bool:
    """Make a folder; False if it is there already. Raises UserError with `key`, the setting or flag that names it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError as error:
        if folder.parent.is_dir():
            return False
        raise UserError(f"{key}: {folder.parent} is no folder") from error
    except OSError as error:
        raise UserError(f"{key}: {folder} cannot be made: {error.strerror}") from error
    return True


def lock(folder: Path) -> str:
    """Keep other processes out of a folder until this one ends or calls `release`; returns what to tell the user: "",
    or that this file system has no locks. Raises UserError, with host and process, where another one holds it."""
    folder = folder.resolve()
    release(folder)  # one process never writes two runs into one folder
    try:
        file = (folder / LOCK).open("a+")  # a refusal closes it, which gives the lock back
        _wait_for_lock(file, folder)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except OSError as error:
        if error.errno in NO_WRITING:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from error
        return f"{folder}: its file system has no locks ({error.strerror}): see that no other run writes there"
    _held[folder] = file
    return ""


def _wait_for_lock(file: TextIO, folder: Path) -> None:
    """For a holder that was killed. One that is alive is refused."""
    end = time.monotonic() + WAIT_S
    while True:
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.monotonic() > end:
            file.seek(0)
            holder = file.read() or "another process"
            raise UserError(f"{holder} is writing to {folder}: stop it or wait for its end, or choose another folder")
        time.sleep(0.1)


def held_folders() -> list[Path]:
    """The folders that this process keeps others out of, the one that it took last in the end."""
    return list(_held)


def release(folder: Path) -> None:
    """Let other processes in."""
    if file := _held.pop(folder.resolve(), None):
        file.close()


def check_writable(folder: Path) -> None:
    """Raises UserError unless files can be made in a folder."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error


def remove(path: Path) -> None:
    """A folder with all in it, or whatever lies in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_problem(path: Path) -> str:
    """Why a file cannot be what its name says, "" where it may be: it is not there, empty, unreadable or a Git LFS
    pointer, which stands for a file that a clone has not fetched."""
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except FileNotFoundError:
        return "is a link to a file that is gone" if path.is_symlink() else "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if start == LFS_POINTER:
        return "is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
    return "" if start else "is empty"


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError for a file that does not hold one JSON object."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(stored, ensure_ascii=False).encode()  # of a lone surrogate, which no file can hold, a ValueError
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise UserError(f"{path} holds no JSON object")
    return stored


def read_record(kind: type[Record], path: Path) -> Record:
    """What a JSON file holds of a record's fields. Raises UserError for a file that no run has written."""
    return record_of(kind, read_json(path), path)


def record_of(kind: type[Record], fields: dict[str, Any], path: Path) -> Record:
    """A record of fields that a JSON file holds. Raises UserError where one is missing, has no part in the record, or
    has another type than the record says."""
    try:
        record = kind(**fields)
    except TypeError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    for name, annotation in get_type_hints(kind).items():
        value = getattr(record, name)
        if not _has_type(value, annotation):
            raise UserError(f"{path} is damaged: {name} is {quoted(value)}")
    return record


def _has_type(value: Any, annotation: Any) -> bool:
    """Whether a JSON value is what a record's annotation says."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is UnionType:
        return any(_has_type(value, part) for part in parts)
    if kind is dict:
        return isinstance(value, dict) and all(_has_type(entry, parts[1]) for entry in value.values())
    if kind is list:
        return isinstance(value, list) and all(_has_type(entry, parts[0]) for entry in value)
    if annotation in (int, float):
        numbers = {int: (int,), float: (int, float)}[annotation]
        return type(value) in numbers and not (type(value) is int and abs(value) > LARGEST)
    return isinstance(value, annotation)


def is_unused(folder: Path) -> bool:
    """Whether a folder holds no more than a run writes before it loads anything."""
    return {path.name for path in folder.iterdir()} <= {LOCK, INPUTS, DIGESTS, PARENT}


@contextmanager
def released_on_error(folder: Path) -> Iterator[None]:
    """If the block fails: release the folder that this process holds. If it is unused, it is removed."""
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


def is_disk_full(error: Exception) -> bool:
    """Whether a disk is full, or a user's share of it."""
    return _is_one_of(error, FULL)


def is_disk_error(error: BaseException) -> bool:
    """Whether a disk is full, broken or not to be written by this user: what no change of the code would mend."""
    return _is_one_of(error, REFUSED)


def _is_one_of(error: BaseException, numbers: Iterable[int]) -> bool:
    """Whether the system failed with one of these numbers; safetensors, and another rank, say so in words alone."""
    return bool(re.search(rf"(Errno|os error) ({'|'.join(map(str, numbers))})\b", str(error)))


def resume_hint(run_folder: Path) -> str:
    """The flag that continues a run that ended, as part of a sentence."""
    folder = run_folder / "checkpoints"
    if any(folder.glob("epoch_*")):
        return f"the same command with --config.resume_from={folder} goes on from its last checkpoint"
    return "it has no checkpoint yet, so the same command starts anew"
