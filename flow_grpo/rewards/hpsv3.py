"""HPSv3 (arXiv:2508.03789): people's preference for an image of a prompt, by a Qwen2-VL 7B trained on their choices.

A score is the mean mu of the predicted preference, unbounded. `sigma`, its standard deviation, is logged beside it. The
package hpsv3 pins transformers 4.45.2.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.base.pixels import to_pictures
from flow_grpo.rewards.clip_model import optional_package

INSTALL = "pip install hpsv3 in an environment of its own, as it pins transformers 4.45.2, and serve it from there"


def load(
    device: torch.device | str, checkpoint: str | None = None, config: str | None = None
) -> Callable[..., dict[str, Tensor]]:
    """Return the scorer, in bfloat16 on `device`. Raise UserError if the package is missing.

    Args:
        checkpoint: local HPSv3.safetensors; the hub's MizzenAI/HPSv3 unless given.
        config: the package's YAML file, which also names the base model; its own HPSv3_7B.yaml unless given.
    """
    package = optional_package("hpsv3", "hpsv3", INSTALL)
    judge = package.HPSv3RewardInferencer(config_path=config, checkpoint_path=checkpoint, device=device)

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> dict[str, Tensor]:
        """Return mean and standard deviation of images [B, 3, H, W] in [0, 1], [B] each."""
        # One image per forward: in bfloat16 a score would depend on its neighbours.
        pairs = zip(to_pictures(images), prompts, strict=True)
        outputs = [judge.reward(image_paths=[picture], prompts=[prompt]) for picture, prompt in pairs]
        mu, log_sigma = torch.cat(outputs).float().unbind(1)
        return {"score": mu, "sigma": log_sigma.exp()}

    return score
