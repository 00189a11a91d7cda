"""The harness of `make faults`: what it calls bad, and a few of its tries of every kind."""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import faults_answers
import faults_attacks
import faults_client
import faults_commands
import faults_disks
import faults_files
import faults_kills
import faults_pairs
import faults_prompts
import faults_rewards
import faults_server
import faults_settings
import faults_tries
import faults_twice
import pytest
import warm
from faults_commands import Ended, judge
from faults_runs import Bench
from faults_tries import Dice, Try, Verdict

TRACEBACK = "Traceback (most recent call last):\n  File x\nKeyError: 'seed'\n"


@pytest.mark.parametrize(
    ("ended", "good"),
    [
        (Ended(0, "epoch 2/2", ""), True),
        (Ended(2, "", "bar 100%\ntrain.py: config.seed is 'x'; it must be finite\n"), True),
        (Ended(2, "", "train.py: config.lora.rank is 'x'\n"), False),
        (Ended(1, "", TRACEBACK), False),
        (Ended(2, "", "train.py: config.seed is " + "x" * 10**4), False),
        (Ended(2, "", "Loading weights: 100%\ntrain.py: config.seed is 'x'\n"), False),
        (Ended(-signal.SIGSEGV, "", "config.seed"), False),
        (Ended(None, "", "config.seed"), False),
    ],
    ids=["end", "refused", "another setting", "traceback", "long", "late", "crash", "hang"],
)
def test_a_run_ends_or_one_sentence_names_the_setting_in_time(ended, good):
    assert judge(ended, ["config.seed"]).good is good


def hang(folder):
    time.sleep(99)


def leave_a_process(folder):
    faults_commands.Command([Path(__file__).resolve(), "sleep"], folder)
    return Verdict(True, "")


def fail(folder):
    raise KeyError("word")


def die(folder):
    os.kill(os.getpid(), signal.SIGKILL)


def go_well(folder):
    (folder / "file").touch()
    command = faults_commands.Command([Path(__file__).resolve(), "say"], folder)
    return Verdict(command.wait().stdout == "said\n", "")


ACTS = {"hang": hang, "left behind": leave_a_process, "KeyError": fail, "-9": die, "": go_well}


def tries_that_end_badly(folder):
    faults_tries.GRACE_S = 0.2
    return [Try("test", number, why, act, 3.0) for number, (why, act) in enumerate(ACTS.items())]


def setting(bench, algorithm, **flags):
    values = {key.replace("__", "."): value for key, value in flags.items()}
    return partial(faults_settings.attempt, bench, algorithm, values, list(values))


def tries_of_every_kind(folder):
    bench, dice = Bench(folder / "shared"), Dice(1, "test", 0)
    for flags in ({}, {"num_epochs": 2}, {"seed": 43}):
        bench.reference("grpo", **flags)
    bench.reference("prepare")
    plan = faults_kills.Plan("grpo", 1, "all", "SIGKILL", "save", 1)
    newest = "checkpoints/epoch_000002"
    acts = {
        "refused": setting(bench, "grpo", train__adam_beta1="1.0"),
        "huge": setting(bench, "nft", train__clip_range="1e400"),
        "byte order mark": partial(faults_prompts.attempt, bench, faults_prompts.byte_order_mark, "train", dice),
        "deep": partial(faults_prompts.attempt, bench, faults_prompts.odd_line, "test", dice),
        "exits": partial(faults_rewards.attempt, bench, "act", "exits", {"backend": "thread", "on_failure": "fail"}),
        "bomb": partial(faults_files.attempt, bench, "grpo", f"{newest}/best/evaluation.json", "disguised", dice),
        "flipped bit": faults_pairs.make(bench, 1, 6).act,
        "cut": partial(faults_files.attempt, bench, "grpo", f"{newest}/config.json", "cut", dice),
        "kill in a save": partial(faults_kills.kill_run, bench, plan, dice),
        "two preparations": partial(faults_twice.two_preparations, bench, "grpo", 0.1),
        "no folder": partial(faults_disks.is_no_folder, bench, "grpo", dice),
        "pickle": partial(faults_client.attempt, faults_answers.pickles, dice, True),
        "values": partial(faults_client.attempt, faults_answers.values, dice, False),
        "array": partial(faults_server.attempt, faults_attacks.arrays, "", dice),
        "wrong token": partial(faults_server.attempt, faults_attacks.tokens, "sesame", dice),
    }
    return [Try("test", number, what, act, 120.0) for number, (what, act) in enumerate(acts.items())]


def execute(make, folder):
    """Make tries and execute them, two at a time; note their records and how many processes are left."""
    faults_tries.adopt_orphans()
    waiting, running, records = make(folder), [], []
    while waiting or running:
        if waiting and len(running) < 2:
            attempt = waiting.pop(0)
            running.append(faults_tries.start(attempt, folder / str(attempt.number)))
        for one in running[:]:
            if record := one.finished():
                running.remove(one)
                records.append(record)
        time.sleep(0.005)
    (folder / "records").write_text(json.dumps(records))
    (folder / "left").write_text(str(len(faults_tries.descendants(os.getpid()))))


def executed(make, folder):
    done = warm.run([Path(__file__).resolve(), make.__name__, folder])
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "left").read_text() == "0"
    return [faults_tries.Record(*values) for values in json.loads((folder / "records").read_text())]


def test_a_try_that_hangs_fails_dies_or_leaves_a_process_is_bad_and_ended(tmp_path):
    records = executed(tries_that_end_badly, tmp_path)
    assert {record.what: record.outcome for record in records} == {why: "bad" if why else "good" for why in ACTS}
    assert all(record.what in record.why for record in records)
    folders = {record.what: record.folder for record in records}
    assert folders.pop("") == ""
    assert all(Path(folder).is_dir() for folder in folders.values())
    assert not (tmp_path / "4").exists()


def test_tries_of_every_kind_end_well(tmp_path):
    records = executed(tries_of_every_kind, tmp_path)
    assert [record for record in records if record.outcome != "good"] == []
    assert len(records) == 15


def test_the_harness_counts_its_tries_in_a_table_and_makes_one_again_by_name(tmp_path):
    names = ["client:1", "prompts:0", "client:2"]
    done = warm.run(["benchmarks/faults.py", "--seed", "1", "--out", tmp_path, "--only", *names])
    records = [json.loads(line) for line in (tmp_path / "tries.jsonl").read_text().splitlines()]
    assert {f"{record['kind']}:{record['number']}" for record in records} == set(names)
    bad = sum(record["outcome"] == "bad" for record in records)
    assert f"| sum | 3 | {3 - bad} | {bad} |" in (tmp_path / "table.md").read_text()
    assert done.returncode == (bad > 0)


if __name__ == "__main__":
    if sys.argv[1] == "sleep":
        time.sleep(99)
    elif sys.argv[1] == "say":
        sys.stdout.write("said\n")
    else:
        execute(globals()[sys.argv[1]], Path(sys.argv[2]))
