"""`light.py` reads a JSON list of commands, and prints [status, stdout, stderr] of each as a JSON list.

Each command is a fork of one process that has imported what answers a command line. Where a start of an interpreter
takes half a second, this takes a twentieth.
"""

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

from flow_grpo.command_line import checks, command_line, help_text  # noqa: F401  # what most commands import

FORKS = multiprocessing.get_context("fork")


def become(words, files):
    """In a fork: be `python WORD ...`."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent.resolve()))
        runpy.run_path(words[0], run_name="__main__")


def answer(words):
    """[exit status, stdout, stderr] of a command."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        process = FORKS.Process(target=become, args=[words, [out.name, err.name]])
        process.start()
        process.join()
        return [process.exitcode, out.read(), err.read()]


if __name__ == "__main__":
    json.dump([answer(words) for words in json.load(sys.stdin)], sys.stdout)
