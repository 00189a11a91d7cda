"""Floats become the nearest byte."""

import torch

from flow_grpo.base.pixels import to_uint8


def test_every_byte_comes_back_from_its_float_with_colours_last():
    images = (torch.arange(256 * 3).view(1, 3, 16, 16) % 256).float() / 255
    pixels = to_uint8(images + 0.4 / 255)
    assert (pixels == (images * 255).round().permute(0, 2, 3, 1).numpy()).all()
    assert (to_uint8(images[0] - 0.4 / 255) == pixels[0]).all()


def test_what_is_outside_is_black_or_full():
    assert to_uint8(torch.tensor([-0.5, 0.5, 1.5]).view(3, 1, 1)).tolist() == [[[0, 128, 255]]]
