"""Threads that the end of the process does not wait for."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

_LOOPS: dict[str, asyncio.AbstractEventLoop] = {}
_STARTING = threading.Lock()  # many threads ask for a loop at once


def event_loop(name: str, initialize: Callable[[], None] = lambda: None) -> asyncio.AbstractEventLoop:
    """The event loop of a name, in a thread of its own that begins with `initialize` and runs for ever."""
    with _STARTING:
        if name not in _LOOPS:
            loop = _LOOPS[name] = asyncio.new_event_loop()
            threading.Thread(target=lambda: (initialize(), loop.run_forever()), daemon=True, name=name).start()
    return _LOOPS[name]


class Threads:
    """Calls in threads that begin with `initialize`, in the order in which they come. The threads of concurrent.futures
    would be joined when the interpreter exits, for ever if one of them hangs."""

    def __init__(self, count: int, initialize: Callable[[], None] = lambda: None):
        self.count, self.calls = count, queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, args=(initialize,), daemon=True, name="reward").start()

    def submit(self, function: Callable, *args) -> Future:
        future = Future()
        self.calls.put((future, function, args))
        return future

    def stop(self) -> None:
        """End each thread after what has been submitted."""
        for _ in range(self.count):
            self.calls.put(None)

    def _work(self, initialize: Callable[[], None]) -> None:
        initialize()
        while call := self.calls.get():
            future, function, args = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:
                    future.set_exception(error)
            del call, future, args  # images
