"""Ranks: how they meet, split the transformer's weights between them, and agree. The only torch.distributed.

Weights lie in one of three layouts, which differ in memory and traffic but not in numbers: `replicate` (every rank has
all; fast with LoRA, since only adapter gradients travel), `shard` (FSDP2: every rank has 1/world of each tensor) and
`hybrid` (sharded inside groups of ranks, replicated across groups).
"""

import os
import resource
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flow_grpo import stored_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    # gloo beside nccl, so that objects and CPU tensors travel without touching the GPU. The timeout covers the longest
    # one-sided wait: rank 0 writing a checkpoint, or one rank's slow reward server.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=30))
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def close() -> None:
    """Leave, all ranks together."""
    if dist.is_initialized():
        barrier()  # under gloo a rank that leaves early aborts the others
        dist.destroy_process_group()


def is_main() -> bool:
    """Whether this is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def on_main(function: Callable, *args: Any) -> None:
    """Call on rank 0 while the others wait. An exception there is raised on every rank, so that none waits for ever."""
    error = None
    if is_main():
        try:
            function(*args)
        except Exception as caught:
            error = caught
    message = broadcast_object(error and repr(error))
    if message:
        raise error or RuntimeError(f"rank 0 raised {message}")


def gather(tensor: Tensor) -> Tensor:
    """[b, ...] on every rank -> [world * b, ...], in rank order, on every rank."""
    if not dist.is_initialized():
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def mine(tensor: Tensor) -> Tensor:
    """The inverse of `gather`: this rank's rows."""
    return tensor if not dist.is_initialized() else tensor.chunk(dist.get_world_size())[dist.get_rank()]


def is_sharded(transformer: nn.Module) -> bool:
    """Whether a forward gathers weights from all ranks, so that these must make equally many."""
    return isinstance(transformer, FSDPModule)


def any_rank(flag: bool) -> bool:
    """Whether some rank says so; all ranks must call."""
    if not dist.is_initialized():
        return flag
    found = torch.tensor(int(flag))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def deal(values: list) -> list:
    """This rank's share of a list, every world-th."""
    return values[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else values


def gather_objects(values: list) -> list:
    """The ranks' lists one after the other, in rank order, on every rank. Lengths may differ."""
    if not dist.is_initialized():
        return values
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, values)
    return [value for part in lists for value in part]


def make_mesh(mode: str, device: torch.device, shard_size: int = 0, offload: bool = False) -> DeviceMesh | None:
    """The ranks as `prepare` lays weights out on them; None = replicate, which `shard` on a single rank is too, unless
    its weights are to be offloaded.

    Make one per run: each opens process groups of its own.

    Args:
        mode: "replicate", "shard", or "hybrid" with `shard_size` ranks to each copy of the weights.
    Raises:
        ValueError: an unknown mode, a shard_size into which the ranks do not divide, or offload without torchrun.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if mode not in ("replicate", "shard", "hybrid"):
        raise ValueError(f"unknown layout {mode!r}; there are: replicate, shard, hybrid")
    if mode == "hybrid" and (shard_size < 1 or world_size % shard_size):
        raise ValueError(f"{world_size} ranks do not divide into groups of shard_size = {shard_size}")
    if offload and not dist.is_initialized():
        raise ValueError("config.fsdp.offload_weights needs torchrun, on one GPU too: torchrun --nproc_per_node=1 ...")
    if mode == "replicate" or (world_size == 1 and not offload):
        return None
    if mode == "shard":
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def trainable_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """What the optimizer steps and the EMA follows."""
    return {name: p for name, p in transformer.named_parameters() if p.requires_grad}


def learned_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Everything but the frozen base: trainable parameters and all adapters, those frozen for now too."""
    return {name: p for name, p in transformer.named_parameters() if p.requires_grad or "lora_" in name}


def prepare(
    transformer: nn.Module,
    mesh: DeviceMesh | None,
    *,
    units: tuple[str, ...],
    device: torch.device,
    precision: str,
    weights: Path | str | None,
    init: Callable[[str, torch.Size], Tensor] | None = None,
    offload: bool = False,
) -> nn.Module:
    """Lay a diffusers transformer out over the ranks, in place, and fill it. Learned parameters become float32.

    Args:
        transformer: on the meta device, adapters attached; a real one when `weights` is None.
        mesh: from `make_mesh`.
        units: class names of the modules that gather their weights at once, e.g. ("QwenImageTransformerBlock",).
        precision: "fp32", "bf16" or "fp16", of the frozen weights, and of all weights in a sharded forward. The caller
            brings the inputs: autocast for float32 weights, in every layout, or inputs of that dtype.
        weights: folder with diffusers' safetensors, of which each rank reads its own rows.
        init: (name, shape) -> adapter weight f32, CPU. By name, so that ranks and layouts start equal.
        offload: sharded weights, gradients and what the optimizer keeps of them stay in pinned host memory; a unit's
            weights come to the device for as long as it computes.
    Raises:
        ValueError: names or shapes in `weights` that are not the transformer's, or names that are missing.
    """
    if weights is None and any(p.is_meta for p in transformer.parameters()):
        raise ValueError("the transformer has no weights yet: pass the folder that holds them")
    _set_dtypes(transformer, DTYPES[precision])
    if weights is None:
        transformer.to(device)
    if mesh is not None:
        _shard(transformer, mesh, units, DTYPES[precision], offload)
    _materialise(transformer, device, offload)
    fill(transformer, weights, init)
    return transformer


@torch.no_grad()
def fill(transformer: nn.Module, weights: Path | str | None, init: Callable[[str, torch.Size], Tensor] | None) -> None:
    """Write stored weights into a transformer that is laid out, all but its adapters from `weights`, these by `init`.

    Arguments and errors as in `prepare`; None leaves what is there.
    """
    if weights is not None:
        stored_weights.read(transformer, Path(weights), _copy_rows)
    if init is not None:
        _init_adapters(transformer, init)


def _set_dtypes(transformer: nn.Module, frozen: torch.dtype) -> None:
    learned = learned_parameters(transformer)
    for name, p in transformer.named_parameters():
        p.data = p.data.to(torch.float32 if name in learned else frozen)


def _shard(transformer: nn.Module, mesh: DeviceMesh, units: tuple[str, ...], dtype: torch.dtype, offload: bool) -> None:
    """FSDP2 over each unit and the rest.

    A unit may mix bf16 frozen and float32 trainable parameters, since FSDP2 asks only the trainable ones for one dtype.
    So adapters are sharded along with their layers, which divides their gradients and moments over the ranks too.
    """
    found = [module for module in transformer.modules() if type(module).__name__ in units]
    if not found:
        raise ValueError(f"no module of {type(transformer).__name__} is one of {units}")
    # Inputs are not cast: SD3 takes timesteps up to 1000, which bf16 would round to multiples of 4.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # The root reshards too. By default it would stay gathered after a no-grad forward, and go on using old weights when
    # something else than backward (the EMA, a checkpoint) writes new ones.
    how = dict(mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    if offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for module in [*found, transformer]:
        fully_shard(module, **how)
    for module, before in zip([*found[1:], transformer], found):  # its own order forgets all forwards but the last
        module.set_modules_to_backward_prefetch([before])
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing writes there in place
    transformer.cuts = []
    transformer.register_forward_hook(_cut)


def _cut(transformer: nn.Module, inputs: tuple, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """End a forward's graph at what comes out; `backward` goes on from there."""
    if not outputs[0].requires_grad:
        return None
    ends = tuple(part.detach().requires_grad_() for part in outputs)
    transformer.cuts.append((outputs, ends))
    return ends


def backward(loss: Tensor, transformer: nn.Module) -> None:
    """Add a loss's gradient to those of the parameters; of sharded ones forward by forward, the last first.

    In one go autograd would hold the whole gradient of every weight, until each of the loss's forwards (two, with
    guidance) had added to it. So it is reduced and sharded layer by layer.
    """
    loss.backward()
    while is_sharded(transformer) and transformer.cuts:
        outputs, ends = transformer.cuts.pop()
        torch.autograd.backward(outputs, [end.grad for end in ends])


def _materialise(transformer: nn.Module, device: torch.device, offload: bool) -> None:
    """Give meta parameters memory and move the rest. Unlike `to_empty` it leaves real buffers their values."""

    def place(tensor: Tensor) -> Tensor:
        there = torch.device("cpu") if offload and isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=there) if tensor.is_meta else tensor.to(there)

    transformer._apply(place)


def _init_adapters(transformer: nn.Module, init: Callable[[str, torch.Size], Tensor]) -> None:
    for name, p in learned_parameters(transformer).items():
        if "lora_" in name:
            _copy_rows(p.detach(), init(name, p.shape))


def _copy_rows(target: Tensor, source: Any) -> None:
    """This rank's rows of `source`, a tensor or a slice of a safetensors file, into `target`."""
    if not isinstance(target, DTensor):
        target.copy_(source[:])
        return
    num_ranks, rank = target.device_mesh.size(-1), target.device_mesh.get_local_rank(-1)
    num_rows = -(-target.shape[0] // num_ranks)  # FSDP2 splits dim 0 like torch.chunk: the last ranks may get none
    local = target.to_local()
    if len(local):
        local.copy_(source[rank * num_rows : rank * num_rows + len(local)])


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Mean of the gradients over the ranks, in one all-reduce. FSDP has averaged sharded ones in backward."""
    # Who has no gradient here has none anywhere (Qwen-Image's last text MLP). Zeros would let weight decay shrink it.
    grads = [p.grad for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
    if not dist.is_initialized() or not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(mean.view_as(grad))


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a global norm of at most `max_norm`; returns the norm before, [] f32, without a host sync."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm([p.grad for p in parameters]))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; all ranks must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_state_dict(transformer: nn.Module, trainable_only: bool = True) -> dict[str, Tensor]:
    """Whole tensors by name, on the CPU of rank 0 and {} elsewhere: learned parameters, or all and persistent buffers.

    All ranks must call.
    """
    tensors = learned_parameters(transformer) if trainable_only else transformer.state_dict()
    state = {}
    for name, tensor in tensors.items():  # one at a time: more than one need not fit beside the shards
        whole = full_tensor(tensor.detach())
        if is_main():
            state[name] = whole.to("cpu", copy=True)
    return state


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this rank so far: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
