"""Killed at any moment and resumed, a run logs what it would have logged."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import warm
from small import FEW, config_of, lines_of, stored, train
from two_ranks import launch

from flow_grpo import folders, fsdp_utils, report, resuming
from flow_grpo import run as runs
from flow_grpo.dashboards import Dashboard

NAME = "shapes_qwenimage_pr"
NUM_KILLS, NUM_EPOCHS = 4, 7
LARGE = dict(lora__rank=32, lora__alpha=64)  # so that a kill meets the writing of its checkpoints


def command(output_dir):
    script = "scripts/train_qwenimage_pr.py"
    how = dict(output_dir=output_dir, resume_from="latest", num_epochs=NUM_EPOCHS, eval_freq=4)
    # but for the checkpoints, as in this process's runs
    how = FEW | LARGE | how | dict(save_freq=1, sample__num_branches=3)
    flags = [f"--config.{key.replace('__', '.')}={value}" for key, value in how.items()]
    return [script, f"--config=config/grpo.py:{NAME},smoke", *flags]


def started(folder, process):
    """Wait until training runs or is over."""
    size = folder.stat().st_size if folder.exists() else 0
    while process.poll() is None and (not folder.exists() or folder.stat().st_size == size):
        time.sleep(0.02)


def best_of(folder):
    """Everything in best/, byte for byte, but the card, which quotes settings that may differ."""
    return {path.name: path.read_bytes() for path in (folder / "best").iterdir() if path.name != "README.md"}


def writes(folder, since):
    """Whether a checkpoint has been begun since then and is not complete."""
    with contextlib.suppress(FileNotFoundError):  # complete by now
        return any(path.stat().st_mtime >= since for path in folder.glob(".tmp-epoch_*"))


def stops_in_save(process, folder, since):
    """Halt the process if it writes a checkpoint, and see that it has not completed it meanwhile."""
    if writes(folder, since):
        os.kill(process.pid, signal.SIGSTOP)
        if writes(folder, since):
            return True
        os.kill(process.pid, signal.SIGCONT)
    return False


def test_kills_change_nothing(tmp_path):
    """Every second one while a checkpoint is being written, the others at random moments."""
    unbroken = train(NAME, tmp_path / "unbroken", num_epochs=NUM_EPOCHS, eval_freq=4, **LARGE)
    delays = torch.rand(NUM_KILLS, generator=torch.Generator().manual_seed(0))
    folder, kills, kills_in_save = tmp_path / "broken" / f"{NAME}_smoke", 0, 0
    for number, delay in enumerate(delays.tolist()):
        since = time.time()
        process = warm.Started(command(tmp_path / "broken"))
        started(folder / "metrics.jsonl", process)
        if number % 2 == 1:
            while process.poll() is None and not stops_in_save(process, folder / "checkpoints", since):
                time.sleep(0.001)
        else:
            time.sleep(delay)
        kills += process.poll() is None
        process.kill()
        process.wait()
        kills_in_save += bool(writes(folder / "checkpoints", since))
    assert kills == NUM_KILLS
    assert kills_in_save >= 1
    last = warm.run(command(tmp_path / "broken"))
    assert last.returncode == 0, last.stderr[-3000:]
    assert lines_of(folder) == lines_of(unbroken)
    assert best_of(folder) == best_of(unbroken)
    assert [path.name for path in (tmp_path / "broken").iterdir()] == [folder.name]


class Clock:
    """Stands in for flow_grpo.run's time: half an hour passes from one look to the next."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1800.0
        return self.now


def test_a_run_ends_as_after_its_last_epoch_once_its_hours_are_over(tmp_path, monkeypatch):
    whole = train(NAME, tmp_path / "whole", num_epochs=2, save_freq=0)
    monkeypatch.setattr(runs, "time", Clock())
    timed = train(NAME, tmp_path / "timed", num_epochs=5, save_freq=0, max_hours=1.0)
    assert lines_of(timed) == lines_of(whole)
    assert best_of(timed) == best_of(whole)
    for file in ("checkpoints/epoch_000002", "pytorch_lora_weights.safetensors", "best", "reward.png"):
        assert (timed / file).exists()


def test_a_resumed_run_counts_its_hours_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "time", Clock())
    how = dict(num_epochs=5, eval_freq=0, max_hours=1.0, resume_from="latest")
    lengths = [len(lines_of(train(NAME, tmp_path, **how), "epoch")) for _ in range(3)]
    assert lengths == [2, 4, 5]


def test_without_a_limit_no_hours_end_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "time", Clock())
    assert len(lines_of(train(NAME, tmp_path, num_epochs=4, eval_freq=0), "epoch")) == 4


def test_all_ranks_end_by_the_main_ranks_clock(tmp_path):
    """The other rank's clock stands still: by itself it would go on, and wait for ever."""
    launch(__file__, tmp_path)
    assert len(lines_of(tmp_path / f"{NAME}_smoke", "epoch")) == 2


def test_a_new_run_leaves_an_older_one_alone(tmp_path):
    first = train(NAME, tmp_path, num_epochs=1, eval_freq=0)
    before = (first / "metrics.jsonl").read_bytes()
    second = train(NAME, tmp_path, num_epochs=1, eval_freq=0)
    assert second.name == first.name + "-2"
    assert (first / "metrics.jsonl").read_bytes() == before


def test_resuming_with_another_config_names_the_settings(tmp_path):
    folder = train(NAME, tmp_path, num_epochs=1, eval_freq=0)
    checkpoint = folder / "checkpoints" / "epoch_000001"
    with pytest.raises(ValueError, match=r"train\.learning_rate: 0\.0002 -> 0\.5"):
        train(NAME, tmp_path, resume_from=str(checkpoint), train__learning_rate=0.5)
    resumed = train(NAME, tmp_path, resume_from=str(checkpoint), num_epochs=2, eval_freq=0)
    assert resumed == folder
    assert [row["epoch"] for row in lines_of(folder, "epoch")] == [0, 1]
    assert json.loads((folder / "config.json").read_text())["num_epochs"] == 2


def test_damage_is_named_and_costs_an_epoch_at_most(tmp_path, capfd):
    folder = train(NAME, tmp_path, num_epochs=2, save_freq=1)
    before, (first, newest) = lines_of(folder), sorted((folder / "checkpoints").iterdir())
    for path in [next((newest / "state").iterdir()), next((first / "best").glob("*.safetensors"))]:
        flip_a_bit(path)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"kind": "epoch"}\n')
    cut(folder / "images" / "first.npz")
    put_loop(newest.with_name(".tmp-epoch_000009"))
    put_file(folder / ".tmp-best")
    put_loop(folder / ".old-best")
    capfd.readouterr()
    with pytest.raises(ValueError, match=f"{newest} is damaged: state/rank_0000_0000.safetensors: the bytes are not"):
        train(NAME, tmp_path, resume_from=str(newest))
    train(NAME, tmp_path, resume_from="latest", num_epochs=2)
    said = capfd.readouterr().out
    assert f"{newest} is damaged: " in said
    assert f"the run goes on from {first}" in said
    assert f"{first / 'best'} is damaged: " in said
    for name in ("metrics.damaged.jsonl", "images/first.damaged.npz", "best_damaged"):
        assert str(folder / name) in said
        assert (folder / name).exists()
    assert lines_of(folder, "update") == [line for line in before if line["kind"] == "update"]
    assert (folder / "best").is_dir()
    assert (folder / "samples.png").is_file()
    left = {path.name: path.is_dir() for path in folder.iterdir() if not path.name.startswith("best_")}
    assert {name for name, is_dir in left.items() if is_dir} <= {*folders.FOLDERS, "checkpoints"}
    assert {name for name, is_dir in left.items() if not is_dir} <= {*folders.FILES, folders.LOCK}


def put_folder(path):
    (path / "inside").mkdir(parents=True)


def put_file(path):
    path.write_text("no folder")


def put_loop(path):
    path.symlink_to(path.name)


def put_link_to_nowhere(path):
    path.symlink_to("nowhere")


def put_in_place_of_everything(put_file_like, put_folder_like, folder):
    """Other things under the names of a run's files and folders; of images/ and transformer/, in turn."""
    names = dict.fromkeys((*folders.FILES, folders.LOCK, "images/first.npz", "transformer/part"), put_file_like)
    names |= dict.fromkeys(("wandb", "tensorboard", "best"), put_folder_like)
    names |= {"images/eval_000001.png": put_file_like, "images/eval_000001.json": put_file_like}
    for name, put in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        put(folder / name)
    return names


@pytest.mark.parametrize(
    ("put_file_like", "put_folder_like"),
    [(put_folder, put_file), (put_loop, put_loop), (put_link_to_nowhere, put_link_to_nowhere)],
    ids=["another kind", "loops", "links to nowhere"],
)
def test_what_a_run_can_go_on_without_is_set_aside_with_a_line(tmp_path, capfd, put_file_like, put_folder_like):
    folder = tmp_path / f"{NAME}_smoke"
    names = put_in_place_of_everything(put_file_like, put_folder_like, folder)
    config = config_of(NAME, tmp_path, resume_from="latest", logger="wandb")
    assert resuming.take_folder(config) == (folder, None)
    board = Dashboard(folder, config, "run", is_main=True)
    board.log("epoch", {"reward/avg": 0.5}, epoch=0, step=1)
    board.log_images(torch.rand(2, 3, 8, 8), ["a", "b"], [0.0, 1.0], epoch=1, step=1)
    board.finish()
    report.write([folder], folder / "report.html")
    folders.release(folder)
    said = capfd.readouterr().out
    for name in names:
        assert f"{folder / name} cannot be used, and is now {folder / name}.aside-1" in said
        assert os.path.lexists(folder / f"{name}.aside-1")
    for name in ("config.json", "metrics.jsonl", "wandb_id", "reward.png", "samples.png", "images/first.npz"):
        assert (folder / name).is_file()
    assert len(folders.clear_the_way(folder)) == 0


def test_a_folder_or_checkpoints_that_are_none_are_named(tmp_path):
    config = config_of(NAME, tmp_path, resume_from="latest")
    folder = tmp_path / f"{NAME}_smoke"
    for put in (put_file, put_loop, put_link_to_nowhere):
        put(folder)
        with pytest.raises(ValueError, match=f"config.resume_from: {folder} is no folder"):
            resuming.take_folder(config)
        folder.unlink()
        folder.mkdir()
        put(folder / "checkpoints")
        with pytest.raises(ValueError, match=f"{folder / 'checkpoints'} is no folder"):
            resuming.take_folder(config)
        shutil.rmtree(folder)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_latest_with_nothing_there_is_a_new_run(tmp_path):
    folder = train(NAME, tmp_path, resume_from="latest", num_epochs=1, eval_freq=0)
    assert len(lines_of(folder, "epoch")) == 1


def test_fp16_resumes_with_the_loss_scale_it_had(tmp_path, monkeypatch):
    """The first gradient overflows, so that the scale is halved; the resumed run begins with the half."""
    plain, calls = fsdp_utils.clip_grad_norm, []

    def overflow(parameters, max_norm):
        calls.append(None)
        return plain(parameters, max_norm) * (float("inf") if len(calls) == 1 else 1)

    monkeypatch.setattr(fsdp_utils, "clip_grad_norm", overflow)
    how = dict(precision="fp16", eval_freq=0)
    whole = train("shapes_qwenimage", tmp_path / "whole", num_epochs=2, **how)
    calls.clear()
    train("shapes_qwenimage", tmp_path / "parts", num_epochs=1, **how)
    parts = train("shapes_qwenimage", tmp_path / "parts", num_epochs=2, resume_from="latest", **how)
    assert lines_of(whole, "update")[0]["grad_norm"] == "inf"
    assert lines_of(whole) == lines_of(parts)
    scales = [stored(folder, epoch=2)["loss_scale"] for folder in (whole, parts)]
    assert scales[0] == scales[1]
    assert 2.0**15 < scales[0] < 2.0**15.1


def end_by_the_clock(folder):
    """What test_all_ranks_end_by_the_main_ranks_clock runs on each of two ranks."""
    runs.time = Clock()
    if os.environ["RANK"] == "1":
        runs.time.monotonic = lambda: 0.0
    how = dict(sample__num_images_per_prompt=4, num_epochs=5, eval_freq=0, max_hours=1.0)
    train(NAME, folder, **how)
    Path(folder, "done").touch()


if __name__ == "__main__":
    end_by_the_clock(sys.argv[1])
