"""The reward for rendered text: what it reads, how it counts, and who cheats it; and the prompts that come with it."""

import functools
import itertools
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from refused import assert_refused
from small import ROOT

from flow_grpo.base.pixels import from_picture
from flow_grpo.base.prompt import texts_of
from flow_grpo.data.prompts import load_prompts
from flow_grpo.rewards import ocr

FOLDER = ROOT / "dataset" / "ocr"
TRAIN = load_prompts(str(FOLDER), "train")
TEST = load_prompts(str(FOLDER), "test")
SAMPLE = TEST[::87]
TARGETS = ["Bakery", "JAZZ", "river", "1987", "Exit 36", "Late Soup"]


def picture(lines, side=256, ink="black", paper="white"):
    """Lines of text [3, side, side], as large as they fit, centred."""
    image = Image.new("RGB", (side, side), paper)
    draw = ImageDraw.Draw(image)
    text = "\n".join(lines)
    left, top, right, bottom = draw.multiline_textbbox((0, 0), text, ImageFont.load_default(100))
    font = ImageFont.load_default(min(80 * side / (right - left), 80 * side / (bottom - top), side / 5))
    draw.multiline_text((side / 2, side / 2), text, ink, font, anchor="mm", align="center")
    return from_picture(image)


@pytest.fixture(scope="module")
def score():
    return ocr.load("cpu", threads=1)


def scored(score, images, targets):
    return score(images, [f'a sign that says "{target}"' for target in targets], [{}] * len(targets))


def quoted(prompt):
    return prompt.metadata["target"]


def of(prompts):
    return texts_of(prompts), [prompt.metadata for prompt in prompts]


@pytest.mark.slow
def test_clean_pictures_earn_all_alone_too_and_other_words_little(score):
    images = torch.stack([picture(quoted(prompt).split()) for prompt in SAMPLE])
    found = score(images, *of(SAMPLE))
    for number in range(2):
        row = slice(number, number + 1)
        assert torch.equal(score(images[row], *of(SAMPLE[row]))["score"], found["score"][row])
    for values in found.values():
        assert values.shape == (6,)
        assert values.dtype == torch.float32
    assert found["score"].mean() >= 0.95
    assert found["exact"].mean() >= 0.9
    others = score(images.roll(3, 0)[::3], *of(SAMPLE[::3]))
    assert others["score"].mean() <= 0.3
    assert others["exact"].sum() == 0
    scores = torch.cat([found["score"], others["score"]])
    assert ocr.RANGE[0] <= scores.min() <= scores.max() <= ocr.RANGE[1]


@pytest.mark.parametrize(
    ("side", "ink", "paper"), [pytest.param(64, "black", "white", marks=pytest.mark.slow), (512, "gold", "navy")]
)
def test_any_size_and_colour(score, side, ink, paper):
    pictures = torch.stack([picture(target.split(), side, ink, paper) for target in TARGETS])
    assert scored(score, pictures, TARGETS)["score"].mean() >= 0.95


def test_nothing_and_noise_earn_nothing_and_the_engine_is_silent(capfd):
    noise = torch.rand(2, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    images = torch.cat([torch.ones(1, 3, 256, 256), torch.zeros(1, 3, 256, 256), noise])
    assert scored(ocr.load("cpu", threads=1), images, ["Bakery"] * 4)["score"].tolist() == [0, 0, 0, 0]
    assert capfd.readouterr() == ("", "")


def test_a_dictionary_earns_nothing_for_the_words_that_are_in_it(score):
    targets = [quoted(prompt).lower() for prompt in TEST]
    words = [word for word in targets if word.isalpha()][:60]
    lines = [" ".join(words[i : i + 6]) for i in range(0, 60, 6)]
    found = scored(score, picture(lines, 512)[None], words[3:4])
    assert found["exact"].all(), "the page must be legible, or this shows nothing"
    assert found["score"].max() == 0
    assert found["surplus"].min() > 50


def test_lines_are_read_top_to_bottom_and_left_to_right(score):
    target = "one two three four five six"
    assert scored(score, picture(["one two", "three four", "five six"], 512)[None], [target])["score"] == 1
    assert scored(score, picture(["five six", "three four", "one two"], 512)[None], [target])["score"] < 0.7


def test_boxes_of_a_slanted_line_stay_a_line():
    def box(x, y, height=20):
        return [[x, y], [x + 30, y], [x + 30, y + height], [x, y + height]]

    boxes = np.array([box(80, 2), box(0, 8), box(40, 5, 24), box(90, 40), box(10, 44)], dtype=float)
    assert ocr.reading_order(boxes) == [1, 2, 0, 4, 3]


@functools.cache
def edit_distance(a, b):
    """Levenshtein's recursion."""
    if not a or not b:
        return len(a) + len(b)
    substituted = edit_distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(substituted, edit_distance(a[1:], b) + 1, edit_distance(a, b[1:]) + 1)


def test_the_window_distance_is_the_least_over_all_stretches():
    assert ocr.window_distance("thesittingroom", "kitten") == 2  # "sittin"
    texts = []
    for length in (1, 3, 5):
        texts += map("".join, itertools.product("ab", repeat=length))
    for found, wanted in itertools.product(texts, texts[::3]):
        ends = itertools.combinations(range(len(found) + 1), 2)
        stretches = ["", *(found[start:end] for start, end in ends)]
        least = min(edit_distance(stretch, wanted) for stretch in stretches)
        assert ocr.window_distance(found, wanted) == least


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("Ｆｒｅｓｈ\nbread", 1),  # 10 characters
        ("Fresh Bred", 0.9),
        ("Fresh Bread daily", 0.95),
        ("Fresh Bread\nfresh bread", 0.9),  # a tenth for each repetition
        ("Fresh Bread " * 4, 0.7),
        ("Fresh Bred daily", 0.86),  # one edit, 4 surplus characters
        ("zzz", 0),
        ("", 0),
    ],
)
def test_grades(found, wanted):
    assert ocr.grade(found, "Fresh Bread")["score"] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("prompt", "metadata", "target"),
    [
        ('a sign that says "Open Late" at night', {}, "Open Late"),
        ("a sign that says “Open Late” at night", {}, "Open Late"),
        ("ein Schild: „Offen“", {}, "Offen"),
        ('a poster with "Jazz" above "Tonight"', {}, "Jazz Tonight"),
        ('a sign that says "Open"', {"target": "Closed"}, "Closed"),
    ],
)
def test_the_target_is_quoted_or_in_the_metadata(prompt, metadata, target):
    assert ocr.target_of(prompt, metadata) == target
    ocr.check_prompts([prompt], [metadata])


@pytest.mark.parametrize(
    ("prompt", "metadata"), [("a red circle", {}), ('a 5" pipe', {}), ('a " " sign', {}), ("a sign", {"target": 7})]
)
def test_a_prompt_without_a_target_is_named(score, prompt, metadata):
    words = ["text", repr(prompt)]
    rows = [
        ("check", lambda: ocr.check_prompts(['the "first"', prompt], [{}, metadata]), words),
        ("grade", lambda: score(torch.ones(1, 3, 64, 64), [prompt], [metadata]), words),
    ]
    assert_refused(rows)


@pytest.mark.parametrize("package", ["rapidocr", "onnxruntime"])
def test_a_missing_engine_is_answered_with_the_command(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"{package}.* pip install 'flow_grpo\[ocr\]'"):
        ocr.load("cpu")


def test_prompts_quote_their_targets_and_the_splits_share_none():
    assert len(TRAIN) == 5200
    assert len(TEST) == 520
    for prompt in (*TRAIN, *TEST):
        assert ocr.target_of(prompt.text, {}) == quoted(prompt)
    keys = [ocr.normalise(quoted(prompt)) for prompt in (*TRAIN, *TEST)]
    assert len(set(keys)) == 5720
    assert min(map(len, keys)) >= 3
    for line in (FOLDER / "test_metadata.jsonl").read_text().splitlines():
        assert list(json.loads(line)) == ["prompt", "target"]
