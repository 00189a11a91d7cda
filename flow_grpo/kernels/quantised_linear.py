"""Linear layers that are not trained and keep their weights in 8 or 4 bits, with gradients of their inputs."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted
from flow_grpo.kernels import stochastic_rounding
from flow_grpo.kernels.one_kernel import one_kernel

# 4 bits of exponent, 3 of mantissa (arXiv:2209.05433). Its largest number is 448.
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
# Below so many rows reading W takes all of a product's time, and cuBLAS refuses some shapes.
FEW_ROWS = 128
# Not 0, so that a row or block of zeros stays one, and far below gradients, which may be as small as 1e-15.
SMALLEST_SCALE = 1e-30
# Weights of a scale, at most.
NF4_BLOCK = 64
# Quantiles of a normal distribution, with 0 among them (arXiv:2305.14314, appendix E).
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class QuantisedLinear(nn.Module):
    """Layer x W^T + b of a stored W [out, in] that gets no gradient; the result is of `dtype`. Its weight has no dtype
    that an optimizer or autocast would see, and is in no state dict: `store` fills it."""

    rounds_x = False  # whether x has 8 bits in products, too; for results that enter neither a log-prob nor a loss

    def __init__(
        self, out_features: int, in_features: int, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ):
        super().__init__()
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        for name, tensor in self.empty(device).items():
            self.register_buffer(name, tensor, persistent=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> "QuantisedLinear":
        """Make the quantised layer of a linear one; its weight is stored unless it is on the meta device."""
        weight = linear.weight
        out_features, in_features = weight.shape
        layer = cls(out_features, in_features, linear.bias, weight.dtype, weight.device)
        if not weight.is_meta:
            layer.store(weight.detach())
        return layer

    @property
    def shape(self) -> torch.Size:
        """Shape [out, in] of W."""
        return torch.Size((self.out_features, self.in_features))

    def empty(self, device: torch.device) -> dict[str, Tensor]:
        """Make the tensors that W is stored as, by name, without its numbers."""
        raise NotImplementedError

    def store(self, weight: Tensor) -> None:
        """Fill in W [out, in], of any floating dtype and from any device; no more of it than this lies beside it."""
        raise NotImplementedError


class EightBitLinear(QuantisedLinear):
    """Linear layer of W as rows of 8-bit floats, each with a float32 scale, unpacked for each product.

    Sides are multiples of 16.

    Where `rounds_x` says so, products are of 8-bit rows of x and of W, with sums in float32 and without gradients. An x
    of few rows, or of one vector per image (modulation), keeps its bits, which costs nothing there. Where
    `rounds_gradients` says so, the same holds for the gradient of x, while the product itself stays as it is.
    """

    rounds_gradients = False

    rows: Tensor  # [out, in] e4m3
    scale: Tensor  # [out, 1] f32

    def empty(self, device: torch.device) -> dict[str, Tensor]:
        """Make rows, and a scale of each."""
        if self.in_features % 16 or self.out_features % 16:
            raise UserError(f"a layer of {self.in_features} x {self.out_features} has no products of 8-bit floats")
        return dict(
            rows=torch.empty(self.shape, dtype=E4M3, device=device),
            scale=torch.empty(self.out_features, 1, device=device),
        )

    def store(self, weight: Tensor) -> None:
        """Quantise each row by its largest."""
        rows, scale = quantise(weight.to(self.rows.device))
        self.rows.copy_(rows)
        self.scale.copy_(scale)

    def store_sum(self, base: "EightBitLinear", change: Tensor) -> None:
        """Store W of `base` plus a change [out, in], which may be much smaller than a step of 8 bits.

        It is rounded stochastically, with the scales of `base`, or a power of two times these where a row outgrows
        them. So without a change it is `base`, number for number.
        """
        noise = stochastic_rounding.noise_like(change)
        rows, scale = _rounded_sum(change, base.rows, base.scale, noise)
        self.rows.copy_(rows)
        self.scale.copy_(scale)

    def forward(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out].

        Args:
            largest: [..., 1], an upper bound of each row's |x|, where the caller has one; read only where x is rounded.
        """
        # [B, in] is one vector per image (modulation), of which nothing is rounded.
        is_of_tokens = x.ndim > 2
        if not (self.rounds_x and is_of_tokens):
            rounds_gradient = self.rounds_gradients and is_of_tokens and not _has_few_rows(x)
            product = ProductOfRoundedGradient if rounds_gradient else UnpackedProduct
            return product.apply(x.to(self.dtype), self.bias, self.rows, self.scale)
        assert not (torch.is_grad_enabled() and x.requires_grad), "rounding has no gradient"
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        if _has_few_rows(x):
            weight = unpacked(self.rows, self.scale, torch.bfloat16)
            return F.linear(x.to(torch.bfloat16), weight, bias).to(self.dtype)

        # cuBLAS wants a multiple of 16 rows: zeros are added to [n, in], and their results cut off.
        flat = x.flatten(0, -2)
        if largest is not None:
            largest = padded(largest.flatten(0, -2))
        rows, row_scale = quantise(padded(flat), largest)
        out = product_of_rows(rows, row_scale, self.rows.T, self.scale.T, bias)
        return out[: len(flat)].unflatten(0, x.shape[:-1]).to(self.dtype)


def _has_few_rows(x: Tensor) -> bool:
    """Tell whether x [..., in] has fewer than FEW_ROWS rows."""
    return x[..., 0].numel() < FEW_ROWS


def padded(x: Tensor) -> Tensor:
    """Add rows of zeros behind [n, k], for cuBLAS, which asks for a multiple of 16."""
    return F.pad(x, (0, 0, 0, -len(x) % 16))


def product_of_rows(rows: Tensor, row_scale: Tensor, columns: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply e4m3 rows [n, k] and scales [n, 1] by e4m3 columns [k, m] and scales [1, m], plus bf16 [m]."""
    assert len(rows) % 16 == 0, "cuBLAS has no such product"
    assert columns.stride(0) == 1, "cuBLAS reads columns"
    # CPUs have such products in newer versions of torch alone.
    if not rows.is_cuda:
        product = rows.float() @ columns.float() * row_scale * scale
        if bias is not None:
            product = product + bias
        return product.to(torch.bfloat16)
    # With a scale for each row there are only bfloat16 results. Fast accumulation keeps 14 bits, more than the rows do.
    # The public torch.nn.functional.scaled_mm would do the same, but breaks a compiled block in parts (torch 2.11).
    return torch._scaled_mm(
        rows,
        columns,
        scale_a=row_scale,
        scale_b=scale,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def unpacked(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack W [out, in] of e4m3 rows and their scales [out, 1]."""
    return (rows.float() * scale).to(dtype)


def quantise(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise x [n, k] to e4m3 rows [n, k] and float32 scales [n, 1], whose product is x to 4 significant bits.

    Args:
        largest: [n, 1], the number that becomes 448, e4m3's largest: an upper bound of each row's |x|. None = its
            maximum, for which x is read once more.
    """
    if largest is None:
        largest = x.abs().amax(1, keepdim=True)
    # A row of zeros would divide by 0.
    largest = largest.float().clamp(min=SMALLEST_SCALE)
    return (x.float() * (LARGEST / largest)).to(E4M3), largest / LARGEST


def rounded_sum(change: Tensor, rows: Tensor, scale: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Add a change [out, in] to W of e4m3 rows and their scales [out, 1], and round the sum stochastically.

    Args:
        noise: [out, in], uniform in [0, 1).

    Returns:
        Rows and scales of the sum. A scale is that of W, or a power of two times it where the row outgrows e4m3.
    """
    total = change / scale + rows.float()
    outgrown = total.abs().amax(1, keepdim=True) / LARGEST
    growth = torch.exp2(outgrown.log2().ceil().clamp(min=0))
    # Clamped, since log2 may round down.
    total = (total / growth).clamp(-LARGEST, LARGEST)
    return stochastic_rounding.rounded_by(noise, total, E4M3), scale * growth


_rounded_sum = one_kernel(rounded_sum)


class NF4Linear(QuantisedLinear):
    """Linear layer of NF4 weights (arXiv:2305.14314), dequantised in every forward and backward."""

    codes: Tensor  # [out, in / 2] uint8, two 4-bit codes each
    scale: Tensor  # [out, blocks of a row] bf16
    levels: Tensor  # [16] f32, of the codes; here, since a copy from the host in each forward would wait for it

    def empty(self, device: torch.device) -> dict[str, Tensor]:
        """Make codes, two a byte, a bfloat16 scale for each block of a row, and the levels of codes."""
        if self.in_features % 2:
            raise UserError(
                f"a layer of {counted(self.in_features, 'columns')} has an odd number of 4-bit codes in a row"
            )
        num_blocks = self.in_features // math.gcd(self.in_features, NF4_BLOCK)
        return dict(
            codes=torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8, device=device),
            scale=torch.empty(self.out_features, num_blocks, dtype=torch.bfloat16, device=device),
            levels=torch.empty(len(NF4_LEVELS), device=device),
        )

    def store(self, weight: Tensor) -> None:
        """Round each weight to the nearest level of its block's largest."""
        self.levels.copy_(torch.tensor(NF4_LEVELS))
        # Blocks [out, blocks of a row, weights of a block].
        blocks = weight.to(self.scale.device).float().unflatten(1, (self.scale.shape[1], -1))
        self.scale.copy_(blocks.abs().amax(2))
        shares = blocks / self.scale.float().clamp(min=SMALLEST_SCALE)[..., None]
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        codes = torch.bucketize(shares, middles).to(torch.uint8).flatten(1)
        # The first of two weights is the high half of their byte.
        high = codes[:, ::2]
        low = codes[:, 1::2]
        self.codes.copy_(high << 4 | low)

    def forward(self, x: Tensor) -> Tensor:
        return UnpackedProduct.apply(x.to(self.dtype), self.bias, self.codes, self.scale, self.levels)


class UnpackedProduct(torch.autograd.Function):
    """Product x W^T + b and the gradient of x, in the dtype of x. W, as it is stored, is unpacked for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *stored: Tensor) -> Tensor:
        """Multiply x [..., in] by W [out, in].

        Args:
            stored: of W: rows and scale of an EightBitLinear, or codes, scale and levels of an NF4Linear.
        """
        ctx.save_for_backward(*stored)
        return F.linear(x, _weight(stored, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of x from that of the result, [..., out]."""
        (grad,) = grad_outputs
        stored = ctx.saved_tensors
        without = [None] * len(stored)
        return grad @ _weight_again(stored, grad.dtype), None, *without


class ProductOfRoundedGradient(UnpackedProduct):
    """The same product of e4m3 rows, bit for bit. The gradient of x is a product of 8-bit rows, with sums in float32.

    It is dX = dY S R, with W = S R: the scales S of W's rows lie along the axis that is summed, where a product of
    8 bits has none. So they go into dY, whose rows are quantised with them.
    """

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of x [..., in] from that of the result, [..., out]."""
        (grad,) = grad_outputs
        rows, scale = ctx.saved_tensors
        scaled = grad.flatten(0, -2).float() * scale.T
        grad_rows, grad_scale = quantise(padded(scaled))
        # cuBLAS reads the second factor column by column. The copy lives as long as the product.
        columns = rows.T.contiguous().T
        column_scale = torch.ones(1, rows.shape[1], device=rows.device)
        product = product_of_rows(grad_rows, grad_scale, columns, column_scale, None)
        return product[: len(scaled)].unflatten(0, grad.shape[:-1]).to(grad.dtype), None, None, None


def _weight(stored: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Unpack W [out, in], whichever way it is stored."""
    if len(stored) == 2:
        rows, scale = stored
        return unpacked(rows, scale, dtype)
    codes, scale, levels = stored
    return _of_levels(codes >> 4, codes & 15, scale, levels, dtype)


def _weight_again(stored: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Unpack the same W, bit for bit, by other operations.

    A compiled graph whose backward has the operations of its forward keeps what they gave until then: of all layers of
    Qwen-Image together, 25 GiB of unpacked 8-bit weights, or 13 GiB of 4-bit codes, one a byte. Factors in another
    order, and divisions instead of shifts, are enough.
    """
    if len(stored) == 2:
        rows, scale = stored
        return (scale * rows.float()).to(dtype)
    codes, scale, levels = stored
    return _of_levels(codes // 16, codes % 16, scale, levels, dtype)


def _of_levels(high: Tensor, low: Tensor, scale: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack W [out, in] of 4-bit codes [out, in / 2], a byte's high one first."""
    numbers = torch.stack([high, low], -1).flatten(1).int()
    # Blocks [out, blocks of a row, weights of a block].
    blocks = levels[numbers].unflatten(1, (scale.shape[1], -1))
    return (blocks * scale[..., None].float()).flatten(1).to(dtype)
