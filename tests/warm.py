"""Commands as forks of one process that has imported everything, which saves each of them six seconds of start.

A program still is the `__main__` of a process of its own, with its arguments, environment and exit status. Real starts,
by python and by torchrun, are in test_scripts.py and test_ranks.py.
"""

import faulthandler
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "tests", "scripts", "tools", "benchmarks")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["warm_imports"])


class Done(NamedTuple):
    returncode: int  # minus the signal
    stdout: str
    stderr: str


def start_server():
    """The process that forks, once. It finds the project's modules, and those of the tests' own PYTHONPATH, such as
    another torch."""
    path = [*(str(ROOT / folder) for folder in FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        forkserver.ensure_running()


class Started:
    """One command; what subprocess.Popen offers, with output in files."""

    def __init__(self, command, env=None, cwd=ROOT):
        self.files = [Path(tempfile.mkstemp()[1]) for _ in range(2)]
        env = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"} | dict(os.environ if env is None else env)
        start_server()
        words = [str(part) for part in command]
        self.process = FORKS.Process(target=become, args=(words, env, self.files, cwd), daemon=True)
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout_s=300.0):
        """The exit status. Raises TimeoutError, after a kill."""
        self.process.join(timeout_s)
        if self.poll() is None:
            self.kill()
            raise TimeoutError(f"{timeout_s} s are over: {self.stderr()[-3000:]}")
        return self.poll()

    def kill(self):
        self.process.kill()

    def stdout(self):
        return self.files[0].read_text()

    def stderr(self):
        return self.files[1].read_text()

    def done(self, timeout_s=300.0):
        result = Done(self.wait(timeout_s), self.stdout(), self.stderr())
        for path in self.files:
            path.unlink()
        return result


def run(command, env=None, timeout_s=300.0, cwd=ROOT):
    """Run `[program, argument, ...]` to its end."""
    return Started(command, env, cwd).done(timeout_s)


def torchrun(command, env=None, num_ranks=2, timeout_s=300.0):
    """Run it on ranks, to the end of all; their results. A rank that fails leaves the others waiting, so they go."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    env = dict(os.environ if env is None else env) | world
    ranks = [Started(command, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(num_ranks)]
    end = time.monotonic() + timeout_s
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > end or any(rank.poll() not in (None, 0) for rank in ranks):
            time.sleep(1)  # for what the others have to say
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    return [rank.done() for rank in ranks]


def become(command, env, files, cwd):
    """In a fork: be the command, as the interpreter would run it."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    faulthandler.enable()  # a crash in a library says where
    runpy.run_path(command[0], run_name="__main__")
