"""The learned reward guesses what the rule says, has a gradient, and can be hacked."""

import build_shapes_proxy as build
import draw_shapes
import pytest
import torch
from refused import assert_refused
from safetensors.torch import load_file
from small import as_prompts, loaded
from torch.nn.functional import interpolate

from flow_grpo import rewards
from flow_grpo.base import rng
from flow_grpo.diffusers_patch.sample_with_logprob import pipeline_with_logprob
from flow_grpo.rewards import shapes, shapes_proxy
from flow_grpo.rewards.detection import detect

RULE = shapes.load("cpu")


@pytest.fixture(scope="module")
def score_pixels():
    return rewards.load_differentiable("shapes_proxy", "cpu")


@pytest.fixture(scope="module")
def rendered():
    """Metadata of 240 test prompts, and a picture of each."""
    asked = draw_shapes.balanced(draw_shapes.shapes_prompts("test"), 240)
    return asked, draw_shapes.pictures(asked, torch.Generator().manual_seed(5))


def guessed(score_pixels, images, asked):
    with torch.no_grad():
        return score_pixels(images, [""] * len(asked), asked)


def correlation(one, other):
    return torch.corrcoef(torch.stack([one, other]))[0, 1].item()


def test_the_shipped_weights_fit_into_a_megabyte():
    assert shapes_proxy.WEIGHTS.stat().st_size < 1e6


@pytest.mark.slow
def test_it_follows_the_rule_on_renders_and_on_images_of_the_tiny_model(score_pixels, rendered):
    asked, images = rendered
    # Pictures are judged by their own prompts and by others of the same kind.
    images = torch.cat([images, images])
    asked = asked + asked[1:] + asked[:1]
    assert correlation(guessed(score_pixels, images, asked), RULE(images, [], asked)["score"]) > 0.95

    asked = draw_shapes.balanced(draw_shapes.shapes_prompts("test"), 96)
    drawn = pipeline_with_logprob(
        loaded("qwenimage").pipeline,
        [prompt["prompt"] for prompt in asked],
        torch.Generator().manual_seed(6),
        window=range(0),
        noise_level=0.0,
        num_steps=6,
        height=64,
        width=64,
        guidance_scale=1.0,
    ).images
    assert correlation(guessed(score_pixels, drawn, asked), RULE(drawn, [], asked)["score"]) > 0.7


def test_the_scorer_says_what_the_function_with_a_graph_says(score_pixels, rendered):
    asked, images = rendered
    scores = rewards.load("shapes_proxy", "cpu")(images, [""] * len(asked), asked)
    assert set(scores) == {"score"}
    assert scores["score"].dtype == torch.float32
    torch.testing.assert_close(scores["score"], guessed(score_pixels, images, asked), rtol=0, atol=1e-5)
    low, high = rewards.bounds("shapes_proxy")
    assert low < scores["score"].min() < scores["score"].max() < high


def test_the_gradient_is_the_slope_of_the_score(score_pixels, rendered):
    asked, images = (part[::60] for part in rendered)
    images = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score_pixels(images, [""] * 4, asked).sum(), images)
    for image, data, direction in zip(images.detach(), asked, gradient):
        step = 0.01 * direction / direction.norm()
        after, before = guessed(score_pixels, torch.stack([image + step, image - step]), [data] * 2).double()
        assert float(after - before) == pytest.approx(float(2 * (step * direction).sum()), rel=0.05)


def test_ascending_its_gradient_hacks_it(score_pixels, rendered):
    """Pictures of other prompts become such that the network likes and the rule does not."""
    asked, images = (part[::10] for part in rendered)
    asked = asked[5:] + asked[:5]
    images = images.clone()
    assert guessed(score_pixels, images, asked).mean() < 0.3
    for _ in range(40):
        images.requires_grad_()
        (gradient,) = torch.autograd.grad(score_pixels(images, [""] * 24, asked).logit().sum(), images)
        images = (images.detach() + 0.01 * gradient.sign()).clamp(0, 1)
    assert guessed(score_pixels, images, asked).mean() > 0.55
    assert RULE(images, [], asked)["score"].mean() < 0.25


@pytest.mark.parametrize("size", [(128, 128), (32, 32), (48, 96)], ids=str)
def test_pictures_of_any_size_are_scored_as_the_square_around_them(score_pixels, rendered, size):
    asked, images = (part[::12] for part in rendered)
    resized = interpolate(images, size, mode="bilinear", antialias=True)
    scores = guessed(score_pixels, resized, asked)
    assert scores.shape == (len(asked),)
    if size[0] == size[1]:
        assert correlation(scores, guessed(score_pixels, images, asked)) > 0.5
    else:
        squares = shapes_proxy.resized(resized)
        assert squares.shape[2:] == (64, 64)
        torch.testing.assert_close(squares[:, :, :16], squares[:, :, :1].expand(-1, -1, 16, -1))
        torch.testing.assert_close(scores, guessed(score_pixels, squares, asked), rtol=0, atol=1e-5)


def test_what_a_prompt_asks_for_is_read_from_every_part_of_its_metadata():
    circle = {"class": "circle", "count": 2}
    left = {"class": "square", "count": 1, "position": ["left of", 0]}
    asked = [
        {"include": [circle]},
        {"include": [circle | {"count": 3}]},
        {"include": [circle | {"class": "cross"}]},
        {"include": [circle | {"color": "red"}]},
        {"include": [circle | {"color": "blue"}]},
        {"include": [circle], "exclude": [{"class": "circle", "count": 3}]},
        {"include": [circle], "exclude": [{"class": "circle", "count": 3, "color": "red"}]},
        {"include": [circle, left]},
        {"include": [circle, left | {"position": ["above", 0]}]},
        {"include": [left | {"position": ["left of", 1]}, circle]},
    ]
    features = [shapes_proxy.features_of(data) for data in asked]
    for number, other in enumerate(features[:-1]):
        for later in features[number + 1 : 9]:
            assert not torch.equal(other, later)
    # The order of clauses says nothing.
    assert torch.equal(features[7], features[9])


def test_prompts_that_the_rule_cannot_read_are_refused():
    prompts = as_prompts(["a circle"])
    assert_refused(
        [("no metadata", lambda: rewards.check_prompts({"shapes_proxy": 1.0}, prompts), ["shapes_proxy", "include"])]
    )


@pytest.mark.slow
def test_the_builder_gives_the_same_weights_again(tmp_path, capsys):
    sizes = ["--renders=12", "--samples=6", "--steps=2", "--held_out=12"]
    for name in ("one", "two"):
        build.main(build.parser().parse_args(["--out", str(tmp_path / name), *sizes]))
    one, two = (load_file(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == load_file(shapes_proxy.WEIGHTS).keys()
    for name, weight in one.items():
        assert torch.equal(weight, two[name])
    assert '"held out": "samples"' in capsys.readouterr().out


def test_a_mirrored_picture_is_seen_as_the_rule_sees_it():
    asked = draw_shapes.balanced(draw_shapes.shapes_prompts("test"), 12)
    pictures = build.renders(asked, 12, rng.generator(0, "mirrored"))
    for image, detections in zip(pictures.images, pictures.detections):
        mirrored, expected = build.mirrored(image, detections)
        (seen,) = detect(mirrored[None])
        assert places_of(seen) == places_of(expected)


def places_of(detections):
    """From left to right: where each object lies, and what it is."""
    return sorted((round(detection.center[0], 3), detection.kind, detection.color) for detection in detections)
