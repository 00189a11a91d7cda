"""How far a loop has come: a bar in a terminal, a line a minute where there is none."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

LINE_EVERY_S = 60

Item = TypeVar("Item")


class Lines:
    """Progress as lines, counted as tqdm's bars are."""

    def __init__(self, desc: str, total: int, say: Callable[[str], object]):
        self.desc, self.total, self.say = desc, total, say
        self.done = 0
        self.start = self.last = time.perf_counter()

    def update(self, count: int) -> None:
        """So many more are done."""
        self.done += count
        now = time.perf_counter()
        if now - self.last >= LINE_EVERY_S and self.done < self.total:
            left = tqdm.format_interval((now - self.start) / self.done * (self.total - self.done))
            self.say(f"{self.desc}: {self.done}/{self.total}, {left} left")
            self.last = now

    def close(self) -> None:
        """Nothing is left open."""


def counter(desc: str, total: int, say: Callable[[str], object] | None) -> tqdm | Lines:
    """What to `update` with the number of things that are done, and to close; `say` is None where nothing is shown."""
    if say is None or sys.stderr.isatty():
        return tqdm(desc=desc, total=total, leave=False, dynamic_ncols=True, disable=say is None)
    return Lines(desc, total, say)


def shown(
    iterable: Iterable[Item], desc: str, total: int | None = None, *, say: Callable[[str], object] | None
) -> Iterable[Item]:
    """The same, counted as it is walked through; `say` is None where nothing is shown."""
    if say is None:
        return iterable
    return _counted(iterable, counter(desc, len(iterable) if total is None else total, say))


def _counted(iterable: Iterable[Item], progress: tqdm | Lines) -> Iterator[Item]:
    try:
        for item in iterable:
            yield item
            progress.update(1)
    finally:
        progress.close()
