"""Ranks: how they meet, exchange values and agree. The only module that calls torch.distributed's collectives."""

import ctypes
import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flow_grpo.base.errors import UserError, WriteFailed

Value = TypeVar("Value")

# Errors of one rank that all ranks raise as such, the first that fits; others travel as a RuntimeError.
_SHARED_ERRORS = {"UserError": UserError, "WriteFailed": WriteFailed, "OSError": OSError}

# Seconds in which gloo's threads let go of the last collectives.
GLOO_ENDS_S = 0.1

# Whether this process has left the other ranks for good.
_is_withdrawn = False


class Ranks(NamedTuple):
    """Place of this process among the ranks."""

    rank: int
    world_size: int
    device: torch.device


def init_distributed() -> Ranks:
    """Join the ranks that torchrun started; rank 0 of 1 without torchrun."""
    has_cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if has_cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return Ranks(0, 1, device)
    end_with_torchrun()
    # gloo beside nccl, so that objects and CPU tensors travel without touching the GPU. The timeout covers the longest
    # one-sided wait: rank 0 writing a checkpoint, or one rank's slow reward server.
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_cuda else "gloo", timeout=timedelta(minutes=30))
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def end_with_torchrun() -> None:
    """Have Linux kill this rank as soon as torchrun has ended: a killed torchrun cannot end its ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # Processes that this one forks do not inherit the setting.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def close() -> None:
    """Leave, all ranks together."""
    if is_joined():
        # Under gloo a rank that leaves early aborts the others.
        barrier()
        # gloo's threads let go of the tensors of the last collectives a moment after these are done, and need the
        # interpreter for it. Where it is ending by then, they abort the process, after a run that is complete.
        time.sleep(GLOO_ENDS_S)
        dist.destroy_process_group()


def is_joined() -> bool:
    """Return whether this process exchanges values with other ranks."""
    return dist.is_initialized() and not _is_withdrawn


def withdraw() -> None:
    """Act as the only rank from here on, without a word to the others: they may wait elsewhere, or have ended."""
    global _is_withdrawn
    _is_withdrawn = True


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if is_joined() else 1


def rank() -> int:
    """Return this rank's number."""
    return dist.get_rank() if is_joined() else 0


def is_main() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if is_joined():
        dist.barrier()


def broadcast_object(value: Value) -> Value:
    """Return rank 0's value, on every rank."""
    return gather_objects([value] if is_main() else [])[0]


def on_main(function: Callable[..., Value], *args: Any) -> Value:
    """Call on rank 0 while the others wait, and return its value on every rank. Errors are raised as by `on_all`."""
    return gather_objects(on_all(_values_on_main, function, *args))[0]


def _values_on_main(function: Callable[..., Value], *args: Any) -> list[Value]:
    """Call on rank 0 and return its one value; return none on the others."""
    if is_main():
        return [function(*args)]
    return []


def on_all(function: Callable[..., Value], *args: Any) -> Value:
    """Call on every rank and return the rank's own value.

    An error on any rank is raised on every rank, so that none waits for ever: a UserError or an OSError as such, others
    as a RuntimeError.
    """
    values = []
    errors = []
    try:
        values.append(function(*args))
    except Exception as error:
        errors.append(error)
    failures = gather_objects([_described(error) for error in errors])
    if errors:
        raise errors[0]
    if failures:
        kind, message = failures[0]
        raise _SHARED_ERRORS.get(kind, RuntimeError)(message)
    return values[0]


def _described(error: Exception) -> tuple[str, str]:
    """Return an error as other ranks raise it: the name of its kind, and its text with this rank's number."""
    message = f"rank {rank()}: {str(error) or repr(error)}"
    for name, kind in _SHARED_ERRORS.items():
        if isinstance(error, kind):
            return name, message
    return "RuntimeError", message


def gather(tensor: Tensor) -> Tensor:
    """Return [world * b, ...], in rank order and on every rank, of [b, ...] on every rank."""
    if not is_joined():
        return tensor
    tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor.contiguous())
    return torch.cat(tensors)


def local_rows(tensor: Tensor) -> Tensor:
    """Return this rank's rows: the inverse of `gather`."""
    if not is_joined():
        return tensor
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def average(tensor: Tensor) -> Tensor:
    """Replace a tensor by its mean over the ranks, by one all-reduce, and return it."""
    if is_joined():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return tensor


def over_ranks(sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums added up over the ranks, and the largest of their maxima; shapes stay."""
    total = gather(sums[None]).sum(0)
    highest = gather(maxima[None]).amax(0)
    return total, highest


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank. All ranks must call."""
    flags = gather(torch.tensor([int(flag)]))
    return bool(flags.any())


def gather_objects(values: list[Value]) -> list[Value]:
    """Return the lists of all ranks joined in rank order, on every rank. Lengths may differ."""
    if not is_joined():
        return values
    lists: list[list[Value]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lists, values)
    return list(itertools.chain.from_iterable(lists))


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this rank so far: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
