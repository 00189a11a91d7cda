"""How the transformer's weights lie on the ranks, how they are filled, and how their gradients come together. The only
module that knows of FSDP2 and its tensors.

Weights lie in one of three layouts, which differ in memory and traffic but not in numbers: `replicate` (every rank has
all; fast with LoRA, since only adapter gradients travel), `shard` (FSDP2: every rank has 1/world of each tensor) and
`hybrid` (sharded inside groups of ranks, replicated across groups).
"""

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flow_grpo.base import distributed
from flow_grpo.base.errors import UserError
from flow_grpo.kernels.quantised_linear import QuantisedLinear
from flow_grpo.weights import quantisation, safetensors_reader

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def is_sharded(network: nn.Module) -> bool:
    """Whether a forward gathers weights from all ranks, so that these must make equally many."""
    return isinstance(network, FSDPModule)


def make_mesh(mode: str, device: torch.device, offload: bool = False) -> DeviceMesh | None:
    """The ranks as `prepare` lays weights out on them; None = replicate, which `shard` on a single rank is too, unless
    its weights are to be offloaded. Make one per run: each opens process groups of its own."""
    world_size = distributed.world_size()
    if offload and not torch.distributed.is_initialized():
        raise UserError("config.fsdp.offload 'weights' needs torchrun, on one GPU too: torchrun --nproc_per_node=1 ...")
    if mode == "replicate" or (world_size == 1 and not offload):
        return None
    if mode == "shard":
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    per_machine = int(os.environ["LOCAL_WORLD_SIZE"])  # ranks that torchrun has started on each
    shape = (world_size // per_machine, per_machine)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def trainable_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by name: the adapter, or all weights."""
    return {name: p for name, p in transformer.named_parameters() if p.requires_grad}


def prepare(
    network: nn.Module,
    mesh: DeviceMesh | None,
    *,
    units: tuple[str, ...],
    device: torch.device,
    precision: str,
    weights: Path | str | None,
    init: Callable[[str, torch.Size], Tensor] | None = None,
    offload: bool = False,
) -> nn.Module:
    """Lay a FlowModel's network out over the ranks, in place, and fill its `transformer`. Trainable parameters become
    float32.

    Args:
        network: its transformer is on the meta device, adapters attached; a real one when `weights` is None.
        mesh: from `make_mesh`.
        units: class names of the modules that gather their weights at once, e.g. ("QwenImageTransformerBlock",).
        precision: "fp32" or "bf16", of the frozen weights, and of all weights in a sharded forward. The caller
            brings the inputs: autocast for float32 weights, in every layout, or inputs of that dtype.
        weights: folder with diffusers' safetensors, of which each rank reads its own rows.
        init: (name, shape) -> adapter weight f32, CPU. By name, so that ranks and layouts start equal.
        offload: sharded weights, gradients and what the optimizer keeps of them stay in pinned host memory; a unit's
            weights come to the device for as long as it computes.
    """
    transformer = network.transformer
    for p in transformer.parameters():
        p.data = p.data.to(torch.float32 if p.requires_grad else DTYPES[precision])
    for layer in quantisation.quantised_layers(transformer).values():
        layer.dtype = DTYPES[precision]
    if weights is None:
        transformer.to(device)
    if mesh is not None:
        _shard(network, mesh, units, DTYPES[precision], offload)
    _materialise(network, device, offload)
    fill(transformer, weights, init)
    return network


@torch.no_grad()
def fill(transformer: nn.Module, weights: Path | str | None, init: Callable[[str, torch.Size], Tensor] | None) -> None:
    """Write stored weights into a transformer that is laid out, all but its adapters from `weights`, these by `init`.

    Arguments and errors as in `prepare`; None leaves what is there.
    """
    if weights is not None:
        safetensors_reader.read(transformer, Path(weights), _copy_rows)
    if init is not None:
        adapters = {name: p for name, p in trainable_parameters(transformer).items() if "lora_" in name}
        for name, p in adapters.items():
            _copy_rows(p.detach(), init(name, p.shape))


def _shard(network: nn.Module, mesh: DeviceMesh, units: tuple[str, ...], dtype: torch.dtype, offload: bool) -> None:
    """FSDP2 over each unit and the rest.

    A unit may mix bf16 frozen and float32 trainable parameters, since FSDP2 asks only the trainable ones for one dtype.
    So adapters are sharded along with their layers, which divides their gradients and moments over the ranks too.
    """
    unit_modules = [module for module in network.modules() if type(module).__name__ in units]
    assert unit_modules, f"no module of {type(network.transformer).__name__} is one of {units}"
    # Inputs are not cast: SD3 takes timesteps up to 1000, which bf16 would round to multiples of 4.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # The root reshards too. By default it would stay gathered after a no-grad forward, and go on using old weights when
    # something else than backward (the EMA, a checkpoint) writes new ones.
    fsdp_options = dict(mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    if offload:
        fsdp_options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for module in [*unit_modules, network]:
        fully_shard(module, **fsdp_options)
    following = [*unit_modules[1:], network]
    for module, before in zip(following, unit_modules):  # its own order forgets all forwards but the last
        module.set_modules_to_backward_prefetch([before])
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing writes there in place
    network.register_forward_hook(_separate)


def _separate(network: nn.Module, inputs: tuple, output: Tensor) -> Tensor | None:
    """Make the backward of a forward one step of the loss's graph."""
    return _OneForward.apply([output], torch.zeros((), requires_grad=True)) if output.requires_grad else None


class _OneForward(torch.autograd.Function):
    """One forward's output, in a list, which hides its graph; its backward is walked whole before autograd goes on.

    In one graph autograd would hold the whole gradient of every weight, until each of the loss's forwards (two, with
    guidance) had added to it. So FSDP2 reduces and shards it layer by layer, for one forward after the other.
    """

    @staticmethod
    def forward(ctx, output: list[Tensor], _: Tensor) -> Tensor:
        """_: a scalar that requires grad, without which autograd would not call `backward`."""
        ctx.output = output[0]
        return output[0].clone()  # no view, which could not be written to

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, None]:
        output, ctx.output = ctx.output, None
        torch.autograd.backward(output, gradient)
        return None, None


def _materialise(network: nn.Module, device: torch.device, offload: bool) -> None:
    """Give meta parameters memory and move the rest. Unlike `to_empty` it leaves real buffers their values."""

    def place(tensor: Tensor) -> Tensor:
        target = torch.device("cpu") if offload and isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)

    network._apply(place)


def _copy_rows(target: Tensor | QuantisedLinear, source: Any) -> None:
    """This rank's rows of `source`, a tensor or a slice of a safetensors file, into `target`."""
    if isinstance(target, QuantisedLinear):
        target.store(source[:])
        return
    if not isinstance(target, DTensor):
        target.copy_(source[:])
        return
    rows = rows_of(target)
    if len(rows.tensor):
        rows.tensor.copy_(source[rows.first : rows.first + len(rows.tensor)])


class Rows(NamedTuple):
    """What a rank has of a tensor."""

    tensor: Tensor  # live; the whole one, unless it is sharded
    first: int  # its first row's number in the whole tensor
    copy: int  # which of the copies that ranks have of these rows
    num_copies: int


def rows_of(tensor: Tensor) -> Rows:
    """This rank's rows of a tensor in any layout."""
    if not isinstance(tensor, DTensor):
        return Rows(tensor, 0, distributed.rank(), distributed.world_size())
    mesh = tensor.device_mesh
    num_rows = -(-tensor.shape[0] // mesh.size(-1))  # FSDP2 splits dim 0 like torch.chunk: the last ranks may get none
    copy, num_copies = (mesh.get_local_rank(0), mesh.size(0)) if mesh.ndim == 2 else (0, 1)
    return Rows(tensor.to_local(), mesh.get_local_rank(-1) * num_rows, copy, num_copies)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Mean of the gradients over the ranks, in one all-reduce. FSDP has averaged sharded ones in backward."""
    # Who has no gradient here has none anywhere (Qwen-Image's last text MLP). Zeros would let weight decay shrink it.
    grads = [p.grad for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
    if distributed.world_size() == 1 or not grads:
        return
    flat = distributed.average(torch.cat([grad.flatten() for grad in grads]))
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(mean.view_as(grad))


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a global norm of at most `max_norm`; returns the norm before, [] f32, without a host sync."""
    parameters = [p for p in parameters if p.grad is not None]
    if not parameters:
        raise ValueError("no trained weight has a gradient: call backward() on a loss of the transformer before a step")
    norm = full_tensor(nn.utils.get_total_norm([p.grad for p in parameters]))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def weight_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all weights together, [] f32; all ranks must call."""
    return full_tensor(nn.utils.get_total_norm([p.detach() for p in parameters]))


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; all ranks must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor; another one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def from_local_part(rows: Tensor, whole: Tensor) -> Tensor:
    """The inverse of `local_part`, with `rows` for those of `whole`."""
    if not isinstance(whole, DTensor):
        return rows
    layout = whole.device_mesh, whole.placements
    return DTensor.from_local(rows, *layout, run_check=False, shape=whole.shape, stride=whole.stride())


def full_state_dict(transformer: nn.Module, trainable_only: bool = True) -> dict[str, Tensor]:
    """Whole tensors by name, on the CPU of rank 0 and {} elsewhere: what is trained, or all and persistent buffers.

    All ranks must call.
    """
    tensors = trainable_parameters(transformer) if trainable_only else transformer.state_dict()
    state = {}
    for name, tensor in tensors.items():  # one at a time: more than one need not fit beside the shards
        whole = full_tensor(tensor.detach())
        if distributed.is_main():
            state[name] = whole.to("cpu", copy=True)
    return state
