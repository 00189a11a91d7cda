"""What the numbers that a run logs are called and mean: assets/metrics.md, the only list of them."""

from typing import NamedTuple

from flow_grpo.base import shipped


class Metric(NamedTuple):
    meaning: str
    expect: str  # what a healthy run shows
    unit: str = ""
    group: str = ""  # heading under which the page of a run draws it


TABLE = shipped.PACKAGE / "assets" / "metrics.md"
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


def explain(name: str) -> Metric | None:
    """The row of METRICS for a name; None for a name that it does not explain."""
    if name in METRICS:
        return METRICS[name]
    keys = [key for key in METRICS if "<" in key and name.startswith(key.split("<")[0])]
    fitting = [key for key in keys if name.endswith(key.rpartition(">")[2]) and name.count("/") == key.count("/")]
    return METRICS.get(max(fitting or keys, key=len, default=""))  # reward/<name>_group_std before reward/<name>
