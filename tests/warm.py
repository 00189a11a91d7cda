"""Commands as forks of one process that has imported everything, which saves each of them six seconds of start. Each
still is the `__main__` of a process of its own. A real start, by torchrun, is in test_ranks.py."""

import contextlib
import faulthandler
import functools
import gc
import logging
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("fork")


@functools.cache
def server():
    """The connection to the process that forks. It is a fork of this one when no test has begun."""
    ours, theirs = multiprocessing.Pipe()
    if os.fork() == 0:
        ours.close()
        serve(theirs)
        os._exit(0)
    theirs.close()
    return ours


def serve(connection):
    """Start each command that is named, and say the exit status of each process that is."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    processes = {}
    while True:
        try:
            asked = connection.recv()
        except EOFError:  # the tests are over
            return
        if isinstance(asked, int):
            connection.send(processes[asked].exitcode)
            continue
        gc.disable()
        import warm_imports  # noqa: F401  # as late as this, since few files of tests start a command

        gc.enable()

        process = FORKS.Process(target=become, args=asked, daemon=True)
        process.start()
        processes[process.pid] = process
        connection.send(process.pid)


def answer(asked):
    server().send(asked)
    return server().recv()


class Started:
    """One command; what subprocess.Popen offers, with output in files."""

    def __init__(self, command, env=None, cwd=ROOT):
        self.files = [Path(tempfile.mkstemp()[1]) for _ in range(2)]
        env = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"} | dict(os.environ if env is None else env)
        self.command = [str(part) for part in command]
        self.pid = answer((self.command, env, self.files, cwd))

    def poll(self):
        return answer(self.pid)

    def wait(self, timeout_s=300.0):
        """The exit status. Raises TimeoutError, after a kill."""
        end = time.monotonic() + timeout_s
        status = self.poll()
        while status is None:
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"{timeout_s} s are over: {self.stderr()[-3000:]}")
            time.sleep(0.01)
            status = self.poll()
        return status

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def stdout(self):
        return self.files[0].read_text()

    def stderr(self):
        return self.files[1].read_text()

    def done(self, timeout_s=300.0):
        result = subprocess.CompletedProcess(self.command, self.wait(timeout_s), self.stdout(), self.stderr())
        for path in self.files:
            path.unlink()
        return result


def run(command, env=None, timeout_s=300.0, cwd=ROOT):
    """Run `[program, argument, ...]` to its end."""
    return Started(command, env, cwd).done(timeout_s)


def free_port():
    """A port that nobody listens on. The system gives those above 32768 to any connection, perhaps before the ranks
    are there."""
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def torchrun(command, env=None, num_ranks=2, timeout_s=300.0):
    """Run it on ranks, to the end of all; their results. A rank that fails leaves the others waiting, so they go."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    env = dict(os.environ if env is None else env) | world
    ranks = []
    for rank in range(num_ranks):
        ranks.append(Started(command, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
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
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    logging.getLogger().handlers.clear()  # pytest's
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    faulthandler.enable()  # a crash in a library says where
    torch.set_num_threads(1)  # as torchrun has it; several wait for ever where the process before the fork had several
    runpy.run_path(command[0], run_name="__main__")
