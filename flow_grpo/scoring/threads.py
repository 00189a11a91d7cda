"""Threads that the end of the process does not wait for."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Threads:
    """Calls in threads of their own, in the order in which they come.

    concurrent.futures joins its threads when the interpreter exits, for ever if one of them hangs.

    Args:
        initialize: called first in each thread.
    """

    def __init__(self, count: int, initialize: Callable[[], None] = lambda: None):
        self.count, self.calls = count, queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, args=(initialize,), daemon=True, name="reward").start()

    def submit(self, function: Callable, *args) -> Future:
        """Its result, some time."""
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
