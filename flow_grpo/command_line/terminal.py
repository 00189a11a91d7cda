"""Standard output and error of a command: writing to them never ends it, whatever becomes of who reads them."""

import io
import os
import select
import sys
from pathlib import Path
from typing import Any, TextIO


class _Descriptor(io.FileIO):
    """The file behind a stream. What it cannot take is lost: its reader has died, its disk is full."""

    def __init__(self, stream: TextIO):
        super().__init__(stream.fileno(), "w", closefd=False)
        self.stream = stream  # would close the descriptor with its own end

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            while written is None:  # the descriptor does not wait by itself, and its reader is slow
                select.select([], [self], [])
                written = super().write(data)
            return written
        except (OSError, ValueError):
            return memoryview(data).nbytes


def protect() -> None:
    """Let no later write to sys.stdout or sys.stderr fail: not for a letter that the encoding lacks, a reader that has
    died, a full disk or a closed descriptor. Streams that others have put there, such as a notebook's, stay."""
    _open_closed_descriptors()
    sys.stdout = _protected(sys.stdout)
    sys.stderr = _protected(sys.stderr)


def _open_closed_descriptors() -> None:
    """Lead closed standard descriptors nowhere: otherwise the next file that is opened, such as a checkpoint, becomes
    the standard output of libraries and of child processes."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            lowest_free = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(lowest_free, True)


def _protected(stream: TextIO | None) -> TextIO:
    """Return a stream to the same descriptor whose writes do not fail; other streams are returned as they are."""
    if stream is None:  # as Python has it where the descriptor was closed
        return Path(os.devnull).open("w", encoding="utf-8")
    if type(stream) is not io.TextIOWrapper or not _writes_to_a_descriptor(stream):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(stream)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _writes_to_a_descriptor(stream: io.TextIOWrapper) -> bool:
    """Return whether a stream's bytes go to a file of the system, and not yet through `_Descriptor`. With `python -u`
    they go there without a buffer."""
    raw = getattr(stream.buffer, "raw", stream.buffer)
    return type(raw) is io.FileIO
