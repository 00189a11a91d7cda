"""Images of floats as the bytes that files and image libraries take."""

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flow_grpo.base.prompt import Prompt


def to_uint8(images: Tensor) -> np.ndarray:
    """[..., 3, H, W] in [0, 1] -> [..., H, W, 3] of 0 to 255, on the CPU."""
    return images.detach().float().clamp(0, 1).mul_(255).round_().byte().movedim(-3, -1).contiguous().cpu().numpy()


def from_picture(picture: Image.Image) -> Tensor:
    """A picture of 8 bits a channel, RGB -> [3, H, W] float32 in [0, 1]."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255


def beside_sources(images: Tensor, prompts: list[Prompt]) -> Tensor:
    """Images [B, 3, H, W] to show, each behind what its prompt edits, if anything, at the image's height."""
    rows, (height, width) = [], images.shape[2:]
    for image, prompt in zip(images, prompts, strict=True):
        pictures = [ImageOps.pad(picture, (width, height), color="white") for picture in prompt.pictures()]
        rows.append(torch.cat([*(from_picture(picture).to(image) for picture in pictures), image], 2))
    return torch.stack(rows)


def to_pictures(images: Tensor) -> list[Image.Image]:
    """[B, 3, H, W] in [0, 1] -> B pictures of 8 bits a channel."""
    return [Image.fromarray(pixels) for pixels in to_uint8(images)]
