"""LAION's improved aesthetic predictor: the beauty that people see in an image, whatever the prompt.

Linear layers on the L2-normalised image embedding of OpenAI's CLIP ViT-L/14, fitted to ratings from 1 to 10
(github.com/christophschuhmann/improved-aesthetic-predictor). Nothing keeps a score within that scale.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line
from flow_grpo.base.pixels import to_pictures
from flow_grpo.rewards.clip_model import in_batches, load_clip, read_weights

MODEL = "openai/clip-vit-large-patch14"
PREDICTOR = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"


def load(device: torch.device | str, model: str = MODEL, predictor: str = PREDICTOR) -> Callable[..., Tensor]:
    """Return the scorer, in float32 on `device`.

    Raise UserError if weights are missing, or the predictor does not belong to this CLIP.

    Args:
        model: hub id or folder of the CLIPModel that the predictor was fitted to, and of its CLIPProcessor.
        predictor: state dict of the linear layers, a local file or owner/repository/file of the hub.
    """
    weights = read_weights("aesthetic", predictor)
    clip, prepare = load_clip("aesthetic", model, model, device)
    rating = linear_layers(clip.visual_projection.out_features)
    try:
        rating.load_state_dict(weights)
    except RuntimeError as error:
        problem = in_one_line(error)
        raise UserError(f"reward aesthetic: {predictor!r} is no predictor for the CLIP {model!r}: {problem}") from error
    rating = rating["layers"].to(device).requires_grad_(False)

    def rate(images: Tensor) -> Tensor:
        pixels = prepare(images=to_pictures(images), return_tensors="pt")["pixel_values"].to(clip.device)
        embeddings = clip.visual_projection(clip.vision_model(pixel_values=pixels).pooler_output)
        return rating(normalize(embeddings)).squeeze(1)

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return in_batches(rate, images)

    return score


def linear_layers(width: int) -> nn.ModuleDict:
    """Return the layers from an embedding to its rating: no activations, as published; numbered as in the file."""
    # Numbers between these were dropout layers in training.
    shapes = {0: (width, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
    layers = {str(number): nn.Linear(*shape) for number, shape in shapes.items()}
    return nn.ModuleDict({"layers": nn.Sequential(OrderedDict(layers))})
