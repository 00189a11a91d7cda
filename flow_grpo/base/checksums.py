"""Checksums, which tell whether files are as they were written, and digests, which name the content of files.

A folder's checksums.json holds size and CRC-32, the fastest sum that Python has, of each file in it and below it; an
inner folder with a checksums.json of its own is left out. It does not tell who wrote a file.
"""

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line

FILE = "checksums.json"
# Bytes that are read at once: other threads may run while so many are read or summed.
CHUNK = 2**22
# Threads of digests that are computed beside other work: they leave that work the other cores and most of the disk, and
# finish the first files before they begin with the last.
READERS_BESIDE = 4
THREADS = "digests"  # in the names of threads


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder."""
    checksums = _checksums(folder, _names(folder))
    (folder / FILE).write_text(json.dumps(checksums))


def damage(folder: Path) -> str:
    """Return what is wrong with the files of a folder, "" for nothing."""
    try:
        expected = folders.read_json(folder / FILE)
        if not expected:
            return f"{FILE} lists no file"
        for name in expected:
            if not (folder / name).is_file():
                return f"{name} is missing"
        actual = _checksums(folder, list(expected))
    except (UserError, OSError) as error:
        return str(error)
    changed = [name for name in expected if actual[name] != expected[name]]
    if not changed:
        return ""
    return f"{', '.join(changed[:3])}: the bytes are not those that were written"


def check_files(folder: Path) -> None:
    """Raise UserError if a folder has a checksums.json and its files are others. A folder without one is accepted."""
    if not (folder / FILE).exists():
        return
    problem = damage(folder)
    if problem:
        raise UserError(
            f"{folder} is damaged: {problem}; where its files were changed on purpose, delete {folder / FILE}"
        )


def _names(folder: Path) -> list[str]:
    """Return the paths in a folder that its checksums.json lists."""
    names = []
    for place, inner_folders, files in os.walk(folder):
        # os.walk goes on into what is left in its own list.
        inner_folders[:] = sorted(name for name in inner_folders if not Path(place, name, FILE).exists())
        for name in sorted(files):
            if name != FILE:
                names.append(str(Path(place, name).relative_to(folder)))
    return names


def _checksums(folder: Path, names: list[str]) -> dict[str, list[int]]:
    """Return the checksum of each file by its name, computed side by side: reading and summing release Python's
    lock."""
    paths = [folder / name for name in names]
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(_checksum, paths), strict=True))


def _checksum(path: Path) -> list[int]:
    """Return [bytes, CRC-32] of a file."""
    crc = 0
    for chunk in _chunks(path):
        crc = zlib.crc32(chunk, crc)
    return [path.stat().st_size, crc]


def _chunks(path: Path) -> Iterator[memoryview]:
    """Yield the bytes of a file in parts of CHUNK bytes, each of which is valid until the next one is asked for."""
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while True:
            count = file.readinto(buffer)
            if not count:
                return
            yield buffer[:count]


def file_digest(path: Path, digests_file: Path | None = None) -> str:
    """Return the digest of one file, see `file_digests`."""
    return file_digests({"": path}, digests_file)[""]


def digests_in(folder: Path, patterns: Iterable[str], digests_file: Path | None) -> dict[str, str]:
    """Return the digests of a folder's files that match a pattern, by their paths in it, see `file_digests`."""
    return file_digests(files_in(folder, patterns), digests_file)


def files_in(folder: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """Return the files of a folder that match a pattern, by their paths in it, in the order of the patterns."""
    files = {}
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                files[str(path.relative_to(folder))] = path
    return files


def file_digests(files: dict[str, Path], digests_file: Path | None = None) -> dict[str, str]:
    """Return name -> BLAKE2b digest of a file's bytes, 32 hexadecimal digits. Files are read side by side.

    Args:
        digests_file: JSON file that keeps digests for later processes, which may share it; it need not be readable or
            writable.

    Raises:
        UserError: a file cannot be read.
    """
    return _compute(_resolved(files), _memory_at(digests_file), threading.Event())


class LaterDigests:
    """Digests as `file_digests` returns them, computed by threads while the process does other work.

    After its `with` block no thread is left: those that still read have stopped, and what they had finished is in the
    `digests_file`.
    """

    def __init__(self, files: dict[str, Path], digests_file: Path | None = None) -> None:
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, THREADS)
        # Held, so that `file_digests` shares what is computed here. Paths are made absolute now, since other work may
        # change the working directory.
        self._memory = _memory_at(digests_file)
        self._digests = self._pool.submit(_compute, _resolved(files), self._memory, self._stopped, READERS_BESIDE)

    def result(self) -> dict[str, str]:
        """Wait for the digests. Raises UserError for a file that cannot be read."""
        return self._digests.result()

    def __enter__(self) -> "LaterDigests":
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._pool.shutdown()


class _Stopped(Exception):
    """End of a thread whose digest nobody waits for any more."""


class _Memory:
    """Digests that this process has computed, and the JSON file that keeps them for later ones.

    Threads share them: two that want the digest of one file read it once.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._entries: dict[str, list[Any]] = {}  # path -> [bytes, time of the content, of the entry in ns, digest]
        self._reading: dict[str, threading.Lock] = {}  # path -> lock of the thread that reads the file
        self._writing = threading.Lock()

    def stored(self) -> dict[str, Any]:
        """Return the entries of the file, {} if it is missing or damaged."""
        if self._file:
            with suppress(UserError):
                return folders.read_json(self._file)
        return {}

    def store(self) -> None:
        """Add what was computed to the file, which another process may have written in between."""
        if not self._file:
            return
        with self._writing:
            stored = self.stored()
            updated = stored | self._entries
            if updated != stored:
                with suppress(OSError):
                    folders.write_text(self._file, json.dumps(updated))

    def digest(self, file: Path, stored: dict[str, Any], stopped: threading.Event) -> str:
        """Return the digest of a file, computed unless its size and times are those of a known one."""
        path = str(file)
        with self._reading.setdefault(path, threading.Lock()):
            try:
                status = file.stat()
                state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
                for known in (self._entries.get(path), stored.get(path)):
                    # Another program may have written the file of stored ones.
                    if isinstance(known, list) and known[:-1] == state and isinstance(known[-1], str):
                        return known[-1]
                digest = _computed_digest(file, stopped)
            except OSError as error:
                raise UserError(f"{in_one_line(file)} cannot be read: {error.strerror}") from error
            self._entries[path] = [*state, digest]
            return digest


# Memories that are in use, by their files.
_memories: WeakValueDictionary[Path, _Memory] = WeakValueDictionary()


def _memory_at(file: Path | None) -> _Memory:
    """Return the memory that a file keeps, the same one as long as anybody uses it."""
    if file is None:
        return _Memory(None)
    return _memories.setdefault(file.absolute(), _Memory(file.absolute()))


def _resolved(files: dict[str, Path]) -> dict[str, Path]:
    """Return files by their names with absolute paths, in which no link is left."""
    resolved = {}
    for name, path in files.items():
        resolved[name] = Path(path).resolve()
    return resolved


def _compute(
    paths: dict[str, Path], memory: _Memory, stopped: threading.Event, threads: int | None = None
) -> dict[str, str]:
    """Return name -> digest of a path. `memory` keeps those that are done, even where another one fails."""
    digest = partial(memory.digest, stored=memory.stored(), stopped=stopped)
    try:
        with ThreadPoolExecutor(threads, THREADS) as pool:
            return dict(zip(paths, pool.map(digest, paths.values())))
    finally:
        memory.store()


def _computed_digest(file: Path, stopped: threading.Event) -> str:
    """Return the digest of a file's bytes. Raise _Stopped once nobody waits for it any more."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in _chunks(file):
        if stopped.is_set():
            raise _Stopped
        digest.update(chunk)
    return digest.hexdigest()
