"""ImageReward (arXiv:2304.05977): people's preference for an image of a prompt, by a BLIP trained on their rankings.

Standardised by the authors to mean 0 and standard deviation 1, so mostly -2 to 2, and unbounded. Only 35 tokens of the
prompt count. It comes in the package image-reward, which needs a transformers older than 5.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.base.pixels import to_pictures
from flow_grpo.rewards.clip_model import optional_package

MODEL = "ImageReward-v1.0"
INSTALL = (
    "pip install image-reward, and transformers older than 5, in an environment of its own, and serve it from there"
)


def load(device: torch.device | str, model: str = MODEL, folder: str | None = None) -> Callable[..., Tensor]:
    """Return the scorer, on `device`. Raise UserError if the package is missing.

    Args:
        model: name that the package knows, or a local checkpoint.
        folder: folder with ImageReward.pt and med_config.json; ~/.cache/ImageReward unless given.
    """
    package = optional_package("imagereward", "ImageReward", INSTALL)
    judge = package.load(model, device=device, download_root=folder).requires_grad_(False)

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """Return the scores of images [B, 3, H, W] in [0, 1], [B] float32, with one image per forward."""
        return torch.tensor(list(map(judge.score, prompts, to_pictures(images))))

    return score
