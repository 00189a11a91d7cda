"""Helpers of rewards with a model, mostly a CLIP: batches, and weights and packages that may be missing.

This is no reward itself (`flow_grpo.rewards.HELPERS`).
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, interpolate
from transformers import BatchFeature, CLIPModel, CLIPProcessor

from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import to_pictures

Prepare = Callable[..., BatchFeature]  # a CLIPProcessor, whose own types lack the arguments of its parts
Model = TypeVar("Model", bound=nn.Module)
BATCH_SIZE = 32  # images per forward
WAY_OUT = "where there is a network, and set HF_HOME to the folder it filled"
# Models in use, by what they were loaded from and their device. One is freed with the last reward that holds it.
_loaded: WeakValueDictionary[tuple[str, ...], nn.Module] = WeakValueDictionary()


def in_batches(score: Callable[..., Tensor], *columns) -> Tensor:
    """Return score(*columns), computed BATCH_SIZE rows at a time. Every column has a row per image."""
    scores = []
    for start in range(0, len(columns[0]), BATCH_SIZE):
        batch = [column[start : start + BATCH_SIZE] for column in columns]
        scores.append(score(*batch))
    return torch.cat(scores)


def shared_model(key: tuple[str, ...], load: Callable[[], Model]) -> Model:
    """Return the frozen model of a key, loaded unless a reward holds it, with or without a gradient.

    A forward writes nothing into the model and the grad mode is each thread's own, so threads may call it at the same
    time.
    """
    model: Any = _loaded.get(key)
    if model is None:
        model = load().requires_grad_(False).eval()
        _loaded[key] = model
    return model


def load_clip(reward: str, model: str, processor: str, device: torch.device | str) -> tuple[CLIPModel, Prepare]:
    """Return a frozen CLIP in float32 on `device`, and its processor, both by hub id or folder.

    Raise UserError, which names the reward and the id, if weights or processor are missing.
    """
    clip = shared_model(
        (model, str(torch.device(device))),
        lambda: _pretrained(reward, CLIPModel, model, dtype=torch.float32).to(device),
    )
    # torchvision, the other backend, resizes a little differently.
    prepare = _pretrained(reward, CLIPProcessor, processor, backend="pil")
    return clip, prepare


def _pretrained(reward: str, kind: type, name: str, **options: Any) -> Any:
    """Return `kind.from_pretrained(name, **options)`. Raise UserError if it is neither cached nor to be downloaded."""
    try:
        return kind.from_pretrained(name, **options)
    except OSError as error:
        raise UserError(
            f"reward {reward} needs the {kind.__name__} {name!r}, neither in the Hugging Face cache nor to be "
            f"downloaded: run `hf download {name}` {WAY_OUT}"
        ) from error


def cosines(clip: CLIPModel, prepare: Prepare, pixels: Tensor, prompts: list[str]) -> Tensor:
    """Return the cosine of each image with its own prompt, [B], of pixels that are prepared for the model."""
    # All prompts have one width, so that none depends on its neighbours.
    inputs = prepare(
        text=prompts,
        padding="max_length",
        truncation=True,
        max_length=clip.text_model.config.max_position_embeddings,
        return_tensors="pt",
    ).to(clip.device)
    output = clip(pixel_values=pixels, **inputs)
    return cosine_similarity(output.image_embeds, output.text_embeds)


def image_embeddings(clip: CLIPModel, pixels: Tensor) -> Tensor:
    """Return the embeddings of images, [B, D], of pixels that are prepared for the model."""
    return clip.visual_projection(clip.vision_model(pixel_values=pixels).pooler_output)


def pixels_of_pictures(clip: CLIPModel, prepare: Prepare, images: Tensor) -> Tensor:
    """Return images [B, 3, H, W] in [0, 1] as the processor prepares their pictures of 8 bits, on the CLIP's device."""
    # Pixels are rounded on the GPU, where it is quicker.
    pictures = to_pictures(images.to(clip.device))
    return prepare(images=pictures, return_tensors="pt")["pixel_values"].to(clip.device)


def differentiable_pixels(clip: CLIPModel, prepare: Any, images: Tensor) -> Tensor:
    """Return what `pixels_of_pictures` does, with a graph: nothing is rounded to 8 bits.

    The shorter side is resized to the model's own size, bicubic and antialiased, then the middle is cut out.
    """
    settings = prepare.image_processor
    mean = torch.tensor(settings.image_mean, device=clip.device).view(3, 1, 1)
    std = torch.tensor(settings.image_std, device=clip.device).view(3, 1, 1)
    pixels = resize_shorter_side(images.to(clip.device, torch.float32), settings.size["shortest_edge"])
    cropped = crop_middle(pixels, settings.crop_size["height"], settings.crop_size["width"])
    return (cropped - mean) / std


def resize_shorter_side(images: Tensor, side: int) -> Tensor:
    """Return images [B, 3, H, W] with a shorter side of so many pixels, the longer one rounded down."""
    height, width = images.shape[2:]
    shorter = min(height, width)
    size = (side * height // shorter, side * width // shorter)
    # Not clamped to [0, 1]: a third of a white picture is a rounding above 1, and would have no gradient.
    return interpolate(images, size, mode="bicubic", antialias=True)


def crop_middle(images: Tensor, height: int, width: int) -> Tensor:
    """Return the middle of images [B, 3, H, W], [B, 3, height, width]."""
    top = (images.shape[2] - height) // 2
    left = (images.shape[3] - width) // 2
    return images[:, :, top : top + height, left : left + width]


def read_weights(reward: str, name: str) -> dict[str, Any]:
    """Return the state dict in a local file or owner/repository/file of the hub: .safetensors, or torch.save's format.

    Raise UserError, which names the reward and the file, if there is none.
    """
    path = Path(name)
    if not path.is_file():
        try:
            owner, repository, file = name.split("/", 2)
            path = Path(hf_hub_download(f"{owner}/{repository}", file))
        # Nothing can be had from there, or the name is no id of the hub.
        except (OSError, ValueError) as error:
            raise UserError(
                f"reward {reward} needs the weights {name!r}, neither a file, nor in the Hugging Face cache, nor to be "
                f"downloaded: give a path, or run `hf download OWNER/REPOSITORY FILE` {WAY_OUT}"
            ) from error
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def optional_package(reward: str, name: str, install: str) -> ModuleType:
    """Import a package that only one reward needs. Raise UserError, which says how to install it, if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"reward {reward} needs the package {name} ({error}): {install}") from error
