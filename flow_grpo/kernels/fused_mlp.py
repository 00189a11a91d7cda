"""A feed-forward of 8-bit rows, whose first product computes GELU and rounds it to 8 bits before anything is written:
the rows between its layers are written once and read once, with 8 bits a number."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.base import checksums
from flow_grpo.kernels import flash_attention
from flow_grpo.kernels.quantised_linear import (
    E4M3,
    LARGEST,
    SMALLEST_SCALE,
    EightBitLinear,
    padded,
    product_of_rows,
    quantise,
)

CAPABILITY = 9  # major, of H100 and H200, for which the tiles are chosen
GROWTH = 1 + 2**-4 + 2**-8  # of a number that is rounded to 8 bits, and of sums in 14


def available(attention: str, device: torch.device) -> bool:
    """Whether the kernel may be used: with FlashAttention-4, whose package brings quack-kernels, on a Hopper GPU.

    False, with a warning, where quack-kernels cannot be used.
    """
    on_gpu = attention == flash_attention.NAME and device.type == "cuda"
    if not on_gpu or torch.cuda.get_device_capability(device)[0] != CAPABILITY:
        return False
    return flash_attention.package_works("GELU is not computed inside 8-bit products", _kernels)


def feed_forward(x: Tensor, first: EightBitLinear, last: EightBitLinear) -> Tensor:
    """last(GELU(first(x))), without a gradient.

    A row's scale is chosen before the row is known, by a bound: |GELU(y)| <= |y| = |w x + b| <= |w| |x| + |b|, with the
    longest w and the largest b. With random weights it is 14 times a row's largest number, which costs the smallest
    numbers bits: e4m3 has its whole mantissa over a factor of 29,000. x [..., D] -> [..., D] in the dtype of `last`.
    """
    flat = padded(x.flatten(0, -2))
    largest = torch.linalg.vector_norm(flat.float(), dim=1, keepdim=True) * (GROWTH * first.longest)
    largest = (largest + first.bias.float().abs().max()).clamp(min=SMALLEST_SCALE)
    rows, scale = quantise(flat)
    rows = gelu_of_product(rows, scale, first.rows, first.scale, first.bias.float(), LARGEST / largest)
    out = product_of_rows(rows, largest / LARGEST, last.rows.T, last.scale.T, last.bias.to(torch.bfloat16))
    return out[: x[..., 0].numel()].unflatten(0, x.shape[:-1]).to(last.dtype)


VERSION = checksums.file_digest(Path(__file__))[:8]  # see qk_norm_rope.py


@torch.library.custom_op(f"flow_grpo::gelu_of_product_{VERSION}", mutates_args=())
def gelu_of_product(
    rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, factor: Tensor
) -> Tensor:
    """GELU by tanh (arXiv:1606.08415) of x W^T + b, times a factor for each row; e4m3 [n, m].

    Args:
        rows, row_scale: of x, e4m3 [n, k] and float32 [n, 1].
        weight, scale: of W, e4m3 [m, k] and float32 [m, 1].
        bias: [m] float32.
        factor: [n, 1] float32.
    """
    if rows.is_cuda:
        return _kernels().gelu_of_product(rows, row_scale, weight, scale, bias, factor)
    product = rows.float() @ weight.float().T * row_scale * scale.T + bias
    return (F.gelu(product, approximate="tanh") * factor).to(E4M3)


def _kernels():
    from flow_grpo.kernels import fused_mlp_quack

    return fused_mlp_quack


@gelu_of_product.register_fake
def _(rows, row_scale, weight, scale, bias, factor):
    return rows.new_empty(len(rows), len(weight))
