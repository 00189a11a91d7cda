"""Triton kernels of `qk_norm_rope`: a program for each token, which holds its heads in registers.

Nothing depends on other tokens or rows, or on how many there are: a row's bits are the same in any batch.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # it is there on GPUs alone
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


def join(tokens: list[Tensor], weights: list[Tensor], angles: list[Tensor], eps: float) -> Tensor:
    """Join as `qk_norm_rope.norm_rotate_join` does."""
    num_rows, _, num_heads, width = tokens[0].shape
    num_tokens = sum(x.shape[1] for x in tokens)
    joint = tokens[0].new_empty(num_rows, num_tokens, num_heads, width)
    # `first` is the token of the joint tensor at which a part begins.
    first = 0
    for x, weight, part_angles in zip(tokens, weights, angles):
        cos_sin = torch.view_as_real(part_angles).contiguous()
        _launch(_join, joint, first, (x.contiguous(), weight, cos_sin, joint), eps)
        first += x.shape[1]
    return joint


def split_gradient(
    grad: Tensor, tokens: list[Tensor], weights: list[Tensor], angles: list[Tensor], eps: float
) -> list[Tensor]:
    """Compute what `qk_norm_rope.norm_rotate_join_backward` does."""
    grad = grad.contiguous()
    gradients = []
    first = 0
    for x, weight, part_angles in zip(tokens, weights, angles):
        cos_sin = torch.view_as_real(part_angles).contiguous()
        gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(_split_gradient, grad, first, (x.contiguous(), weight, cos_sin, grad, gradient), eps)
        gradients.append(gradient)
        first += x.shape[1]
    return gradients


def _launch(kernel: Any, joint: Tensor, first: int, tensors: tuple[Tensor, ...], eps: float) -> None:
    """Run a kernel for one part of the sequence: a program for each of its tokens.

    Args:
        joint: [B, tokens of all parts, heads, width], for its number of tokens.
        first: token of `joint` at which the part begins.
        tensors: the kernel's, of which the first one is the part, [B, tokens, heads, width].
    """
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
    """Norm and rotate the heads of one token of `x`, into `joint`."""
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
    """Compute the gradient of one token of `x` from that of the joint tensor, into `out`."""
    token, at, joint_at, valid = _places(tokens, joint_tokens, first, HEADS, PADDED, WIDTH)
    grad_turned = tl.load(grad + joint_at, valid, 0.0).to(tl.float32)
    grad_of_norm = _turned(grad_turned, angles + token * WIDTH, -1.0, PADDED, WIDTH)
    grad_normed = grad_of_norm * _row(weight, WIDTH)
    values = tl.load(x + at, valid, 0.0).to(tl.float32)
    scale = _scale(values, eps, WIDTH)
    normed = values * scale
    grad_x = scale * (grad_normed - normed * (tl.sum(grad_normed * normed, 1) / WIDTH)[:, None])
    tl.store(out + at, grad_x.to(out.dtype.element_ty), valid)


@triton.jit
def _places(tokens, joint_tokens, first, HEADS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Return this program's token, the offsets of its numbers [PADDED, WIDTH] in the part's tensor and in the joint
    one, and a mask of those that exist: Triton takes powers of two, so PADDED heads, the first HEADS of which exist."""
    place = tl.program_id(0).to(tl.int64)
    token = place % tokens
    inside = tl.arange(0, PADDED)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    size = HEADS * WIDTH
    joint_place = place // tokens * joint_tokens + first + token
    return token, place * size + inside, joint_place * size + inside, inside < size


@triton.jit
def _row(weight, WIDTH: tl.constexpr):
    """Load a weight [WIDTH] as [1, WIDTH]."""
    return tl.load(weight + tl.arange(0, WIDTH)).to(tl.float32)[None, :]


@triton.jit
def _scale(values, eps, WIDTH: tl.constexpr):
    """Compute the inverse RMS [PADDED, 1] of each head."""
    return tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)[:, None]


@triton.jit
def _turned(values, angles, sense, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Rotate `values` [PADDED, WIDTH], whose neighbours are a complex number, by the token's angles, or back by them
    where `sense` is -1."""
    pair = 2 * tl.arange(0, WIDTH // 2)
    cos = tl.load(angles + pair)[None, :]
    sin = sense * tl.load(angles + pair + 1)[None, :]
    real, imaginary = tl.split(tl.reshape(values, [PADDED, WIDTH // 2, 2]))
    turned_real = real * cos - imaginary * sin
    turned_imaginary = real * sin + imaginary * cos
    return tl.reshape(tl.join(turned_real, turned_imaginary), [PADDED, WIDTH])
