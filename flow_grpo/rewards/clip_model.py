"""Helpers of rewards with a model, mostly a CLIP: batches, and weights and packages that may be missing.

This is no reward itself (`flow_grpo.rewards.HELPERS`).
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import BatchFeature, CLIPModel, CLIPProcessor

from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import to_pictures

Prepare = Callable[..., BatchFeature]  # a CLIPProcessor, whose own types lack the arguments of its parts
BATCH_SIZE = 32  # images per forward
WAY_OUT = "where there is a network, and set HF_HOME to the folder it filled"


def in_batches(score: Callable[..., Tensor], *columns) -> Tensor:
    """Return score(*columns), computed BATCH_SIZE rows at a time. Every column has a row per image."""
    scores = []
    for start in range(0, len(columns[0]), BATCH_SIZE):
        batch = [column[start : start + BATCH_SIZE] for column in columns]
        scores.append(score(*batch))
    return torch.cat(scores)


def load_clip(reward: str, model: str, processor: str, device: torch.device | str) -> tuple[CLIPModel, Prepare]:
    """Return a frozen CLIP in float32 on `device`, and its processor, both by hub id or folder.

    Raise UserError, which names the reward and the id, if weights or processor are missing.
    """
    clip = _pretrained(reward, CLIPModel, model, dtype=torch.float32)
    # torchvision, the other backend, resizes a little differently.
    prepare = _pretrained(reward, CLIPProcessor, processor, backend="pil")
    return clip.to(device).requires_grad_(False).eval(), prepare


def _pretrained(reward: str, kind: type, name: str, **options: Any) -> Any:
    """Return `kind.from_pretrained(name, **options)`. Raise UserError if it is neither cached nor to be downloaded."""
    try:
        return kind.from_pretrained(name, **options)
    except OSError as error:
        raise UserError(
            f"reward {reward} needs the {kind.__name__} {name!r}, neither in the Hugging Face cache nor to be "
            f"downloaded: run `hf download {name}` {WAY_OUT}"
        ) from error


def cosines(clip: CLIPModel, prepare: Prepare, images: Tensor, prompts: list[str]) -> Tensor:
    """Return the cosine of each image with its own prompt, [B]."""
    # Pixels are rounded on the GPU, where it is quicker. All prompts have one width, so that none depends on its
    # neighbours.
    inputs = prepare(
        text=prompts,
        images=to_pictures(images.to(clip.device)),
        padding="max_length",
        truncation=True,
        max_length=clip.text_model.config.max_position_embeddings,
        return_tensors="pt",
    ).to(clip.device)
    output = clip(**inputs)
    return cosine_similarity(output.image_embeds, output.text_embeds)


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
