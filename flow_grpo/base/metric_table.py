"""Names and meanings of the numbers that a run logs, read from assets/metrics.md, the only list of them."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from flow_grpo.base import locations


class Metric(NamedTuple):
    """Row of the table of metrics."""

    meaning: str
    expect: str  # what a healthy run shows
    unit: str = ""
    group: str = ""  # heading under which the page of a run draws it


TABLE = locations.PACKAGE / "assets" / "metrics.md"
NOT_DRAWN = "In metrics.jsonl alone"  # heading of what the page of a run does not draw


def _table() -> dict[str, Metric]:
    """Return the rows by name. A part <...> of a name stands for any text, <step> for a number."""
    group = ""
    rows = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            group = line.removeprefix("## ")
        elif line.startswith("| `"):
            name, unit, meaning, expect = map(str.strip, line.strip("|").split("|"))
            rows[name.strip("`")] = Metric(meaning, expect, unit, group)
    return rows


METRICS = _table()


def names_score(name: str, rewards: Iterable[str]) -> bool:
    """Return whether a name is that of a score: "avg", a reward, or a figure of a reward, such as shapes_accuracy.

    Of a figure only the beginning is known before the reward has scored.
    """
    return name == "avg" or any(name == reward or name.startswith(f"{reward}_") for reward in rewards)


def is_of_frame(name: str) -> bool:
    """Return whether a figure is the score of one frame of videos."""
    return re.search(r"_frame_\d+$", name) is not None


def explain(name: str, rewards: Iterable[str] | None = None) -> Metric | None:
    """Return the row of METRICS for a name, or None if no row describes it.

    Args:
        rewards: names of the measured rewards, whose scores `<name>` of a row may stand for; None = any.
    """
    if name in METRICS:
        return METRICS[name]
    matching = [key for key in METRICS if "<" in key and _matches(key, name, rewards)]
    # The longest key is the most specific: reward/<name>_group_std before reward/<name>.
    return METRICS[max(matching, key=len)] if matching else None


def _matches(key: str, name: str, rewards: Iterable[str] | None) -> bool:
    """Return whether a key with <...> describes a name."""
    pattern = re.escape(key).replace("<name>", "(?P<name>[^/]+)").replace("<tag>", ".+").replace("<step>", "[0-9]+")
    match = re.fullmatch(pattern, name)
    if match is None:
        return False
    if "name" not in match.groupdict():
        return True
    # Held-out pairs have the metrics of an update.
    if key == "validation/<name>":
        return match["name"] in METRICS
    return rewards is None or names_score(match["name"], rewards)
