"""Matrix products of 8-bit floats (arXiv:2209.05433), for forwards whose velocity enters no log-prob."""

import torch
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa
LARGEST = torch.finfo(E4M3).max  # 448


def check_device(device: torch.device) -> None:
    """Raises ValueError for a GPU without such products: they came with compute capability 8.9 (Ada, Hopper)."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"config.sample.merged_precision 'fp8': {name} has no products of 8-bit floats")


class Float8Linear(nn.Module):
    """x W^T + b of 8-bit rows of x and W, each with a float32 scale; sums in float32, result of the weight's dtype.

    Args:
        weight: [out, in], both multiples of 16.
        bias: [out] or None.
        dtype: of the result.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        rows, scale = quantise(weight)
        self.register_buffer("rows", rows)
        self.register_buffer("scale", scale.T.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.bfloat16))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows, scale = quantise(x.flatten(0, -2))
        # Of rows with scales there are bfloat16 results alone. Fast sums keep 14 bits, more than the rows do. The
        # public torch.nn.functional.scaled_mm would do the same, but breaks a compiled block in parts (torch 2.11).
        out = torch._scaled_mm(
            rows,
            self.rows.T,
            scale_a=scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out.unflatten(0, x.shape[:-1]).to(self.dtype)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] -> e4m3 [n, k] and float32 scales [n, 1], whose product is x to 4 bits; a row's largest becomes 448."""
    largest = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12)
    return (x.float() * (LARGEST / largest)).to(E4M3), largest / LARGEST
