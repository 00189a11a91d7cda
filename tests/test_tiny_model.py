"""The tiny Qwen-Image is a Qwen-Image, and the shipped one is good enough to train and bad enough to be worth it."""

import copy
from pathlib import Path

import build_random_pipeline
import build_tiny_qwenimage as build
import build_tiny_wan
import draw_shapes
import pytest
import torch
from safetensors.torch import load_file
from small import loaded

import flow_grpo

SHIPPED = Path(flow_grpo.__file__).parent / "assets" / "tiny_qwenimage"


@pytest.fixture(scope="module")
def held_out():
    return draw_shapes.shapes_prompts("test")


@pytest.fixture(scope="module")
def shipped():
    return loaded("qwenimage").pipeline


def test_the_pipeline_drops_the_template_and_nothing_else(shipped, held_out):
    prompts = [build.NO_PROMPT, *(p["prompt"] for p in held_out)]
    _, mask = shipped.encode_prompt(prompts, "cpu")
    suffix = len(shipped.tokenizer("<|im_end|>\n<|im_start|>assistant\n").input_ids)
    assert mask.sum(1).tolist() == [1 + suffix, *(len(prompt.split()) + suffix for prompt in prompts[1:])]


def test_shipped_fits_into_10_mb(shipped):
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()) <= 10e6


@pytest.mark.slow
def test_shipped_latent_statistics_are_the_vaes_own(shipped, held_out):
    config = shipped.vae.config
    prompts = draw_shapes.balanced(held_out, 240)
    images = draw_shapes.pictures(prompts, torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        std, mean = torch.std_mean(shipped.vae.encode(images[:, :, None]).latent_dist.mean, dim=(0, 2, 3, 4))
    torch.testing.assert_close(std / torch.tensor(config.latents_std), torch.ones(16), rtol=0, atol=0.2)
    torch.testing.assert_close((mean - torch.tensor(config.latents_mean)) / std, torch.zeros(16), rtol=0, atol=0.2)


@pytest.mark.slow
def test_shipped_vae_keeps_what_the_detector_reads(shipped, held_out):
    measured = build.reconstruction(shipped.vae, draw_shapes.balanced(held_out, 150), torch.Generator().manual_seed(2))
    assert measured["reconstructions"]["all"] >= 0.97, measured


@pytest.mark.slow
def test_shipped_base_is_right_about_half_the_time(shipped, held_out):
    prompts = draw_shapes.balanced(held_out, 72)
    measured = draw_shapes.accuracy(build.sample(shipped, prompts, seed=3), prompts)
    assert 0.30 <= measured["all"] <= 0.60, measured


@pytest.mark.parametrize(
    "name", [name for name in build_random_pipeline.BUILDERS if name in build_random_pipeline.TINY]
)
def test_the_shipped_random_pipelines_are_what_their_builder_writes(name, tmp_path):
    build_random_pipeline.build(name, str(tmp_path))
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    shipped = SHIPPED.with_name(f"tiny_{name}")
    assert files == sorted(path.relative_to(shipped) for path in shipped.rglob("*") if path.is_file())
    weights = [file for file in files if file.suffix == ".safetensors"]
    assert len(weights) > 2
    for file in weights:  # a normal draw, of a logarithm and a cosine, is rounded otherwise by other instructions
        torch.testing.assert_close(load_file(tmp_path / file), load_file(shipped / file))


def test_the_shipped_tiny_wan_fits_into_4_mb():
    folder = SHIPPED.with_name("tiny_wan")
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 4e6


@pytest.mark.slow
def test_the_shipped_tiny_wan_moves_things_as_asked_about_half_the_time():
    pipeline = loaded("wan").pipeline
    prompts = build_tiny_wan.prompts_of("test")[::2]
    drawn = build_tiny_wan.sample(pipeline, prompts, seed=3, guidance_scale=1.0)
    measured = build_tiny_wan.accuracy(drawn, prompts)
    assert 0.30 <= measured["all"] <= 0.60, measured
    stills = build_tiny_wan.accuracy(drawn[:, :1].expand_as(drawn), prompts)
    assert stills["all"] <= 0.05, stills
    shuffled = build_tiny_wan.accuracy(drawn, prompts[1:] + prompts[:1])
    assert shuffled["all"] <= 0.1, shuffled


@pytest.mark.slow
def test_the_vae_of_the_shipped_tiny_wan_keeps_what_the_reward_reads():
    vae = loaded("wan").pipeline.vae
    prompts = build_tiny_wan.prompts_of("test")[::2]
    measured = build_tiny_wan.reconstruction(vae, prompts, torch.Generator().manual_seed(2))
    assert measured["reconstructions"]["all"] >= 0.8, measured


@torch.no_grad()
def test_the_text_encoder_of_the_tiny_wan_tells_where_a_word_stands():
    """The embedding of "left" depends on the object that moves there."""
    pipeline = build_tiny_wan.build_pipeline(seed=0)
    texts = ["a red circle moves left", "a red square moves left"]
    embeds = []
    for text in texts:
        ids = pipeline.tokenizer(text, return_tensors="pt").input_ids
        embeds.append(pipeline.text_encoder(ids).last_hidden_state[0])
    direction = texts[0].split().index("left")
    difference = (embeds[0][direction] - embeds[1][direction]).norm() / embeds[0][direction].norm()
    assert difference > 0.3


@torch.no_grad()
@pytest.mark.parametrize(("name", "frames"), [("wan", 3), ("qwenimage", 1)])
def test_a_vae_is_trained_by_what_it_decodes_before_it_is_clamped(name, frames):
    vae = copy.deepcopy(loaded(name).pipeline.vae)
    # Pixels of random weights would stay within the range.
    vae.decoder.conv_out.weight.mul_(10)
    latents = torch.randn(2, 16, frames, 4, 4, generator=torch.Generator().manual_seed(0))
    decoded = build.decoded(vae, latents)
    assert decoded.abs().max() > 1
    assert torch.equal(decoded.clamp(-1, 1), vae.decode(latents).sample)


@torch.no_grad()
def test_the_vae_of_the_tiny_wan_begins_with_what_the_tiny_qwenimages_has_learned():
    vae = build_tiny_wan.build_pipeline(seed=0).vae
    picture = draw_shapes.pictures(draw_shapes.shapes_prompts("test")[:2], torch.Generator().manual_seed(0))
    still = (2 * picture - 1)[:, :, None].expand(-1, -1, 5, -1, -1)
    latents = vae.encode(still).latent_dist.mean
    torch.testing.assert_close(latents[:, :, 1], latents[:, :, 0])
    drawn = vae.decode(latents).sample
    error = (drawn - still).abs().mean((0, 1, 3, 4))  # of each frame
    assert (error < 0.02).all(), error


@pytest.mark.slow
def test_the_builder_of_wan_trains_by_flow_matching_with_its_schedulers_shift():
    pipeline = build_tiny_wan.build_pipeline(seed=0)
    model = build_tiny_wan.Wan(pipeline, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    rows = build_tiny_wan.prompts_of("train")[:3]
    steps = build_tiny_wan.batches(model, rows, generator, num_encoded=6)
    x_0, condition = next(steps)
    assert x_0.shape == (6, *model.latent_shape(build_tiny_wan.SIZE))
    loss = build_tiny_wan.flow_matching_loss(model, x_0[:4], condition.take(slice(4)), generator)
    # An untrained transformer predicts next to nothing: the target's own square is left.
    assert 0.5 < loss.item() < 4
