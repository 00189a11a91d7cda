"""EditReward (arXiv:2509.26346): people's preference for an edit, by a VLM trained on their choices.

A score is the mean of the predicted preference, unbounded. The model sees the first of a prompt's sources.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import to_pictures
from flow_grpo.rewards.clip_model import optional_package

INSTALL = "pip install the repository TIGER-AI-Lab/EditReward in an environment of its own, and serve it from there"


def load(device: torch.device | str, checkpoint: str, config: str) -> Callable[..., Tensor]:
    """Return the scorer, on `device`. Raise UserError if the package is missing.

    Args:
        checkpoint: folder with the model.safetensors of TIGER-Lab/EditReward-Qwen2.5-VL-7B.
        config: the repository's YAML file for it, which also names the base model.
    """
    optional_package("editreward", "EditReward", INSTALL)
    package = optional_package("editreward", "EditReward.inference_edit", INSTALL)
    judge = package.EditRewardInferencer(
        config, checkpoint, device=device, reward_dim="overall_detail", rm_head_type="ranknet_multi_head"
    )

    def score(images: Tensor, prompts: list[str], metadata: list[dict], sources: list[list[Tensor]]) -> Tensor:
        """Return the scores of images [B, 3, H, W] in [0, 1], [B]; one image per forward, whatever its neighbours."""
        if not all(sources):
            raise UserError("editreward compares an image with its source, but there is a prompt without one")
        scores = []
        for picture, prompt, prompt_sources in zip(to_pictures(images), prompts, sources, strict=True):
            source = to_pictures(prompt_sources[0][None])
            output = judge.reward(prompts=[prompt], image_src=source, image_paths=[picture])
            scores.append(output[0][0].float())
        return torch.stack(scores)

    return score
