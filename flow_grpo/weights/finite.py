"""Checks that tensors hold finite numbers alone, before they are saved, exported or scored."""

import math
from collections.abc import Mapping

from torch import Tensor, nn

from flow_grpo.base import distributed
from flow_grpo.base.formatting import counted
from flow_grpo.weights import fsdp_utils


def problem_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return which of this rank's parts of tensors are not finite, in words, "" for none; one wait for the device."""
    parts = {}
    for name, tensor in tensors.items():
        part = fsdp_utils.local_part(tensor.detach())
        # A rank may have no rows of a small tensor.
        if part.numel():
            parts[name] = part
    if not parts:
        return ""
    # The norm of infinite order is the largest number, or NaN if there is one.
    largest = nn.utils.get_total_norm(list(parts.values()), math.inf)
    if largest.isfinite():
        return ""
    bad = [name for name, part in parts.items() if not part.isfinite().all()]
    return f"{len(bad)} of {counted(len(parts), 'tensors')} with NaN or infinities, {bad[0]} the first"


def check_tensors(tensors: Mapping[str, Tensor], what: str) -> None:
    """Raise FloatingPointError, on every rank, unless all tensors are finite; all ranks must call."""
    for problem in distributed.gather_objects([problem_of_tensors(tensors)]):
        if problem:
            raise FloatingPointError(f"{what}: {problem}")
