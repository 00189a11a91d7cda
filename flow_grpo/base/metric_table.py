"""What the numbers that a run logs are called and mean: assets/metrics.md, the only list of them."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from flow_grpo.base import locations


class Metric(NamedTuple):
    meaning: str
    expect: str  # what a healthy run shows
    unit: str = ""
    group: str = ""  # heading under which the page of a run draws it


TABLE = locations.PACKAGE / "assets" / "metrics.md"
NOT_DRAWN = "In metrics.jsonl alone"  # heading of what the page of a run does not draw


def _table() -> dict[str, Metric]:
    """A name that ends in <...> stands for every name that begins with what precedes it."""
    group, rows = "", {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            group = line.removeprefix("## ")
        elif line.startswith("| `"):
            name, unit, meaning, expect = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name.strip("`")] = Metric(meaning, expect, unit, group)
    return rows


METRICS = _table()


def names_score(name: str, rewards: Iterable[str]) -> bool:
    """Whether a name is that of a score: "avg", a reward's, or a figure of one, of which only the beginning is known
    before it has scored, such as shapes_accuracy."""
    return name == "avg" or any(name == reward or name.startswith(f"{reward}_") for reward in rewards)


def explain(name: str, rewards: Iterable[str] | None = None) -> Metric | None:
    """Return the row of METRICS for a name, or None where no row is about it.

    Args:
        rewards: those that were measured, whose scores `<name>` of a row may stand for; None = any.
    """
    if name in METRICS:
        return METRICS[name]
    fitting = [key for key in METRICS if "<" in key and _fits(key, name, rewards)]
    return METRICS.get(max(fitting, key=len, default=""))  # reward/<name>_group_std before reward/<name>


def _fits(key: str, name: str, rewards: Iterable[str] | None) -> bool:
    pattern = re.escape(key).replace("<name>", "(?P<name>[^/]+)").replace("<tag>", ".+")
    match = re.fullmatch(pattern, name)
    if match is None:
        return False
    if key == "validation/<name>":  # held-out pairs have the metrics of an update
        return match["name"] in METRICS
    return rewards is None or names_score(match["name"], rewards)
