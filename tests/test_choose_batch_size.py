"""Which numbers of rows choose_batch_size.py tries, what it makes of a run's end, and what it says."""

import os
import signal
import subprocess
import sys
import time

import choose_batch_size
import pytest
from choose_batch_size import Rows, Trials, climb, second_epoch
from small import ROOT, config_of

from flow_grpo import command_line
from flow_grpo.prompts import load_prompts

RUN = """
import json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[-1].split("=")[1], "trial")
folder.mkdir()
with (folder / "metrics.jsonl").open("w") as file:
    for number in range(3):
        for kind in ("update", "epoch"):
            line = json.dumps(dict(kind=kind, images_per_s=number, pid=os.getpid()))
            file.write(line[:9])
            file.flush()
            time.sleep(0.3)
            file.write(line[9:] + "\\n")
            file.flush()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("start", "speeds", "best"),
    [
        (4, {4: 1.0, 8: 1.5, 16: 2.0, 32: 2.0}, 16),
        (4, {4: 1.0, 8: 1.015}, 4),  # too little to pay for it
        (4, {4: 1.0, 8: 1.03}, 8),
        (4, {4: 1.0, 8: 1.5, 16: 0.0}, 8),
        (4, {4: 1.0, 8: 1.5}, 8),  # 16 rows do not divide
        (4, {4: 0.0, 2: 0.0, 1: 1.0}, 1),
        (12, {12: 0.0, 6: 1.0, 3: 9.0}, 6),
    ],
)
def test_it_doubles_while_that_is_faster_and_halves_until_it_fits(start, speeds, best):
    assert climb(start, lambda number: number in speeds, speeds.__getitem__) == best


@pytest.mark.parametrize("speeds", [{4: 0.0, 2: 0.0, 1: 0.0}, {4: 0.0, 2: 0.0}])
def test_where_nothing_fits_it_says_so(speeds):
    with pytest.raises(ValueError, match=f"not even {min(speeds)} rows fit"):
        climb(4, lambda number: number in speeds, speeds.__getitem__)


def script(folder, text):
    file = folder / "train_mine.py"
    file.write_text(text)
    return [sys.executable, str(file)]


def test_a_run_is_measured_by_its_second_epoch_and_ended_then(tmp_path):
    line = second_epoch(script(tmp_path, RUN), tmp_path / "run")
    assert (line["kind"], line["images_per_s"]) == ("epoch", 1)
    with pytest.raises(ProcessLookupError):
        os.kill(line["pid"], 0)


def test_memory_that_runs_out_is_no_error_and_all_else_is(tmp_path, capsys):
    full = "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate')"
    trials = Trials(script(tmp_path, full)[1:], config_of("shapes_qwenimage", tmp_path), 1, tmp_path)
    assert trials.images_per_s(Rows(4)) == 0
    assert capsys.readouterr().out == "--config.sample.batch_size=4  out of memory\n"
    refused = "import sys; sys.exit('Warning: x\\ntrain_mine.py: config.a is 1; it must be 2\\nmore')"
    with pytest.raises(ValueError, match=r"^train_mine.py: config.a is 1; it must be 2$"):
        second_epoch(script(tmp_path, refused), tmp_path / "refused")
    bug = f"print('the server was out of memory'); print('train_mine.py: {command_line.ANOTHER_RANK}'); nothing.is_here"
    with pytest.raises(ValueError, match="status 1"):
        second_epoch(script(tmp_path, bug), tmp_path / "bug")
    assert "name 'nothing' is not defined" in capsys.readouterr().err


def test_what_was_measured_outlasts_a_later_trial_that_fails(tmp_path, capsys):
    """Such as one that the system ends, since the host has no memory left."""
    ends = script(tmp_path, "import os; os.kill(os.getpid(), 9)")[1:]
    trials = Trials(ends, config_of("shapes_qwenimage"), 1, tmp_path)
    with pytest.raises(ValueError, match="the run ended"):
        trials.images_per_s(Rows(4))
    trials.speeds[Rows(4)] = 1.0
    assert trials.images_per_s(Rows(8)) == 0
    assert "--config.sample.batch_size=8  the run ended" in capsys.readouterr().out


FEW_IMAGES = dict(sample__num_prompts_per_epoch=12, sample__num_images_per_prompt=4, train__updates_per_epoch=4)


@pytest.mark.parametrize(
    ("name", "gpus", "rows", "expected"),
    [
        ("shapes_qwenimage", 2, Rows(4), 4),  # 4 x 4 images, a batch of 8 for each GPU: twice 4
        ("shapes_qwenimage", 2, Rows(2), 4),
        ("shapes_qwenimage", 1, Rows(4, 16), 4),  # 16 images at once
        ("shapes_qwenimage", 2, Rows(4, 16), 8),
        ("shapes_qwenimage_pr", 1, Rows(4, 24), 2),  # 8 trunks of 6 branches, in two batches or one
        ("shapes_qwenimage_pr", 1, Rows(4, 72), 4),  # 16 trunks: 12 do not divide into batches of 8
        ("shapes_qwenimage_nft", 1, Rows(64), 12),  # all there are
        ("shapes_qwenimage_dpo,online", 1, Rows(4), 1),  # 8 do not divide, nor 4 with the config's own updates
    ],
)
def test_a_trial_has_as_many_prompts_as_fill_its_forwards(name, gpus, rows, expected, tmp_path):
    how = FEW_IMAGES | dict(sample__batch_size=4, sample__completion_batch_size=0)
    how |= dict(sample__num_branches=6) if name.endswith("_pr") else {}
    assert choose_batch_size.few_prompts(config_of(name, tmp_path, **how), gpus, rows) == expected


def test_a_trial_is_the_users_command_but_short(tmp_path):
    """Their flags stay, what a trial needs comes last."""
    theirs = ["--config=config/grpo.py:shapes_qwenimage", "--config.seed=3", "--config.sample.batch_size=12"]
    theirs += ["--config.run_name=mine", "--config.max_hours=1", "--config.num_epochs=1", "--config.save_freq=1"]
    theirs += ["--config.health.action=stop", "--config.train.target_update_size=1", "--config.resume_from=latest"]
    theirs += ["--config.rollout_images_freq=1", "--config.dataset=dataset/shapes"]
    trials = Trials(["train.py", *theirs], command_line.config_of(theirs, ""), 2, tmp_path)
    command = trials.short_run(Rows(6, 24))
    script = command.index("train.py")
    assert "--nproc_per_node=2" in command[:script]
    short = command_line.config_of(command[script + 1 :], "")
    assert (short.seed, short.sample.batch_size, short.sample.completion_batch_size) == (3, 6, 24)
    assert short.num_epochs > 2  # nothing is saved at an end that is not reached
    assert (short.run_name, short.logger, short.resume_from, short.max_hours) == ("trial", "none", "", 0)
    assert short.eval_freq == short.save_freq == short.rollout_images_freq == 0
    assert short.train.updates_per_epoch == 1
    assert (short.health.action, short.train.target_update_size) == ("log", 0)
    assert short.sample.num_prompts_per_epoch * short.sample.num_images_per_prompt == 48
    (only,) = {prompt.text for prompt in load_prompts(short.dataset, "train")}
    assert len(only) == max(len(prompt.text) for prompt in load_prompts("dataset/shapes", "train"))


SLOTS = dict(sample__engine="stepwise")


@pytest.mark.parametrize(
    ("how", "gpus", "fits", "chosen"),
    [
        ({}, 1, Rows(4096, 0), Rows(16)),  # 48 images: 16 divides them, 32 does not
        ({}, 2, Rows(4096, 0), Rows(8)),
        (SLOTS, 1, Rows(8, 4096), Rows(8, 32)),  # 64 rows are more than there are images
        (SLOTS, 2, Rows(8, 4096), Rows(8, 16)),
        (SLOTS, 1, Rows(8, 8), Rows(8, 0)),
        (SLOTS | dict(sample__completion_batch_size=6), 1, Rows(4, 48), Rows(4, 48)),
        (SLOTS | dict(sample__completion_batch_size=6), 1, Rows(2, 48), Rows(2, 32)),  # 4 rows do not fit
        (SLOTS | dict(sample__completion_batch_size=24), 1, Rows(4, 16), Rows(4, 16)),  # 24 do not fit
    ],
)
def test_both_numbers_are_chosen_one_after_the_other(how, gpus, fits, chosen, tmp_path):
    how = FEW_IMAGES | dict(sample__batch_size=4, sample__sde_window_size=2, train__updates_per_epoch=1) | how
    config, tried = config_of("shapes_qwenimage", tmp_path, **how), []

    def speed(rows):
        tried.append(rows)
        free = rows.completion_batch_size or rows.batch_size
        fit = rows.batch_size <= fits.batch_size and free <= max(fits.completion_batch_size, fits.batch_size)
        return float(rows.batch_size + free) if fit else 0.0

    assert choose_batch_size.choose(config, gpus, speed) == chosen
    assert tried[0] == Rows(4, config.sample.completion_batch_size if config.sample.engine == "stepwise" else None)
    assert chosen in tried


def test_no_slots_are_chosen_for_preference_pairs(tmp_path):
    how = FEW_IMAGES | SLOTS | dict(sample__batch_size=4, train__updates_per_epoch=1)
    config = config_of("shapes_qwenimage_dpo,online", tmp_path, **how)
    assert choose_batch_size.choose(config, 1, lambda rows: float(rows.batch_size <= 8)) == Rows(4)


def test_rows_that_do_not_divide_are_refused_before_a_trial(tmp_path):
    config, tried = config_of("shapes_qwenimage", tmp_path, **FEW_IMAGES, sample__batch_size=5), []
    with pytest.raises(ValueError, match="do not divide"):
        choose_batch_size.choose(config, 1, tried.append)
    assert not tried


def test_a_script_with_its_flags_gets_the_flags_of_the_fastest(capsys):
    flags = ["--config", "config/grpo.py:shapes_qwenimage,stepwise,smoke", "--config.sample.num_prompts_per_epoch=2"]
    choose_batch_size.main(["scripts/train_qwenimage.py", *flags, "--config.sample.batch_size=8"])
    tried, chosen = capsys.readouterr().out.splitlines()
    assert chosen == "--config.sample.batch_size=8 --config.sample.completion_batch_size=0"
    assert tried.startswith(f"{chosen}  ")
    assert "images/s" in tried


CONFIG = "--config", "config/grpo.py:shapes_qwenimage"
WAITS = """
import os, time
from pathlib import Path
file = Path(__file__).with_name("pid")
file.with_suffix(".part").write_text(str(os.getpid()))
file.with_suffix(".part").rename(file)
time.sleep(60)
"""


def test_it_ends_its_run_when_it_is_ended(tmp_path):
    _, waits = script(tmp_path, WAITS)
    tool = subprocess.Popen([sys.executable, "tools/choose_batch_size.py", waits, *CONFIG], cwd=ROOT)
    try:
        while not (tmp_path / "pid").exists():
            assert tool.poll() is None
            time.sleep(0.1)
    finally:
        tool.terminate()
    assert tool.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scripts/train_nothing.py", *CONFIG], "no training script"),
        (["scripts/evaluate.py", *CONFIG], "no training script"),
        (["--gpus=0", "scripts/train_qwenimage.py", *CONFIG], "at least 1"),
        (["scripts/train_qwenimage.py", "--config=config/grpo.py:x"], "no run 'x'"),
        (["scripts/train_qwenimage.py", "--config.seed=2"], "--config FILE:NAME"),
        (["scripts/train_qwenimage.py", *CONFIG, "--config.sample.batch_size=0"], "config.sample.batch_size is 0"),
    ],
)
def test_a_wrong_command_is_refused_in_a_sentence(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        choose_batch_size.main(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
