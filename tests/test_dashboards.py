"""Logs of a run: real wandb offline, real files, nothing pretended."""

import itertools
import json
import shutil
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import evaluate
import numpy as np
import pytest
import torch
import warm
from PIL import Image
from small import ENV, ROOT, command_of, lines_of, no_file_above, random_images, train

from flow_grpo.base.distributed import over_ranks
from flow_grpo.base.errors import WriteFailed
from flow_grpo.base.pixels import to_uint8
from flow_grpo.base.prompt import Prompt
from flow_grpo.command_line import alerts
from flow_grpo.data.prompts import Split
from flow_grpo.evaluation.evaluation import Scores
from flow_grpo.monitoring import dashboard, plots, progress, sheets, trackers
from flow_grpo.monitoring.dashboard import Dashboard
from flow_grpo.monitoring.metrics import Meter, RowValues, by_step, gather_rows
from flow_grpo.settings.sections import Config, Train

CONFIG = Config(
    run_name="red",
    num_epochs=3,
    alert="ntfy --token tk_secret publish",
    train=Train(learning_rate=0.00037, adam_betas=(0.5, 0.75)),
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)


@pytest.fixture
def board(tmp_path):
    board = Dashboard(tmp_path, CONFIG, is_main=True)
    yield board
    board.finish()


@pytest.fixture
def now(monkeypatch):
    """The time that a dashboard sees, in seconds."""
    now = [100.0]
    for module in (dashboard, progress):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_meter_means_are_over_rows_however_batches_and_ranks_were_cut():
    values = normal(37)
    ranks = [Meter(), Meter()]
    sent = []
    for number, batch in enumerate(values.split(10)):
        ranks[number % 2].add(loss=batch.requires_grad_(), learning_rate=0.5)
        ranks[number % 2].add_max(peak=batch)
        ranks[number % 2].add_spread(ratio=batch)
    ranks[1].pop(lambda *parts: sent.extend(parts) or parts)
    popped = ranks[0].pop(lambda sums, maxima: (sums + sent[0], torch.maximum(maxima, sent[1])))
    mean = values.mean().item()
    spread = values.std(correction=0).item()
    figures = {"loss": mean, "ratio_mean": mean, "ratio_std": spread, "peak": values.max().item()}
    assert popped == pytest.approx(figures | {"learning_rate": 0.5})
    assert ranks[0].pop(over_ranks) == {}


def test_meter_resolves_the_spread_of_a_ratio_near_one():
    ratio = 1 + 1e-5 * normal(1000).double()
    meter = Meter()
    for batch in ratio.split(300):
        meter.add_spread(ratio=batch)
    popped = meter.pop(over_ranks)
    assert popped["ratio_std"] == pytest.approx(ratio.std(correction=0).item(), rel=1e-4)
    assert popped["ratio_mean"] == pytest.approx(ratio.mean().item(), abs=1e-12)
    meter.add_spread(ratio=torch.tensor([1.0, torch.nan]))
    assert meter.pop(over_ranks)["ratio_std"] != 0


ONE_GROUP = sheets.GroupRow(["step 0"], [Image.new("RGB", (64, 64))] * 2, [0.0, 1.0])


def test_values_of_rows_are_averaged_for_each_denoising_step():
    """Five rows in two minibatches; their timesteps are those of steps 0 and 2 but for rounding."""
    levels = torch.tensor([1000.0, 800.0, 500.0])
    of_two = {"ratio": torch.tensor([1.0, 3.0]), "kl": torch.tensor([0.5, 4.0])}
    of_three = {"ratio": torch.tensor([1.0, 1.0, 2.0]), "kl": torch.tensor([2.0, 1.5, 0.0])}
    first = RowValues(torch.tensor([1000.0, 500.1]), of_two | {"in_one_minibatch": torch.ones(2)})
    second = RowValues(torch.tensor([500.0, 999.9, 499.9]), of_three)
    assert gather_rows([]) is None
    rows = gather_rows([first, second])
    assert rows.values["ratio"].tolist() == [1.0, 3.0, 1.0, 1.0, 2.0]
    assert by_step(rows, levels) == {
        "steps/sigma/0": 1.0,
        "steps/ratio_std/0": 0.0,
        "steps/kl/0": 1.0,
        "steps/sigma/2": 0.5,
        "steps/ratio_std/2": pytest.approx((2 / 3) ** 0.5),
        "steps/kl/2": 2.0,
    }


def test_a_run_folder_has_config_and_lines_and_wandb_has_them_and_what_config_alert_says(tmp_path, board):
    board.log("update", {"loss": 0.5, "grad_norm": float("nan")}, epoch=0, step=1)
    board.log("eval", {"eval/shapes_accuracy": 0.25}, epoch=1, step=1)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(json.dumps(CONFIG.to_dict()))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    line = json.loads(lines[0], parse_constant=pytest.fail)
    assert abs((datetime.now(UTC) - datetime.fromisoformat(line.pop("written_at"))).total_seconds()) < 3600
    assert line == dict(kind="update", epoch=0, step=1, loss=0.5, grad_norm="nan")
    assert str(dashboard.read_metrics(tmp_path)[0]["grad_norm"]) == "nan"
    board.log_histogram("reward", torch.tensor([0.25, 0.5]), epoch=1, step=1)
    board.log_groups([ONE_GROUP], epoch=1, step=1, name="groups")
    assert alerts.send("wandb", "the reward has fallen") == ""
    board.finish()
    words = [b"0.00037", b"num_epochs", b"eval/shapes_accuracy", b"train/grad_norm", b"the reward has fallen"]
    words += [b"histograms/reward", b"images/groups"]
    recorded = next(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    deadline = time.monotonic() + 20
    while not all(word in recorded.read_bytes() for word in words):  # its own process writes on after finish
        assert time.monotonic() < deadline, recorded.read_bytes()
        time.sleep(0.05)
    assert b"tk_secret" not in recorded.read_bytes()


def test_a_resumed_run_is_the_same_wandb_run_and_goes_on_at_the_next_line(tmp_path, board):
    for epoch in range(4):
        board.log("epoch", {"images": 10 * epoch + 10}, epoch=epoch, step=epoch)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"kind": "epoch", "epoch": {"9" * 400}}}\n{{"kind": "epoch", "ep')  # no float, and cut
    (first,) = board.trackers
    resumed = Dashboard(tmp_path, CONFIG, is_main=True)
    before = dashboard.read_metrics(tmp_path)
    resumed.truncate(2)
    assert dashboard.read_metrics(tmp_path) == before[:2], "with their times"
    assert resumed.trackers[0].run.id == first.run.id == (tmp_path / "wandb_id").read_text()
    resumed.log("epoch", {}, epoch=2, step=2)
    assert [line["epoch"] for line in dashboard.read_metrics(tmp_path)] == [0, 1, 2]
    assert (len(resumed.history), resumed.latest["images"]) == (3, 20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "metrics.jsonl", "wandb", "wandb_id"]
    resumed.finish()


def test_phases_are_timed_into_the_epochs_line(tmp_path, now):
    waited = []
    board = Dashboard(tmp_path, CONFIG, is_main=True, synchronize=lambda: waited.append(1))
    for phase in ("rollout", "eval", "rollout"):
        with board.timed(phase):
            now[0] += 0.5
    now[0] += 2.5  # in no phase
    board.log("epoch", {"images": 20}, epoch=0, step=1)
    line = dashboard.read_metrics(tmp_path)[0]
    assert (line["time/rollout_s"], line["time/eval_s"], line["time/epoch_s"]) == (1.0, 0.5, 4.0)
    assert line["images_per_s"] == pytest.approx(20 / (4.0 - 0.5))
    with board.timed("update"):
        pass
    board.log("epoch", {}, epoch=1, step=2)
    assert "time/rollout_s" not in dashboard.read_metrics(tmp_path)[1]
    assert len(waited) == 8


def test_in_a_pipe_an_epoch_is_one_plain_line(board, capsys):
    board.log("eval", {"eval/shapes": 0.25}, epoch=1, step=4)
    with board.timed("rollout"):
        board.log("update", {"loss": -0.5, "grad_norm": 2.0}, epoch=1, step=5)
    board.log("epoch", {"reward/avg": 0.125}, epoch=1, step=5)
    evaluation, epoch = capsys.readouterr().out.splitlines()
    assert evaluation == "evaluation after 1 epoch  eval/shapes 0.25"
    assert epoch.startswith("epoch 2/3  reward/avg 0.125  loss -0.5  grad_norm 2  ")
    assert epoch.endswith("s/epoch  ETA 00:00")
    assert len(epoch) <= 120


def test_the_eta_is_the_end_of_the_last_epoch_or_of_the_one_in_which_the_hours_end(now, board, capsys):
    board.config = replace(board.config, num_epochs=10)
    for epoch, left in enumerate([{}, dict(seconds_left=150.0), dict(seconds_left=-250.0)]):
        with board.timed("rollout"):
            now[0] += 100
        board.log("epoch", {}, epoch=epoch, step=epoch, **left)
    etas = [line.split("ETA ")[1] for line in capsys.readouterr().out.splitlines()]
    assert etas == ["15:00", "03:20", "00:00"]


def test_what_takes_long_is_a_line_a_minute_where_there_is_no_terminal(now, board, capsys):
    for _ in board.bar(range(5), "epoch 1, update"):
        now[0] += 40
    assert capsys.readouterr() == ("epoch 1, update: 2/5, 02:00 left\nepoch 1, update: 4/5, 00:40 left\n", "")


def test_a_tracker_that_is_missing_is_refused(monkeypatch):
    trackers.check_logger("none")
    for logger in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, logger, None)
        with pytest.raises(ValueError, match=f"pip install {logger}"):
            trackers.check_logger(logger)


LOGS_IN = """
import os, sys
from flow_grpo.monitoring import trackers

for word in sys.argv[1:]:
    os.environ["WANDB_MODE"], os.environ["WANDB_API_KEY"] = word.split(":")
    try:
        trackers.check_logger("wandb")
        print("taken")
    except trackers.UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_wandb_that_could_not_send_a_run_is_refused(tmp_path):
    """In a process of its own: wandb remembers how the first run of a process was logged in."""
    (tmp_path / "logs_in.py").write_text(LOGS_IN)
    env = {name: value for name, value in ENV.items() if name != "NETRC"}
    env |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}  # a home without .netrc
    rows = [
        ("offline:", ["taken"]),
        ("disabled:", ["taken"]),
        ("online:", ["WANDB_MODE", "'online'", "`wandb login`"]),
        ("online:abc", ["WANDB_API_KEY", "'online'", "40"]),
        ("on-line:", ["'on-line'", "online"]),
        ("online:" + 40 * "a", ["taken"]),  # the last one, since wandb stays logged in
    ]
    done = warm.run([tmp_path / "logs_in.py", *(words for words, _ in rows)], env)
    assert done.returncode == 0, done.stderr
    for (row, expected), answer in zip(rows, done.stdout.splitlines(), strict=True):
        for word in expected:
            assert word in answer, row


def test_a_wandb_that_sends_nothing_although_it_has_a_key_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert f"wandb sync {tmp_path}" in trackers.notice("wandb", tmp_path)
    assert trackers.notice("tensorboard", tmp_path) == ""
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert trackers.notice("wandb", tmp_path) == ""
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "")
    assert trackers.notice("wandb", tmp_path) == ""


SERVICE_DIES = """
import os, runpy, signal, sys
from pathlib import Path
from flow_grpo import rewards


def service():
    stats = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/stat")}
    return [process for process, stat in stats.items() if int(stat.rsplit(")", 1)[1].split()[1]) == os.getpid()]


def brightness(images, prompts, metadata):
    # In the second epoch; wandb has the first one.
    lines = [path.read_text() for path in Path(sys.argv[-1].partition("=")[2]).glob("*/metrics.jsonl")]
    if service() and '"kind": "epoch"' in "".join(lines):
        (process,) = service()
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    return images.mean((1, 2, 3))


rewards.register("brightness", brightness)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for wandb's process in /proc")
def test_a_wandb_service_that_dies_in_a_run_is_one_sentence_and_ends_nothing(shallow, tmp_path):
    """In a process of its own, which ends as one does."""
    how = shallow | dict(num_epochs=3, eval_freq=0, logger="wandb")
    command = command_of("shapes_qwenimage", tmp_path, **how)
    (tmp_path / "dies.py").write_text(SERVICE_DIES)
    env = ENV | {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    done = warm.run([tmp_path / "dies.py", *command, f"--config.output_dir={tmp_path / 'runs'}"], env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.count("it is told nothing more of this run") == 1
    (folder,) = (tmp_path / "runs").iterdir()
    assert [line["epoch"] for line in lines_of(folder, "epoch")] == [0, 1, 2]
    assert {"README.md", "pytorch_lora_weights.safetensors", "reward.png"} <= {path.name for path in folder.iterdir()}


def test_a_report_is_drawn_again_only_after_a_multiple_of_its_own_time_and_at_the_end(tmp_path):
    board = Dashboard(tmp_path, replace(CONFIG, logger="none"), is_main=True)
    report = tmp_path / "report.html"
    for epoch, is_drawn in ((0, True), (1, False)):
        board.log("eval", {"eval/shapes": 0.25}, epoch=epoch, step=epoch)
        board.log_images(random_images(2), ["a", "b"], [1.0, 0.5], epoch=epoch, step=epoch)
        assert report.exists() == is_drawn
        report.unlink(missing_ok=True)
    board.report_due_s = time.perf_counter()
    board.log_images(random_images(2), ["a", "b"], [1.0, 0.5], epoch=2, step=2)
    assert report.exists()
    report.unlink()
    board.finish()
    assert report.exists()


@pytest.mark.skipif(not trackers.is_installed("tensorboard"), reason="tensorboard, of the extra test, is not installed")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of tensorboard's own thread
def test_a_tensorboard_whose_folder_goes_is_one_sentence_and_ends_nothing(tmp_path, capsys):
    board = Dashboard(tmp_path, replace(CONFIG, logger="tensorboard"), is_main=True)
    board.log("update", {"loss": 0.5}, epoch=0, step=1)
    board.trackers[0].writer.flush()
    shutil.rmtree(tmp_path / "tensorboard")
    for step in range(2, 60):  # its thread writes later
        board.log("update", {"loss": 0.5}, epoch=0, step=step)
    board.finish()
    assert board.trackers == []
    assert capsys.readouterr().out.count("it is told nothing more of this run") == 1
    assert [line["step"] for line in plots.read_metrics(tmp_path)] == [*range(1, 60)]


@pytest.mark.skipif(not trackers.is_installed("tensorboard"), reason="tensorboard, of the extra test, is not installed")
def test_tensorboard_holds_what_was_logged_without_an_abandoned_future(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(CONFIG, logger="tensorboard")
    board = Dashboard(tmp_path, config, is_main=True)
    for step in (1, 2, 3):
        board.log("update", {"loss": step / 8}, epoch=step - 1, step=step)
    board.log_images(random_images(2), ["a", "b"], [1.0, 0.5], epoch=3, step=3)
    board.log_groups([ONE_GROUP], epoch=3, step=3, name="branches")
    board.log_histogram("reward", torch.tensor([0.25, 0.5, torch.nan]), epoch=3, step=3)
    board.log_histogram("reward", torch.tensor([torch.nan]), epoch=3, step=4)
    sheet = Image.open(tmp_path / "images" / "eval_000003.png")
    board.finish()
    resumed = Dashboard(tmp_path, config, is_main=True)
    resumed.truncate(1)
    resumed.log("eval", {"eval/shapes": 0.25}, epoch=1, step=1)
    resumed.log("update", {"loss": 4.0}, epoch=1, step=2)
    resumed.finish()
    stored = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    first, second = stored.Scalars("train/loss")
    assert (first.step, first.value) == (1, 0.125)
    assert (second.step, second.value) == (2, 4.0)
    (evaluation,) = stored.Scalars("eval/shapes")
    assert (evaluation.step, evaluation.value) == (1, 0.25)
    assert not (tmp_path / "wandb").exists()
    first = EventAccumulator(str(min((tmp_path / "tensorboard").iterdir()))).Reload()
    text = first.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b"0.00037" in text
    assert b"tk_secret" not in text
    (shown,) = first.Images("images/eval")
    assert (shown.step, shown.width, shown.height) == (3, *sheet.size)
    (page,) = first.Images("images/branches")
    assert (page.step, page.width, page.height) == (3, *sheets.group_sheet([ONE_GROUP]).size)
    (histogram,) = first.Histograms("histograms/reward")
    values = histogram.histogram_value
    assert (histogram.step, values.num, values.min, values.max) == (3, 2, 0.25, 0.5)


@pytest.mark.skipif(not trackers.is_installed("tensorboard"), reason="tensorboard, of the extra test, is not installed")
def test_distributions_of_an_epoch_of_branches_stand_at_the_step_of_its_figures(shallow, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_folder = train("shapes_qwenimage_pr", tmp_path, **shallow | dict(num_epochs=2, logger="tensorboard"))
    ends = [line["step"] for line in lines_of(run_folder, "epoch")]
    assert len(ends) == 2
    stored = EventAccumulator(str(run_folder / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    for step in (0, 1):
        for name in ("reward", "group_std", "sigma", "ratio_std", "approx_kl", "weight"):
            assert [point.step for point in stored.Scalars(f"steps/{name}/{step}")] == ends, name
    for name in ("reward", "advantage", "log_ratio"):
        assert [point.step for point in stored.Histograms(f"histograms/{name}")] == ends, name


def test_a_sheet_shows_images_enlarged_or_shrunk_which_wandb_has_whole(tmp_path, board):
    board.log_images(random_images(6), ["a red circle"] * 6, torch.arange(6), epoch=10, step=20)
    sent = tmp_path.glob("wandb/offline-run-*/files/media/images/**/*.png")
    assert [Image.open(path).size for path in sent] == [(64, 64)] * 6
    sheet = sheets.evaluations(tmp_path)[10]
    assert Image.open(sheet).size == (14 + 4 * (128 + 14), 14 + 2 * (128 + 4 + 2 * 15 + 14))
    pictures, captions, rewards = zip(*sheets.panel_pictures(sheet))
    assert set(captions) == {"a red circle"}
    assert rewards == ("0.000", "1.000", "2.000", "3.000", "4.000", "5.000")
    assert np.array_equal([np.asarray(picture)[1::2, ::2] for picture in pictures], to_uint8(random_images(6)))
    board.log_images(random_images(1, 512), ["after"], epoch=3, step=6, name="masks")
    assert {path.name for path in (tmp_path / "images").glob("masks*")} == {"masks_000003.json", "masks_000003.png"}
    assert Image.open(tmp_path / "images" / "masks_000003.png").width == 14 + 256 + 14
    (sent,) = tmp_path.glob("wandb/offline-run-*/files/media/images/images/masks_*.jpg")
    assert Image.open(sent).size == (512, 512)


def test_videos_are_strips_in_the_sheet_and_in_wandb_and_move_in_a_file(tmp_path, board):
    videos = torch.stack([random_images(2, seed=seed) for seed in range(5)], 1)
    board.log_images(videos, ["a", "b"], torch.tensor([0.25, 0.5]), epoch=4, step=8)
    sent = tmp_path.glob("wandb/offline-run-*/files/media/images/**/*.png")
    assert [Image.open(path).size for path in sent] == [(4 * 64 + 3 * 2, 64)] * 2
    sheet = sheets.evaluations(tmp_path)[4]
    pictures, _, rewards = zip(*sheets.panel_pictures(sheet))
    assert rewards == ("0.250", "0.500")
    expected = []
    for first, *others in to_uint8(videos[:, [0, 1, 3, 4]]):
        gap = np.full((64, 2, 3), 255, np.uint8)
        expected.append(np.concatenate([first, *(part for frame in others for part in (gap, frame))], 1))
    assert np.array_equal([np.asarray(picture) for picture in pictures], expected)
    with Image.open(sheet.with_suffix(".webp")) as moving:
        assert (moving.n_frames, moving.size[0]) == (5, 14 + 2 * (128 + 14))


def test_groups_are_rows_with_best_and_worst_marked_and_an_abandoned_future_has_none(tmp_path, board):
    pictures = [Image.new("RGB", (64, 64), (shade, 0, 0)) for shade in (10, 20, 30)]
    rows = [
        sheets.GroupRow(["step 0"], pictures, [0.5, 0.25, float("nan")]),
        sheets.GroupRow(["step 1"], pictures[:2], [1.0, 1.0]),
    ]
    page = sheets.group_sheet(rows)
    assert page.size == (14 + 4 * (128 + 14), 14 + 2 * (128 + 4 + 15 + 14))
    row_tops = (14, 14 + 128 + 4 + 15 + 14)
    columns = [14 + column * (128 + 14) for column in (1, 2, 3)]
    shades = []
    for left, top in itertools.product(columns, row_tops):
        shades.append(page.getpixel((left, top))[0])
    assert shades == [10, 10, 20, 20, 30, 255]
    assert [sheets.mark(score, rows[0].scores) for score in rows[0].scores] == [" best", " worst", ""]
    assert sheets.mark(1.0, rows[1].scores) == ""

    for epoch in (0, 1, 2):
        board.log_groups(rows, epoch=epoch, step=epoch, name="branches")
        (tmp_path / "images" / f"eval_{epoch:06d}").mkdir()
    (tmp_path / "images" / "branches_of_mine.png").write_bytes(b"")
    for ending in (".png", ".json"):
        (tmp_path / "images" / f"eval_000001_of_mine{ending}").write_bytes(b"")
    board.truncate(1, kinds={"eval"})
    assert list(sheets.saved_images(tmp_path)) == [0, 1]
    assert list(sheets.group_sheets(tmp_path, "branches")) == [0]
    assert (tmp_path / "images" / "branches_of_mine.png").exists()
    assert (tmp_path / "images" / "eval_000001_of_mine.png").exists()


def test_samples_put_the_first_evaluation_beside_the_last(tmp_path, board):
    prompts = ["a red circle", "two blue squares", "a star left of a triangle"]
    for epoch in (0, 10, 20):
        board.log_images(random_images(3, seed=epoch), prompts, [0.1, 0.2, 0.3], epoch=epoch, step=epoch)
    board.truncate(10)  # resumed from there
    board.log_images(random_images(3, seed=5), prompts, [0.1, 0.2, 0.3], epoch=10, step=10)
    dashboard.plot_samples(tmp_path)
    page = Image.open(tmp_path / "samples.png")
    first_top = 14 + 15 + 14
    tops = [first_top + row * (128 + 4 + 15 + 14) for row in range(3)]
    assert page.size == (14 + 3 * (128 + 14), tops[-1] + 128 + 4 + 15 + 14)
    for (column, seed), row in itertools.product([(1, 0), (2, 5)], range(3)):
        pixel = page.getpixel((14 + column * (128 + 14), tops[row]))
        assert list(pixel) == to_uint8(random_images(3, seed=seed))[row, 0, 0].tolist()


def test_samples_pair_no_evaluations_that_were_made_in_different_ways(tmp_path, board):
    for epoch in (0, 10, 20):
        board.log_images(random_images(1, seed=epoch), ["a red circle"], [0.1], epoch=epoch, step=epoch)
    board.truncate(20, kinds={"eval"})
    assert [*sheets.evaluations(tmp_path)] == [0, 10, 20]
    dashboard.plot_samples(tmp_path, since=10)
    first = Image.open(tmp_path / "samples.png").getpixel((14 + 128 + 14, 14 + 15 + 14))
    assert list(first) == to_uint8(random_images(1, seed=10))[0, 0, 0].tolist()
    board.truncate(20)  # the way of evaluating has changed, so the line of epoch 20 goes
    assert [*sheets.evaluations(tmp_path)] == [0, 10]
    dashboard.plot_samples(tmp_path, since=20)
    assert not (tmp_path / "samples.png").exists(), "there is nothing to compare yet"
    dashboard.plot_samples(tmp_path, since=20)


def test_a_picture_that_a_disk_refuses_leaves_the_old_one(tmp_path, board):
    board.log_images(random_images(2), ["a", "b"], [1.0, 0.0], epoch=0, step=0)
    records = [{"kind": "eval", "epoch": 0, "eval/shapes": 0.5}]
    row = {"policy": "base", "weights": ""}
    split = Split("test", [Prompt("a red circle", {})])
    scores = Scores({"avg": torch.zeros(1, 1)}, {0: random_images(1)[0]}, {}, {})
    draws = {
        "samples.png": lambda file: dashboard.plot_samples(file.parent),
        "reward.png": lambda file: dashboard.plot_reward(records, board.config, file),
        "1_base.png": lambda file: evaluate.write_sheet(file.parent, 1, row, scores, split),
    }
    for name, draw in draws.items():
        draw(tmp_path / name)
        before = (tmp_path / name).read_bytes()
        with no_file_above(2000), pytest.raises(OSError, match="File too large"):
            draw(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    assert not [*tmp_path.glob("*.scratch-*")]


def test_finish_draws_curves_from_the_folder_alone_and_no_damaged_picture_ends_a_run(tmp_path, board, capsys):
    assert not dashboard.plot_reward([], board.config, tmp_path / "reward.png")
    board.log_images(random_images(1), ["a"], [1.0], epoch=0, step=0)
    (tmp_path / "images" / "eval_000000.png").write_bytes(b"damaged")
    board.log("eval", {"eval/shapes": 0.1, "eval/shapes_accuracy": 0.0, "eval/std_error": 0.1}, epoch=0, step=0)
    for epoch in range(3):
        values = {"reward/avg": epoch / 3, "reward/shapes": epoch / 3, "images": 128 * (epoch + 1)}
        board.log("epoch", values, epoch=epoch, step=epoch)
    board.finish()
    figure = Image.open(tmp_path / "reward.png").convert("RGB")
    assert figure.width == 160 * 2 * 4, "two panels: shapes and shapes_accuracy"
    colours = {colour for _, colour in figure.getcolors(1 << 20)}
    assert {(0x2F, 0x6D, 0xB5), (0xE0, 0x7B, 0x28)} <= colours
    assert f"{tmp_path / 'samples.png'} could not be drawn" in capsys.readouterr().out


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    board = Dashboard(tmp_path / "run", CONFIG, is_main=False)
    board.truncate(0)
    with board.timed("rollout"):
        board.log("epoch", {"reward/avg": 1.0}, epoch=0, step=0)
    board.log_images(random_images(1), ["a"], [1.0], epoch=0, step=0)
    assert list(board.bar([1], "images")) == [1]
    board.finish()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_full_disk_is_named_with_the_way_out(tmp_path, board):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(WriteFailed, match=rf"^{tmp_path} cannot be written: .*; free some space; .* no checkpoint yet"):
        board.log("update", {"loss": 0.0}, epoch=0, step=0)


def test_what_only_informs_ends_no_run(tmp_path, board, capsys):
    board.trackers[0].run.finish()  # as after the death of its service, each call is an error from here on
    (tmp_path / "images").write_text("a file where the folder of pictures belongs")
    board.log("update", {"loss": 0.25}, epoch=0, step=0)
    board.log_images(random_images(1), ["a"], [1.0], epoch=0, step=0)
    board.log("update", {"loss": 0.5}, epoch=0, step=1)
    assert [line["loss"] for line in dashboard.read_metrics(tmp_path)] == [0.25, 0.5]
    assert board.trackers == []
    said = capsys.readouterr().out
    assert said.count("it is told nothing more of this run") == 1
    assert "eval_000000.png could not be drawn" in said


def test_every_byte_comes_back_from_its_float_with_colours_last_and_what_is_outside_is_black_or_full():
    images = (torch.arange(256 * 3).view(1, 3, 16, 16) % 256).float() / 255
    pixels = to_uint8(images + 0.4 / 255)
    assert (pixels == (images * 255).round().permute(0, 2, 3, 1).numpy()).all()
    assert (to_uint8(images[0] - 0.4 / 255) == pixels[0]).all()
    assert to_uint8(torch.tensor([-0.5, 0.5, 1.5]).view(3, 1, 1)).tolist() == [[[0, 128, 255]]]
