"""Folders of runs: made, locked until the process ends, written whole. The only module that locks files."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any, TextIO, TypeVar, get_args, get_origin, get_type_hints
from uuid import uuid4

from flow_grpo.base import locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted

LOCK = ".lock"
INPUTS = "inputs.json"
DIGESTS = "digests.json"
PARENT = "parent.json"
BEST = "best"  # the folder in a run's that holds its best policy
WAIT_S = 10.0  # for a killed holder, whose lock stays until the system has taken back all of its memory
SCRATCH = ".scratch-"  # in the names of what is being written
LEFTOVER_S = 3600.0  # age of a scratch file that nobody is writing any more
LFS_POINTER = b"version https://git-lfs"
LARGEST = 2**63 - 1  # whole number in a record

# Errors of a full disk, of a disk that no change of the code would mend, and of a folder in which nothing can be made.
FULL = (errno.ENOSPC, errno.EDQUOT)
BROKEN = (*FULL, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)
UNWRITABLE = (*FULL, errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)

Record = TypeVar("Record")

_held: dict[Path, TextIO] = {}  # folder -> its open lock file; the system ends the lock when the file is closed


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's."""
    return (folder / "config.json").is_file() and (folder / "metrics.jsonl").is_file()


def run_of(folder: Path) -> Path | None:
    """Return the run that a folder is, or whose best/ it is; None for any other folder."""
    if is_run(folder):
        return folder
    if folder.name == BEST and is_run(folder.parent):
        return folder.parent
    return None


def find_run(name: str) -> Path | None:
    """Return the run that a name on a command line stands for, as `locations.resolve` finds it; None for anything
    else."""
    return run_of(Path(locations.resolve(name)))


def apply_umask(file: Path) -> None:
    """Give a file the permissions that the user's umask asks for: safetensors lets only the owner read its files."""
    # The umask can only be read by setting another one.
    umask = os.umask(0o077)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def write_text(file: Path, text: str) -> None:
    """Write a file, which appears whole or not at all.

    A new file takes the old one's place, so that hard links to the old one, such as a backup's, keep their content.
    """
    with published(file) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def published(path: Path, replaces: bool = False) -> Iterator[Path]:
    """Yield where to write a file or a folder. After the block it is at `path`, as by `publish`, or not at all."""
    scratch = scratch_beside(path)
    try:
        yield scratch
        publish(scratch, path, replaces)
    finally:
        remove(scratch)


def scratch_beside(path: Path) -> Path:
    """Return where to write a file or folder first: a name that no other process of any machine has."""
    return path.with_name(f"{path.stem}{SCRATCH}{uuid4().hex}")


def publish(scratch: Path, path: Path, replaces: bool) -> None:
    """Make a file or a folder durable, then visible at its path.

    With `replaces` it may take the place of a folder: a kill leaves the new one, or the old one at `path` or at
    `replaced_at(path)`. Without, OSError is raised if there is a folder at the path.
    """
    for part in [*scratch.rglob("*"), scratch]:
        if part.is_file() and not part.is_symlink():
            apply_umask(part)
        if not part.is_symlink():
            sync(part)
    # A folder cannot be renamed onto another.
    if replaces and path.exists():
        path.rename(replaced_at(path))
    scratch.replace(path)
    sync(path.parent)
    if replaces:
        shutil.rmtree(replaced_at(path), ignore_errors=True)


def replaced_at(path: Path) -> Path:
    """Return where a folder is kept while another one takes its place."""
    return path.with_name(f"{path.stem}{SCRATCH}old")


def recover(path: Path) -> None:
    """Undo what a kill in `publish` left half done; no other process may be writing there."""
    old = replaced_at(path)
    if old.exists() and not path.exists():
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
    """Remove what killed processes left at `scratch_beside`, except what was written within `age_s`."""
    with suppress(OSError):
        for leftover in list(folder.glob(f"{stem}{SCRATCH}*")):
            if time.time() - leftover.stat().st_mtime >= age_s:
                remove(leftover)


def numbered_folders(first: Path) -> list[Path]:
    """Return what exists of `first`, NAME-2, NAME-3 and so on, the lowest number first, whatever it is."""
    members = _by_number(first)
    return [members[number] for number in sorted(members)]


def _by_number(first: Path) -> dict[int, Path]:
    """Return number -> path of what exists of `first`, which is 1, and of NAME-N."""
    members = {}
    for path in first.parent.glob("*"):
        match = re.fullmatch(rf"{re.escape(first.name)}(?:-([2-9]|[1-9]\d+))?", path.name)
        if match:
            members[int(match[1] or 1)] = path
    return members


def make_new_folder(first: Path, key: str = "config.output_dir") -> Path:
    """Make a folder that was not there: `first`, or NAME-2, NAME-3, and so on. Two runs never get the same one."""
    number = 1
    folder = first
    taken = _by_number(first)
    if taken:
        number = max(taken) + 1
        folder = first.with_name(f"{first.name}-{number}")
    # Another process may make the same folder in between. Only one of them can.
    while not make_folder(folder, key):
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder


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


def ensure_folder(folder: Path, key: str) -> None:
    """Make a folder unless it is there. Raises UserError with `key`, the setting or flag that names it."""
    if not make_folder(folder, key) and not folder.is_dir():
        raise UserError(f"{key}: {folder} is no folder")


def lock(folder: Path) -> str:
    """Keep other processes out of a folder until this one ends or calls `release`.

    Return what to tell the user: "", or that this file system has no locks. Raise UserError, with host and process, if
    another process holds the folder.
    """
    folder = folder.resolve()
    # One process never writes two runs into one folder.
    release(folder)
    try:
        file = (folder / LOCK).open("a+")
        _wait_for_lock(file, folder)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except OSError as error:
        if error.errno in UNWRITABLE:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from error
        return f"{folder}: its file system has no locks ({error.strerror}): see that no other run writes there"
    _held[folder] = file
    return ""


def _wait_for_lock(file: TextIO, folder: Path) -> None:
    """Take a lock, which a killed holder keeps for a while. Raise UserError if the holder lives on."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            file.seek(0)
            holder = file.read() or "another process"
            raise UserError(f"{holder} is writing to {folder}: stop it or wait for its end, or choose another folder")
        time.sleep(0.1)


def held_folders() -> list[Path]:
    """Return the folders that this process keeps others out of, the one that it locked last at the end."""
    return list(_held)


def release(folder: Path) -> None:
    """Let other processes into a folder."""
    file = _held.pop(folder.resolve(), None)
    if file:
        file.close()


def check_writable(folder: Path) -> None:
    """Raise UserError unless files can be made in a folder."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error


def remove(path: Path) -> None:
    """Remove a folder with all in it, or a file or link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_problem(path: Path) -> str:
    """Return why a file cannot be what its name says, or "" if it may be.

    It does not exist, is empty, unreadable, a pipe or a device, or a Git LFS pointer, which stands for a file that a
    clone has not fetched.
    """
    try:
        if is_pipe_or_device(path):
            return "is a pipe or a device: save what it gives as a file"
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except FileNotFoundError:
        if path.is_symlink():
            return "is a link to a file that is gone"
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError:  # a zero character
        return "has a name that no file can have"
    if start == LFS_POINTER:
        return "is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
    if not start:
        return "is empty"
    return ""


def check_file(path: Path) -> None:
    """Raise UserError for a file that has a `file_problem`."""
    problem = file_problem(path)
    if problem:
        raise UserError(f"{in_one_line(path)} {problem}")


def exists(path: Path) -> bool:
    """Return whether there is something at a path; False for a name that is too long and a folder that nobody may look
    into."""
    try:
        return path.exists()
    except OSError:
        return False


def is_pipe_or_device(path: Path) -> bool:
    """Return whether a path is neither a file nor a folder. To open a pipe waits for its writer, perhaps for ever, and
    some devices have no end. Raise OSError for a path that does not exist."""
    mode = path.stat().st_mode
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise UserError if the file holds anything else."""
    try:
        if is_pipe_or_device(path):
            raise OSError("it is a pipe or a device")
        stored = json.loads(path.read_text(encoding="utf-8"))
        # JSON can name a lone surrogate, which no text file can hold: a ValueError here, not when it is written.
        json.dumps(stored, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise UserError(f"{path} holds no JSON object")
    return stored


def read_record(kind: type[Record], path: Path) -> Record:
    """Return the record that a JSON file holds. Raise UserError for a file that no run has written."""
    return record_of(kind, read_json(path), path)


def record_of(kind: type[Record], fields: dict[str, Any], path: Path) -> Record:
    """Return a record of the fields that a JSON file holds.

    Raise UserError if a field is missing, unknown, or has another type than the record says.
    """
    try:
        record = kind(**fields)
    except TypeError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    for name, annotation in get_type_hints(kind).items():
        value = getattr(record, name)
        if not _has_type(value, annotation):
            raise UserError(f"{path} is damaged: {name} is {quoted(value)}")
    return record


def record_within(kind: type[Record], stored: dict[str, Any], path: Path) -> Record:
    """Return the record among the entries of a JSON file, which has others, too; an older version wrote fewer. Raise
    UserError as `record_of`."""
    fields = {name: stored[name] for name in get_type_hints(kind) if name in stored}
    return record_of(kind, fields, path)


def _has_type(value: Any, annotation: Any) -> bool:
    """Return whether a JSON value is what a record's annotation says."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is UnionType:
        return any(_has_type(value, part) for part in parts)
    if origin is dict:
        return isinstance(value, dict) and all(_has_type(entry, parts[1]) for entry in value.values())
    if origin is list:
        return isinstance(value, list) and all(_has_type(entry, parts[0]) for entry in value)
    # A bool is an int to isinstance, and no number in a record.
    if annotation is int:
        return type(value) is int and abs(value) <= LARGEST
    if annotation is float:
        return type(value) is float or _has_type(value, int)
    return isinstance(value, annotation)


def is_unused(folder: Path) -> bool:
    """Return whether a folder holds no more than a run writes before it loads anything."""
    return {path.name for path in folder.iterdir()} <= {LOCK, INPUTS, DIGESTS, PARENT}


@contextmanager
def released_on_error(folder: Path) -> Iterator[None]:
    """Release the folder that this process holds if the block fails, and remove it if it is unused."""
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


def is_of_the_system(error: BaseException) -> bool:
    """Return whether the system failed. safetensors raises errors of its own, which say "(os error NUMBER)"."""
    return isinstance(error, OSError) or "(os error" in str(error)


def is_disk_full(error: Exception) -> bool:
    """Return whether an error says that a disk, or the user's share of it, is full."""
    return _has_number(error, FULL)


def is_disk_error(error: BaseException) -> bool:
    """Return whether an error says that a disk is full, broken or not to be written by this user."""
    return _has_number(error, BROKEN)


def _has_number(error: BaseException, numbers: Iterable[int]) -> bool:
    """Return whether the system failed with one of these numbers.

    The number is looked for in the text, since safetensors' errors and those of another rank have no `errno`.
    """
    alternatives = "|".join(map(str, numbers))
    return bool(re.search(rf"(Errno|os error) ({alternatives})\b", str(error)))


def resume_hint(run_folder: Path) -> str:
    """Return how to go on with a run that ended, as part of a sentence."""
    folder = run_folder / "checkpoints"
    if any(folder.glob("epoch_*")):
        return f"the same command with --config.resume_from={folder} goes on from its last checkpoint"
    return "it has no checkpoint yet, so the same command starts anew"
