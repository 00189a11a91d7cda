"""How much an image looks like a reference image: cosine of their CLIP embeddings (arXiv:2103.00020), -1 to 1.

metadata["reference"] is the reference's path. A copy of it scores 1. The prompt does not count.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import to_pictures
from flow_grpo.base.quoting import quoted
from flow_grpo.rewards.clip_model import embed, in_batches, load_clip

MODEL = "openai/clip-vit-large-patch14"
RANGE = (-1.0, 1.0)


def check_prompts(prompts: Sequence[str], metadata: Sequence[dict]) -> None:
    """Raises UserError for the first prompt without a reference."""
    for prompt, data in zip(prompts, metadata, strict=True):
        _reference(prompt, data)


def load(device: torch.device | str, model: str = MODEL, folder: str = "."):
    """The scorer, in float32 on `device`; a reference is read and embedded once.

    Args:
        model: hub id or folder of a CLIPModel and its CLIPProcessor.
        folder: what the references' paths are relative to.

    Raises:
        UserError: missing weights or processor; when scoring, no reference or none that can be read.
    """
    clip, prepare = load_clip("image_similarity", model, model, device)
    known = {}  # path -> embedding

    def embedding(path: Path) -> Tensor:
        if path not in known:
            known[path] = embed(clip, prepare, [_read(path)])[0]
        return known[path]

    @torch.no_grad()
    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """Images [B, 3, H, W] in [0, 1] -> [B] float32."""
        paths = [Path(folder, _reference(prompt, data)) for prompt, data in zip(prompts, metadata, strict=True)]
        wanted = torch.stack([embedding(path) for path in paths])
        embeddings = in_batches(lambda part: embed(clip, prepare, to_pictures(part)), images)
        return (embeddings * wanted).sum(1).clamp(*RANGE)

    return score


def _reference(prompt: str, metadata: dict) -> str:
    reference = metadata.get("reference")
    if not isinstance(reference, str):
        raise UserError(f"reward image_similarity needs the path metadata['reference'], which {quoted(prompt)} has not")
    return reference


def _read(path: Path) -> Image.Image:
    try:
        with Image.open(path) as picture:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except OSError as error:
        raise UserError(f"reward image_similarity cannot read the reference {path}: {error}") from error
