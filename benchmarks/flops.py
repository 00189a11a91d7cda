"""How much arithmetic a forward of a diffusers transformer is, so that rates of different settings can be compared."""

import re

import torch
from torch import nn

from flow_grpo.kernels.quantised_linear import QuantisedLinear

STREAMS = (  # what a linear layer is applied to, by its name; the first that matches
    (r"time_text_embed|_mod\.|norm\w*\.linear", "row"),  # the timestep: once per image
    (r"single_transformer_blocks", "both"),
    (r"context_embedder|txt_in|add_\w_proj|to_add_out|ff_context|txt_mlp", "text"),
    (r"", "image"),
)


def row_flops(transformer: nn.Module, image_tokens: int, text_tokens: int) -> int:
    """Multiply-adds times two of one row's forward: matrix products and attention. Adapters are not counted, nor a
    second forward for guidance."""
    counts = {"row": 1, "image": image_tokens, "text": text_tokens, "both": image_tokens + text_tokens}
    total = 0
    for name, module in transformer.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.Linear | nn.Conv2d | QuantisedLinear):
            stream = next(stream for pattern, stream in STREAMS if re.search(pattern, name))
            size = module.shape if isinstance(module, QuantisedLinear) else module.weight.shape
            total += 2 * size.numel() * counts[stream]
        if hasattr(module, "to_q"):
            tokens = counts["image" if name.endswith("attn2") else "both"]
            total += 4 * tokens**2 * module.to_q.out_features
    return total


def matrix_rate(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of a bf16 matrix product of this size on a GPU: what rates are a share of."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a @ b
    start.record()
    for _ in range(repeats):
        a @ b
    end.record()
    torch.cuda.synchronize(device)
    return 2 * size**3 * repeats / (start.elapsed_time(end) / 1e3)
