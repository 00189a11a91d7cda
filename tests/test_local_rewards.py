"""Rewards that run beside the training: tiny models of the real classes, with random weights."""

import gc
import importlib
import io
import itertools
import json
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import huggingface_hub
import pytest
import torch
from refused import assert_refused
from rounding import rounding
from safetensors.torch import save_file
from small import random_images
from torch.nn.functional import normalize
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from flow_grpo import rewards
from flow_grpo.base.pixels import to_pictures
from flow_grpo.rewards import aesthetic, clip_model, clipscore, hpsv2, jpeg_compressibility, pickscore
from flow_grpo.scoring.settings import check_gradients
from flow_grpo.settings.sections import Reward

PROMPTS = ["a red circle", "two blue squares and a very long row of words", "a cross", "a green triangle"]
OPTIONAL = dict(imagereward="ImageReward", hpsv2="open_clip", hpsv3="hpsv3", editreward="EditReward")  # what it imports
IMAGES = random_images(4, 48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved CLIPModel and CLIPProcessor that read letters."""
    folder = tmp_path_factory.mktemp("clip")
    letters = [chr(i) for i in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", *letters, *(f"{letter}</w>" for letter in letters), "<|endoftext|>"]
    tokenizer = CLIPTokenizer({word: i for i, word in enumerate(words)}, [])
    text = dict(vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2)
    text |= dict(num_attention_heads=2, max_position_embeddings=24, bos_token_id=0, eos_token_id=len(words) - 1)
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    vision |= dict(image_size=32, patch_size=8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    """The aesthetic predictor's linear layers for embeddings of 8, in a file with the published names."""
    path = tmp_path_factory.mktemp("aesthetic") / "predictor.pth"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.save(aesthetic.linear_layers(8).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def hps_weights(tmp_path_factory):
    """A tiny open_clip of random weights in HPS's kind of file; open_clip knows it as "tiny"."""
    reason = "open_clip_torch needs torchvision, which this installation does not have"
    open_clip = pytest.importorskip("open_clip", reason=reason)
    path = tmp_path_factory.mktemp("open_clip")
    vision = dict(image_size=32, layers=2, width=16, head_width=8, patch_size=8)
    text = dict(context_length=77, vocab_size=49408, width=16, heads=2, layers=2)
    (path / "tiny.json").write_text(json.dumps(dict(embed_dim=8, vision_cfg=vision, text_cfg=text)))
    open_clip.add_model_config(path / "tiny.json")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        clip = open_clip.create_model("tiny", load_weights=False)
    torch.save({"state_dict": clip.state_dict()}, path / "tiny.pt")
    return path / "tiny.pt"


@pytest.fixture
def options(request, folder, predictor):
    """A function: a reward's name -> the options that load it with tiny weights."""

    def of_reward(name):
        if name == "hpsv2":
            return dict(weights=str(request.getfixturevalue("hps_weights")), architecture="tiny")
        return {
            "pickscore": dict(model=folder, processor=folder),
            "clipscore": dict(model=folder),
            "aesthetic": dict(model=folder, predictor=str(predictor)),
            "jpeg_compressibility": {},
        }[name]

    return of_reward


@pytest.fixture(params=["pickscore", "clipscore", "aesthetic", "jpeg_compressibility", "hpsv2"])
def reward(request, options):
    """(name, its scorer) of one reward."""
    return request.param, rewards.load(request.param, torch.device("cpu"), options(request.param))


@pytest.fixture(params=["pickscore", "clipscore", "aesthetic", "hpsv2"])
def differentiable(request, options):
    """(name, its options, its scorer with a graph) of one reward."""
    name = request.param
    return name, options(name), rewards.load_differentiable(name, torch.device("cpu"), options(name))


def close(found, wanted):
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=torch.float32), rtol=1e-4, atol=1e-5)


def test_an_image_alone_scores_as_in_any_batch(reward, monkeypatch):
    name, score = reward
    metadata = [{}] * 4
    scores = score(IMAGES, PROMPTS, metadata)
    assert scores.shape == (4,)
    assert scores.dtype == torch.float32
    low, high = rewards.bounds(name)
    assert low <= scores.min() < scores.max() <= high
    alone = [score(image[None], [prompt], [{}]) for image, prompt in zip(IMAGES, PROMPTS)]
    # The sums on an image's way through the tiny CLIP and the aesthetic predictor have 2,000 terms.
    rounded = dict(rtol=0, atol=rounding(2000, float(scores.abs().max())))
    torch.testing.assert_close(torch.cat(alone), scores, **rounded)
    torch.testing.assert_close(score(IMAGES.flip(0), PROMPTS[::-1], metadata).flip(0), scores, **rounded)
    monkeypatch.setattr(clip_model, "BATCH_SIZE", 3)
    torch.testing.assert_close(score(IMAGES, PROMPTS, metadata), scores, **rounded)


@torch.no_grad()
def seen_by_clip(path, texts):
    """CLIP's own logit of each image with its own text, the scale of its cosines, and the images' embeddings."""
    clip = CLIPModel.from_pretrained(path)
    prepare = CLIPProcessor.from_pretrained(path, backend="pil")
    how = dict(padding=True, truncation=True, max_length=24, return_tensors="pt")
    output = clip(**prepare(text=texts, images=to_pictures(IMAGES), **how))
    return output.logits_per_image.diagonal(), clip.logit_scale.exp(), output.image_embeds


def test_pickscore_is_clips_own_logit_over_26(folder):
    logits, *_ = seen_by_clip(folder, PROMPTS)
    close(pickscore.load("cpu", folder, folder)(IMAGES, PROMPTS, [{}] * 4), logits / 26)


def test_clipscore_is_two_and_a_half_cosines_and_never_negative(folder, tmp_path):
    """An image's cosine with opposite text has the other sign, so that half of all scores are 0."""
    clip = CLIPModel.from_pretrained(folder)
    with torch.no_grad():
        clip.text_projection.weight.neg_()
    clip.save_pretrained(shutil.copytree(folder, tmp_path, dirs_exist_ok=True))
    for model, prefix in itertools.product((folder, str(tmp_path)), ("", "a photo of ")):
        logits, scale, _ = seen_by_clip(folder, [prefix + prompt for prompt in PROMPTS])
        scores = clipscore.load("cpu", model, prefix=prefix)(IMAGES, PROMPTS, [{}] * 4)
        close(scores, 2.5 * (logits / scale * (1 if model == folder else -1)).clamp(min=0))


def test_aesthetic_is_the_linear_layers_of_the_unit_embedding(folder, predictor, tmp_path):
    weights = torch.load(predictor, weights_only=True)
    *_, embeddings = seen_by_clip(folder, PROMPTS)
    wanted = normalize(embeddings.double())
    for i in (0, 2, 4, 6, 7):
        wanted = wanted @ weights[f"layers.{i}.weight"].double().T + weights[f"layers.{i}.bias"]
    save_file(weights, tmp_path / "predictor.safetensors")
    for file, prompts in ((predictor, PROMPTS), (tmp_path / "predictor.safetensors", PROMPTS[::-1])):
        close(aesthetic.load("cpu", folder, predictor=str(file))(IMAGES, prompts, [{}] * 4), wanted[:, 0])


def test_compressibility_is_minus_the_kilobytes_of_a_jpeg_most_for_a_flat_image():
    batch = torch.cat([torch.full((1, 3, 48, 48), 0.5), IMAGES])
    scores = jpeg_compressibility.load("cpu")(batch, ["a"] * 5, [{}] * 5)
    assert scores[1:].max() < scores[0] < 0
    for picture, score in zip(to_pictures(batch), scores.tolist()):
        file = io.BytesIO()
        picture.save(file, format="JPEG", quality=95)
        assert score == pytest.approx(-len(file.getvalue()) / 1000)


def test_hpsv2_is_open_clips_own_cosine_and_pads_what_is_not_square(hps_weights):
    open_clip = pytest.importorskip("open_clip")
    wide = torch.rand(2, 3, 24, 48, generator=torch.Generator().manual_seed(0))
    black = torch.zeros(2, 3, 12, 48)
    clip, _, prepare = open_clip.create_model_and_transforms("tiny", str(hps_weights))
    padded = torch.stack([prepare(p) for p in to_pictures(torch.cat([black, wide, black], 2))])
    with torch.no_grad():
        seen, asked, _ = clip(padded, open_clip.get_tokenizer("tiny")(PROMPTS[:2]))
    scores = hpsv2.load("cpu", str(hps_weights), "tiny")(wide, PROMPTS[:2], [{}] * 2)
    torch.testing.assert_close(scores, (seen * asked).sum(1), rtol=0, atol=0.02)  # the border is resized another way


@pytest.mark.parametrize("size", [(48, 48), (24, 40), (300, 200)], ids=str)
def test_a_score_with_a_graph_differs_by_what_pictures_of_8_bits_round(differentiable, size):
    """Bounds are twice what docs/reference/rewards.md says was measured."""
    name, options, score_pixels = differentiable
    bounds = {"pickscore": 0.003, "clipscore": 0.012, "aesthetic": 0.0005, "hpsv2": 0.004}
    images = torch.rand(4, 3, *size, generator=torch.Generator().manual_seed(3))
    wanted = rewards.load(name, "cpu", options)(images, PROMPTS, [{}] * 4)
    scores = score_pixels(images, PROMPTS, [{}] * 4)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, wanted, rtol=0, atol=bounds[name])
    assert scores.std() > bounds[name], "the bound tells the images apart"


def test_the_gradient_is_the_slope_of_the_score(differentiable):
    _, _, score_pixels = differentiable
    images = IMAGES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score_pixels(images, PROMPTS, [{}] * 4).sum(), images)
    # Half of CLIPScore's cosines are negative, and have no slope.
    rows = [row for row in range(4) if gradient[row].any()]
    assert len(rows) >= 2
    for row in rows:
        image = IMAGES[row]
        prompt = PROMPTS[row]
        direction = gradient[row]
        step = 0.05 * direction / direction.norm()
        both = torch.stack([image + step, image - step])
        after, before = score_pixels(both, [prompt] * 2, [{}] * 2).double()
        # By the mean value theorem exact but for the third derivative.
        wanted = float(2 * (step * direction).sum())
        assert float(after - before) == pytest.approx(wanted, rel=0.02)


def test_an_image_gets_the_gradient_of_its_own_score_beside_any_others_and_threads(differentiable, options):
    name, how, score_pixels = differentiable
    score = rewards.load(name, "cpu", how)
    images = IMAGES.clone().requires_grad_()
    scores = score_pixels(images, PROMPTS, [{}] * 4)
    # As the scorers' threads do, between the forward and the backward pass.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(torch.no_grad()(score), IMAGES, PROMPTS, [{}] * 4).result()
    scores.sum().backward()
    alone = IMAGES[1:2].clone().requires_grad_()
    score_pixels(alone, PROMPTS[1:2], [{}]).sum().backward()
    scale = float(images.grad[1].abs().max())
    torch.testing.assert_close(images.grad[1:2], alone.grad, rtol=0, atol=rounding(2000, scale))


def test_rewards_share_a_clip_until_the_last_one_is_gone(folder):
    with_graph = rewards.load_differentiable("pickscore", "cpu", dict(model=folder, processor=folder))
    score = rewards.load("clipscore", "cpu", dict(model=folder))
    held = list(clip_model._loaded.values())
    assert len(held) == 1
    model = weakref.ref(held.pop())
    del with_graph
    gc.collect()
    assert model() is not None
    del score
    gc.collect()
    assert model() is None


def test_a_reward_without_a_gradient_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(rewards, "REGISTERED", {})

    def flat(images, prompts, metadata):
        return torch.zeros(len(images))

    rewards.register("without_graph", flat, flat)
    rewards.register("of_one_number", flat, lambda images, *_: images.mean())
    images = IMAGES.clone().requires_grad_()

    def called(name):
        return lambda: rewards.load_differentiable(name, "cpu")(images, PROMPTS, [{}] * 4)

    def checked(weights, **args):
        return lambda: check_gradients(weights, Reward(args=args))

    remote = {"url": "http://127.0.0.1:1"}
    having = ["aesthetic", "clipscore", "hpsv2", "pickscore"]
    rows = [
        ("a rule", checked({"pickscore": 1, "shapes": 0.1}), ["shapes", "no gradient", *having]),
        ("load", lambda: rewards.load_differentiable("jpeg_compressibility", "cpu"), ["jpeg_compressibility", *having]),
        ("served", checked({"pickscore": 1}, pickscore=remote), ["pickscore", "server", "reward.args.pickscore.url"]),
        ("a judge", checked({"vlm_judge": 1}, vlm_judge=remote), ["vlm_judge", "server", *having]),
        ("no graph", called("without_graph"), ["without_graph", "without a graph"]),
        ("one number", called("of_one_number"), ["of_one_number", "() for 4 images"]),
    ]
    assert_refused(rows)
    checked({"pickscore": 1.0, "aesthetic": 0.1})()
    assert not rewards.has_gradient("no_such_reward")
    rewards.register("only_scores", flat)
    assert not rewards.has_gradient("only_scores")


def test_what_a_reward_cannot_be_made_of_is_refused_with_its_name(folder, predictor, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "outdated_package.py").write_text("from torch import no_such_name\n")
    torch.save(aesthetic.linear_layers(768).state_dict(), tmp_path / "wide.pth")
    no_processor = tmp_path / "no_processor"
    no_processor.mkdir()
    (no_processor / "config.json").write_text(json.dumps({"model_type": "clip"}))
    nowhere = str(tmp_path / "nowhere")

    def weights(name):
        return lambda: aesthetic.load("cpu", folder, predictor=name)

    own = "outdated_package", "pip install it"
    rows = [
        ("clipscore", lambda: clipscore.load("cpu", nowhere), ["clipscore", nowhere, "HF_HOME"]),
        ("no processor", lambda: pickscore.load("cpu", folder, str(no_processor)), ["CLIPProcessor", "hf download"]),
        ("CLIP", lambda: aesthetic.load("cpu", nowhere, predictor=str(predictor)), ["aesthetic", nowhere, "HF_HOME"]),
        ("another CLIP's", weights(str(tmp_path / "wide.pth")), ["aesthetic", "wide.pth", folder]),
        ("a package", lambda: clip_model.optional_package("hpsv2", *own), ["hpsv2", own[0], "no_such_name"]),
    ]
    names = "/tmp/no/such.pth", "no_such.pth", aesthetic.PREDICTOR
    rows += [(name, weights(name), ["aesthetic", name, "HF_HOME"]) for name in names]
    for name, package in OPTIONAL.items():
        if not find_spec(package):
            load = importlib.import_module(f"flow_grpo.rewards.{name}").load
            needed = ("folder", "file.yaml") if name == "editreward" else ()
            rows.append((name, lambda load=load, needed=needed: load("cpu", *needed), [name, package, "pip install "]))
    assert_refused(rows)
