"""How much arithmetic a forward of a model is, so that rates of different settings can be compared."""

import torch

from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.plan import row_cost


def row_flops(model: FlowModel, condition: Condition, size: Size) -> int:
    """Return multiply-adds times two of one row's forward: matrix products and attention.

    Adapters are not counted, nor a second forward for guidance.

    Args:
        condition: of any number of rows.
    """
    with loading.empty_weights():
        transformer = model.TRANSFORMER.from_config(model.transformer_config)
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in condition.tensors().items()}
    shapes["latents"] = model.latent_shape(size)
    cost, _ = row_cost.count(model, transformer, size, shapes)
    return cost.flops


def matrix_rate(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """Return FLOP/s of a bf16 product of two [size, size] matrices on a GPU, the rate that others are compared with."""
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    left @ right
    start.record()
    for _ in range(repeats):
        left @ right
    end.record()
    torch.cuda.synchronize(device)
    elapsed_s = start.elapsed_time(end) / 1e3
    return 2 * size**3 * repeats / elapsed_s
