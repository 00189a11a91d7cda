"""No command ends because of who reads what it prints, and what it prints is English."""

import ast
import itertools
import re
import subprocess
import sys

import pytest
from small import ENV, ROOT

from flow_grpo.base.formatting import counted

PRINTS = """
import sys
from flow_grpo.command_line import terminal
terminal.protect()
for stream in (sys.stdout, sys.stderr):
    for _ in range(3000):
        print("0.5 \\u00b1 0.1", file=stream, flush=True)
file = open(sys.argv[1], "w")
file.write("whole" if file.fileno() > 2 else "file took the place of a standard stream")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize(
    "shell",
    ['"$@" | head -1', '"$@" 2>&1 | head -1', '"$@" >/dev/full 2>&1', '"$@" >&-', '"$@" 2>&-', '"$@" <&- >&- 2>&-'],
)
@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_dies_a_full_disk_and_a_missing_letter_end_nothing(shell, options, tmp_path):
    command = ["bash", "-c", f"set -o pipefail; {shell}", "bash", sys.executable, *options, "-c", PRINTS]
    env = ENV | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, tmp_path / "file"], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "whole"


def test_python_without_docstrings_is_one_sentence():
    command = [sys.executable, "-OO", "scripts/train_qwenimage.py", "--dry_run=2"]
    env = ENV | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "without -OO" in done.stderr
    assert done.stderr.count("\n") == 1


def commands():
    """All files that are to be run."""
    found = []
    for folder in ("scripts", "tools", "benchmarks", "flow_grpo/monitoring"):
        for path in sorted((ROOT / folder).glob("*.py")):
            if 'if __name__ == "__main__":' in path.read_text():
                found.append(path)
    return found


UNPROTECTED = "minimal_grpo.py"  # an hour's reading, kept to what the algorithm needs


@pytest.mark.parametrize("path", commands(), ids=lambda path: path.name)
def test_each_command_protects_its_streams_before_it_prints(path):
    """By the functions that read a command line, or by itself."""
    lines = path.read_text().split('if __name__ == "__main__":', 1)[1]
    assert re.search(r"command_line\.(parse|arguments)\(|terminal\.protect\(\)", lines) or path.name == UNPROTECTED


def test_one_thing_is_counted_in_the_singular():
    assert counted(1, "epochs") == "1 epoch"
    assert counted(1, "batches") == "1 batch"
    assert counted(0, "images") == "0 images"
    assert counted(1024, "images") == "1,024 images"


COUNTED = r" (batches|columns|epochs|fields|images|layers|pairs|prompts|requests|rows|runs|tensors|updates)\b"
NOT_ONE = r"[A-Z]$|\.name$"  # constants, and names before a noun


def plurals_behind_numbers(path):
    """Numbers in a file's f-strings that may be 1 and stand before a plural."""
    found = []
    for text in ast.walk(ast.parse(path.read_text())):
        if not isinstance(text, ast.JoinedStr):
            continue
        for value, after in itertools.pairwise(text.values):
            if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            number = ast.unparse(value.value)
            if re.match(COUNTED, str(after.value)) and not re.search(NOT_ONE, number):
                found.append(f"{path.name}: {number}{after.value}")
    return found


def test_no_message_counts_one_thing_in_the_plural():
    """`counted` writes 1 batch, 2 batches."""
    found = []
    for path in [*(ROOT / "flow_grpo").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        found += plurals_behind_numbers(path)
    assert found == []
