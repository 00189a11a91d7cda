"""Queries or keys of text and image tokens, normed, rotated and joined by one kernel: each is read and written once,
where the compiler's kernels do so several times.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.base import checksums

# torch's cache of compiled graphs knows an operation by its name alone, whatever its gradient and its shapes are now.
VERSION = checksums.file_digest(Path(__file__))[:8]


@torch.library.custom_op(f"flow_grpo::norm_rotate_join_{VERSION}", mutates_args=())
def norm_rotate_join(tokens: list[Tensor], weights: list[Tensor], angles: list[Tensor], eps: float) -> Tensor:
    """Join queries or keys of the parts of a sequence, such as text and image: each head's RMS-normed
    (arXiv:1910.07467) and rotated by its token's angles (RoPE, arXiv:2104.09864). Computed in float32, rounded once.

    Args:
        tokens: [B, L, H, D] of each part; D is a power of 2.
        weights: [D] of each part's norm; they get no gradient.
        angles: [L, D / 2] complex64 of each part, of modulus 1, for neighbours of a head.
    Returns:
        [B, sum of L, H, D], in the dtype of the tokens.
    """
    if tokens[0].is_cuda:
        return _kernels().join(tokens, weights, angles, eps)
    parts = []
    for x, weight, part_angles in zip(tokens, weights, angles):
        parts.append(rotate(norm(x, weight, eps), part_angles))
    return torch.cat(parts, 1).to(tokens[0].dtype)


@torch.library.custom_op(f"flow_grpo::norm_rotate_join_backward_{VERSION}", mutates_args=())
def norm_rotate_join_backward(
    grad: Tensor, tokens: list[Tensor], weights: list[Tensor], angles: list[Tensor], eps: float
) -> list[Tensor]:
    """Compute gradients of the tokens, from that of the joint tensor."""
    if grad.is_cuda:
        return _kernels().split_gradient(grad, tokens, weights, angles, eps)
    parts = grad.split([x.shape[1] for x in tokens], 1)
    gradients = []
    for part, x, weight, part_angles in zip(parts, tokens, weights, angles):
        # A rotation's gradient is the rotation back.
        grad_of_norm = rotate(part, part_angles.conj())
        gradients.append(norm_gradient(grad_of_norm, x, weight, eps).to(x.dtype))
    return gradients


def _kernels() -> ModuleType:
    """Import the Triton kernels: machines without a GPU have no Triton."""
    from flow_grpo.kernels import qk_norm_rope_triton

    return qk_norm_rope_triton


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, float32."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps)


def norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gradient of `norm` with respect to x, float32: s (g w - n mean(g w n)), with the inverse RMS s of x and n = s x.

    Args:
        grad: g, of the result of `norm`, in the shape of x.
        weight: w.
    """
    x = x.float()
    grad_normed = grad.float() * weight.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * scale
    return scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x [B, L, H, D] by angles [L, D / 2] complex, float32."""
    pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[:, None]).flatten(-2)


@norm_rotate_join.register_fake
def _(tokens: list[Tensor], weights: list[Tensor], angles: list[Tensor], eps: float) -> Tensor:
    num_rows, _, num_heads, width = tokens[0].shape
    num_tokens = sum(x.shape[1] for x in tokens)
    return tokens[0].new_empty(num_rows, num_tokens, num_heads, width)


@norm_rotate_join_backward.register_fake
def _(grad: Tensor, tokens: list[Tensor], weights: list[Tensor], angles: list[Tensor], eps: float) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tokens]


def _keep(ctx: Any, inputs: tuple[list[Tensor], list[Tensor], list[Tensor], float], output: Tensor) -> None:
    tokens, weights, angles, eps = inputs
    ctx.save_for_backward(*tokens, *weights, *angles)
    ctx.eps = eps


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], list[None], list[None], None]:
    saved = list(ctx.saved_tensors)
    num_parts = len(saved) // 3
    tokens = saved[:num_parts]
    weights = saved[num_parts : 2 * num_parts]
    angles = saved[2 * num_parts :]
    gradients = norm_rotate_join_backward(grad, tokens, weights, angles, ctx.eps)
    return gradients, [None] * num_parts, [None] * num_parts, None


norm_rotate_join.register_autograd(_backward, setup_context=_keep)
