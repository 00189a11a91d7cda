"""EditReward (arXiv:2509.26346): how well an edit is done, by a VLM trained on people's choices.

A score is the mean of the predicted preference, unbounded. It sees the first of a prompt's sources.
"""

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import to_pictures
from flow_grpo.rewards.clip_model import optional_package

INSTALL = "pip install the repository TIGER-AI-Lab/EditReward in an environment of its own, and serve it from there"


def load(device: torch.device | str, checkpoint: str, config: str):
    """The scorer, on `device`. Raises UserError: no package.

    Args:
        checkpoint: folder with the model.safetensors of TIGER-Lab/EditReward-Qwen2.5-VL-7B.
        config: the repository's YAML file for it, which also names the base model.
    """
    for name in ("EditReward", "EditReward.inference_edit"):
        package = optional_package("editreward", name, INSTALL)
    how = dict(reward_dim="overall_detail", rm_head_type="ranknet_multi_head")
    judge = package.EditRewardInferencer(config, checkpoint, device=device, **how)

    def score(images: Tensor, prompts: list[str], metadata: list[dict], sources: list[list[Tensor]]) -> Tensor:
        """[B], an image per forward, so that no score depends on its neighbours."""
        if not all(sources):
            raise UserError("editreward compares an image with its source, but there is a prompt without one")
        scores = []
        for picture, prompt, (source, *_) in zip(to_pictures(images), prompts, sources, strict=True):
            output = judge.reward(prompts=[prompt], image_src=to_pictures(source[None]), image_paths=[picture])
            scores.append(output[0][0].float())
        return torch.stack(scores)

    return score
