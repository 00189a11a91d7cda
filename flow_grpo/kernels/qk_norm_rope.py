"""Queries or keys of text and image tokens, normed, rotated and joined by one kernel: each is read and written once,
where the compiler's kernels do so several times.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.base import checksums

# torch's cache of compiled graphs knows an operation by its name alone, whatever its gradient and its shapes are now.
VERSION = checksums.file_digest(Path(__file__))[:8]


@torch.library.custom_op(f"flow_grpo::norm_rotate_join_{VERSION}", mutates_args=())
def norm_rotate_join(tokens: list[Tensor], weights: list[Tensor], angles: list[Tensor], eps: float) -> Tensor:
    """Queries or keys of the parts of a sequence, such as text and image: each head's RMS-normed (arXiv:1910.07467) and
    rotated by its token's angles (RoPE, arXiv:2104.09864). Computed in float32, rounded once.

    Args:
        tokens: [B, L, H, D] of each part; D is a power of 2.
        weights: [D] of each part's norm; they get no gradient.
        angles: [L, D / 2] complex64 of each part, of modulus 1, for neighbours of a head.
    Returns:
        [B, sum of L, H, D], in the dtype of the tokens.
    """
    if tokens[0].is_cuda:
        return _kernels().join(tokens, weights, angles, eps)
    parts = [rotate(norm(x, weight, eps), turns) for x, weight, turns in zip(tokens, weights, angles)]
    return torch.cat(parts, 1).to(tokens[0].dtype)


@torch.library.custom_op(f"flow_grpo::norm_rotate_join_backward_{VERSION}", mutates_args=())
def norm_rotate_join_backward(
    grad: Tensor, tokens: list[Tensor], weights: list[Tensor], angles: list[Tensor], eps: float
) -> list[Tensor]:
    """Gradients of the tokens, from that of the joint tensor."""
    if grad.is_cuda:
        return _kernels().split_gradient(grad, tokens, weights, angles, eps)
    parts = grad.split([x.shape[1] for x in tokens], 1)
    return [
        norm_gradient(rotate(part, turns.conj()), x, weight, eps).to(x.dtype)
        for part, x, weight, turns in zip(parts, tokens, weights, angles)
    ]


def _kernels():
    from flow_grpo.kernels import qk_norm_rope_triton

    return qk_norm_rope_triton


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, float32."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps)


def norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of `norm` with respect to x, float32."""
    x, grad = x.float(), grad.float() * weight.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * scale
    return scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [B, L, H, D] by angles [L, D / 2] complex, float32."""
    pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[:, None]).flatten(-2)


@norm_rotate_join.register_fake
def _(tokens, weights, angles, eps):
    num_rows, _, *head = tokens[0].shape
    return tokens[0].new_empty(num_rows, sum(x.shape[1] for x in tokens), *head)


@norm_rotate_join_backward.register_fake
def _(grad, tokens, weights, angles, eps):
    return [x.new_empty(x.shape) for x in tokens]


def _keep(ctx, inputs, output):
    tokens, weights, angles, ctx.eps = inputs
    ctx.save_for_backward(*tokens, *weights, *angles)


def _backward(ctx, grad):
    saved = ctx.saved_tensors
    count = len(saved) // 3
    tokens, weights, angles = (list(saved[first : first + count]) for first in range(0, len(saved), count))
    return norm_rotate_join_backward(grad, tokens, weights, angles, ctx.eps), [None] * count, [None] * count, None


norm_rotate_join.register_autograd(_backward, setup_context=_keep)
