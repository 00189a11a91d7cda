"""HPS v2.1 (arXiv:2306.09341): people's preference for an image of a prompt, by a CLIP trained on their choices.

A score is cosine(image, prompt), about 0.2 to 0.35. An oblong image is padded with black, as by the authors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from flow_grpo.base.pixels import to_pictures
from flow_grpo.rewards.clip_model import in_batches, optional_package, read_weights, shared_model

WEIGHTS = "xswu/HPSv2/HPS_v2.1_compressed.pt"
ARCHITECTURE = "ViT-H-14"
INSTALL = "pip install flow_grpo[hpsv2]"
RANGE = (-1.0, 1.0)


def load(device: torch.device | str, weights: str = WEIGHTS, architecture: str = ARCHITECTURE) -> Callable[..., Tensor]:
    """Return the scorer, in float32 on `device`. Raise UserError if open_clip or weights are missing.

    Args:
        weights: checkpoint with a "state_dict", a local file or owner/repository/file of the hub.
        architecture: name that open_clip knows.
    """
    clip, prepare, tokenize = _load_model(device, weights, architecture)

    def similarity(images: Tensor, prompts: list[str]) -> Tensor:
        pixels = torch.stack([prepare(picture) for picture in to_pictures(images)])
        return _cosines(clip, pixels.to(device), tokenize(prompts).to(device))

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return in_batches(similarity, images, prompts)

    return score


def load_differentiable(
    device: torch.device | str, weights: str = WEIGHTS, architecture: str = ARCHITECTURE
) -> Callable[..., Tensor]:
    """Return the scorer with a graph. Arguments and errors as of `load`, with which it shares the model."""
    clip, _, tokenize = _load_model(device, weights, architecture)
    size, channel_means, channel_stds = _preprocessing(clip)
    mean = torch.tensor(channel_means, device=device).view(3, 1, 1)
    std = torch.tensor(channel_stds, device=device).view(3, 1, 1)

    def score_pixels(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        pixels = pad_to_square(images.to(device, torch.float32), side=size[0])
        return _cosines(clip, (pixels - mean) / std, tokenize(prompts).to(device))

    return score_pixels


def _load_model(device: torch.device | str, weights: str, architecture: str) -> tuple[Any, Callable, Callable]:
    """Return the CLIP, what prepares a picture, and the tokenizer. Arguments and errors as of `load`."""
    open_clip = optional_package("hpsv2", "open_clip", INSTALL)

    def read_model() -> nn.Module:
        state = read_weights("hpsv2", weights)["state_dict"]
        clip = open_clip.create_model(architecture, load_weights=False)
        clip.load_state_dict(state)
        return clip.to(device)

    clip = shared_model((weights, architecture, str(torch.device(device))), read_model)
    size, mean, std = _preprocessing(clip)
    prepare = open_clip.image_transform(size, is_train=False, mean=mean, std=std, resize_mode="longest")
    # It pads all prompts to one width, so that none depends on its neighbours.
    return clip, prepare, open_clip.get_tokenizer(architecture)


def _preprocessing(clip: Any) -> tuple[tuple[int, int], tuple[float, ...], tuple[float, ...]]:
    """Return the height and width of the model's images, and mean and standard deviation of its three channels."""
    settings = clip.visual.preprocess_cfg
    return clip.visual.image_size, settings["mean"], settings["std"]


def _cosines(clip: Any, pixels: Tensor, tokens: Tensor) -> Tensor:
    """Return the cosine of each image with its own prompt, [B], of pixels that are prepared for the model."""
    image_embeddings = clip.encode_image(pixels, normalize=True)
    text_embeddings = clip.encode_text(tokens, normalize=True)
    return (image_embeddings * text_embeddings).sum(1)


def pad_to_square(images: Tensor, side: int) -> Tensor:
    """Return images [B, 3, H, W] amid black squares [B, 3, side, side], which the longer side fills."""
    height, width = images.shape[2:]
    ratio = max(height, width) / side
    resized = interpolate(images, (round(height / ratio), round(width / ratio)), mode="bicubic", antialias=True)
    rows = side - resized.shape[2]
    columns = side - resized.shape[3]
    return pad(resized, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
