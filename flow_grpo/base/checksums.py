"""Checksums, which tell whether files are as they were written, and digests, which name the content of files.

A folder's checksums.json holds size and CRC-32, the fastest sum that Python has, of each file in it and below it; an
inner folder with a checksums.json of its own is left out. It does not tell who wrote a file.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError

FILE = "checksums.json"
CHUNK = 2**22  # bytes


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder."""
    names = _names(folder)
    checksums = dict(zip(names, _checksums(folder, names)))
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
        actual = dict(zip(expected, _checksums(folder, list(expected))))
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


def _checksums(folder: Path, names: list[str]) -> list[list[int]]:
    """Return the checksum of each file, computed side by side: reading and summing release Python's lock."""
    paths = [folder / name for name in names]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_checksum, paths))


def _checksum(path: Path) -> list[int]:
    """Return [bytes, CRC-32] of a file."""
    crc = 0
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        # readinto returns 0 at the end.
        for count in iter(partial(file.readinto, buffer), 0):
            crc = zlib.crc32(buffer[:count], crc)
    return [path.stat().st_size, crc]


def file_digest(path: Path, memory: Path | None = None) -> str:
    """Return the digest of one file, see `file_digests`."""
    return file_digests({"": path}, memory)[""]


def digests_in(folder: Path, patterns: Iterable[str], memory: Path | None) -> dict[str, str]:
    """Return the digests of a folder's files that match a pattern, by their paths in it, see `file_digests`."""
    files = {}
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                files[str(path.relative_to(folder))] = path
    return file_digests(files, memory)


def file_digests(files: dict[str, Path], memory: Path | None = None) -> dict[str, str]:
    """Return name -> BLAKE2b digest of a file's bytes, 32 hexadecimal digits. Files are read side by side.

    Args:
        memory: JSON file that keeps digests for later processes, which may share it; it need not be readable or
            writable.
    """
    paths = {name: Path(path).resolve() for name, path in files.items()}
    known = {}  # path -> [bytes, time of the content, time of the entry in ns, digest]
    if memory:
        with suppress(UserError):  # it is missing or damaged
            known = folders.read_json(memory)
    with ThreadPoolExecutor() as pool:
        entries = pool.map(partial(_digest_entry, known), paths.values())
        current = dict(zip(map(str, paths.values()), entries))
    updated = known | current
    if memory and known != updated:
        with suppress(OSError):
            folders.write_text(memory, json.dumps(updated))
    return {name: current[str(path)][-1] for name, path in paths.items()}


def _digest_entry(known: dict[str, Any], file: Path) -> list[Any]:
    """Return a file's size, times and digest. The digest is computed unless size and times are the known ones."""
    status = file.stat()
    entry = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    remembered = known.get(str(file))
    if isinstance(remembered, list) and remembered[:-1] == entry and isinstance(remembered[-1], str):
        return remembered
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=16))
    return [*entry, digest.hexdigest()]
