"""Progress of a loop: a bar in a terminal, a line a minute where there is none."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from tqdm import tqdm

LINE_EVERY_S = 60

Item = TypeVar("Item")


class Lines:
    """Progress as lines, with the methods of tqdm's bars."""

    def __init__(self, desc: str, total: int, say: Callable[[str], object]):
        self.desc = desc
        self.total = total
        self.say = say
        self.done = 0
        self.start = time.perf_counter()
        self.last = self.start

    def update(self, count: int) -> None:
        """Count things done since the last call, and say a line if the last one is LINE_EVERY_S old."""
        self.done += count
        now = time.perf_counter()
        if now - self.last >= LINE_EVERY_S and self.done < self.total:
            seconds_each = (now - self.start) / self.done
            left = tqdm.format_interval(seconds_each * (self.total - self.done))
            self.say(f"{self.desc}: {self.done}/{self.total}, {left} left")
            self.last = now

    def close(self) -> None:
        """Do nothing: no line is left open."""


def counter(desc: str, total: int, say: Callable[[str], object] | None) -> tqdm | Lines:
    """Return a counter to `update` with the number of things done, and to close; it is silent if `say` is None."""
    if say is None or sys.stderr.isatty():
        return tqdm(desc=desc, total=total, leave=False, dynamic_ncols=True, disable=say is None)
    return Lines(desc, total, say)


def shown(
    iterable: Iterable[Item], desc: str, total: int | None = None, *, say: Callable[[str], object] | None
) -> Iterable[Item]:
    """Return the same things, counted as they are iterated over; silent if `say` is None."""
    if say is None:
        return iterable
    if total is None:
        assert isinstance(iterable, Sized), "what has no length needs a total"
        total = len(iterable)
    return _counted(iterable, counter(desc, total, say))


def _counted(iterable: Iterable[Item], progress: tqdm | Lines) -> Iterator[Item]:
    try:
        for item in iterable:
            yield item
            progress.update(1)
    finally:
        progress.close()
