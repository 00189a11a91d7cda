"""Threads of rewards, for which the end of the process does not wait."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_LOOPS: dict[str, asyncio.AbstractEventLoop] = {}
_STARTING = threading.Lock()  # many threads ask for a loop at once


def event_loop(name: str, initialize: Callable[[], None] | None = None) -> asyncio.AbstractEventLoop:
    """Return the event loop of a name. Its thread begins with `initialize` and runs for ever."""
    with _STARTING:
        if name not in _LOOPS:
            _LOOPS[name] = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(_LOOPS[name], initialize), daemon=True, name=name).start()
    return _LOOPS[name]


def _run_loop(loop: asyncio.AbstractEventLoop, initialize: Callable[[], None] | None) -> None:
    """Run an event loop for ever, in its thread."""
    if initialize:
        initialize()
    loop.run_forever()


class Threads:
    """Threads that make calls in the order in which they are submitted. Each thread begins with `initialize`.

    The interpreter would join the threads of concurrent.futures when it exits, for ever if one of them hangs.
    """

    def __init__(self, count: int, initialize: Callable[[], None] | None = None):
        self.count = count
        self.calls = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, args=(initialize,), daemon=True, name="reward").start()

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
            # The thread waits for its next call without holding the images of this one.
            del call, future, args
