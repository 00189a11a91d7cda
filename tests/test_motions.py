"""The motions task: videos show what their prompt asks for, the reward sees it, and is not fooled."""

from collections import defaultdict

import draw_motions
import pytest
import torch
from refused import assert_refused

from flow_grpo.data.motions import check_metadata
from flow_grpo.data.prompts import load_prompts
from flow_grpo.rewards import motions as reward
from flow_grpo.rewards.detection import Detection


def metadata_of(split):
    return [prompt.metadata for prompt in load_prompts("dataset/motions", split)]


SPLITS = {split: metadata_of(split) for split in draw_motions.SPLITS}
score = reward.load("cpu")


def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module", params=[5, 9], ids="{} frames".format)
def drawn(request):
    """Test prompts, and a video of each."""
    rows = SPLITS["test"][::2]
    return rows, draw_motions.videos(rows, request.param, generator())


def accuracy(videos, rows):
    return score(videos, [], rows)["accuracy"].mean().item()


def test_the_data_set_is_what_the_tool_writes_and_holds_out_what_it_says():
    assert draw_motions.prompts() == SPLITS
    asked = defaultdict(set)
    for split, rows in SPLITS.items():
        for row in rows:
            asked[split, row["tag"]].add(draw_motions.held_out_key(row["tag"], row["objects"]))
    for tag, held_out in draw_motions.HELD_OUT.items():
        assert asked["validation", tag] == asked["test", tag] == held_out
        assert not asked["train", tag] & held_out
    texts = [row["prompt"] for rows in SPLITS.values() for row in rows]
    assert len(texts) == len(set(texts))


def test_drawn_videos_are_right(drawn):
    rows, videos = drawn
    assert accuracy(videos, rows) == 1
    noisy = (videos + 0.03 * torch.randn(videos.shape, generator=generator())).clamp(0, 1)
    assert accuracy(noisy, rows) > 0.95


def test_training_prompts_can_be_drawn():
    rows = SPLITS["train"][::8]
    assert accuracy(draw_motions.videos(rows, 5, generator()), rows) > 0.99


def test_still_pictures_reversed_and_shuffled_videos_are_wrong(drawn):
    rows, videos = drawn
    standing = sum(not item["moves"] for row in rows for item in row["objects"]) / 2 / len(rows)
    for number in (0, videos.shape[1] // 2):
        still = videos[:, number : number + 1].expand_as(videos)
        assert accuracy(still, rows) == 0
        # What shall stand still has its half of the score.
        assert score(still, [], rows)["score"].mean().item() == pytest.approx(standing, abs=0.02)
    assert accuracy(videos.flip(1), rows) == 0
    order = torch.randperm(len(rows), generator=generator())
    assert accuracy(videos[order], rows) < 0.05


def test_one_motion_for_all_prompts_is_hardly_ever_right(drawn):
    rows, videos = drawn
    shares = [accuracy(videos[number : number + 1].expand_as(videos), rows) for number in range(0, len(rows), 12)]
    assert max(shares) < 0.1


def circle(x, y, color="red"):
    return Detection("circle", color, (x, y), 0.05)


RIGHT = {"objects": [{"class": "circle", "color": "red", "moves": ["right"]}]}
SLOWLY = {"objects": [{"class": "circle", "moves": ["right"], "speed": "slowly"}]}
FAST = {"objects": [{"class": "circle", "moves": ["right"], "speed": "fast"}]}
TURN = {"objects": [{"class": "circle", "moves": ["right", "down"]}]}
STILL = {"objects": [{"class": "circle", "moves": []}]}


@pytest.mark.parametrize(
    ("metadata", "xs", "ys", "expected"),
    [
        (RIGHT, [0.2, 0.3, 0.4], [0.5] * 3, 1.0),
        (RIGHT, [0.2, 0.23, 0.26], [0.5] * 3, 0.5),  # half of the shortest way
        (RIGHT, [0.4, 0.3, 0.2], [0.5] * 3, 0.0),
        (RIGHT, [0.2, 0.3, 0.4], [0.2, 0.4, 0.6], 0.0),  # further down than to the right
        (RIGHT, [0.2, 0.5, 0.4], [0.5] * 3, 0.5),  # a step back
        (SLOWLY, [0.2, 0.3, 0.4], [0.5] * 3, 1.0),
        (SLOWLY, [0.2, 0.4, 0.65], [0.5] * 3, 0.0),
        (FAST, [0.2, 0.4, 0.6], [0.5] * 3, 1.0),
        (FAST, [0.2, 0.3, 0.38], [0.5] * 3, 0.5),
        (TURN, [0.2, 0.3, 0.4, 0.4, 0.4], [0.3, 0.3, 0.3, 0.4, 0.5], 1.0),
        (TURN, [0.4] * 5, [0.3, 0.4, 0.5, 0.5, 0.5], 0.0),  # the legs the other way round
        (TURN, [0.2, 0.3, 0.4, 0.5, 0.6], [0.3] * 5, 0.5),  # without the turn
        (STILL, [0.5] * 3, [0.5, 0.52, 0.5], 1.0),
        (STILL, [0.2, 0.3, 0.4], [0.5] * 3, 0.0),
        # A picture, which a model of videos may draw, and a video without a frame between the halves.
        (RIGHT, [0.2], [0.5], 0.0),
        (TURN, [0.2], [0.5], 0.0),
        (STILL, [0.2], [0.5], 1.0),
        (TURN, [0.2, 0.6], [0.5] * 2, 0.0),
    ],
)
def test_credit_is_that_of_the_rule(metadata, xs, ys, expected):
    frames = [[circle(x, y)] for x, y in zip(xs, ys, strict=True)]
    found, strict = reward.grade(frames, metadata)
    assert found == pytest.approx(expected, abs=0.07)
    assert strict == (expected == 1)


def test_an_object_counts_in_frames_that_have_exactly_one():
    of_another_colour = circle(0.8, 0.8, "blue")
    frames = [[circle(0.2, 0.5)], [circle(0.3, 0.5), circle(0.6, 0.5)], [circle(0.4, 0.5), of_another_colour]]
    assert reward.grade(frames, RIGHT)[0] == pytest.approx(2 / 3)
    gone = [[circle(0.2, 0.5)], [circle(0.3, 0.5)], []]
    assert reward.grade(gone, RIGHT) == (0.0, 0.0)
    blue = [[circle(x, 0.5, "blue")] for x in (0.2, 0.3, 0.4)]
    assert reward.grade(blue, RIGHT) == (0.0, 0.0)


def test_malformed_metadata_are_refused_with_the_prompts_name():
    def start(*objects):
        return lambda: check_metadata({"prompt": "a cat", "objects": list(objects)})

    good = {"class": "circle", "moves": ["up"]}
    rows = [
        ("none", lambda: check_metadata({"prompt": "a cat"}), ["'a cat'", "`objects`"]),
        ("text", start("circle"), ["'a cat'", "no object of JSON"]),
        ("class", start(good | {"class": "cat"}), ["unknown class 'cat'"]),
        ("color", start(good | {"color": ["red"]}), ["unknown color"]),
        ("moves", start(good | {"moves": "up"}), ["`moves` of circle is 'up'"]),
        ("too many", start(good | {"moves": ["up", "left", "down"]}), ["at most 2 directions"]),
        ("direction", start(good | {"moves": ["north"]}), ["unknown direction 'north'"]),
        ("speed", start(good | {"speed": "quick"}), ["unknown speed 'quick'"]),
        ("speed of a turn", start(good | {"moves": ["up", "left"], "speed": "fast"}), ["takes one direction"]),
        ("twice", start(good, good), ["two `objects` are of one class"]),
    ]
    assert_refused(rows)
