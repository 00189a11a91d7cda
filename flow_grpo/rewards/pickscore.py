"""PickScore (arXiv:2305.01569): people's liking of an image for its prompt, by a CLIP trained on their choices.

A score is logit_scale * cosine(image, prompt) / 26, the scale of the Flow-GRPO code base.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import CLIPModel

from flow_grpo.rewards.clip_model import (
    Prepare,
    cosines,
    differentiable_pixels,
    in_batches,
    load_clip,
    pixels_of_pictures,
)

MODEL = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
SCALE = 26.0


def load(device: torch.device | str, model: str = MODEL, processor: str = PROCESSOR) -> Callable[..., Tensor]:
    """Return the scorer, in float32 on `device`. Raise UserError if weights or processor are missing.

    Args:
        model: hub id or folder of a CLIPModel.
        processor: hub id or folder of its CLIPProcessor.
    """
    clip, prepare = load_clip("pickscore", model, processor, device)

    def similarity(images: Tensor, prompts: list[str]) -> Tensor:
        return _logits(clip, prepare, pixels_of_pictures(clip, prepare, images), prompts)

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return in_batches(similarity, images, prompts)

    return score


def load_differentiable(
    device: torch.device | str, model: str = MODEL, processor: str = PROCESSOR
) -> Callable[..., Tensor]:
    """Return the scorer with a graph. Arguments and errors as of `load`, with which it shares the model."""
    clip, prepare = load_clip("pickscore", model, processor, device)

    def score_pixels(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return _logits(clip, prepare, differentiable_pixels(clip, prepare, images), prompts)

    return score_pixels


def _logits(clip: CLIPModel, prepare: Prepare, pixels: Tensor, prompts: list[str]) -> Tensor:
    """Return the model's own logits, [B], on the scale of the Flow-GRPO code base."""
    return clip.logit_scale.exp() * cosines(clip, prepare, pixels, prompts) / SCALE
