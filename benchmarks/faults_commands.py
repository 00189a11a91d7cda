"""The user's commands as forks of this process, whose imports are done: a tenth of a second instead of six."""

import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import faults_tries

from flow_grpo import rewards

ROOT = Path(__file__).resolve().parents[1]
MEMORY_GIB = 4.0  # more than the imports have taken
LONGEST_SENTENCE = 2200  # characters
REWARD_FOLDERS = list(rewards.__path__)
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ENV = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": PYTHONPATH}


class Ended(NamedTuple):
    status: int | None  # exit status, or minus the signal that ended it; None = still at work at the limit
    stdout: str
    stderr: str

    @property
    def last(self) -> str:
        """The last line of what it said."""
        lines = [line for line in (self.stderr.strip() or self.stdout.strip()).splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


class Command:
    """A program with its arguments, as the `__main__` of a process group of its own, in `folder`.

    Args:
        name: of its output files in `folder`.
        file_bytes: no file may grow larger (RLIMIT_FSIZE); 0 = no limit.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        name: str = "command",
        env: Mapping[str, str] | None = None,
        memory_gib: float = MEMORY_GIB,
        file_bytes: int = 0,
    ):
        self.status, self.files = None, [folder / f"{name}.{stream}" for stream in ("stdout", "stderr")]
        for file in self.files:
            file.write_bytes(b"")
        self.pid = os.fork()
        if not self.pid:
            self._become([str(word) for word in words], folder, env or {}, memory_gib, file_bytes)

    def _become(self, words: list[str], folder: Path, env: Mapping[str, str], memory_gib: float, file_bytes: int):
        """What the child does instead of coming back."""
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(self.files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
        os.environ.update(ENV | dict(env))
        extra = os.environ.get("FLOW_GRPO_REWARDS", "").split(os.pathsep)
        rewards.__path__[:] = REWARD_FOLDERS + [path for path in extra if path]
        os.chdir(folder)
        faults_tries.limit_memory(memory_gib)
        if file_bytes:
            faults_tries.resource.setrlimit(faults_tries.resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        sys.argv = words
        os._exit(exit_status(words[0]))  # without the clean-up of the parent's own things

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        if self.status is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # `kill` has reaped it
                ended, status = self.pid, signal.SIGKILL
            self.status = os.waitstatus_to_exitcode(status) if ended else None
        return self.status

    def wait(self, limit_s: float = 150.0) -> Ended:
        """Until it ends or the time is over; then it is killed, with all below it."""
        end = time.monotonic() + limit_s
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        status = self.poll()
        if status is None:
            self.kill()
        return Ended(status, *self.output())

    def output(self) -> tuple[str, str]:
        """What it has said so far."""
        return tuple(file.read_text(errors="replace") for file in self.files)

    def send(self, number: int) -> None:
        """A signal to it alone."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def interrupt(self) -> None:
        """What Ctrl-C sends: SIGINT to its whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """It and all below it."""
        faults_tries.end_all(faults_tries.descendants(self.pid) | {self.pid})


def exit_status(program: str) -> int:
    """Run a file as the interpreter would; as the last thing in a process."""
    try:
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    with suppress(Exception):
        wait_for_threads()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def wait_for_threads() -> None:
    """As the interpreter does at its end: a thread that is no daemon keeps the process."""
    threading._shutdown()


def judge(ended: Ended, names: Sequence[str], early: bool = True) -> faults_tries.Verdict:
    """Good: it ran to its end, or one sentence names one of `names`. Bad: hang, crash, traceback, another sentence.

    Args:
        early: whether a refusal must come before weights are loaded.
    """
    if ended.status is None:
        return faults_tries.Verdict(False, f"hang; it said: {ended.last[-200:]}")
    if ended.status == 0:
        return faults_tries.Verdict(True, "ran to its end")
    if ended.status < 0:
        return faults_tries.Verdict(False, f"ended by signal {-ended.status}: {ended.last[-200:]}")
    if "Traceback (most recent call last)" in ended.stderr:
        return faults_tries.Verdict(False, f"traceback: {ended.last[:300]}")
    if len(ended.last) > LONGEST_SENTENCE:
        return faults_tries.Verdict(False, f"a message of {len(ended.last)} characters: {ended.last[:200]}")
    if not any(name in ended.last for name in names):
        return faults_tries.Verdict(False, f"names none of {', '.join(names)}: {ended.last[:300]}")
    if early and "Loading weights" in ended.stderr:
        return faults_tries.Verdict(False, f"refused after weights were loaded: {ended.last[:300]}")
    return faults_tries.Verdict(True, f"refused: {ended.last[:300]}")
