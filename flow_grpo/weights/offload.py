"""Tensors in host memory: optimizer states, for a while, and weights that FSDP2 offloads between their uses."""

from collections.abc import Iterable

import torch
from torch import Tensor

from flow_grpo.weights import fsdp_utils

# State of AdamW that moves; its step count stays where it is.
MOMENTS = {"exp_avg", "exp_avg_sq"}


def wait_for_offloaded(parameters: Iterable[Tensor]) -> None:
    """Wait before weights in host memory are written: the device may not have read them yet."""
    if torch.cuda.is_available() and any(parameter.device.type == "cpu" for parameter in parameters):
        torch.cuda.synchronize()


def offload_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Move the moments to pinned host memory. They can be neither stepped nor saved until `reload_optimizer_state`."""
    for state in optimizer.state.values():
        for key in MOMENTS & state.keys():
            moment = fsdp_utils.local_part(state[key])
            # Only pinned memory is filled without a wait for each tensor.
            in_host_memory = torch.empty_like(moment, device="cpu", pin_memory=moment.is_cuda)
            state[key] = in_host_memory.copy_(moment, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reload_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Undo `offload_optimizer_state`, if it was called."""
    for parameter, state in optimizer.state.items():
        for key in MOMENTS & state.keys():
            moment = fsdp_utils.local_part(state[key]).to(parameter.device, non_blocking=True)
            state[key] = fsdp_utils.from_local_part(moment, parameter)
