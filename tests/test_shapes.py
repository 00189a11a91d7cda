"""The shapes task: pictures show what their prompt asks for, the reward sees it, and is not fooled."""

import io
import itertools
from argparse import Namespace

import draw_edits
import draw_motions
import draw_shapes
import numpy as np
import pytest
import torch
from draw_shapes import TAGS
from PIL import Image
from refused import assert_refused
from scipy import ndimage
from torch.nn.functional import avg_pool2d, interpolate, pad

from flow_grpo.base.pixels import from_picture, to_pictures
from flow_grpo.data import shapes
from flow_grpo.data.prompts import load_prompts
from flow_grpo.data.shapes import BACKGROUND, COLORS, RELATIONS, SHAPES
from flow_grpo.rewards import shapes as reward
from flow_grpo.rewards.detection import Detection, detect
from flow_grpo.rewards.shapes import grade

PER_TAG = 100


def metadata_of(split):
    return [prompt.metadata for prompt in load_prompts("dataset/shapes", split)]


TRAIN = metadata_of("train")
VALIDATION = metadata_of("validation")
TEST = metadata_of("test")
PROMPTS = TRAIN + VALIDATION + TEST
score = reward.load("cpu")


def of_tag(prompts, tag):
    return [p for p in prompts if p["tag"] == tag]


def draw(prompts, resolution=64):
    table = draw_shapes.prompt_table(prompts)
    layout = draw_shapes.sample_layouts(table, torch.arange(len(prompts)), torch.Generator().manual_seed(0))
    return draw_shapes.render(layout, resolution)


@pytest.fixture(scope="module")
def pictures():
    """PER_TAG prompts of every tag, and a picture of each: 600 pictures, looked at in five conditions."""
    asked = []
    for tag in TAGS:
        asked += (of_tag(PROMPTS, tag) * PER_TAG)[: 7 * PER_TAG : 7]
    return asked, draw(asked)


def noise(images, sigma):
    return (images + sigma * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)


def blur(images, sigma):
    return torch.from_numpy(ndimage.gaussian_filter(images.numpy(), (0, 0, sigma, sigma)))


def jpeg(images, quality):
    seen = []
    for picture in to_pictures(images):
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality)
        seen.append(from_picture(Image.open(file)))
    return torch.stack(seen)


CONDITIONS = {
    "clean": lambda images: images,
    "noise": lambda images: noise(images, 0.05),
    "blur": lambda images: blur(images, 0.7),
    "jpeg": lambda images: jpeg(images, 50),
    "all, mildly": lambda images: jpeg(noise(blur(images, 0.4), 0.025), 70),
}


def contradicted(metadata):
    """A prompt that a picture of this one cannot satisfy."""
    other = {**metadata, "include": [dict(entry) for entry in metadata["include"]]}
    first = other["include"][0]
    last = other["include"][-1]
    if metadata["tag"] in ("single_object", "two_object"):
        first["class"] = next(kind for kind in SHAPES if kind not in (first["class"], last["class"]))
    elif metadata["tag"] == "counting":
        first["count"] += 1 if first["count"] < 4 else -1
        other["exclude"] = [{"class": first["class"], "count": first["count"] + 1}]
    elif metadata["tag"] == "colors":
        first["color"] = next(color for color in COLORS if color != first["color"])
    elif metadata["tag"] == "position":
        opposite = dict(zip(RELATIONS, ("right of", "left of", "below", "above")))
        last["position"] = [opposite[last["position"][0]], 0]
    else:
        first["color"], last["color"] = last["color"], first["color"]
    return other


def accuracy_by_tag(seen, prompts):
    """Share of pictures that satisfy their prompts, for each tag."""
    graded = [grade(detections, prompt)[1] for detections, prompt in zip(seen, prompts, strict=True)]
    return torch.tensor(graded).view(len(TAGS), PER_TAG).mean(1)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_pictures_satisfy_their_prompt_and_none_that_contradicts_it(pictures, condition):
    asked, images = pictures
    seen = detect(CONDITIONS[condition](images))
    right = accuracy_by_tag(seen, asked)
    fooled = accuracy_by_tag(seen, map(contradicted, asked))
    assert right.min() >= 0.99, dict(zip(TAGS, right.tolist()))
    assert fooled.max() <= 0.01, "four of which one is missed are three"


def test_resolution_does_not_matter_and_smaller_pictures_are_still_read():
    asked = PROMPTS[::40]
    for resolution in (96, 128, 250):
        assert score(draw(asked, resolution).bfloat16(), None, asked)["accuracy"].mean() >= 0.99
    asked = of_tag(PROMPTS, "colors")[:20]
    assert score(interpolate(draw(asked), (48, 48), mode="area"), None, asked)["accuracy"].mean() >= 0.9


# What a policy may find: each picture is made by hand, at 4 samples a pixel and side.

AXIS = (torch.arange(256) + 0.5) / 256
X, Y = torch.meshgrid(AXIS, AXIS, indexing="xy")
RGB = {name: torch.tensor(color).view(3, 1, 1) for name, color in COLORS.items()}
BLANK = torch.tensor(BACKGROUND).view(3, 1, 1).expand(3, 64, 64)


def region(kind, x=0.5, y=0.5, radius=0.2):
    return shapes.signed_distances((X - x) / radius, (Y - y) / radius)[SHAPES.index(kind)] < 0


def paint(mask, color, canvas=BLANK):
    return canvas.lerp(color, avg_pool2d(mask.float()[None], 4))


def superellipse(power):
    return ((X - 0.5).abs() ** power + (Y - 0.5).abs() ** power) < 0.2**power


CIRCLE = region("circle")
RED = RGB["red"]
LONGER = shapes.signed_distances((X - 0.5) / 0.2, (Y - 0.5) / 0.28) < 0
SPOILT = {
    "speck": paint(region("circle", radius=0.05), RED),
    "merged circles": paint(region("circle", 0.4) | region("circle", 0.6), RED),
    "nearly one circle": paint(region("circle", 0.45, radius=0.15) | region("circle", 0.55, radius=0.15), RED),
    "touching, two colours": paint(region("circle", 0.7), RED, paint(region("square", 0.45), RGB["blue"])),
    "half circle": paint(CIRCLE & (X < 0.5), RED),
    "half triangle": paint(region("triangle") & (X < 0.5), RED),
    "cut by the frame": paint(region("circle", 0.17), RED),
    "ring": paint(CIRCLE & ~region("circle", radius=0.1), RED),
    "ellipse": paint(LONGER[SHAPES.index("circle")], RED),
    "rectangle": paint(LONGER[SHAPES.index("square")], RED),
    "diamond": paint(superellipse(1), RED),
    "between circle and square": paint(superellipse(3.2), RED),
    "triangle upside down": paint(region("triangle").flip(0), RED),
    "thin cross": paint(region("cross") & (((X - 0.5).abs() < 0.03) | ((Y - 0.5).abs() < 0.03)), RED),
    "two colours": paint(CIRCLE & (X < 0.5), RGB["purple"], paint(CIRCLE, RED)),
    "a fifth of another colour": paint(CIRCLE & (X > 0.6), RGB["purple"], paint(CIRCLE, RED)),
    "squares that touch at a corner": paint(
        region("square", *[0.5 - 0.2 * 0.5**0.5] * 2), RED, paint(region("square", *[0.5 + 0.2 * 0.5**0.5] * 2), RED)
    ),
    "rim of another colour": paint(CIRCLE & ~region("circle", radius=0.16), RGB["blue"], paint(CIRCLE, RED)),
    "faint": paint(CIRCLE, BLANK[:, :1, :1].lerp(RED, 0.65)),
    "dark": paint(CIRCLE, RED / 2),
    "grey": paint(CIRCLE, torch.full((3, 1, 1), 0.5)),
    "tinted background": paint(CIRCLE, RED, BLANK.lerp(RED, 0.3)),
    "strongly tinted background": paint(CIRCLE, RGB["blue"], BLANK.lerp(RED, 0.7)),
    "red all over": RED.expand(3, 64, 64),
    "noise all over": torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0)),
    "nothing": BLANK,
    "no numbers": torch.full((3, 64, 64), float("nan")),
}
for one, other in itertools.combinations(RGB, 2):
    SPOILT[f"blend of {one} and {other}"] = paint(CIRCLE, (RGB[one] + RGB[other]) / 2)


def test_spoilt_shapes_are_unknown_objects_alone_and_among_others_and_a_speck_is_nothing():
    detections = detect(torch.stack(list(SPOILT.values())))
    for name, detected in zip(SPOILT, detections, strict=True):
        assert [detection.kind for detection in detected if detection.kind] == [], name
    assert [detect(image[None])[0] for image in SPOILT.values()] == detections
    ((half,),) = detect(SPOILT["half circle"][None])
    assert half.color is None
    assert half.area == pytest.approx(torch.pi * 0.2**2 / 2, rel=0.1)
    assert detect(paint(region("circle", radius=0.02), RED)[None]) == [[]]


def test_a_detection_is_where_the_object_is_and_slightly_wrong_shapes_still_count():
    ((found,),) = detect(paint(region("circle", 0.4, 0.7), RED)[None])
    assert found.center == pytest.approx((0.4, 0.7), abs=5e-3)
    for wobbly in (superellipse(2.2), superellipse(1.8)):
        assert [d.kind for d in detect(paint(wobbly, RED)[None])[0]] == ["circle"]
    off = paint(CIRCLE, RED + 0.07 * torch.tensor([-1, 1, 1]).view(3, 1, 1), BLANK - 0.05)
    assert [(d.kind, d.color) for d in detect(off[None])[0]] == [("circle", "red")]


@pytest.mark.parametrize("sides", [(16, 16, 0, 0), (0, 0, 16, 16)], ids=["wide", "high"])
def test_a_picture_that_is_no_square_is_looked_at_undistorted(sides):
    """A square picture with background at two sides, which then is 1.5 times as wide or as high."""
    square = torch.stack([paint(region(kind, 0.4, 0.6), RED) for kind in SHAPES])
    planes = [pad(plane, sides, value=value) for plane, value in zip(square.unbind(1), BACKGROUND)]
    longer = torch.stack(planes, 1)
    for (ours,), (theirs,) in zip(detect(longer), detect(square), strict=True):
        assert (ours.kind, ours.color) == (theirs.kind, theirs.color)
        assert ours.area == pytest.approx(theirs.area * (2 / 3) ** 2, rel=0.25)
        from_middle = np.array(theirs.center) - 0.5
        np.testing.assert_allclose(ours.center, 0.5 + from_middle * 2 / 3, atol=0.02)


@pytest.mark.parametrize(("top", "kind"), [(0, None), (16, "square"), (32, None)])
def test_an_object_that_touches_an_edge_of_a_picture_that_is_no_square_is_not_whole(top, kind):
    picture = BLANK[:, :48].clone()
    picture[:, top : top + 16, 24:40] = RED
    assert [d.kind for d in detect(picture[None])[0]] == [kind]


def seen(kind, color="red", x=0.5, y=0.5):
    return Detection(kind, color, (x, y), 0.1)


CIRCLE_LEFT = [seen("square", "blue", 0.75), seen("circle", "red", 0.25)]
TWO = {"include": [{"class": "circle", "count": 2}], "exclude": [{"class": "circle", "count": 3}]}
THREE_RED = {"include": [{"class": "circle", "count": 3, "color": "red"}]}
PLACED = {
    "include": [
        {"class": "square", "count": 1, "color": "blue"},
        {"class": "circle", "count": 1, "color": "red", "position": ["left of", 0]},
    ]
}


@pytest.mark.parametrize(
    ("detections", "metadata", "dense", "strict"),
    [
        ([], TWO, 0, 0),
        ([seen("circle")], TWO, (1 / 2 + 1) / 2, 0),
        ([seen("circle")] * 2, TWO, 1, 1),
        ([seen("circle")] * 2 + [seen(None, None)] * 2, TWO, 1, 1),
        ([seen("circle")] * 3, TWO, (1 / 2 + 0) / 2, 0),
        ([seen("circle")] * 5, TWO, 0, 0),  # the count's credit stops at 0: the published server goes on to -1/2
        ([seen("circle")] * 2 + [seen("circle", "blue")], THREE_RED, (1 + 0) / 2, 0),
        ([seen("circle")] * 2, THREE_RED, (2 / 3 + 0) / 2, 0),
        ([seen("circle")] * 3, THREE_RED, 1, 1),
        (CIRCLE_LEFT, PLACED, 1, 1),
        ([seen("square", "blue", 0.25), seen("circle", "red", 0.75)], PLACED, 4 / 5, 0),  # right of
        ([seen("square", "blue", 0.52), seen("circle", "red", 0.48)], PLACED, 4 / 5, 0),  # too near to say
        ([seen("square", "blue", 0.55, 0.2), seen("circle", "red", 0.45, 0.8)], PLACED, 4 / 5, 0),  # rather below
        ([seen("square", "blue", 0.7, 0.2), seen("circle", "red", 0.3, 0.6)], PLACED, 1, 1),  # left, and below
        ([seen("square", "red", 0.75), seen("circle", "blue", 0.25)], PLACED, 2 / 5, 0),  # colours swapped
        ([*CIRCLE_LEFT, seen("circle", "red", 0.9)], PLACED, 2 / 5, 0),  # circles on both sides
        ([seen("circle", "red", 0.25)], PLACED, 2 / 5, 0),
        ([seen(None, None)], PLACED, 0, 0),
    ],
)
def test_grades_by_hand(detections, metadata, dense, strict):
    assert grade(detections, metadata) == (pytest.approx(dense), strict)


def test_relations_point_the_right_way():
    """Which no picture shows: what draws them reads the same table."""
    places = {"left of": (0.2, 0.5), "right of": (0.8, 0.5), "above": (0.5, 0.2), "below": (0.5, 0.8)}
    for (relation, (x, y)), name in itertools.product(places.items(), RELATIONS):
        include = [{"class": "square", "count": 1}, {"class": "circle", "count": 1, "position": [name, 0]}]
        strict = grade([seen("square"), seen("circle", "red", x, y)], {"include": include})[1]
        assert strict == (name == relation)


def circle(**clause):
    return {"include": [{"class": "circle", "count": 1} | clause]}


MALFORMED = [  # metadata, and words of the sentence
    ({"include": []}, "include"),
    ({"include": ["circle"]}, "'circle'"),
    ({"include": circle()["include"] * 2}, "twice"),
    (circle() | {"exclude": 3}, "3"),
    (circle() | {"exclude": [{"class": "dog", "count": 1}]}, "'dog'"),
    (circle(count=True), "count of circle", "True"),
    (circle(count=0), "count of circle", "0"),
    (circle(color=["red"]), "color", "['red']"),
    (circle(position=["above"]), "position", "index"),
    (circle(position=["beside", 0]), "relation", "'beside'"),
    (circle(position=[["above"], 0]), "relation"),
    (circle(position=["above", [0]]), "include[[0]]"),
    (circle(position=["above", 7]), "include[7]"),
    ({"include": [{"class": ["circle"], "count": 1}]}, "class", "['circle']"),
]


def test_what_the_reward_and_the_renderer_cannot_read_is_refused_with_the_prompt():
    def scored(metadata):
        return lambda: score(BLANK[None], None, [metadata | {"prompt": "a strange prompt"}])

    def drawn(prompt, include):
        return lambda: draw_shapes.prompt_table([{"prompt": prompt, "include": include}])

    square_first = [*circle(position=["above", 1])["include"], {"class": "square", "count": 1}]
    rows = [
        ("no include", lambda: reward.check_prompts(["a circle"], [{}]), ["'a circle'", "include"]),
        ("too many", drawn("five circles", circle(count=5)["include"]), ["'five circles'", "5"], ValueError),
        ("odd", drawn("odd", square_first), ["'odd'", "include[1]"], ValueError),
    ]
    for metadata, *words in MALFORMED:
        rows.append((str(metadata), scored(metadata), ["a strange prompt", *words]))
    assert_refused(rows)


def test_the_tools_that_draw_data_refuse_a_file_in_the_place_of_their_folder_and_no_picture(tmp_path):
    file = tmp_path / "file"
    file.touch()
    words = [f"FOLDER: {file} is no folder"]
    assert_refused(
        [
            ("shapes", lambda: draw_shapes.write(file, 1, 0), words),
            ("edits", lambda: draw_edits.write(file), words),
            ("motions", lambda: draw_motions.write(file), words),
            ("none", lambda: draw_shapes.check_flags(Namespace(number=0)), ["--number is 0", "1 or more"]),
        ]
    )


def combination(prompt):
    """Return what a prompt asks for, however worded: "a left of b" is "b right of a". Colours count in tags of
    colours."""
    colored = "color" in prompt["tag"]
    objects = [(entry["class"], colored and entry["color"], entry["count"]) for entry in prompt["include"]]
    if prompt["tag"] != "position":
        return tuple(sorted(objects))
    relation, _ = prompt["include"][1]["position"]
    opposite = {"right of": "left of", "below": "above"}
    if relation in opposite:
        return (opposite[relation], *objects)
    return (relation, *objects[::-1])


def test_no_two_splits_share_a_prompt_and_what_is_held_out_shares_no_combination_with_training():
    assert len({prompt["prompt"] for prompt in PROMPTS}) == len(PROMPTS) == 2869 + 160 + 272
    for tag in TAGS[1:]:  # a single object is held out by an ending, and has no validation prompt
        trained = set(map(combination, of_tag(TRAIN, tag)))
        for split in (TEST, VALIDATION):
            asked = set(map(combination, of_tag(split, tag)))
            assert len(asked) >= 2
            assert not asked & trained


def test_labels_are_what_a_prompt_leaves_open_of_its_first_object():
    asked = [dict(include=[{"class": "circle", "count": 1}]), dict(include=[{"class": "cross", "count": 1}])]
    asked.append(dict(include=[{"class": "circle", "count": 1, "color": "cyan"}]))
    rows = torch.arange(64)
    disc = (rows[:, None] - 12).square() + (rows - 52).square() < 100  # 20 of 64 pixels wide, at the top right
    found = reward.labels(torch.where(disc, RGB["cyan"], BLANK).expand(3, -1, -1, -1), asked)
    width = int(20 * (100 * np.pi / 64**2) ** 0.5)
    assert found.keys() == {"color", "position", "size"}
    assert found["color"].tolist() == [list(COLORS).index("cyan"), -1, -1]
    assert found["position"].tolist() == [2, -1, 2]
    assert found["size"].tolist() == [width, -1, width]
