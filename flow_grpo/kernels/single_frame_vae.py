"""Qwen-Image's VAE for single frames: it is a causal video model, whose 3-D convolutions of one frame are 2-D ones."""

from functools import partial
from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor
from torch.nn import functional as F


def convolve_in_2d(vae: Any) -> None:
    """Make the decoder skip the time slices of its kernels that meet nothing but zero padding, in place.

    For one frame a kernel's last slice alone counts, a third of the work with the same result up to rounding. More
    frames go the usual way, and a VAE without such convolutions stays as it is.
    """
    for module in [*vae.decoder.modules(), getattr(vae, "post_quant_conv", None)]:
        if isinstance(module, QwenImageCausalConv3d):
            module.forward = partial(_forward, module)


def _forward(conv: QwenImageCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """Convolve videos [B, C, T, H, W], by a convolution of images where T = 1."""
    if x.shape[2] != 1 or cache_x is not None or conv.stride != (1, 1, 1):
        return QwenImageCausalConv3d.forward(conv, x, cache_x)
    left, _, top, *_ = map(int, conv._padding)
    frame = x[:, :, 0]
    # The convolution is causal: the kernel's last slice is the present frame's.
    kernel = conv.weight[:, :, -1]
    return F.conv2d(frame, kernel, conv.bias, padding=(top, left))[:, :, None]
