"""Answers to a setting that does not exist: its name of today, the setting with its part here if it is another
program's, or the setting that it is a slip of."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from flow_grpo.base import locations
from flow_grpo.settings import stored_config, table

PAGE = "docs/reference/coming_from.md"
TABLE = locations.PACKAGE / "assets" / "other_programs.md"  # PAGE shows it
SHORTEST = 4  # letters of a word that may be a slip of another: with fewer, eta would be one of beta


class Row(NamedTuple):
    """A setting of another program."""

    program: str
    name: str  # dotted, as it is typed there
    ours: tuple[str, ...]  # the settings that have its part; () = none has
    note: str


def rows() -> list[Row]:
    """Return the settings of other programs that have a row in TABLE."""
    program = ""
    settings = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            program = line.removeprefix("## Settings of ")
        elif line.startswith("| `"):
            # Where the last cell is empty, the separator in front of it ends the line.
            cells = line.strip().removeprefix("|").removesuffix("|").split(" | ")
            name, ours, note = map(str.strip, cells)
            our_keys = tuple(re.findall(r"`([^`]+)`", ours))
            settings.append(Row(program, name.strip("`"), our_keys, note))
    return settings


def answer(key: str, names: Iterable[str] = table.BY_KEY, called: str = "") -> str:
    """Return the sentence for a dotted key, or for the part of one that ml_collections has refused.

    Args:
        names: the settings that there are, dotted.
        called: what the sentence calls it; "" = config.KEY.
    """
    moved = _moved(key)
    if moved:
        return moved
    ours = nearest(key, names)
    foreign = _most_alike(key)
    is_foreign_name = bool(foreign) and _is_its_name(key, foreign[0])
    parts = [f"there is no setting {called or f'config.{key}'}"]
    if foreign and (is_foreign_name or not ours):
        parts.append(_sentence(foreign))
    # beta is DiffusionNFT's, and may stand for train.beta.
    if ours and (not is_foreign_name or "." not in key):
        nearest_keys = " or ".join(f"config.{name}" for name in ours)
        parts.append(f"nearest: {nearest_keys}")
    if len(parts) == 1:
        parts.append(_where_to_look(key))
    return "; ".join([*parts, PAGE])


def _where_to_look(key: str) -> str:
    """Return advice for a key that is like no other."""
    section = key.partition(".")[0]
    if section == "custom":
        return "a config file of your own has to set it first"
    if section not in table.SECTIONS:
        section = "config"
    return f"--help {section} lists all of its section"


def of_other_program(key: str) -> str:
    """Say what has the part of another program's setting of exactly this name; "" if no program has it."""
    namesakes = [row for row in rows() if _is_its_name(key, row)]
    return f"{_sentence(namesakes)}; {PAGE}" if namesakes else ""


def nearest(key: str, names: Iterable[str]) -> list[str]:
    """Return the settings, or sections, of which `key` is a slip: the same last part in another section, or a last part
    with one slip. A name that is only loosely alike is another setting, and would make another experiment of it."""
    last = _last_part(key)
    names = list(names)
    namesakes = [name for name in names if _last_part(name) == last]
    if namesakes:
        return namesakes
    sections = sorted({name.partition(".")[0] for name in names if "." in name})
    return [name for name in [*names, *sections] if is_slip(last, _last_part(name))]


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def is_slip(word: str, name: str) -> bool:
    """Return whether a word differs from a name in one letter, which is wrong, missing or too many, or in two
    neighbours that have changed places."""
    if len(word) < SHORTEST:
        return False
    # What is left between the common beginning and the common end of both.
    start = _num_alike(word, name)
    word = word[start:]
    name = name[start:]
    end = _num_alike(word[::-1], name[::-1])
    word = word[: len(word) - end]
    name = name[: len(name) - end]
    are_exchanged = len(word) == 2 and word == name[::-1]
    return max(len(word), len(name)) <= 1 or are_exchanged


def _num_alike(word: str, name: str) -> int:
    """Return how many letters two words have in common at their beginning."""
    for i, (one, other) in enumerate(zip(word, name)):
        if one != other:
            return i
    return min(len(word), len(name))


def _moved(key: str) -> str:
    """Return a sentence for a setting of an older version, named by its key or by the last part of it; "" for any
    other."""
    for moved, today in stored_config.MOVED.items():
        if key in (moved, _last_part(moved)):
            return f"config.{moved} is now {today}"
    return ""


def _is_its_name(key: str, row: Row) -> bool:
    """Return whether a key is a row's name, or the end or the beginning of it."""
    name = row.name.lstrip("-")  # of a flag
    return name == key or name.endswith(f".{key}") or name.startswith(f"{key}.")


def _most_alike(key: str) -> list[Row]:
    """Return the rows of exactly this name, else those that begin or end with it, else those with its last part."""
    last = _last_part(key)
    alike = [row for row in rows() if _is_its_name(key, row) or _last_part(row.name) == last]
    exact = [row for row in alike if row.name == key]
    parts = [row for row in alike if _is_its_name(key, row)]
    return exact or parts or alike


def _sentence(alike: list[Row]) -> str:
    """Join what the first two rows say that have different counterparts here."""
    # Of rows with one counterpart the first counts, and comes in the place of the last of them.
    first_by_part = {row.ours: row for row in reversed(alike)}
    in_order = list(reversed(first_by_part.values()))
    return "; ".join(map(_clause, in_order[:2]))


def _clause(row: Row) -> str:
    """Say what has the part of a row's setting here."""
    ours = " and ".join(f"config.{name}" for name in row.ours)
    part_here = f"is {ours} here" if ours else "has no like here"
    clause = f"{row.program}'s {row.name} {part_here}"
    if row.note:
        clause += f" ({row.note})"
    return clause
