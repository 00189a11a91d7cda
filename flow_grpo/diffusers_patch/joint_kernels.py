"""Triton kernels of `joint_attention`: a program for each token, which holds its heads in registers.

Nothing depends on other tokens or rows, or on how many there are: a row's bits are the same in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def join(
    sources: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """As `joint_attention.norm_rotate_join`; each pair is of text and image."""
    text, image = sources
    joint = image.new_empty(len(image), text.shape[1] + image.shape[1], *image.shape[2:])
    for x, weight, turns, first in zip(sources, weights, angles, (0, text.shape[1])):
        _launch(_join, joint, first, (x.contiguous(), weight, torch.view_as_real(turns).contiguous(), joint), eps)
    return joint


def split_gradient(
    grad: Tensor,
    sources: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As `joint_attention.norm_rotate_join_backward`."""
    grad, sources = grad.contiguous(), [x.contiguous() for x in sources]
    gradients = tuple(torch.empty_like(x) for x in sources)
    for x, weight, turns, out, first in zip(sources, weights, angles, gradients, (0, sources[0].shape[1])):
        tensors = x, weight, torch.view_as_real(turns).contiguous(), grad, out
        _launch(_split_gradient, grad, first, tensors, eps)
    return gradients


def _launch(kernel, joint: Tensor, first: int, tensors: tuple[Tensor, ...], eps: float) -> None:
    num_rows, num_tokens, heads, width = tensors[0].shape
    kernel[(num_rows * num_tokens,)](
        *tensors,
        eps,
        num_tokens,
        joint.shape[1],
        first,
        HEADS=heads,
        PADDED=triton.next_power_of_2(heads),
        WIDTH=width,
    )


@triton.jit
def _join(
    x,
    weight,
    angles,
    joint,
    eps,
    tokens,
    joint_tokens,
    first,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    token, joint_place = place % tokens, place // tokens * joint_tokens + first + place % tokens
    column = tl.arange(0, WIDTH)
    inside = tl.arange(0, PADDED)[:, None] * WIDTH + column[None, :]
    valid = inside < HEADS * WIDTH
    values = tl.load(x + place * HEADS * WIDTH + inside, valid, 0.0).to(tl.float32)
    normed = values * _scale(values, eps, WIDTH) * tl.load(weight + column).to(tl.float32)[None, :]
    turned = _turned(normed, angles + token * WIDTH, 1.0, PADDED, WIDTH)
    tl.store(joint + joint_place * HEADS * WIDTH + inside, turned.to(joint.dtype.element_ty), valid)


@triton.jit
def _split_gradient(
    x,
    weight,
    angles,
    grad,
    out,
    eps,
    tokens,
    joint_tokens,
    first,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    token, joint_place = place % tokens, place // tokens * joint_tokens + first + place % tokens
    column = tl.arange(0, WIDTH)
    inside = tl.arange(0, PADDED)[:, None] * WIDTH + column[None, :]
    valid = inside < HEADS * WIDTH
    turned = tl.load(grad + joint_place * HEADS * WIDTH + inside, valid, 0.0).to(tl.float32)
    of_weighted = _turned(turned, angles + token * WIDTH, -1.0, PADDED, WIDTH)
    of_normed = of_weighted * tl.load(weight + column).to(tl.float32)[None, :]
    values = tl.load(x + place * HEADS * WIDTH + inside, valid, 0.0).to(tl.float32)
    scale = _scale(values, eps, WIDTH)
    normed = values * scale
    of_x = scale * (of_normed - normed * (tl.sum(of_normed * normed, 1) / WIDTH)[:, None])
    tl.store(out + place * HEADS * WIDTH + inside, of_x.to(out.dtype.element_ty), valid)


@triton.jit
def _scale(values, eps, WIDTH: tl.constexpr):
    return tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)[:, None]


@triton.jit
def _turned(values, angles, sense, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Neighbours of [PADDED, WIDTH] as complex numbers, times the token's, or its conjugates where `sense` is -1."""
    pair = 2 * tl.arange(0, WIDTH // 2)
    cos, sin = tl.load(angles + pair)[None, :], sense * tl.load(angles + pair + 1)[None, :]
    real, imaginary = tl.split(tl.reshape(values, [PADDED, WIDTH // 2, 2]))
    return tl.reshape(tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos), [PADDED, WIDTH])
