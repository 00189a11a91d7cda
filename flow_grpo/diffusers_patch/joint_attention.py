"""Queries or keys of text and image tokens, normed, rotated and joined by one kernel: each is read and written once,
where the compiler's kernels do so several times.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


# torch's cache of compiled graphs knows an operation by its name alone: whoever changes what is registered below, its
# gradient or its shapes, changes the number, too.
@torch.library.custom_op("flow_grpo::norm_rotate_join_1", mutates_args=())
def norm_rotate_join(
    text: Tensor,
    image: Tensor,
    text_weight: Tensor,
    image_weight: Tensor,
    text_angles: Tensor,
    image_angles: Tensor,
    eps: float,
) -> Tensor:
    """Queries or keys of text and image tokens, each head's RMS-normed (arXiv:1910.07467) and rotated by its token's
    angles (RoPE, arXiv:2104.09864), text first. Computed in float32, rounded once; the weights get no gradient.

    Args:
        text, image: [B, T, H, D] and [B, N, H, D]; D is a power of 2.
        text_weight, image_weight: [D], of the norms.
        text_angles, image_angles: [T, D / 2] and [N, D / 2] complex64, of modulus 1, for neighbours of a head.
        eps: of the norms.

    Returns:
        [B, T + N, H, D], in the dtype of `image`.
    """
    weights, angles = (text_weight, image_weight), (text_angles, image_angles)
    if image.is_cuda:
        return _kernels().join((text, image), weights, angles, eps)
    return torch.cat([rotate(norm(x, w, eps), a) for x, w, a in zip((text, image), weights, angles)], 1).to(image.dtype)


@torch.library.custom_op("flow_grpo::norm_rotate_join_backward_1", mutates_args=())
def norm_rotate_join_backward(
    grad: Tensor,
    text: Tensor,
    image: Tensor,
    text_weight: Tensor,
    image_weight: Tensor,
    text_angles: Tensor,
    image_angles: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of `text` and `image`, from that of the joint tensor."""
    sources, weights = (text, image), (text_weight, image_weight)
    angles = (text_angles, image_angles)
    if image.is_cuda:
        return _kernels().split_gradient(grad, sources, weights, angles, eps)
    parts = grad.split([text.shape[1], image.shape[1]], 1)
    return tuple(
        norm_gradient(rotate(part, a.conj()), x, w, eps).to(x.dtype)
        for part, x, w, a in zip(parts, sources, weights, angles)
    )


def _kernels():
    from flow_grpo.diffusers_patch import joint_kernels  # Triton comes with torch for CUDA alone

    return joint_kernels


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
def _(text, image, text_weight, image_weight, text_angles, image_angles, eps):
    return image.new_empty(len(image), text.shape[1] + image.shape[1], *image.shape[2:])


@norm_rotate_join_backward.register_fake
def _(grad, text, image, text_weight, image_weight, text_angles, image_angles, eps):
    return text.new_empty(text.shape), image.new_empty(image.shape)


def _keep(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    gradients = norm_rotate_join_backward(grad, *ctx.saved_tensors, ctx.eps)
    return *gradients, None, None, None, None, None


norm_rotate_join.register_autograd(_backward, setup_context=_keep)
