"""Editing: the task and its reward, sources on their way to rewards and sheets, and pairs with sources."""

import json
import shutil
from functools import partial

import draw_edits
import pytest
import torch
from PIL import Image
from refused import assert_refused
from small import MODELS, config_of, lines_of, loaded, prepare, random_images, train

from config.variants import smoke
from flow_grpo.base import rng
from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import from_picture, to_pictures
from flow_grpo.base.prompt import Prompt, captions_of
from flow_grpo.data import preferences
from flow_grpo.data.prompts import load_file, load_prompts
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.monitoring import sheets
from flow_grpo.rewards import detection
from flow_grpo.rewards import edits as reward
from flow_grpo.settings.table import default_config

NFT = "editreward_qwenimage_edit_nft"
DPO = "edits_qwenimage_edit_dpo"
CPU = torch.device("cpu")
PROMPTS = {split: load_prompts("dataset/edits", split) for split in ("train", "validation", "test")}


def scored(images, metadata):
    return reward.load(CPU)(images, [data["prompt"] for data in metadata], metadata)["score"]


def test_the_reward_wants_the_edit_of_this_source_by_this_instruction():
    generator = rng.generator(0, "edits")
    layout = draw_edits.sample_sources(300, generator)
    edits = draw_edits.sample_edits(layout, generator)
    metadata = draw_edits.metadata_of(layout, edits, [""] * 300)
    sources, edited = (draw_edits.render(each) for each in (layout, draw_edits.apply(layout, edits)))
    assert scored(edited, metadata).tolist() == [1.0] * 300
    assert scored(sources, metadata).tolist() == [0.0] * 300, "nothing was edited"
    assert scored(edited.roll(1, 0), metadata).mean() < 0.1, "the edit of another source"
    others = draw_edits.apply(layout, draw_edits.sample_edits(layout, generator))
    assert scored(draw_edits.render(others), metadata).mean() < 0.2, "another edit, but for chance"
    emptied = layout._replace(present=layout.present & False)
    assert scored(draw_edits.render(emptied), metadata).max() == 0, "what must stay is gone"


@pytest.mark.parametrize(
    ("center", "more", "score", "accuracy"),
    [
        ((0.65, 0.5), 0, 1, 1),
        ((0.65, 0.58), 0, 1, 1),
        ((0.65, 0.65), 0, 0, 0),  # aside of its line
        ((0.45, 0.5), 0, 0, 0),  # hardly
        ((0.15, 0.5), 0, 0, 0),  # the other way
        ((0.65, 0.5), 1, 0.5, 0),  # beside an object that was not there
    ],
)
def test_a_move_is_far_enough_along_its_line_and_adds_nothing(center, more, score, accuracy):
    circle = {"class": "circle", "color": "red", "center": [0.4, 0.5], "radius": 0.1}
    cross = {"class": "cross", "color": "blue", "center": [0.2, 0.8], "radius": 0.1}
    moved = detection.Detection("circle", "red", center, reward.AREAS["circle"] * 0.01)
    stays = detection.Detection("cross", "blue", (0.2, 0.8), reward.AREAS["cross"] * 0.01)
    extra = [detection.Detection(None, None, (0.8, 0.2), 0.02)] * more
    metadata = {"objects": [circle, cross], "edit": {"object": 0, "action": "move", "to": "to the right"}}
    assert reward.grade([moved, stays, *extra], metadata) == (score, accuracy)


@pytest.mark.parametrize(
    ("direction", "center"),
    [("to the left", (0.25, 0.5)), ("to the right", (0.75, 0.5)), ("up", (0.5, 0.25)), ("down", (0.5, 0.75))],
)
def test_the_origin_of_directions_is_the_pictures_upper_left_corner(direction, center):
    circle = {"class": "circle", "color": "red", "center": [0.5, 0.5], "radius": 0.1}
    moved = detection.Detection("circle", "red", center, reward.AREAS["circle"] * 0.01)
    edit = {"object": 0, "action": "move", "to": direction}
    assert reward.grade([moved], {"objects": [circle], "edit": edit}) == (1, 1)


@pytest.mark.parametrize("turned", [False, True], ids=["2:1", "1:2"])
def test_objects_of_a_picture_that_is_no_square_stand_where_the_metadata_says(turned):
    """Centres and radii are in sides of the square around the picture, which is twice as long as high, or turned."""
    centers = torch.tensor([[[0.25, 0.5], [0.7, 0.5]]])
    layout = draw_edits.Layout(
        kind=torch.tensor([[0, 1]]),
        color=torch.tensor([[0, 2]]),
        center=centers.flip(2) if turned else centers,
        radius=torch.tensor([[0.15, 0.18]]),
        present=torch.tensor([[True, True]]),
    )
    square = draw_edits.render(layout)
    picture = square[..., 16:48] if turned else square[..., 16:48, :]
    edits = draw_edits.Edits(*torch.zeros(4, 1, dtype=torch.int64))
    (metadata,) = draw_edits.metadata_of(layout, edits, [""])
    (seen,) = detection.detect(picture)
    assert [reward._is_there(seen, entry) for entry in metadata["objects"]] == [True, True]


def test_sources_are_what_the_metadata_says_and_no_split_shares_one():
    trained = {prompt.sources[0] for prompt in PROMPTS["train"]}
    assert not trained & {prompt.sources[0] for prompt in PROMPTS["validation"] + PROMPTS["test"]}
    for split, prompts in PROMPTS.items():
        assert len(prompts) == draw_edits.SPLITS[split][1]
        pictures = torch.stack([from_picture(*prompt.pictures()) for prompt in prompts])
        objects = detection.detect(pictures)
        for prompt, seen in zip(prompts, objects):
            for entry in prompt.metadata["objects"]:
                assert reward._is_there(seen, entry)
            assert len(seen) == len(prompt.metadata["objects"])
    assert PROMPTS["test"][0].digest != Prompt(PROMPTS["test"][0].text).digest
    assert PROMPTS["test"][0].digest == Prompt(PROMPTS["test"][0].text, {}, PROMPTS["test"][0].sources).digest


def test_what_no_run_could_use_is_refused(tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "square.png")
    Image.new("RGB", (64, 32)).save(tmp_path / "wide.png")
    (tmp_path / "text.png").write_text("no picture")

    def loads(*sources):
        lines = [json.dumps({"prompt": "a", "sources": names}) for names in sources]
        path = tmp_path / "test_metadata.jsonl"
        path.write_text("\n".join(lines))
        return load_file(path)

    def checks(model, *sources):
        MODELS[model].without_weights(registry.tiny_folder(model)).check_sources(loads(*sources))

    good = PROMPTS["test"][0].metadata
    bad_edits = []
    for changed in ({"object": 9}, {"object": 0.0}, {"object": False}, {"action": "grow"}, {"action": ["grow"]}):
        bad_edits.append(dict(edit=good["edit"] | changed))
    bad_edits += [dict(objects=3), dict(edit=None)]
    rows = [
        ("missing", lambda: loads(["none.png"]), ["none.png"]),
        ("of Windows", lambda: loads(["folder\\square.png"]), ["'folder\\\\square.png'", "write /"]),
        ("no picture", lambda: loads(["text.png"]), ["text.png"]),
        ("no list", lambda: loads("square.png"), ["line 1", "sources"]),
        ("other shapes", lambda: checks("qwenimage_edit", ["square.png"], ["wide.png"]), ["has 64x64", "has 96x32"]),
        ("other numbers", lambda: checks("qwenimage_edit", ["square.png"], ["square.png"] * 2), ["number"]),
        ("none", lambda: checks("qwenimage_edit", []), ["1 to 3"]),
        ("too many", lambda: checks("qwenimage_edit", ["square.png"] * 4), ["1 to 3", "4"]),
        ("none of one", lambda: checks("qwenimage_edit_first", []), ["one source image", "has 0"]),
        (
            "two for one",
            lambda: checks("qwenimage_edit_first", ["square.png"] * 2),
            ["one source image", "has 2"],
        ),
        ("not taken", lambda: checks("qwenimage", ["square.png"]), ["no source"]),
        ("more than one", lambda: checks("flux_kontext", ["square.png"] * 2), ["0 to 1", "2"]),
        ("some without", lambda: checks("flux_kontext", ["square.png"], []), ["number", "has 64x64", "has none"]),
        ("other sides", lambda: checks("flux_kontext", ["square.png"], ["wide.png"]), ["has 64x64", "has 80x32"]),
    ]
    for bad in bad_edits:
        rows.append((str(bad), partial(reward.check_prompts, ["a"], [good | bad]), [good["prompt"]]))
    assert_refused(rows)


@pytest.mark.parametrize(
    "name",
    [
        "editreward_qwenimage_edit",
        pytest.param("edits_qwenimage_edit_pr", marks=pytest.mark.slow),
        pytest.param(NFT, marks=pytest.mark.slow),
        pytest.param(DPO, marks=pytest.mark.slow),
        "editreward_qwenimage_edit_first",
        pytest.param("editreward_qwenimage_edit_first_pr", marks=pytest.mark.slow),
        pytest.param("editreward_qwenimage_edit_first_nft", marks=pytest.mark.slow),
        "editreward_flux_kontext",
        pytest.param("editreward_flux_kontext_pr", marks=pytest.mark.slow),
        pytest.param("editreward_flux_kontext_nft", marks=pytest.mark.slow),
    ],
)
def test_every_algorithm_trains_on_sources_and_shows_them(name, tmp_path):
    """With what is shipped, in place of EditReward and its model."""
    how = dict(train__ema_interval=1, eval_freq=1, num_epochs=1)
    if name == DPO:
        pairs = prepare(name, tmp_path / "pairs", max_rows=8, validation_share=0.0)
        how |= dict(preferences__path=str(pairs), sample__num_prompts_per_epoch=2, train__updates_per_epoch=1)
    folder = train(name, tmp_path / "runs", **how)
    updates = lines_of(folder, "update")
    assert updates[0].get("parity/log_prob_abs_diff_max", 0.0) == 0
    (sheet, *_) = sheets.evaluations(folder).values()
    shown = {caption: picture for picture, caption, _ in sheets.panel_pictures(sheet)}
    captions = dict(zip(captions_of(PROMPTS["validation"]), PROMPTS["validation"], strict=True))
    assert len(captions) > len({prompt.text for prompt in captions.values()})
    caption, picture = next((caption, picture) for caption, picture in shown.items() if caption in captions)
    prompt = captions[caption]
    assert picture.width == 2 * picture.height
    source = picture.crop((0, 0, picture.height, picture.height)).resize((64, 64))
    (expected,) = prompt.pictures()
    assert (from_picture(source) - from_picture(expected)).abs().mean() < 0.05
    is_scored_by_the_rule = "edits" in config_of(name).reward_fn
    assert ("test/edits_accuracy" in lines_of(folder, "test")[0]) == is_scored_by_the_rule


def test_smoke_gives_prompts_with_sources_or_motions_to_the_models_that_take_them_and_to_no_others(tmp_path):
    for name, family in MODELS.items():
        shipped = registry.tiny_folder(name)
        # A model of one's own is in a folder that nobody knows by its name.
        own = shutil.copytree(shipped, tmp_path / name)
        for folder in (shipped, str(own)):
            config = default_config()
            config.model = folder
            config.dataset = "dataset/not_here"
            smoke(config)
            prompts = load_prompts(config.dataset, "train")
            model = family.without_weights(folder)
            model.check_sources(prompts)
            model.check_prompts(prompts, config.text_tokens)
            assert bool(prompts[0].sources) == bool(family.MOST_SOURCES)
            assert (config.dataset == "dataset/motions") == bool(family.FRAMES_PER_LATENT)


def test_pairs_of_image_files_have_the_sources_that_their_lines_name(tmp_path):
    images = tmp_path / "images"
    names = [f"{number}.png" for number in range(12)]
    images.mkdir()
    for name, picture in zip(names, to_pictures(random_images(12))):
        picture.save(images / name)
    rows = []
    for winner, loser in zip(names[::2], names[1::2], strict=True):
        rows.append(dict(prompt="remove the circle", winner=winner, loser=loser, sources=[loser]))
    (images / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    how = dict(source=str(images), validation_share=0.0)
    folder = prepare(DPO, tmp_path / "pairs", **how)
    model = loaded("qwenimage_edit")
    size = Size(64, 64)
    sources = preferences.source_shapes(str(folder))
    assert sources == {"source_1": (16, 8, 8)}
    shapes = model.row_shapes(size, config_of(DPO).text_tokens) | sources
    files = preferences.open_pairs(str(folder), shapes, registry.tiny_folder("qwenimage_edit"), size)
    pairs = files["train"].read(list(range(6)), list(range(6)), CPU)
    latents = model.features(pairs.losers, size)
    torch.testing.assert_close(pairs.condition.source_1, latents, rtol=0, atol=1e-4)
    (images / "pairs.jsonl").write_text(json.dumps(rows[0] | dict(sources=["none.png"])) + "\n")
    with pytest.raises(UserError, match=r"none\.png"):
        prepare(DPO, tmp_path / "other", **how)
