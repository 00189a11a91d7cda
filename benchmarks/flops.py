"""How much arithmetic a forward of a model is, so that rates of different settings can be compared."""

import copy

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import Size


@torch.no_grad()
def row_flops(model: FlowModel, condition: Condition, size: Size) -> int:
    """Return multiply-adds times two of one row's forward: matrix products and attention.

    Adapters are not counted, nor a second forward for guidance.

    Args:
        condition: of any number of rows.
    """
    pipeline = copy.copy(model.pipeline)
    # Tensors without numbers are enough to count, and take no memory.
    with sdpa_kernel(SDPBackend.MATH), FakeTensorMode(), FlopCounterMode(display=False) as counter:
        pipeline.transformer = model.TRANSFORMER.from_config(model.transformer_config)
        empty = type(model)(pipeline, torch.device("cpu"))
        fields = {}
        for name, tensor in condition.tensors().items():
            fields[name] = torch.empty(1, *tensor.shape[1:], dtype=tensor.dtype)
        latents = torch.empty(1, *model.latent_shape(size))
        empty.forward(latents, torch.empty(1), Condition(**fields), 1.0, size)
    return counter.get_total_flops()


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
