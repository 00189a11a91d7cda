"""What the rewards with a model, mostly a CLIP, share: pixels, batches, and weights or packages that may be missing.

It is no reward itself (`flow_grpo.rewards.HELPERS`).
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import CLIPModel, CLIPProcessor

from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import to_pictures

BATCH_SIZE = 32  # images per forward
WAY_OUT = "where there is a network, and set HF_HOME to the folder it filled"


def in_batches(score: Callable[..., Tensor], *columns) -> Tensor:
    """score(*columns) over BATCH_SIZE rows at a time; every column has a row per image."""
    slices = [slice(start, start + BATCH_SIZE) for start in range(0, len(columns[0]), BATCH_SIZE)]
    return torch.cat([score(*(column[rows] for column in columns)) for rows in slices])


def load_clip(reward: str, model: str, processor: str, device: torch.device | str) -> tuple[CLIPModel, CLIPProcessor]:
    """Frozen CLIP in float32 on `device`, and what prepares its inputs; both by hub id or folder. Raises UserError:
    missing weights or processor; the message names the reward and the id."""

    def pretrained(kind: type, name: str, **options):
        try:
            return kind.from_pretrained(name, **options)
        except OSError as error:  # no such id, or no network and nothing in the cache
            raise UserError(
                f"reward {reward} needs the {kind.__name__} {name!r}, neither in the Hugging Face cache nor to be "
                f"downloaded: run `hf download {name}` {WAY_OUT}"
            ) from error

    clip = pretrained(CLIPModel, model, dtype=torch.float32).to(device).requires_grad_(False).eval()
    prepare = pretrained(CLIPProcessor, processor, backend="pil")  # torchvision resizes a little differently
    return clip, prepare


def cosines(clip: CLIPModel, prepare: CLIPProcessor, images: Tensor, prompts: list[str]) -> Tensor:
    """Of each image with its own prompt, [B]."""
    inputs = prepare(
        text=prompts,
        images=to_pictures(images.to(clip.device)),  # where rounding is quicker
        padding="max_length",  # one width, whatever the neighbours
        truncation=True,
        max_length=clip.config.text_config.max_position_embeddings,
        return_tensors="pt",
    ).to(clip.device)
    out = clip(**inputs)
    return cosine_similarity(out.image_embeds, out.text_embeds)


def read_weights(reward: str, name: str) -> dict:
    """The state dict in a local file or in owner/repository/file of the hub: .safetensors, else torch.save's format.
    Raises UserError: it is neither; the message names the reward and the file."""
    path = Path(name)
    if not path.is_file():
        try:
            owner, repository, file = name.split("/", 2)
            path = Path(hf_hub_download(f"{owner}/{repository}", file))
        except (OSError, ValueError) as error:  # nothing to be had there, or no id of the hub at all
            raise UserError(
                f"reward {reward} needs the weights {name!r}, neither a file, nor in the Hugging Face cache, nor to be "
                f"downloaded: give a path, or run `hf download OWNER/REPOSITORY FILE` {WAY_OUT}"
            ) from error
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)


def optional_package(reward: str, name: str, install: str) -> ModuleType:
    """Import what only one reward needs. Raises UserError, which says how to install it: it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"reward {reward} needs the package {name} ({error}): {install}") from error
