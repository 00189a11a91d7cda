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

LOCK = ".lock"
FILES = (  # at the top of a run's folder
    *("config.json", "metrics.jsonl", "metrics.jsonl.tmp", "metrics.damaged.jsonl", "wandb_id"),
    *("report.html", "report.tmp", "reward.png", "samples.png", "README.md"),
    *("pytorch_lora_weights.safetensors", "adapter_config.json", "adapter_model.safetensors", "model_index.json"),
)
FOLDERS = ("images", "wandb", "tensorboard", "best", "transformer")
FOLDERS_OF_FILES = ("images", "transformer")
ASIDE = "aside"  # in the names of what was renamed
WAIT_S = 10.0  # for a killed holder, whose lock stays until the system has taken back all of its memory
FULL = errno.ENOSPC, errno.EDQUOT

_held: dict[Path, TextIO] = {}  # the system takes a lock back when its file is closed, at the latest by its end


def as_any_new_file(file: Path) -> None:
    """Give a file the permissions that the user's umask asks for: safetensors lets nobody but its owner read it."""
    umask = os.umask(0o077)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def take(first: Path) -> Path:
    """Make a folder that was not there: `first`, or NAME-2, NAME-3, and so on. Two runs never get the same one."""
    folder, number = first, 1
    while not make(folder):
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder


def make(folder: Path, setting: str = "output_dir") -> bool:
    """Make a folder; False if it is there already.

    Args:
        setting: of the config, which names it.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError as error:
        if folder.parent.is_dir():
            return False
        raise ValueError(f"config.{setting}: {folder.parent} is no folder") from error
    except OSError as error:
        raise ValueError(f"config.{setting}: {folder} cannot be made: {error.strerror}") from error
    return True


def newest(first: Path) -> Path | None:
    """The last of `first`, NAME-2, NAME-3 and so on; None if there is none."""
    folder, number = None, 1
    while (following := first if number == 1 else first.with_name(f"{first.name}-{number}")).is_dir():
        folder, number = following, number + 1
    return folder


def lock(folder: Path) -> str:
    """Keep other processes out of a folder until this one ends or calls `release`.

    Returns:
        What to tell the user: "", that this file system has no locks, or what lay in the place of the lock.

    Raises:
        ValueError: another process holds it; with its host and its process id.
    """
    folder = folder.resolve()
    release(folder)  # one process never writes two runs into one folder
    end = time.monotonic() + WAIT_S
    try:
        notice = _in_the_way(folder / LOCK, Path.is_file)
        while (file := _open_locked(folder)) is None:
            if time.monotonic() > end:
                raise ValueError(_refusal(folder))
            time.sleep(0.1)
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        file.flush()
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise ValueError(f"{folder} cannot be written: {error.strerror}") from error
        if error.errno in FULL:
            raise ValueError(f"disk full: no space left for {folder}; free some and start again") from error
        return f"{folder}: its file system has no locks ({error.strerror}): see that no other run writes there"
    _held[folder] = file
    return notice


def _open_locked(folder: Path) -> TextIO | None:
    """The folder's lock file, locked; None while another process holds it."""
    file = (folder / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return file
    except BlockingIOError:
        pass
    except OSError:
        file.close()
        raise
    file.close()  # another process holds it, or has removed the file that it held
    return None


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
    link that leads nowhere; a sentence for each. Links to files and folders stay."""
    notices = [_in_the_way(folder / name, _is_usable_folder) for name in FOLDERS]
    files = [folder / name for name in FILES]
    for name in FOLDERS_OF_FILES:
        if (folder / name).is_dir():
            files += [path for path in sorted((folder / name).iterdir()) if f".{ASIDE}-" not in path.name]
    return [notice for notice in [*notices, *(_in_the_way(path, _is_usable_file) for path in files)] if notice]


def _is_usable_file(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK | os.W_OK)


def _is_usable_folder(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.R_OK | os.W_OK | os.X_OK)


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
    """Raises ValueError for a file that does not hold one JSON object."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{path} holds no JSON object")
    return stored


@contextmanager
def given_back(folder: Path) -> Iterator[None]:
    """If the block fails: release the folder that this process holds. If nothing was written to it, it is removed, and
    the folder around it too where that is empty then."""
    try:
        yield
    except BaseException:
        if folder.resolve() in _held and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
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
