"""scripts/sweep.py: the grid, its runs as processes, what it says of them, and how it goes on."""

import json
import os
import shutil
import signal
import time

import pytest
import sweep
import warm
from refused import assert_refused
from small import ROOT, change_json, command_of
from test_signals import epochs_of

from flow_grpo.base import signals
from flow_grpo.checkpoints import checkpoints
from flow_grpo.monitoring import provenance

SCRIPT = "scripts/train_qwenimage.py"


def parsed(*words):
    args = sweep.parser().parse_args([str(word) for word in words])
    sweep.check_arguments(args)
    return args


def test_every_combination_is_a_run_of_its_own_name():
    members = sweep.members_of(["train.learning_rate=1e-4,3e-4", "sample.sde_window_range=(0, 3),(1, 3)", "seed=1"])
    assert [member.name for member in members] == [
        "learning_rate_1e-4_sde_window_range_0-3_seed_1",
        "learning_rate_1e-4_sde_window_range_1-3_seed_1",
        "learning_rate_3e-4_sde_window_range_0-3_seed_1",
        "learning_rate_3e-4_sde_window_range_1-3_seed_1",
    ]
    assert members[1].values == {"train.learning_rate": "1e-4", "sample.sde_window_range": "(1, 3)", "seed": "1"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("(0, 3),(1, 3)", ["(0, 3)", "(1, 3)"]),
        ("((0, 3), (1, 2)),()", ["((0, 3), (1, 2))", "()"]),
        ("{'a': 1, 'b': {'c': [1, 2]}}", ["{'a': 1, 'b': {'c': [1, 2]}}"]),
        ("'a, b', c", ["'a, b'", "c"]),
        ("('a)', 1),2", ["('a)', 1)", "2"]),
        ("don't, can't", ["don't", "can't"]),
    ],
)
def test_a_comma_inside_of_brackets_or_quotes_is_part_of_a_value(values, expected):
    assert [member.values["custom.x"] for member in sweep.members_of([f"custom.x={values}"])] == expected


def test_places_are_gpus_of_their_own_or_the_cpu():
    assert sweep.places_of([], 2, 2) == [{}, {}]
    devices = [place["CUDA_VISIBLE_DEVICES"] for place in sweep.places_of(["0", "1", "5"], 1, 2)]
    assert devices == ["0", "1", "5", "0", "1", "5"]
    assert sweep.places_of(["0", "1", "5"], 2, 1) == [{"CUDA_VISIBLE_DEVICES": "0,1"}]


def test_a_sweep_takes_the_gpus_that_it_is_given_or_else_those_that_it_sees(monkeypatch, tmp_path):
    lister = tmp_path / "nvidia-smi"  # of a machine of two GPUs
    lister.write_text("#!/bin/sh\necho 'GPU 0: a card'\necho 'GPU 1: a card'\n")
    lister.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert sweep.gpus_of("") == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,6")
    assert sweep.gpus_of("") == ["3", "6"]
    assert sweep.gpus_of("0, 1") == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sweep.gpus_of("") == [], "it is asked to use none"


def test_what_no_run_could_be_started_with_is_refused(tmp_path):
    vary = ["--out", tmp_path / "runs", "--vary"]
    file = tmp_path / "file"
    file.write_text("text")
    rows = [
        ("lerning_rate", lambda: parsed(*vary, "train.lerning_rate=1", SCRIPT), ["nearest", "train.learning_rate"]),
        ("no value", lambda: parsed(*vary, "seed=1,,2", SCRIPT), ["seed=1,,2", "lacks a value"]),
        ("twice", lambda: parsed(*vary, "seed=1,1", SCRIPT), ["--vary seed names a value twice: 1, 1"]),
        ("key twice", lambda: parsed(*vary, "seed=1", "--vary", "seed=2", SCRIPT), ["names a setting twice"]),
        ("run_name", lambda: parsed(*vary, "run_name=a", SCRIPT), ["--vary run_name would be ignored"]),
        ("its flag", lambda: parsed(*vary, "seed=1", SCRIPT, "--config.output_dir=x"), ["output_dir would be ignored"]),
        ("varied", lambda: parsed(*vary, "seed=1", SCRIPT, "--config.seed=3"), ["seed would be ignored: --vary"]),
        (
            "varied whole",
            lambda: parsed(*vary, "reward_fn={'shapes': 1}", SCRIPT, "--config.reward_fn.shapes", "2"),
            ["config.reward_fn.shapes would be ignored"],
        ),
        (
            "one dash",
            lambda: parsed(*vary, "seed=1", SCRIPT, "-config.run_name=a"),
            ["config.run_name would be ignored"],
        ),
        ("a file", lambda: sweep.main(parsed("--out", file, "--vary", "seed=1", SCRIPT)), ["--out", "is no folder"]),
        ("no script", lambda: parsed(*vary, "seed=1", "nowhere.py"), ["nowhere.py is no file", "package"]),
        ("gpus", lambda: parsed("--gpus=0", "--ranks=2", *vary, "seed=1", SCRIPT), ["--ranks 2", "this sweep has 1"]),
        ("gpu twice", lambda: parsed("--gpus=0,1,0", *vary, "seed=1", SCRIPT), ["--gpus names a value twice: 0, 1, 0"]),
        ("ranks", lambda: parsed("--ranks=0", *vary, "seed=1", SCRIPT), ["--ranks is 0"]),
        ("slurm", lambda: parsed("--slurm", "--gpus=0", *vary, "seed=1", SCRIPT), ["ignored with --slurm"]),
        (
            "a blank",
            lambda: sweep.main(parsed("--slurm", *vary, "train.adam_betas=(0.9, 0.99)", SCRIPT)),
            ["array job", "blank"],
        ),
    ]
    assert_refused(rows)
    # The other rewards are the flag's, and one varies.
    parsed(*vary, "reward_fn.shapes=1,2", SCRIPT, "--config.reward_fn={'shapes': 1, 'edits': 1}")


def test_an_array_job_has_the_settings_of_each_run(tmp_path, capsys):
    sweep.main(parsed("--slurm", "--out", tmp_path, "--vary", "seed=1,2", SCRIPT, "--config", "config/grpo.py:a"))
    first, second = (tmp_path / "settings.txt").read_text().splitlines()
    assert first == f"--config.seed=1 --config.output_dir={tmp_path} --config.run_name=seed_1"
    assert second.startswith("--config.seed=2 ")
    said = capsys.readouterr().out
    assert f"SWEEP={tmp_path / 'settings.txt'} sbatch --nodes=1 --array=1-2 " in said
    assert said.endswith(f"slurm.sh {SCRIPT} --config config/grpo.py:a\n")


def test_an_array_job_that_is_submitted_elsewhere_is_told_where_the_checkout_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep.main(parsed("--slurm", "--out", "runs", "--vary", "seed=1,2", "train_qwenimage"))
    said = capsys.readouterr().out
    assert f" CHECKOUT={ROOT} sbatch " in said
    assert said.endswith(f" {ROOT}/scripts/multi_node/slurm.sh {ROOT / SCRIPT}\n")


SCORES = {"eval/jpeg_compressibility": -1.0, "test/jpeg_compressibility": -3.0, "test_best/jpeg_compressibility": -2.0}


def test_the_table_has_means_over_seeds_and_the_lowest(recorded, tmp_path):
    """Three copies of a run, of which one has not ended."""
    members = sweep.members_of(["train.learning_rate=1,2", "seed=1,2"])
    for member, added in zip(members, (0.0, 0.5, 1.0), strict=False):
        folder = shutil.copytree(recorded("nft").folder, tmp_path / member.name)
        lines = []
        for text in (folder / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text)
            for name, base in SCORES.items():
                if name in line:
                    line[name] = base + added if line["epoch"] else base
            lines.append(json.dumps(line))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    change_json(tmp_path / members[2].name / "run.json", starts=[])
    text = sweep.write_table(tmp_path, members)
    assert text == (tmp_path / "table.md").read_text()
    head, _, row, empty_row = text.splitlines()
    assert head == "| train.learning_rate | runs | validation: best | test: before | last | best | lowest best |"
    assert row == "| 1 | 2 | -0.75 ± 0.25 | -3 | -2.75 ± 0.25 | -1.75 ± 0.25 | -2 |"
    assert empty_row == "| 2 | 0 (2 not begun) |  |  |  |  |  |"


def test_the_table_says_of_each_combination_how_many_runs_have_no_scores_and_why(recorded, tmp_path):
    members = sweep.members_of(["train.learning_rate=1,2,3,4", "seed=1,2"])
    complete, untested, begun, failed, _, _, too_alike, removed = [tmp_path / member.name for member in members]
    for folder in (complete, untested, begun, too_alike, removed):
        shutil.copytree(recorded("nft").folder, folder)
    lines = (untested / "metrics.jsonl").read_text().splitlines()
    (untested / "metrics.jsonl").write_text("\n".join(line for line in lines if '"test/' not in line) + "\n")
    # It had ended, and goes on for more epochs.
    start = {"start": "", "command": [SCRIPT]}
    change_json(begun / "run.json", starts=[start | {"end": ""}, start])
    # A run tests no best weights that it lacks: there was none of enough variety, or best/ was removed.
    for folder in (too_alike, removed):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text("\n".join(line for line in lines if '"best_epoch"' not in line) + "\n")
    evaluated = json.loads((too_alike / "config.json").read_text())["eval"]
    change_json(too_alike / "config.json", eval=evaluated | {"min_variety": 1.0, "noises_per_prompt": 2})
    rows = sweep.write_table(tmp_path, members, [failed.name]).splitlines()[2:]
    assert rows[0].startswith("| 1 | 1 (1 without a test) | ")
    assert rows[1] == "| 2 | 0 (1 not ended, 1 failed) |  |  |  |  |  |"
    assert rows[2] == "| 3 | 0 (2 not begun) |  |  |  |  |  |"
    assert rows[3] == "| 4 | 0 (2 without a best policy) |  |  |  |  |  |"


def test_a_run_that_has_ended_is_named_with_the_flags_that_were_others(tmp_path):
    model = "--config.reward.args.judge.url=http://127.0.0.1/v1"
    vary = ["--out", tmp_path, "--vary", "seed=1", SCRIPT]
    then = sweep.Sweep(parsed(*vary, f"{model}?key=secret", "--config.num_epochs=4"))
    (member,) = then.members
    command = provenance.without_queries([SCRIPT, *then.flags(member)])
    (tmp_path / member.name).mkdir()
    entry = {"start": "", "command": command, "end": ""}
    (tmp_path / member.name / provenance.FILE).write_text(json.dumps({"starts": [entry]}))

    assert provenance.has_ended(tmp_path / member.name)
    assert then.ended_before(member) == "seed_1: has ended before"
    longer = sweep.Sweep(parsed(*vary, f"{model}?key=another", "--config.num_epochs=8"))
    said = longer.ended_before(member)
    assert said.endswith("others: --config.num_epochs=4 then, --config.num_epochs=8 now")
    shorter = sweep.Sweep(parsed(*vary, model))
    assert shorter.ended_before(member).endswith("others: --config.num_epochs=4 then, none now")


@pytest.mark.slow
def test_a_sweep_says_which_runs_fail_and_an_interrupted_one_goes_on(shallow, tmp_path):
    """The second value is refused by the script. The first run is interrupted in its long training, and saves."""
    out = tmp_path / "runs"
    how = dict(model=shallow["model"], dataset=shallow["dataset"], eval_freq=0, save_freq=0)
    script, *flags = command_of("shapes_qwenimage", tmp_path, **how)
    flags = [flag for flag in flags if not flag.startswith("--config.output_dir")]
    words = ["scripts/sweep.py", "--out", out, "--vary", "train.adv_clip_max=5,-1", script, *flags]
    process = warm.Started([*words, "--config.num_epochs=500"])
    while not epochs_of(out / "adv_clip_max_5") and process.poll() is None:
        time.sleep(0.05)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
    stopped = process.done()
    assert stopped.returncode == signals.STATUS, stopped.stdout + stopped.stderr
    assert stopped.stdout.endswith("the same command continues the sweep\n")
    assert "adv_clip_max_-1" not in stopped.stdout, "nothing more is started"
    newest = checkpoints.find_newest(out / "adv_clip_max_5" / "checkpoints")
    completed = checkpoints.read_progress(newest).epoch

    ended = warm.run([*words, f"--config.num_epochs={completed}"])
    assert ended.returncode == 1, ended.stderr
    assert "adv_clip_max_5: has ended\n" in ended.stdout
    assert "adv_clip_max_-1: stopped with status 2, train_qwenimage.py: config.train.adv_clip_max" in ended.stdout
    assert "failed: adv_clip_max_-1; the same command tries them again" in ended.stdout
    assert (out / "report.html").exists()
    assert (out / "table.md").read_text().splitlines()[2:] == [
        "| 5 | 0 (1 without a test) |  |  |  |  |  |",
        "| -1 | 0 (1 failed) |  |  |  |  |  |",
    ]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
