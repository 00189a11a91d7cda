"""Whether the files of a folder are those that were written: a size and a CRC-32 for each, in checksums.json.

CRC-32 is the fastest that Python has: it sees any flipped bit, and misses other damage once in 4 billion files. It says
nothing about who wrote a file. A folder inside that has checksums of its own is left to these.
"""

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILE = "checksums.json"
CHUNK = 2**22  # bytes

Sums = dict[str, list[int]]  # path below the folder -> [bytes, CRC-32]


def write(folder: Path, known: Sums) -> None:
    """Write the checksums of all files in a folder, of which some are `known`."""
    names = [name for name in _names(folder) if name not in known]
    (folder / FILE).write_text(json.dumps(known | dict(zip(names, _sums_of(folder, names)))))


def damage(folder: Path) -> str:
    """What is wrong with a folder's files, "" for nothing."""
    try:
        expected = json.loads((folder / FILE).read_text())
        expected = {str(name): [int(size), int(crc)] for name, (size, crc) in expected.items()}
    except FileNotFoundError:
        return f"{FILE} is missing"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return f"{FILE} cannot be read"
    try:
        for name, (size, _) in expected.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, of {size} that were written"
        changed = [name for name, crc in zip(expected, _sums_of(folder, [*expected])) if crc != expected[name]]
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return f"{', '.join(changed[:3])}: the bytes are not those that were written" if changed else ""


def _names(folder: Path) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not Path(place, name, FILE).exists())
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
