"""A fork stands for a process that the user starts: its own arguments, environment, output and exit status."""

import os
import signal

import pytest
import warm

PROGRAM = """
import os, sys
print(sys.argv[1:], os.environ["WORD"], os.environ.get("RANK"), __name__)
{end}
"""


@pytest.fixture
def run(tmp_path):
    def run(end, how=warm.run):
        (tmp_path / "program.py").write_text(PROGRAM.format(end=end))
        return how([tmp_path / "program.py", "a", 1], {"WORD": "b"})

    return run


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no such file')", 1, "no such file"),
        ("raise KeyError('word')", 1, "KeyError: 'word'"),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_a_command_ends_as_the_interpreter_would(end, status, says, run):
    done = run("sys.stdout.flush()\n" + end)
    assert done.returncode == status
    assert done.stdout == "['a', '1'] b None __main__\n"
    assert says in done.stderr


def test_ranks_know_their_numbers_and_one_that_fails_ends_the_others(run):
    ranks = run(
        "import time\nif os.environ['RANK'] == '1': sys.exit(2)\nsys.stdout.flush()\ntime.sleep(99)", warm.torchrun
    )
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 2]
    assert ranks[0].stdout == "['a', '1'] b 0 __main__\n"


def test_commands_see_no_gpu(run):
    done = run("print(repr(os.environ['CUDA_VISIBLE_DEVICES']))", lambda *how: warm.run(how[0], os.environ | how[1]))
    assert done.stdout.splitlines()[-1] == "''"
