"""Ranks: how they meet, exchange values and agree. The only module that calls torch.distributed's collectives."""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flow_grpo.base.errors import UserError, WriteFailed

_RAISED = {error.__name__: error for error in (UserError, WriteFailed, OSError)}  # by a rank, and then by all


class Ranks(NamedTuple):
    rank: int
    world_size: int
    device: torch.device


def init_distributed() -> Ranks:
    """Join the ranks that torchrun started; rank 0 of 1 without torchrun."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return Ranks(0, 1, device)
    end_with_torchrun()
    # gloo beside nccl, so that objects and CPU tensors travel without touching the GPU. The timeout covers the longest
    # one-sided wait: rank 0 writing a checkpoint, or one rank's slow reward server.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=30))
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def end_with_torchrun() -> None:
    """On Linux, have the system kill this rank as soon as torchrun has ended: a killed one cannot end its ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        pr_set_pdeathsig = 1  # of this process alone: the ones that it forks do not inherit it
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def close() -> None:
    """Leave, all ranks together."""
    if dist.is_initialized():
        barrier()  # under gloo a rank that leaves early aborts the others
        dist.destroy_process_group()


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This rank's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return gather_objects([value] if is_main() else [])[0]


def on_main(function: Callable, *args: Any) -> Any:
    """Call on rank 0 while the others wait; its value, on every rank. An exception is raised as by `on_all`."""
    return broadcast_object(on_all(function, *args) if is_main() else on_all(lambda: None))


def on_all(function: Callable, *args: Any) -> Any:
    """Call on every rank; the rank's own value. An exception on any rank is raised on every rank, so that none waits
    for ever: a UserError or an OSError as such, others as a RuntimeError."""
    value = error = None
    try:
        value = function(*args)
    except Exception as caught:
        error = caught
    kind = next((name for name, base in _RAISED.items() if isinstance(error, base)), "RuntimeError")
    failures = gather_objects([(kind, f"rank {rank()}: {str(error) or repr(error)}")] if error else [])
    if failures:
        kind, message = failures[0]
        raise error or _RAISED.get(kind, RuntimeError)(message)
    return value


def gather(tensor: Tensor) -> Tensor:
    """[b, ...] on every rank -> [world * b, ...], in rank order, on every rank."""
    if not dist.is_initialized():
        return tensor
    tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor.contiguous())
    return torch.cat(tensors)


def local_rows(tensor: Tensor) -> Tensor:
    """The inverse of `gather`: this rank's rows."""
    return tensor if not dist.is_initialized() else tensor.chunk(dist.get_world_size())[dist.get_rank()]


def average(tensor: Tensor) -> Tensor:
    """The ranks' mean, in place: one all-reduce."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return tensor


def over_ranks(sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Sums added up over the ranks, and the largest of their maxima; shapes as they were."""
    return gather(sums[None]).sum(0), gather(maxima[None]).amax(0)


def any_rank(flag: bool) -> bool:
    """Whether some rank says so; all ranks must call."""
    return bool(gather(torch.tensor([int(flag)])).any())


def gather_objects(values: list) -> list:
    """The ranks' lists one after the other, in rank order, on every rank. Lengths may differ."""
    if not dist.is_initialized():
        return values
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, values)
    return [value for part in lists for value in part]


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this rank so far: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
