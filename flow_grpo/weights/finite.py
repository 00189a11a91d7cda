"""Whether tensors hold finite numbers alone: asked of everything before it is saved, exported or scored."""

import math

from torch import Tensor, nn

from flow_grpo.base import distributed
from flow_grpo.base.formatting import quoted
from flow_grpo.base.prompt import Prompt
from flow_grpo.weights import fsdp_utils


def problem(tensors: dict[str, Tensor]) -> str:
    """Which of this rank's parts of some tensors are not finite, in words, "" for none; one wait for the device."""
    parts = {name: fsdp_utils.local_part(tensor.detach()) for name, tensor in tensors.items()}
    parts = {name: part for name, part in parts.items() if part.numel()}  # a rank may have no rows of a small tensor
    if not parts or nn.utils.get_total_norm(list(parts.values()), math.inf).isfinite():  # the largest; NaN if one is
        return ""
    bad = [name for name, part in parts.items() if not part.isfinite().all()]
    return f"{len(bad)} of {len(parts)} tensors hold NaN or infinities, {bad[0]} the first"


def check(tensors: dict[str, Tensor], what: str) -> None:
    """Raises FloatingPointError, on every rank, unless all are finite; all ranks must call."""
    problems = [part for part in distributed.gather_objects([problem(tensors)]) if part]
    if problems:
        raise FloatingPointError(f"{what}: {problems[0]}")


def check_images(finite: Tensor, prompts: list[Prompt]) -> None:
    """Raises FloatingPointError, which names a prompt, unless all are finite; `finite` [B] bool."""
    bad = (~finite).nonzero().flatten().tolist()
    if bad:
        first = prompts[bad[0]]
        raise FloatingPointError(
            f"{len(bad)} of {len(finite)} images hold NaN or infinities, the first of {quoted(first.text)}: the "
            "weights are too large (config.train.learning_rate), or a precision is too coarse (config.precision, "
            "config.vae_precision)"
        )
