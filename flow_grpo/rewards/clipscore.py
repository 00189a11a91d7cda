"""CLIPScore (arXiv:2104.08718): agreement of an image with its prompt, 2.5 * max(cosine(image, prompt), 0).

0 to 2.5. The paper's own scores are of ViT-B/32 and the prefix "A photo depicts ", the defaults here ViT-L/14 and the
bare prompt; only scores of one setting compare.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.rewards.clip_model import cosines, differentiable_pixels, in_batches, load_clip, pixels_of_pictures

MODEL = "openai/clip-vit-large-patch14"
SCALE = 2.5
RANGE = (0.0, SCALE)


def load(device: torch.device | str, model: str = MODEL, prefix: str = "") -> Callable[..., Tensor]:
    """Return the scorer, in float32 on `device`. Raise UserError if weights or processor are missing.

    Args:
        model: hub id or folder of a CLIPModel and its CLIPProcessor.
        prefix: text before every prompt, with a space of its own at the end.
    """
    clip, prepare = load_clip("clipscore", model, model, device)

    def similarity(images: Tensor, texts: list[str]) -> Tensor:
        return cosines(clip, prepare, pixels_of_pictures(clip, prepare, images), texts)

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        texts = [prefix + prompt for prompt in prompts]
        return SCALE * in_batches(similarity, images, texts).clamp(0, 1)

    return score


def load_differentiable(device: torch.device | str, model: str = MODEL, prefix: str = "") -> Callable[..., Tensor]:
    """Return the scorer with a graph. Arguments and errors as of `load`, with which it shares the model.

    The gradient is 0 where the cosine is negative.
    """
    clip, prepare = load_clip("clipscore", model, model, device)

    def score_pixels(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        texts = [prefix + prompt for prompt in prompts]
        pixels = differentiable_pixels(clip, prepare, images)
        return SCALE * cosines(clip, prepare, pixels, texts).clamp(0, 1)

    return score_pixels
