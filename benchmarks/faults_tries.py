"""A try: something done to the project in a process of its own, with a folder, a time limit and a verdict."""

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flow_grpo import rng

SUBREAPER = 36  # prctl(2): orphans below this process become its children, so that none is overlooked
GRACE_S = 15.0  # for processes that a try has ended to be gone


class Verdict(NamedTuple):
    good: bool
    why: str


@dataclass(frozen=True)
class Try:
    """`act` gets an empty folder, does what `what` says, and judges what came of it."""

    kind: str
    number: int  # with kind and seed it names the try's random numbers
    what: str  # a command or parameters, to do it again by hand
    act: Callable[[Path], Verdict]
    limit_s: float = 300.0  # a busy machine takes several times as long as a free one


class Record(NamedTuple):
    """A line of tries.jsonl."""

    kind: str
    number: int
    what: str
    outcome: str  # "good" or "bad"
    why: str
    seconds: float
    folder: str  # what a bad try left, "" after a good one


class Dice:
    """Random choices of one named stream."""

    def __init__(self, seed: int, kind: str, number: int):
        self.generator = rng.generator(seed, "faults", kind, number)

    def below(self, limit: int) -> int:
        """Of 0, 1, ... limit - 1."""
        return int(torch.randint(max(1, limit), (), generator=self.generator))

    def share(self) -> float:
        """From 0 to 1."""
        return float(torch.rand((), generator=self.generator))

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def bytes(self, count: int) -> bytes:
        return torch.randint(256, (count,), generator=self.generator, dtype=torch.uint8).numpy().tobytes()


@dataclass
class Running:
    """A try whose process runs."""

    attempt: Try
    folder: Path
    pid: int
    started_s: float = field(default_factory=time.monotonic)

    def finished(self) -> Record | None:
        """Its record, once it has ended or its time is over."""
        seconds = time.monotonic() - self.started_s
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if not ended and seconds <= self.attempt.limit_s:
            return None
        if ended:
            verdict = self._verdict(status)
        else:
            verdict = Verdict(False, f"hang: no end within {self.attempt.limit_s:.0f} s")
            end_all(descendants(self.pid) | {self.pid})
        return self._record(verdict, seconds)

    def _verdict(self, status: int) -> Verdict:
        with suppress(FileNotFoundError):
            return Verdict(*json.loads(self._note.read_text()))
        return Verdict(False, f"the harness's own process ended with {os.waitstatus_to_exitcode(status)}")

    def _record(self, verdict: Verdict, seconds: float) -> Record:
        self._note.unlink(missing_ok=True)
        if verdict.good:
            remove(self.folder)
        outcome, folder = ("good", "") if verdict.good else ("bad", str(self.folder))
        attempt = self.attempt
        return Record(attempt.kind, attempt.number, attempt.what, outcome, verdict.why[:400], round(seconds, 2), folder)

    @property
    def _note(self) -> Path:
        return self.folder.with_suffix(".verdict")


def start(attempt: Try, folder: Path) -> Running:
    """Fork the process of a try."""
    remove(folder)
    folder.mkdir(parents=True)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.setsid()
        adopt_orphans()
        output = os.open(folder / "try.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        verdict = judged(attempt, folder)
        folder.with_suffix(".verdict").write_text(json.dumps(verdict))
        os._exit(0)
    return Running(attempt, folder, pid)


def judged(attempt: Try, folder: Path) -> Verdict:
    """The verdict; a process that a try leaves behind is a bad one."""
    try:
        verdict = attempt.act(folder)
    except Exception as error:
        (folder / "harness_traceback.txt").write_text(traceback.format_exc())
        return Verdict(False, f"the try itself failed: {type(error).__name__}: {error}")
    left = living(os.getpid(), GRACE_S)
    if left:
        verdict = Verdict(False, f"{len(left)} processes left behind: {', '.join(map(command_of, left))}")
    end_all(left)
    return verdict


def living(pid: int, grace_s: float) -> set[int]:
    """The descendants of a process that are still there after a while; the dead among its children are reaped."""
    end = time.monotonic() + grace_s
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = descendants(pid)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.02)


def descendants(pid: int) -> set[int]:
    """All processes below one, zombies left out."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(folder.name)] = int(parent)
    below, size = {pid}, 0
    while len(below) > size:
        size = len(below)
        below |= {child for child, parent in parents.items() if parent in below}
    return below - {pid}


def command_of(pid: int) -> str:
    """A process's words."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    return "?"


def end_all(pids: Iterable[int]) -> None:
    """Kill processes, and what they start meanwhile."""
    left = set(pids)
    for _ in range(100):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            for pid in left:
                os.waitpid(pid, os.WNOHANG)
        left = {pid for pid in left if Path(f"/proc/{pid}").exists()} | {p for pid in left for p in descendants(pid)}
        if not left:
            return
        time.sleep(0.05)


def adopt_orphans() -> None:
    """Processes below this one whose parents have ended become its children."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def limit_memory(more_gib: float) -> None:
    """From now on this process may take so much more address space than it has."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize")]
    size = int(line.split()[1]) * 1024 + int(more_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def remove(folder: Path) -> None:
    """A folder, with the file systems mounted in it."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in mounted:
        if Path(place).is_relative_to(folder.resolve()):
            subprocess.run(["umount", "-l", place], check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(folder, ignore_errors=True)
