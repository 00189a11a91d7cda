"""LAION's improved aesthetic predictor: the beauty that people see in an image, whatever the prompt.

Linear layers on the L2-normalised image embedding of OpenAI's CLIP ViT-L/14, fitted to ratings from 1 to 10
(github.com/christophschuhmann/improved-aesthetic-predictor). Nothing keeps a score within that scale.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import CLIPModel

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line
from flow_grpo.rewards.clip_model import (
    Prepare,
    differentiable_pixels,
    image_embeddings,
    in_batches,
    load_clip,
    pixels_of_pictures,
    read_weights,
)

MODEL = "openai/clip-vit-large-patch14"
PREDICTOR = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"


def load(device: torch.device | str, model: str = MODEL, predictor: str = PREDICTOR) -> Callable[..., Tensor]:
    """Return the scorer, in float32 on `device`.

    Raise UserError if weights are missing, or the predictor does not belong to this CLIP.

    Args:
        model: hub id or folder of the CLIPModel that the predictor was fitted to, and of its CLIPProcessor.
        predictor: state dict of the linear layers, a local file or owner/repository/file of the hub.
    """
    clip, prepare, rating = _load_models(device, model, predictor)

    def rate(images: Tensor) -> Tensor:
        return _ratings(clip, rating, pixels_of_pictures(clip, prepare, images))

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return in_batches(rate, images)

    return score


def load_differentiable(
    device: torch.device | str, model: str = MODEL, predictor: str = PREDICTOR
) -> Callable[..., Tensor]:
    """Return the scorer with a graph. Arguments and errors as of `load`, with which it shares the model."""
    clip, prepare, rating = _load_models(device, model, predictor)

    def score_pixels(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return _ratings(clip, rating, differentiable_pixels(clip, prepare, images))

    return score_pixels


def _load_models(device: torch.device | str, model: str, predictor: str) -> tuple[CLIPModel, Prepare, nn.Module]:
    """Return the CLIP, its processor and the linear layers, all frozen. Arguments and errors as of `load`."""
    weights = read_weights("aesthetic", predictor)
    clip, prepare = load_clip("aesthetic", model, model, device)
    rating = linear_layers(clip.visual_projection.out_features)
    try:
        rating.load_state_dict(weights)
    except RuntimeError as error:
        problem = in_one_line(error)
        raise UserError(f"reward aesthetic: {predictor!r} is no predictor for the CLIP {model!r}: {problem}") from error
    return clip, prepare, rating["layers"].to(device).requires_grad_(False)


def _ratings(clip: CLIPModel, rating: nn.Module, pixels: Tensor) -> Tensor:
    """Return the ratings of images, [B], of pixels that are prepared for the model."""
    return rating(normalize(image_embeddings(clip, pixels))).squeeze(1)


def linear_layers(width: int) -> nn.ModuleDict:
    """Return the layers from an embedding to its rating: no activations, as published; numbered as in the file."""
    # Numbers between these were dropout layers in training.
    shapes = {0: (width, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
    layers = {str(number): nn.Linear(*shape) for number, shape in shapes.items()}
    return nn.ModuleDict({"layers": nn.Sequential(OrderedDict(layers))})
