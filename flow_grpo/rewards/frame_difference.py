"""Difference of a video's neighbouring frames: how much it moves, 0 for a still picture, whatever the prompt.

It takes whole videos, needs no model, and is for watching (`eval.rewards`): rewards of images, which score frames, do
not see that videos have come to stand still. Frames are compared in blocks of 8 x 8 pixels, in which noise averages
out. Flicker and a moving camera count, too, so that a run that trains on it alone learns to flicker.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 8  # pixels
RANGE = (0.0, 1.0)


def load(device: torch.device) -> Callable[..., Tensor]:
    """Return the scorer. There is nothing to load."""
    return score


def score(videos: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """Return the mean absolute difference of neighbouring frames of videos [B, f, 3, H, W] in [0, 1], [B] float32; 0 of
    a single frame."""
    num_videos, num_frames = videos.shape[:2]
    if num_frames == 1:
        return videos.new_zeros(num_videos, dtype=torch.float32)
    blocks = F.avg_pool2d(videos.float().flatten(0, 1), BLOCK).unflatten(0, (num_videos, num_frames))
    return blocks.diff(dim=1).abs().mean((1, 2, 3, 4))
