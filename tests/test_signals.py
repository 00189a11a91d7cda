"""Signals that ask a run to end: what is completed is saved, and the resumed run is that of an unbroken one."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from small import ROOT, command_of, lines_of, train

from flow_grpo.base import signals

NAME = "shapes_qwenimage_pr"
HOW = dict(num_epochs=4, eval_freq=2, save_freq=0)


@pytest.fixture(scope="module")
def unbroken(shallow, tmp_path_factory):
    """The folder of a run of HOW that no signal stopped."""
    return train(NAME, tmp_path_factory.mktemp("unbroken"), **shallow, **HOW)


def epochs_of(folder):
    """Number of completed epochs that a running run has written down."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    return sum('"kind": "epoch"' in line for line in path.read_text().splitlines())


def seconds_per_epoch(folder):
    """Time of the fastest epoch of a run that has ended."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return min(line["time/epoch_s"] for line in lines if line["kind"] == "epoch")


def started(command, num_ranks):
    """The ranks of a command, as torchrun would start them."""
    if num_ranks == 1:
        return [warm.Started(command)]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(warm.free_port()), "WORLD_SIZE": str(num_ranks)}
    ranks = []
    for rank in range(num_ranks):
        env = dict(os.environ) | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(warm.Started(command, env))
    return ranks


def interrupt(command, folder, number, num_ranks, delay_s):
    """Send a signal to all ranks some time after the first epoch; their results."""
    ranks = started(command, num_ranks)
    while not epochs_of(folder) and all(rank.poll() is None for rank in ranks):
        time.sleep(0.01)
    time.sleep(delay_s)
    for rank in ranks:
        os.kill(rank.pid, number)
    return [rank.done() for rank in ranks]


@pytest.mark.parametrize(
    ("number", "num_ranks", "grace_s"),
    [
        (signal.SIGTERM, 1, 25.0),
        pytest.param(signal.SIGUSR1, 2, 25.0, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, 0.0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, 0.0, marks=pytest.mark.slow),
    ],
)
def test_what_is_completed_is_saved_and_the_run_goes_on_as_if_nothing_had_happened(
    number, num_ranks, grace_s, unbroken, shallow, tmp_path
):
    folder = tmp_path / "broken" / unbroken.name
    alert = tmp_path / "alert"
    alert.write_text('#!/bin/sh\necho "$1" >> "$0.said"\n')
    alert.chmod(0o755)
    command = command_of(NAME, tmp_path / "broken", **shallow, **HOW, signal_grace_s=grace_s, alert=alert)
    command = ["tests/brightness.py", *command]
    # Within the two epochs after the first, however fast the machine is: one more is to come.
    results = interrupt(command, folder, number, num_ranks, random.uniform(0, 2 * seconds_per_epoch(unbroken)))

    # The status says that the run can go on, and the sentence says how.
    status = 130 if number == signal.SIGINT else signals.STATUS
    assert [result.returncode for result in results] == [status] * num_ranks, results[0].stderr[-3000:]
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    said = re.search(rf"stopped by {name} after (\d) epochs?.*--config.resume_from=\S+", results[0].stderr)
    assert said, results[0].stderr[-3000:]
    if number != signal.SIGINT:
        assert (tmp_path / "alert.said").read_text().startswith(f"{unbroken.name} was stopped by {name}")
    progress = json.loads(next((folder / "checkpoints").glob("*/progress.json")).read_text())
    assert progress["epoch"] == int(said[1])

    last = warm.run([*command, "--config.resume_from=latest"])
    assert last.returncode == 0, last.stderr[-3000:]
    if num_ranks == 1:
        assert lines_of(folder) == lines_of(unbroken)
    else:
        assert_equal_to_rounding(lines_of(folder), lines_of(unbroken))


def test_a_signal_within_an_update_drops_its_epoch_and_none_before_it(shallow, tmp_path):
    """The weights have moved when it comes: the copy of before the epoch's first step is saved."""
    how = shallow | dict(num_epochs=3, eval_freq=0, save_freq=0, train__updates_per_epoch=2, train__beta=0.1)
    unbroken = train(NAME, tmp_path / "unbroken", **how)
    script, *flags = command_of(NAME, tmp_path / "broken", **how, signal_grace_s=0.0)
    stopped = warm.run(["tests/signalled.py", *flags])
    assert stopped.returncode == signals.STATUS, stopped.stderr[-3000:]
    assert "stopped by SIGTERM after 1 epoch; epoch 2 is dropped" in stopped.stderr
    folder = tmp_path / "broken" / unbroken.name
    progress = json.loads((folder / "checkpoints/epoch_000001/progress.json").read_text())
    assert (progress["epoch"], progress["step"]) == (1, 2)
    resumed = warm.run(["tests/brightness.py", script, *flags, "--config.resume_from=latest"])
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert lines_of(folder) == lines_of(unbroken)


def assert_equal_to_rounding(lines, others):
    """Lines of two ranks and of one: batches are filled otherwise, and sums are made in another order."""
    assert [(line["kind"], line["epoch"]) for line in lines] == [(line["kind"], line["epoch"]) for line in others]
    for line, other in zip(lines, others, strict=True):
        for name in ("reward/avg", "eval/avg", "test/avg"):
            if name in other:
                assert line[name] == pytest.approx(other[name], abs=1e-4), name


SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$(dirname "$0")/said"; fi
"""


@pytest.mark.slow
def test_a_job_of_slurm_whose_time_is_nearly_over_saves_the_run_and_requeues_itself(tmp_path):
    """With an srun of one task, and a scontrol that writes down what it is told."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = dict(SLURM_SUBMIT_DIR=str(ROOT), SLURM_NNODES="1", SLURM_GPUS_ON_NODE="1", SLURM_JOB_ID="7")
    job |= dict(SLURM_JOB_NODELIST="here", PORT=str(warm.free_port()), OMP_NUM_THREADS="1")
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    script, *flags = command_of("shapes_qwenimage", tmp_path / "runs", num_epochs=50, eval_freq=0, save_freq=0)
    process = subprocess.Popen(
        ["bash", ROOT / "scripts/multi_node/slurm.sh", script, *flags],
        env=os.environ | job | {"PATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = tmp_path / "runs" / "shapes_qwenimage_smoke"
    while not epochs_of(folder) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    said = process.communicate(timeout=120)[1]
    assert "stopped by SIGUSR1 after" in said, said[-3000:]
    assert (tmp_path / "said").read_text() == "requeue 7\n"
    assert len(list((folder / "checkpoints").glob("epoch_*"))) == 1


REPEATED = """
import os, signal, sys, time
from flow_grpo.base import signals

with signals.of_a_command():
    signals.listen(lambda: True, lambda: "")
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    print(signals.received.name, flush=True)
    time.sleep(1.1 * signals.REPEAT_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
    print("still here")
"""


def test_a_signal_that_comes_twice_within_a_second_is_one_and_a_later_one_ends_the_process(tmp_path):
    program = tmp_path / "repeated.py"
    program.write_text(REPEATED)
    result = warm.run([program])
    assert result.stdout == "SIGTERM\n"
    assert result.returncode == -signal.SIGTERM


def test_handlers_are_those_of_before_once_a_command_is_over():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with signals.of_a_command():
        signals.listen(lambda: True, lambda: "")
        assert signal.getsignal(signal.SIGTERM) == signals.received.note
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    signals.received.note(signal.SIGTERM, None)
    with signals.of_a_command():
        assert signals.received.name == "", "an earlier command's"
    signals.listen(lambda: True, lambda: "")
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before, "a program that is no command"
