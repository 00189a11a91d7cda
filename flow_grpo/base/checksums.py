"""Whether files are those that were written or read before.

A folder's checksums.json holds a size and a CRC-32, the fastest that Python has, of each file; of a folder inside only
where that has none of its own. It says nothing about who wrote a file. A digest is the name of a file's content.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError

FILE = "checksums.json"
CHUNK = 2**22  # bytes


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder."""
    names = list(_names(folder))
    (folder / FILE).write_text(json.dumps(dict(zip(names, _sums_of(folder, names)))))


def damage(folder: Path) -> str:
    """What is wrong with a folder's files, "" for nothing."""
    try:
        expected = folders.read_json(folder / FILE)
        if not expected:
            return f"{FILE} lists no file"
        if missing := [name for name in expected if not (folder / name).is_file()]:
            return f"{missing[0]} is missing"
        changed = [name for name, crc in zip(expected, _sums_of(folder, [*expected])) if crc != expected[name]]
    except (UserError, OSError) as error:
        return str(error)
    return f"{', '.join(changed[:3])}: the bytes are not those that were written" if changed else ""


def check_files(folder: Path) -> None:
    """Raises UserError for a folder whose files are not those that its checksums.json was written for."""
    if (folder / FILE).exists() and (problem := damage(folder)):
        raise UserError(
            f"{folder} is damaged: {problem}; where its files were changed on purpose, delete {folder / FILE}"
        )


def _names(folder: Path) -> Iterator[str]:
    for place, inside, files in os.walk(folder):
        inside[:] = sorted(name for name in inside if not Path(place, name, FILE).exists())
        yield from (str(Path(place, name).relative_to(folder)) for name in sorted(files) if name != FILE)


def _sums_of(folder: Path, names: list[str]) -> list[list[int]]:
    """Files side by side: neither reading nor summing holds Python's lock."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda name: _sum_of(folder / name), names))


def _sum_of(path: Path) -> list[int]:
    crc, buffer = 0, memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return [path.stat().st_size, crc]


def file_digest(path: Path, memory: Path | None = None) -> str:
    """Of one file; see `file_digests`."""
    return file_digests({"": path}, memory)[""]


def digests_in(folder: Path, patterns: Iterable[str], memory: Path | None = None) -> dict[str, str]:
    """Of the files in a folder that fit one of the patterns, by their paths there; see `file_digests`."""
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    return file_digests({str(path.relative_to(folder)): path for path in paths}, memory)


def file_digests(files: dict[str, Path], memory: Path | None = None) -> dict[str, str]:
    """Name -> the BLAKE2b digest of a file's bytes, 32 hexadecimal digits. Files are read side by side. `memory`, a
    JSON file, keeps digests for later processes, which may share it; it is no error if it cannot be read or written."""
    files = {name: Path(path).resolve() for name, path in files.items()}
    known = {}  # path -> [bytes, time of the content, time of the entry in ns, digest]
    with suppress(UserError):  # a missing or damaged memory
        known = folders.read_json(memory) if memory else {}
    with ThreadPoolExecutor() as pool:
        entries = dict(zip(map(str, files.values()), pool.map(partial(_entry_of, known), files.values())))
    if memory and known != known | entries:
        with suppress(OSError):
            folders.write_text(memory, json.dumps(known | entries))
    return {name: entries[str(file)][-1] for name, file in files.items()}


def _entry_of(remembered: dict[str, list], file: Path) -> list:
    """A file's size, times and digest; the digest is computed unless the rest is remembered."""
    status = file.stat()
    entry = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    known = remembered.get(str(file))
    is_whole = isinstance(known, list) and len(known) == 4 and isinstance(known[-1], str)
    if is_whole and known[:-1] == entry:
        return known
    with file.open("rb") as stream:
        return [*entry, hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()]
