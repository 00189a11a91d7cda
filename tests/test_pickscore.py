"""PickScore on a tiny CLIP of the real classes, with random weights."""

import json

import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from flow_grpo.rewards import pickscore

PROMPTS = ["a red circle", "two blue squares and a very long row of words", "a cross", "a green triangle"]


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
def images():
    return torch.rand(4, 3, 48, 48, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def scores(folder, images):
    return pickscore.load("cpu", folder, folder)(images, PROMPTS, [{}] * 4)


def test_a_score_is_clips_own_logit_over_26(folder, images, scores):
    clip, processor = CLIPModel.from_pretrained(folder), CLIPProcessor.from_pretrained(folder, backend="pil")
    pictures = [Image.fromarray(p) for p in images.mul(255).round().byte().permute(0, 2, 3, 1).numpy()]
    inputs = processor(text=PROMPTS, images=pictures, padding=True, truncation=True, max_length=24, return_tensors="pt")
    with torch.no_grad():
        logits = clip(**inputs).logits_per_image
    assert scores.shape == (4,)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, logits.diagonal() / 26, rtol=1e-5, atol=1e-6)


def test_scores_do_not_depend_on_the_batch(folder, images, scores, monkeypatch):
    monkeypatch.setattr(pickscore, "BATCH_SIZE", 3)
    score = pickscore.load("cpu", folder, folder)
    torch.testing.assert_close(score(images, PROMPTS, [{}] * 4), scores)
    alone = [score(images[i : i + 1], PROMPTS[i : i + 1], [{}]) for i in range(4)]
    torch.testing.assert_close(torch.cat(alone), scores)


def test_prompt_and_image_both_matter(folder, images, scores):
    score = pickscore.load("cpu", folder, folder)
    assert (score(images, PROMPTS[::-1], [{}] * 4) - scores).abs().min() > 1e-4
    assert (score(images.flip(0), PROMPTS, [{}] * 4) - scores).abs().min() > 1e-4


def test_weights_that_cannot_be_had_are_named_with_the_way_out(folder, tmp_path):
    with pytest.raises(ValueError, match=r"CLIPModel '.*nowhere', .* `hf download .*nowhere` .* HF_HOME"):
        pickscore.load("cpu", str(tmp_path / "nowhere"), folder)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ValueError, match="CLIPProcessor"):
        pickscore.load("cpu", folder, str(tmp_path))
