"""Which numbers of rows choose_batch_size.py tries, what it makes of a run's end, and what it says."""

import os
import sys

import choose_batch_size
import pytest
from choose_batch_size import Rows, Trials, climb, second_epoch
from small import config_of

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
    assert second_epoch(script(tmp_path, full), tmp_path / "full") is None
    refused = "import sys; sys.exit('Warning: x\\ntrain_mine.py: config.a is 1; it must be 2\\nmore')"
    with pytest.raises(ValueError, match=r"^train_mine.py: config.a is 1; it must be 2$"):
        second_epoch(script(tmp_path, refused), tmp_path / "refused")
    with pytest.raises(ValueError, match="status 1"):
        second_epoch(script(tmp_path, "nothing.is_here"), tmp_path / "bug")
    assert "name 'nothing' is not defined" in capsys.readouterr().err


def trials(tmp_path, name, gpus, **how):
    return Trials(["train.py"], config_of(name, tmp_path, **how), gpus, tmp_path)


@pytest.mark.parametrize(
    ("name", "gpus", "rows", "expected"),
    [
        ("shapes_qwenimage", 2, Rows(4, 0), 2),  # 2 x 4 images, two batches of 4
        ("shapes_qwenimage", 1, Rows(4, 16), 4),  # 16 images at once
        ("shapes_qwenimage_pr", 1, Rows(4, 24), 1),  # 4 trunks of 6 branches
        ("shapes_qwenimage_nft", 1, Rows(64, 0), 12),  # all there are
    ],
)
def test_a_trial_has_as_many_prompts_as_fill_its_forwards(name, gpus, rows, expected, tmp_path):
    how = dict(sample__num_prompts_per_epoch=12, sample__num_images_per_prompt=4, train__updates_per_epoch=4)
    how |= dict(sample__num_branches=6) if name.endswith("_pr") else {}
    assert trials(tmp_path, name, gpus, **how).num_prompts(rows) == expected


@pytest.mark.parametrize(
    ("name", "allowed"), [("shapes_qwenimage", [1, 2, 3, 4]), ("shapes_qwenimage_dpo,online", [4])]
)
def test_rows_must_divide_the_runs_own_epoch(name, allowed, tmp_path):
    how = dict(sample__num_prompts_per_epoch=6, sample__num_images_per_prompt=4, train__updates_per_epoch=1)
    how |= dict(sample__sde_window_size=2)
    found = trials(tmp_path, name, 2, **how)
    assert [rows for rows in (1, 2, 3, 4, 5, 7, 8) if found.divide(rows)] == allowed


def test_a_script_with_its_flags_gets_the_flags_of_the_fastest(capsys):
    flags = ["--config", "config/grpo.py:shapes_qwenimage,stepwise,smoke", "--config.sample.num_prompts_per_epoch=2"]
    choose_batch_size.main(["scripts/train_qwenimage.py", *flags, "--config.sample.batch_size=8"])
    tried, chosen = capsys.readouterr().out.splitlines()
    assert chosen == "--config.sample.batch_size=8 --config.sample.completion_batch_size=0"
    assert tried.startswith(f"{chosen}  ")
    assert "images/s" in tried


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scripts/train_nothing.py", "--config", "config/grpo.py:shapes_qwenimage"], "there must be such a file"),
        (["--gpus=0", "scripts/train_qwenimage.py", "--config", "config/grpo.py:shapes_qwenimage"], "at least one GPU"),
        (["scripts/train_qwenimage.py", "--config=config/grpo.py:x"], "no run 'x'"),
    ],
)
def test_a_wrong_command_is_refused_in_a_sentence(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        choose_batch_size.main(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
