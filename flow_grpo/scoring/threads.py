"""Threads that the end of the process does not wait for."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch


class Threads:
    """Calls in threads of their own, in the order in which they come.

    concurrent.futures joins its threads when the interpreter exits, for ever if one of them hangs.

    Args:
        torch_threads: of each call's torch operations on a CPU; None = as everywhere.
    """

    def __init__(self, count: int, torch_threads: int | None = None):
        self.count, self.calls = count, queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, args=(torch_threads,), daemon=True, name="reward").start()

    def submit(self, function: Callable, *args) -> Future:
        """Its result, some time."""
        future = Future()
        self.calls.put((future, function, args))
        return future

    def stop(self) -> None:
        """End each thread after what has been submitted."""
        for _ in range(self.count):
            self.calls.put(None)

    def _work(self, torch_threads: int | None) -> None:
        if torch_threads:
            torch.set_num_threads(torch_threads)
        while call := self.calls.get():
            future, function, args = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:
                    future.set_exception(error)
            del call, future, args  # images
