"""The harness of `make faults`: what it calls bad, and two of its tries."""

import json
import signal

import faults
import pytest
import warm
from faults import Ended, judge
from small import ENV, ROOT

TRACEBACK = "Traceback (most recent call last):\n  File x\nKeyError: 'config.json'\n"


@pytest.mark.parametrize(
    ("ended", "good"),
    [
        (Ended(2, "bar 100%\ntrain.py: config.json is damaged\n"), True),
        (Ended(2, "train.py: progress.json is damaged\n"), False),
        (Ended(1, TRACEBACK), False),
        (Ended(2, "train.py: config.json is " + "x" * 10**4), False),
        (Ended(-signal.SIGSEGV, "config.json"), False),
        (Ended(None, "config.json"), False),
    ],
    ids=["named", "another file", "traceback", "long", "crash", "hang"],
)
def test_a_run_that_ends_badly_names_the_file_in_one_sentence(ended, good):
    assert judge(ended, ["config.json"]).good is good


@pytest.fixture
def forked(monkeypatch):
    """Runs are forks, which start in a tenth of a second."""

    def start(words, log, env):
        log.write_bytes(b"")
        process = object.__new__(warm.Started)
        environment = {key: value for key, value in ENV.items() if key != "PYTHONPATH"} | faults.ENV | env
        files = [str(log)] * 2
        process.pid = warm.PARENT.ask(command=words, env=environment, files=files, cwd=str(ROOT))
        process.returncode = None
        return process

    monkeypatch.setattr(faults, "start", start)


@pytest.mark.usefixtures("forked")
def test_a_flipped_bit_and_a_kill_in_a_save_change_nothing(tmp_path, monkeypatch):
    """And a try that fails is bad, keeps its folder and is counted."""
    monkeypatch.setattr(faults, "DAMAGES", (faults.flip,))
    monkeypatch.setattr(faults, "MOMENTS", (faults.in_a_save,))
    monkeypatch.setattr(faults, "RECIPES", {"grpo": faults.RECIPES["grpo"]})
    monkeypatch.setattr(faults, "SIGNALS", {"SIGKILL": signal.SIGKILL})
    monkeypatch.setitem(faults.KINDS, "fails", lambda *_: 1 / 0)
    words = ["--out", str(tmp_path), "--only", "files:1", "kills:3", "fails:0"]
    assert faults.main(faults.parser().parse_args(words)) == 1
    lines = [json.loads(line) for line in (tmp_path / "tries.jsonl").read_text().splitlines()]
    assert [line["good"] for line in lines] == [True, True, False], lines
    assert "| sum | 3 | 2 | 1 |" in (tmp_path / "table.md").read_text()
    assert [path.name for path in (tmp_path / "tries").iterdir()] == ["fails_00000"]
