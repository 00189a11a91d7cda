"""Conversion of images between float tensors in [0, 1] and the bytes that files and image libraries take."""

import math
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flow_grpo.base.prompt import Prompt

STRIP_FRAMES = 4
STRIP_GAP = 1 / 48  # between two frames of a strip, of a frame's width
FRAMES_PER_S = 16  # of animations, as of Wan's videos


def to_uint8(images: Tensor) -> np.ndarray:
    """Return [..., 3, H, W] in [0, 1] as [..., H, W, 3] of 0 to 255, on the CPU."""
    rounded = images.detach().float().clamp(0, 1).mul_(255).round_().byte()
    return rounded.movedim(-3, -1).contiguous().cpu().numpy()


def from_picture(picture: Image.Image) -> Tensor:
    """Return an RGB picture of 8 bits a channel as [3, H, W] float32 in [0, 1]."""
    pixels = torch.from_numpy(np.array(picture))
    return pixels.permute(2, 0, 1) / 255


def beside_sources(images: Tensor, prompts: list[Prompt]) -> Tensor:
    """Return images [B, 3, H, W] or videos [B, f, 3, H, W] for a contact sheet, each with what its prompt edits, if
    anything, to the left of it.

    Each source is padded to the image's size.
    """
    height, width = images.shape[-2:]
    rows = []
    for image, prompt in zip(images, prompts, strict=True):
        row = []
        for picture in prompt.pictures():
            padded = ImageOps.pad(picture, (width, height), color="white")
            row.append(from_picture(padded).to(image).expand_as(image))
        rows.append(torch.cat([*row, image], -1))
    return torch.stack(rows)


def film_strips(images: Tensor) -> Tensor:
    """Return images [B, 3, H, W] as they are, and of videos [B, f, 3, H, W] up to STRIP_FRAMES frames at equal
    distances side by side, [B, 3, H, n W and the gaps], with white between them: where a shape is in its frame is what
    a video is about."""
    if images.ndim == 4:
        return images
    first, *later_frames = some_frames(images, STRIP_FRAMES).unbind(1)
    gap = torch.ones_like(first[..., : math.ceil(first.shape[-1] * STRIP_GAP)])
    parts = [first]
    for frame in later_frames:
        parts += [gap, frame]
    return torch.cat(parts, -1)


def some_frames(videos: Tensor, most: int) -> Tensor:
    """Return at most `most` frames of videos [B, f, 3, H, W] at equal distances, [B, n, 3, H, W]: the first and the
    last among them, or the middle one alone."""
    num_frames = videos.shape[1]
    places = torch.linspace(0, num_frames - 1, min(most, num_frames)).round().long()
    if most == 1:
        places = torch.tensor([num_frames // 2])
    return videos[:, places.to(videos.device)]


def motion(frames: list[Image.Image]) -> dict[str, Any]:
    """Return how Pillow saves the first frame of an animation with the others, as WebP or PNG; nothing for a still."""
    later_frames = frames[1:]
    if not later_frames:
        return {}
    return dict(save_all=True, append_images=later_frames, duration=1000 / FRAMES_PER_S, loop=0)


def to_pictures(images: Tensor) -> list[Image.Image]:
    """Return [B, 3, H, W] in [0, 1] as B pictures of 8 bits a channel."""
    return [Image.fromarray(pixels) for pixels in to_uint8(images)]
