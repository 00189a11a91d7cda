"""Videos beside the model: rewards of their frames, film strips, animations, settings, and runs from end to end."""

import base64
import io
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image, ImageSequence
from refused import assert_refused
from small import config_of, evaluated, few_prompts, lines_of, prepare, train

import flow_grpo
from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import FRAMES_PER_S, film_strips
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch import model_classes, registry
from flow_grpo.evaluation.saved_images import SavedImages
from flow_grpo.monitoring import model_card, report
from flow_grpo.monitoring.sheets import contact_sheet, fit, forget, panel_pictures, write_animation
from flow_grpo.rewards import frame_difference
from flow_grpo.scoring import pool as pool_module
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.videos import frames_of
from flow_grpo.settings import table
from flow_grpo.settings.sections import Reward

PROMPTS = [Prompt("a red circle"), Prompt("a blue square"), Prompt("a green cross")]
VIDEO = dict(model=registry.tiny_folder("wan"), frames=5)


def brightening(count=3, num_frames=9):
    """Videos [count, f, 3, 16, 16] whose frame k of video i is k / 10 + i / 100 everywhere."""
    values = torch.arange(num_frames)[None] / 10 + torch.arange(count)[:, None] / 100
    return values[..., None, None, None].expand(-1, -1, 3, 16, 16).contiguous()


def brightness(images, prompts, metadata):
    return {"score": images.mean((1, 2, 3)), "red": images[:, 0].mean((1, 2))}


def rise(videos, prompts, metadata):
    return videos[:, -1].mean((1, 2, 3)) - videos[:, 0].mean((1, 2, 3))


def dark_fails(images, prompts, metadata):
    means = images.mean((1, 2, 3))
    return torch.where(means < 0.005, math.nan, means)


@pytest.fixture
def pool_of(monkeypatch):
    """A function from a `score` to a pool in which it is the only reward, called "mine"."""
    pools = []

    def make(score, **settings):
        monkeypatch.setitem(rewards.REGISTERED, "mine", SimpleNamespace(load=lambda device: score))
        pools.append(Pool(torch.device("cpu"), {"mine": 1.0}, (), Reward(**settings)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.parametrize(
    ("num_frames", "most", "numbers"),
    [(9, 4, [0, 3, 5, 8]), (33, 4, [0, 11, 21, 32]), (5, 16, [0, 1, 2, 3, 4]), (9, 1, [4]), (9, 2, [0, 8])],
)
def test_frames_are_chosen_at_equal_distances_with_the_first_and_the_last(num_frames, most, numbers):
    videos = brightening(2, num_frames)
    frames = frames_of(videos, most)
    assert frames.of_each == len(numbers)
    assert torch.equal(frames.images, videos[:, numbers].flatten(0, 1))
    assert frames.repeat("ab") == ["a"] * len(numbers) + ["b"] * len(numbers)


@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_a_reward_of_images_scores_some_frames_and_each_ones_score_is_a_figure(batch_size, pool_of):
    scores = pool_of(brightness, frames=3, batch_size=batch_size).submit(brightening(), PROMPTS)()
    expected = torch.tensor([0.4, 0.41, 0.42])
    torch.testing.assert_close(scores["mine"], expected)
    torch.testing.assert_close(scores["mine_red"], expected)
    for place, number in {1: 0, 2: 4, 3: 8}.items():
        torch.testing.assert_close(scores[f"mine_frame_{place}"], expected - 0.4 + number / 10)
    assert set(scores) == {"mine", "mine_red", "mine_frame_1", "mine_frame_2", "mine_frame_3", "avg"}


def test_a_reward_that_takes_videos_gets_them_whole_and_an_image_as_one_frame(pool_of):
    pool = pool_of(rise, frames=3)
    torch.testing.assert_close(pool.submit(brightening(), PROMPTS)()["mine"], torch.full((3,), 0.8))
    scores = pool.submit(brightening()[:, 0], PROMPTS)()
    assert scores.keys() == {"mine", "avg"}
    torch.testing.assert_close(scores["mine"], torch.zeros(3))


def test_rewards_are_tried_on_what_the_model_draws(pool_of, capsys):
    pool = pool_of(brightness)
    for shape, tried in ((9, 3, 16, 16), "a grey video"), ((3, 16, 16), "a grey image"):
        pool.try_rewards(shape, Prompt("a red circle"))
        shown = capsys.readouterr()
        assert f"reward mine of {tried}, after " in shown.out + shown.err


def test_a_video_one_of_whose_frames_has_no_score_has_none(pool_of):
    scores = pool_of(dark_fails, frames=2, max_masked_share=0.5).submit(brightening(), PROMPTS)()
    assert scores["mine"].isnan().tolist() == [True, False, False]
    assert scores["mine_frame_2"].isnan().tolist() == [True, False, False]


def test_frames_under_way_are_counted(pool_of, monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_PENDING", 18)
    rooms = []
    pool = pool_of(brightness, batch_size=4)
    monkeypatch.setattr(pool, "_wait_for_room", lambda count, most: rooms.append((count, most)))
    pool.submit(brightening(), PROMPTS)()
    assert rooms == [(1, 2)] * 3
    pool.submit(brightening()[:, 0], PROMPTS)()
    assert rooms[3:] == [(3, 18)]


def test_a_film_strip_is_four_frames_side_by_side_and_an_image_stays_one():
    videos = brightening(2, 9)
    strips = film_strips(videos)
    # A column of white parts frames of 16.
    assert strips.shape == (2, 3, 16, 67)
    for place, number in enumerate((0, 3, 5, 8)):
        start = 17 * place
        assert torch.equal(strips[..., start : start + 16], videos[:, number])
        assert (strips[..., start + 16 : start + 17] == 1).all()
    assert film_strips(videos[:, 0]).data_ptr() == videos[:, 0].data_ptr()


def test_a_strip_is_drawn_as_large_as_two_of_its_frames_and_other_pictures_as_ever():
    for size, drawn in {
        (1664, 240): (887, 128),
        (512, 512): (256, 256),
        (512, 256): (256, 128),
        (64, 64): (128, 128),
        (64, 32): (128, 64),
    }.items():
        assert fit(Image.new("RGB", size)).size == drawn


def test_a_sheet_of_videos_has_strips_and_moves_in_a_file_beside_it_that_goes_with_it(tmp_path):
    videos = brightening(2, 5)
    sheet = contact_sheet(videos, ["a", "b"], [0.5, 0.25])
    # Strips of 67 x 16 pixels, four times as large.
    assert [panel.box[2] - panel.box[0] for panel in sheet.cells] == [268, 268]
    write_animation(videos, ["a", "b"], [0.5, 0.25], tmp_path / "images.webp")
    with Image.open(tmp_path / "images.webp") as moving:
        assert moving.n_frames == 5
        moving.seek(4)
        moving.load()
        assert moving.info["duration"] == int(1000 / FRAMES_PER_S)


@pytest.mark.parametrize("file_type", ["png", "webp"])
def test_saved_videos_are_animations_of_all_frames(file_type, tmp_path):
    saved = SavedImages(tmp_path / "out", PROMPTS, [0, 2], file_type)
    saved.write([(0, 0), (0, 1), (0, 2)], brightening(3, 5))
    assert saved.problem == ""
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"00000_0.{file_type}",
        f"00002_0.{file_type}",
    ]
    with Image.open(tmp_path / "out" / f"00002_0.{file_type}") as moving:
        assert moving.n_frames == 5
        moving.seek(3)
        red, _, _ = moving.convert("RGB").getpixel((8, 8))
        assert red == pytest.approx(0.32 * 255, abs=3)


def test_frames_and_what_does_not_go_with_them_are_refused_before_weights_are_loaded(tmp_path):
    window = "shapes_qwenimage"
    rows = []
    for name, settings, words in (
        (window, dict(frames=5), ["frames is 5", "qwenimage draws images", "set 1"]),
        (window, VIDEO | dict(frames=6), ["frames is 6", "set 5 or 9"]),
        (window, dict(reward__frames=2), ["reward.frames is 2", "config.frames is 1"]),
        (window, VIDEO | dict(eval__save_images=1, eval__image_format="jpg"), ["'jpg'", "'png' or 'webp'"]),
        (window, VIDEO | dict(train__data="somewhere"), ["train.data", "config.frames 1"]),
        ("shapes_proxy_qwenimage_refl", VIDEO, ["config.frames is set to 5", "ignore"]),
    ):
        rows.append((str(settings), lambda name=name, settings=settings: train(name, tmp_path, **settings), words))
    assert_refused(rows)
    assert list(tmp_path.iterdir()) == []


def test_the_difference_of_neighbouring_frames_is_motion_in_which_noise_counts_little(pool_of):
    square = torch.zeros(2, 5, 3, 64, 64)
    for frame in range(5):
        # One jumps by a square of 16 pixels, the other stands still.
        square[0, frame, :, 16:32, 8 * frame : 8 * frame + 16] = 1
        square[1, frame, :, 16:32, 8:24] = 1
    score = frame_difference.load(torch.device("cpu"))
    # Of 64 blocks two appear and two go with each frame.
    assert score(square, [""] * 2, [{}] * 2).tolist() == [4 / 64, 0.0]
    assert score(square[:1], [""], [{}]).tolist() == [4 / 64]
    noise = torch.rand(1, 5, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert score(noise, [""], [{}]).item() < (noise.diff(dim=1).abs().mean() / 6).item()
    flash = torch.stack([torch.zeros(3, 64, 64), torch.ones(3, 64, 64)])
    assert score(flash[None], [""], [{}]).item() == 1
    assert pool_of(score).submit(noise[:, 0], PROMPTS[:1])()["avg"].tolist() == [0]


def frames_shown(moving):
    """The number of frames that a file shows: it has those that equal the one before as a longer duration of that."""
    if moving.n_frames == 1:
        return 1
    milliseconds = 0
    for frame in ImageSequence.Iterator(moving):
        frame.load()
        milliseconds += frame.info["duration"]
    return round(milliseconds * FRAMES_PER_S / 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of videos of five frames, two of which are scored. The model spells the prompts, of shapes, in letters."""
    place = tmp_path_factory.mktemp("videos")
    data = few_prompts(place / "prompts", splits=("train", "test", "validation"))
    how = VIDEO | dict(dataset=data, text_tokens=64, num_epochs=1)
    how |= dict(reward_fn={"jpeg_compressibility": 1.0}, reward__frames=2)
    how |= dict(eval__save_images=1, eval__image_format="webp", logger="none", sample__num_steps=2, eval__num_steps=2)
    how |= dict(sample__sde_window_size=1, sample__sde_window_range=(0, 1))
    return train("shapes_qwenimage", place / "runs", **how)


def test_a_run_shows_strips_beside_animations_and_saves_videos_whole(folder, tmp_path):
    first, _ = lines_of(folder, "eval")
    assert {"eval/jpeg_compressibility_frame_1", "eval/jpeg_compressibility_frame_2"} <= first.keys()
    for epochs in (0, 1):
        sheet = folder / "images" / f"eval_{epochs:06d}.png"
        with Image.open(sheet.with_suffix(".webp")) as moving:
            assert frames_shown(moving) == 5
        (saved,) = sheet.with_suffix("").glob("*.webp")
        with Image.open(saved) as moving:
            assert (frames_shown(moving), moving.size) == (5, (64, 64))
        assert [panel.picture.size for panel in panel_pictures(sheet)] == [(262, 64)] * 4
    resumed = shutil.copytree(folder, tmp_path / "resumed")
    forget(resumed, 1, keeps_evaluation=False)
    assert not (resumed / "images" / "eval_000001.webp").exists()
    assert (resumed / "images" / "eval_000000.webp").exists()


def test_a_report_has_the_last_evaluations_videos_of_a_run_of_videos_alone(folder, tmp_path):
    report.write_page([folder], tmp_path / "page.html")
    addresses = re.findall(r'"data:image/webp;base64,([^"]+)"', (tmp_path / "page.html").read_text())
    numbers = []
    for address in addresses:
        with Image.open(io.BytesIO(base64.b64decode(address))) as picture:
            numbers.append(frames_shown(picture))
    assert sorted(numbers)[-2:] == [1, 5]
    moving = (folder / "images" / "eval_000001.webp").read_bytes()
    assert base64.b64encode(moving).decode() in addresses
    assert '<body class="strips">' in (tmp_path / "page.html").read_text(), "strips have wide columns"
    images = shutil.copytree(folder, tmp_path / "images")
    for file in (images / "images").glob("*.webp"):
        file.unlink()
    assert report.moving_sheet(report.read_run(images, "")) == ""


def test_a_run_of_videos_is_evaluated_as_it_was_and_at_other_numbers_of_frames(folder, tmp_path):
    found, (row, *others) = evaluated(tmp_path, folder, "--weights", "last", "--sizes", "64x64x5", "64x64x9", "64x64")
    assert [row["size"] for row in found["rows"]] == ["64x64x5", "64x64x9", "64x64"]
    tests = [line for line in lines_of(folder, "test") if "test/avg" in line]
    assert row["avg"] == tests[-1]["test/avg"]
    assert len({row["avg"], *(other["avg"] for other in others)}) == 3
    assert all("jpeg_compressibility_frame_1" not in row for row in (row, *others)), "an image has none"
    assert len(list((tmp_path / "out").glob("*.webp"))) == 2
    few = ("--seeds", 0, 1, "--num-prompts", 2, "--rewards", "shapes")
    _, (row,) = evaluated(tmp_path, folder, "--weights", "last", *few)
    assert row["distance"] > 0
    assert "shapes_colors_bits" not in row, "labels are of images"
    with pytest.raises(UserError, match="frames is 8"):
        evaluated(tmp_path, folder, "--weights", "last", "--sizes", "64x64x8")


def test_a_notebook_draws_scores_and_shows_videos_and_the_card_says_what_they_are(folder):
    run = flow_grpo.load_run(folder, "last", "cpu")
    drawn = run.draw(PROMPTS[:2], seeds=[0, 1])
    assert drawn.shape == (2, 2, 5, 3, 64, 64)
    scores = run.score(drawn, PROMPTS[:2])["avg"]
    assert scores.shape == (2, 2)
    # A title and two strips.
    assert run.sheet(drawn, scores).width == 14 + 3 * (262 + 14)
    card = (folder / "best" / "README.md").read_text()
    assert "pipeline_tag: text-to-video" in card
    assert "5 frames of 64 x 64 pixels" in card
    assert "| epochs, updates, videos |" in card
    assert "ComfyUI" not in card


def test_a_card_draws_frames_and_has_the_task_of_videos(tmp_path):
    config = config_of("pickscore_wan", tmp_path)
    family = model_classes.of_folder(config.model)
    call = model_card.call_of(family, table.typed(config), edits=False)
    assert "num_frames=9" in call
    assert call.startswith("frames = pipeline(")
    assert call.endswith(").frames[0]")
    assert model_card.task_of(family, edits=False) == "text-to-video"
    assert model_card.task_of(None, edits=False) == "text-to-image"


@pytest.mark.parametrize("name", ["pickscore_wan", "pickscore_wan_pr", "pickscore_wan_nft", "pickscore_wan_dpo"])
def test_smoke_runs_of_published_videos_need_nothing_that_is_not_shipped(name, tmp_path):
    how = dict(num_epochs=1, eval_freq=0)
    if name.endswith("dpo"):
        how |= dict(preferences__min_margin=0.0, preferences__path=str(tmp_path / "pairs"))
        prepare(name, tmp_path / "pairs", validation_share=0.0, max_rows=8, **how)
    folder = train(name, tmp_path / "runs", **how)
    assert all(line["grad_norm"] > 0 for line in lines_of(folder, "update"))
    assert all(line.get("parity/log_prob_abs_diff_max", 0) == 0 for line in lines_of(folder, "update"))
