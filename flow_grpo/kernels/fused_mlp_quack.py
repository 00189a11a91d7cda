"""The GPU's form of `fused_mlp.gelu_of_product`: a product of quack-kernels and what becomes of its sums."""

import torch
from quack.activation import gelu_tanh_approx
from quack.epilogue import gemm_epilogue
from quack.epilogue.ops import ColVecLoad, RowVecLoad
from torch import Tensor

TILE, CLUSTER = (128, 208), (2, 1)  # the fastest of six forms at 24576 x 3072 x 12288
FAST_SUMS = (("fp8_slow_accum", False),)  # 14 bits, as in torch's products


def gelu_of_product(
    rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, factor: Tensor
) -> Tensor:
    """As `fused_mlp.gelu_of_product`."""
    out = torch.empty(len(rows), len(weight), dtype=rows.dtype, device=rows.device)
    _gelu_1.gemm(
        rows,
        weight,
        out,
        epi_args=dict(row_scale=row_scale.T, scale=scale.T, bias=bias[None], factor=factor.T),
        tile_M=TILE[0],
        tile_N=TILE[1],
        cluster_M=CLUSTER[0],
        cluster_N=CLUSTER[1],
        pingpong=True,
        post_init_attrs=FAST_SUMS,
    )
    return out


# quack keeps compiled kernels on the disk and knows them by this name: whoever changes the function changes the number.
@gemm_epilogue(
    ops={name: ColVecLoad(name) for name in ("row_scale", "factor")}
    | {name: RowVecLoad(name) for name in ("scale", "bias")}
)
def _gelu_1(acc, row_scale, scale, bias, factor):
    return {"D": gelu_tanh_approx(acc * row_scale * scale + bias) * factor}
