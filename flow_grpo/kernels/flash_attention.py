"""FlashAttention-4 as one operation with its gradient. Masked keys cost nothing, and gradients are repeatable; cuDNN's
attention, which torch takes by itself, is slower under a mask, and sums the gradient of queries in any order.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flow_grpo.base import checksums, distributed
from flow_grpo.base.errors import UserError

NAME = "flash_4"  # of config.attention
# Major compute capabilities with a repeatable backward.
CAPABILITIES = (9, 10, 11)


def check_device(attention: str, device: torch.device) -> None:
    """Raise UserError where config.attention asks for it and the GPU, or none, has no kernels of it."""
    on_gpu = device.type == "cuda"
    if attention != NAME or (on_gpu and torch.cuda.get_device_capability(device)[0] in CAPABILITIES):
        return
    name = torch.cuda.get_device_name(device) if on_gpu else "this machine without a GPU"
    raise UserError(
        f"config.attention is {NAME!r}, which runs on H100, H200, B200 and B300 (compute capability 9, 10 or 11), "
        f"not on {name}"
    )


def usable(attention: str) -> str:
    """Return config.attention, or "" with a warning where the package cannot be used. The kernels are private functions
    of the package, so nothing is relied on: it may fail in any way when it is imported."""
    if attention != NAME:
        return attention
    try:
        kernels = _kernels()
        _ = kernels._flash_attn_fwd, kernels._flash_attn_bwd
    except Exception as error:
        if distributed.is_main():
            message = (
                f"config.attention {NAME!r} is not used, but torch's attention: {type(error).__name__}: {error}; "
                "pip install 'flow_grpo[flash4]'"
            )
            warnings.warn(message, stacklevel=2)
        return ""
    return NAME


def _kernels() -> Any:
    """Import the package's kernels, which are there on GPUs alone."""
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]  # it is there on GPUs alone

    return interface


VERSION = checksums.file_digest(Path(__file__))[:8]  # see qk_norm_rope.py


@torch.library.custom_op(f"flow_grpo::attend_first_{VERSION}", mutates_args=())
def attend_first(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to the first tokens of each row: softmax(q k / sqrt(D)) v (arXiv:2307.08691; the GPU's kernels are of
    arXiv:2407.08608).

    Args:
        query, key, value: [B, L, H, D], on a GPU bf16.
        lengths: [B] int32, of the keys and values that are attended to. All queries attend, padding too.
    Returns:
        [B, L, H, D] like `value`; and the logarithms of the softmax's sums, [B, H, L] f32, for the backward.
    """
    query = query.contiguous()
    key = key.contiguous()
    value = value.contiguous()
    if query.is_cuda:
        out, sums, *_ = _kernels()._flash_attn_fwd(query, key, value, seqused_k=lengths, return_lse=True)
        return out, sums

    # Scores and probabilities are [B, H, L queries, M keys].
    scores = masked_scores(query, key, lengths)
    sums = scores.logsumexp(-1)
    probabilities = (scores - sums[..., None]).exp()
    out = torch.einsum("bhlm,bmhd->blhd", probabilities, value.float())
    return out.to(value.dtype).contiguous(), sums


@torch.library.custom_op(f"flow_grpo::attend_first_backward_{VERSION}", mutates_args=())
def attend_first_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of query, key and value from that of `out`; unattended keys and values have 0."""
    query = query.contiguous()
    key = key.contiguous()
    value = value.contiguous()
    if query.is_cuda:
        return _kernels()._flash_attn_bwd(
            query,
            key,
            value,
            out,
            grad.contiguous(),
            sums,
            seqused_k=lengths,
            deterministic=True,
            # Zeros, since the kernel writes none for keys behind a row's length.
            dk=torch.zeros_like(key),
            dv=torch.zeros_like(value),
        )

    # The gradient of a softmax P of scores S, from that of P [B, H, L, M]: dS = P (dP - sum_m P dP), in which the sum
    # is that of the result and its gradient over the head.
    grad = grad.float()
    probabilities = (masked_scores(query, key, lengths) - sums[..., None]).exp()
    grad_probabilities = torch.einsum("blhd,bmhd->bhlm", grad, value.float())
    mean = (grad * out.float()).sum(-1).transpose(1, 2)[..., None]
    grad_scores = probabilities * (grad_probabilities - mean) / math.sqrt(query.shape[-1])
    grad_query = torch.einsum("bhlm,bmhd->blhd", grad_scores, key.float())
    grad_key = torch.einsum("bhlm,blhd->bmhd", grad_scores, query.float())
    grad_value = torch.einsum("bhlm,blhd->bmhd", probabilities, grad)
    dtype = query.dtype
    return grad_query.to(dtype).contiguous(), grad_key.to(dtype).contiguous(), grad_value.to(dtype).contiguous()


def masked_scores(query: Tensor, key: Tensor, lengths: Tensor) -> Tensor:
    """Scores q k / sqrt(D) [B, H, L, L] float32, -inf for keys behind a row's length."""
    scores = torch.einsum("blhd,bmhd->bhlm", query.float(), key.float()) / math.sqrt(query.shape[-1])
    behind = torch.arange(key.shape[1], device=key.device) >= lengths[:, None]
    return scores.masked_fill(behind[:, None, None], -torch.inf)


@attend_first.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_tokens, heads, _ = query.shape
    return value.new_empty(value.shape), query.new_empty(num_rows, heads, num_tokens, dtype=torch.float32)


@attend_first_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@register_flop_formula(getattr(torch.ops.flow_grpo, f"attend_first_{VERSION}"))
def _flops(query: torch.Size, key: torch.Size, *_: Any, **named: Any) -> int:
    """Count the forward's operations from shapes: by them the compiler weighs what to compute twice."""
    num_rows, num_queries, heads, width = query
    return 4 * num_rows * heads * num_queries * key[1] * width


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    assert grad_sums is None, "no gradient leads through the sums"
    query, key, value, lengths, out, sums = ctx.saved_tensors
    grad_query, grad_key, grad_value = attend_first_backward(grad, query, key, value, lengths, out, sums)
    return grad_query, grad_key, grad_value, None


attend_first.register_autograd(_backward, setup_context=_keep)
