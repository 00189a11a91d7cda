"""Threads of rewards, for which the end of the process waits a moment at most.

A thread that frees tensors while the interpreter is being taken down would end the process by SIGABRT, whatever its
exit status. So all threads are asked to end before that. One that hangs is left: it frees nothing.
"""

import asyncio
import atexit
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

LEAVE_S = 1  # time that all threads have at the end of the process

_LOOPS: dict[str, asyncio.AbstractEventLoop] = {}
_STARTING = threading.Lock()  # many threads ask for a loop at once
_STARTED: WeakSet[threading.Thread] = WeakSet()
_POOLS: "WeakSet[Threads]" = WeakSet()


def event_loop(name: str, initialize: Callable[[], None] | None = None) -> asyncio.AbstractEventLoop:
    """Return the event loop of a name. Its thread begins with `initialize` and runs for ever."""
    with _STARTING:
        if name not in _LOOPS:
            _LOOPS[name] = asyncio.new_event_loop()
            _start(name, _run_loop, _LOOPS[name], initialize)
    return _LOOPS[name]


def _start(name: str, function: Callable[..., None], *args: Any) -> None:
    """Start a thread that runs a function."""
    # The interpreter joins threads that are no daemons, for ever if one of them hangs.
    thread = threading.Thread(target=function, args=args, daemon=True, name=name)
    _STARTED.add(thread)
    thread.start()


def _run_loop(loop: asyncio.AbstractEventLoop, initialize: Callable[[], None] | None) -> None:
    """Run an event loop for ever, in its thread."""
    if initialize:
        initialize()
    loop.run_forever()


class Threads:
    """Threads that make calls in the order in which they are submitted. Each thread begins with `initialize`."""

    def __init__(self, count: int, initialize: Callable[[], None] | None = None):
        self.count = count
        self.calls = queue.SimpleQueue()
        _POOLS.add(self)
        for _ in range(count):
            _start("reward", self._work, initialize)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """Return the future result of a call."""
        future = Future()
        self.calls.put((future, function, args))
        return future

    def stop(self) -> None:
        """End all threads after the calls that have been submitted."""
        for _ in range(self.count):
            self.calls.put(None)

    def _work(self, initialize: Callable[[], None] | None) -> None:
        """Make calls until None comes."""
        if initialize:
            initialize()
        for call in iter(self.calls.get, None):
            future, function, args = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:
                    future.set_exception(error)
            # The thread waits for its next call without holding the images of this one, or the model that scored them.
            del call, future, function, args


def _end_all() -> None:
    """Ask all threads to end, and wait for those that do."""
    for threads in _POOLS:
        threads.stop()
    for loop in _LOOPS.values():
        loop.call_soon_threadsafe(loop.stop)
    end_s = time.monotonic() + LEAVE_S
    for thread in list(_STARTED):
        thread.join(max(end_s - time.monotonic(), 0))


atexit.register(_end_all)
