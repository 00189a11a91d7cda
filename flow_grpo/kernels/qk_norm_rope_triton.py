"""Triton kernels of `qk_norm_rope`: a program for each token, which holds its heads in registers.

Nothing depends on other tokens or rows, or on how many there are: a row's bits are the same in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def join(tokens: list[Tensor], weights: list[Tensor], angles: list[Tensor], eps: float) -> Tensor:
    """As `qk_norm_rope.norm_rotate_join`."""
    num_rows, _, *head = tokens[0].shape
    joint = tokens[0].new_empty(num_rows, sum(x.shape[1] for x in tokens), *head)
    first = 0
    for x, weight, turns in zip(tokens, weights, angles):
        _launch(_join, joint, first, (x.contiguous(), weight, torch.view_as_real(turns).contiguous(), joint), eps)
        first += x.shape[1]
    return joint


def split_gradient(
    grad: Tensor, tokens: list[Tensor], weights: list[Tensor], angles: list[Tensor], eps: float
) -> list[Tensor]:
    """As `qk_norm_rope.norm_rotate_join_backward`."""
    grad, gradients = grad.contiguous(), []
    first = 0
    for x, weight, turns in zip(tokens, weights, angles):
        gradients.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        tensors = x.contiguous(), weight, torch.view_as_real(turns).contiguous(), grad, gradients[-1]
        _launch(_split_gradient, grad, first, tensors, eps)
        first += x.shape[1]
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
    token, at, joint_at, valid = _places(tokens, joint_tokens, first, HEADS, PADDED, WIDTH)
    values = tl.load(x + at, valid, 0.0).to(tl.float32)
    normed = values * _scale(values, eps, WIDTH) * _row(weight, WIDTH)
    turned = _turned(normed, angles + token * WIDTH, 1.0, PADDED, WIDTH)
    tl.store(joint + joint_at, turned.to(joint.dtype.element_ty), valid)


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
    token, at, joint_at, valid = _places(tokens, joint_tokens, first, HEADS, PADDED, WIDTH)
    turned = tl.load(grad + joint_at, valid, 0.0).to(tl.float32)
    of_weighted = _turned(turned, angles + token * WIDTH, -1.0, PADDED, WIDTH)
    of_normed = of_weighted * _row(weight, WIDTH)
    values = tl.load(x + at, valid, 0.0).to(tl.float32)
    scale = _scale(values, eps, WIDTH)
    normed = values * scale
    of_x = scale * (of_normed - normed * (tl.sum(of_normed * normed, 1) / WIDTH)[:, None])
    tl.store(out + at, of_x.to(out.dtype.element_ty), valid)


@triton.jit
def _places(tokens, joint_tokens, first, HEADS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """This program's token; where its [PADDED, WIDTH] numbers lie, alone and joint; which of them there are."""
    place = tl.program_id(0).to(tl.int64)
    token = place % tokens
    inside = tl.arange(0, PADDED)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    size = HEADS * WIDTH
    joint_place = place // tokens * joint_tokens + first + token
    return token, place * size + inside, joint_place * size + inside, inside < size


@triton.jit
def _row(weight, WIDTH: tl.constexpr):
    return tl.load(weight + tl.arange(0, WIDTH)).to(tl.float32)[None, :]


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
