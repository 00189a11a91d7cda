"""Commands as forks of one process that has imported everything, which saves each of them six seconds of start.

A program still is the `__main__` of a process of its own, with its arguments, environment and exit status. Real starts,
by python and by torchrun, are in test_scripts.py and test_ranks.py.
"""

import contextlib
import faulthandler
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "tests", "scripts", "tools", "benchmarks")


class Done(NamedTuple):
    returncode: int  # minus the signal
    stdout: str
    stderr: str


class Parent:
    """The process that forks. It is started when it is first needed."""

    def __init__(self):
        self.process, self.lock = None, threading.Lock()

    def ask(self, **request):
        with self.lock:
            if self.process is None:
                command, env, pipe = [sys.executable, __file__], environment(), subprocess.PIPE
                self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())

    def stop(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def environment():
    """The parent's: it finds the project's modules, and those of the tests' own PYTHONPATH, such as another torch."""
    theirs = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([*(str(ROOT / folder) for folder in FOLDERS), *theirs])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


PARENT = Parent()


class Started:
    """One command; what subprocess.Popen offers, with output in files."""

    def __init__(self, command, env=None, cwd=ROOT):
        self.returncode = None
        self.files = [Path(tempfile.mkstemp()[1]) for _ in range(2)]
        env = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"} | dict(os.environ if env is None else env)
        words, files = [str(part) for part in command], [str(path) for path in self.files]
        self.pid = PARENT.ask(command=words, env=env, files=files, cwd=str(cwd))

    def poll(self):
        if self.returncode is None:
            self.returncode = PARENT.ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout_s=300.0):
        """The exit status. Raises TimeoutError, after a kill."""
        end = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"{timeout_s} s are over: {self.stderr()[-3000:]}")
            time.sleep(0.01)
        return self.returncode

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def stdout(self):
        return self.files[0].read_text()

    def stderr(self):
        return self.files[1].read_text()

    def done(self, timeout_s=300.0):
        self.wait(timeout_s)
        result = Done(self.returncode, self.stdout(), self.stderr())
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


def fork(command, env, files, cwd):
    """The child's process id. The child does not come back: it is the command."""
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    faulthandler.enable()  # a crash in a library says where
    os._exit(exit_status(command[0]))  # without the parent's own clean-up, which would remove what it imported


def exit_status(program):
    """Run it as the interpreter would."""
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
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def status(pid):
    """Exit status of a child, minus the signal that ended it; None while it runs."""
    ended, code = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(code) if ended else None


def prepare():
    """Whatever a run imports or works out once in a process: half of a short run's time."""
    import evaluate  # noqa: F401
    import matplotlib.backends.backend_agg  # noqa: F401
    import small
    import tqdm
    import wandb  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from flow_grpo.data import prompts

    tqdm.tqdm.monitor_interval = 0  # else a thread, whose lock a fork might find closed
    get_checkpoint_conversion_mapping("")  # compiles a thousand regular expressions
    config = small.config_of("shapes_qwenimage")
    model = small.MODELS["qwenimage"].without_weights(config.model)
    for split in ("train", "validation", "test"):
        model.check(prompts.load_prompts(config.dataset, split), config.text_tokens)


def serve():
    prepare()
    gc.collect()
    gc.freeze()  # as in conftest.py
    running = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            answer = status(request["pid"])
            running -= {request["pid"]} if answer is not None else set()
        else:
            answer = fork(**request)
            running.add(answer)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for child in running:  # of tests that ended before them
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve()
