"""Images of floats as the bytes that files and image libraries take."""

import numpy as np
from PIL import Image
from torch import Tensor


def to_uint8(images: Tensor) -> np.ndarray:
    """[..., 3, H, W] in [0, 1] -> [..., H, W, 3] of 0 to 255, on the CPU."""
    return images.detach().float().clamp(0, 1).mul(255).round().byte().movedim(-3, -1).cpu().numpy()


def to_pictures(images: Tensor) -> list[Image.Image]:
    """[B, 3, H, W] in [0, 1] -> B pictures of 8 bits a channel."""
    return [Image.fromarray(pixels) for pixels in to_uint8(images)]
