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
    """Multiply-adds times two of one row's forward: matrix products and attention. Adapters are not counted, nor a
    second forward for guidance. They are those of tensors without numbers.

    Args:
        condition: of any rows.
    """
    pipeline, parts = copy.copy(model.pipeline), condition.tensors().items()
    with sdpa_kernel(SDPBackend.MATH), FakeTensorMode(), FlopCounterMode(display=False) as counter:
        pipeline.transformer = model.TRANSFORMER.from_config(model.transformer_config)
        empty = type(model)(pipeline, torch.device("cpu"))
        row = Condition(**{name: torch.empty(1, *part.shape[1:], dtype=part.dtype) for name, part in parts})
        empty.forward(torch.empty(1, *model.latent_shape(size)), torch.empty(1), row, 1.0, size)
    return counter.get_total_flops()


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
