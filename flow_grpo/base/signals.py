"""Signals that ask a run to end: Ctrl-C, and what Slurm, Kubernetes and torchrun send before they kill a process.

A handler only notes the first one. The run asks for it by `check` wherever it can stop without harm, and what was under
way there is undone by the context managers around it; `conclude` then saves what there is.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A scheduler sends one to each rank and to torchrun, which sends its own to its ranks: within this time they are one.
REPEAT_S = 1.0
# Exit status of a run that a scheduler's signal has ended and that can go on: EX_TEMPFAIL, "try again", of sysexits.h.
STATUS = 75


class Interrupted(BaseException):
    """End of a run that a signal has asked for."""


def _never() -> bool:
    return False


def _nothing() -> str:
    return ""


class Received:
    """The first signal that this process got, and what its run does about it."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.at_s = 0.0  # the clock when it came
        self.must_stop: Callable[[], bool] = _never
        self.conclude: Callable[[], str] = _nothing
        self.can_listen = False  # whether this process is a command, whose signals a run may take

    @property
    def name(self) -> str:
        """Name of the signal as a user knows it; "" = none has come."""
        if self.number is None:
            return ""
        return "Ctrl-C" if self.number is signal.SIGINT else self.number.name

    @property
    def status(self) -> int:
        """Exit status of a process that the signal has ended."""
        return 128 + signal.SIGINT if self.number is signal.SIGINT else STATUS

    def note(self, number: int, frame: FrameType | None) -> None:
        """Keep the first signal; a later one ends the process at once, unless it is the same one sent twice."""
        now = time.monotonic()
        if self.number is None:
            self.number = signal.Signals(number)
            self.at_s = now
        elif now - self.at_s > REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


received = Received()


@contextmanager
def of_a_command() -> Iterator[None]:
    """Let `listen` take the process's signals inside this block; after it their handlers are those of before."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    received.can_listen = bool(before)
    received.number = None  # of a command before this one
    try:
        yield
    finally:
        received.can_listen = False
        for number, handler in before.items():
            signal.signal(number, handler)


def listen(must_stop: Callable[[], bool], conclude: Callable[[], str]) -> None:
    """Note signals from here on, if this process is a command.

    Args:
        must_stop: whether a run that a signal has asked to end stops where it is.
        conclude: saves what there is, after the run has stopped; returns what to tell the user.
    """
    if received.can_listen:
        received.must_stop = must_stop
        received.conclude = conclude
        for number in SIGNALS:
            signal.signal(number, received.note)


def check() -> None:
    """Raise Interrupted if a signal has asked the run to end and it stops here."""
    if received.number is not None and received.must_stop():
        raise Interrupted
