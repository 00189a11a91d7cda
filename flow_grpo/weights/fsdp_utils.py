"""Layout of the transformer's weights over the ranks: sharding, filling, reduction of gradients. No other module knows
FSDP2 and its tensors.

There are three layouts, which differ in memory and traffic but not in numbers: `replicate` (every rank has all weights;
fast with LoRA, since only the adapter's gradients travel), `shard` (FSDP2: every rank has 1/world of each tensor) and
`hybrid` (sharded inside groups of ranks, replicated across groups).
"""

import math
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flow_grpo.base import distributed
from flow_grpo.base.errors import UserError
from flow_grpo.kernels.quantised_linear import QuantisedLinear
from flow_grpo.weights import quantisation, safetensors_reader
from flow_grpo.weights.safetensors_reader import StoredWeights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# (parameter name, shape) -> an adapter's first weights, float32 on the CPU. They depend on the name alone, so that
# every rank and every layout starts from the same numbers.
AdapterInit = Callable[[str, torch.Size], Tensor]


def is_sharded(network: nn.Module) -> bool:
    """Return whether a forward gathers weights from all ranks, which must then make equally many forwards."""
    return isinstance(network, FSDPModule)


def make_mesh(mode: str, device: torch.device, offload: bool = False) -> DeviceMesh | None:
    """Return the mesh of ranks over which `prepare` lays weights out; None = every rank has all weights.

    A single rank needs a mesh only to offload its weights. Make one mesh per run: each opens its own process groups.

    Args:
        mode: as config.fsdp.mode.
        offload: whether sharded weights will be kept in host memory.
    """
    world_size = distributed.world_size()
    if offload and not torch.distributed.is_initialized():
        raise UserError("config.fsdp.offload 'weights' needs torchrun, on one GPU too: torchrun --nproc_per_node=1 ...")
    if mode == "replicate" or (world_size == 1 and not offload):
        return None
    if mode == "shard":
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    # torchrun says how many ranks it has started on each machine.
    per_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (world_size // per_machine, per_machine)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def trainable_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name: the adapter's, or all."""
    return {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}


def prepare(
    network: nn.Module,
    mesh: DeviceMesh | None,
    *,
    units: tuple[str, ...],
    device: torch.device,
    precision: str,
    weights: StoredWeights | None,
    init: AdapterInit | None = None,
    offload: bool = False,
) -> nn.Module:
    """Lay a FlowModel's network out over the ranks, in place, and fill its `transformer`. Trainable parameters become
    float32.

    Args:
        network: its transformer is on the meta device, adapters attached; a real one when `weights` is None.
        mesh: from `make_mesh`.
        units: class names of the modules that gather their weights at once, e.g. ("QwenImageTransformerBlock",).
        precision: "fp32" or "bf16", of the frozen weights, and of all weights in a sharded forward. The caller
            provides autocast for float32 weights, in every layout, or inputs of that dtype.
        weights: of which each rank reads its own rows.
        init: the adapter's first weights.
        offload: keep sharded weights, their gradients and the optimizer's state of them in pinned host memory; a
            unit's weights are on the device only while it computes.
    """
    transformer = network.get_submodule("transformer")
    dtype = DTYPES[precision]
    _set_precision(transformer, dtype)
    if weights is None:
        transformer.to(device)
    if mesh is not None:
        _shard(network, mesh, units, dtype, offload)
    _materialise(network, device, offload)
    fill_weights(transformer, weights, init)
    return network


@torch.no_grad()
def fill_layer(
    name: str, layer: nn.Module, device: torch.device, precision: str, weights: StoredWeights | None
) -> None:
    """Fill one frozen layer that has this name in a transformer, whole, on the device. Arguments as in `prepare`."""
    _set_precision(layer, DTYPES[precision])
    _materialise(layer, device, offload=False)
    if weights is not None:
        safetensors_reader.fill_layer(name, layer, weights, _copy_rows)


def _set_precision(module: nn.Module, dtype: torch.dtype) -> None:
    """Give what is frozen this dtype, and what is trained float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)
    for layer in quantisation.quantised_layers(module).values():
        layer.dtype = dtype


@torch.no_grad()
def fill_weights(transformer: nn.Module, weights: StoredWeights | None, init: AdapterInit | None) -> None:
    """Fill a transformer that is laid out: its adapters by `init`, everything else from `weights`.

    Arguments and errors as in `prepare`; None leaves those weights as they are.
    """
    if weights is not None:
        safetensors_reader.fill_transformer(transformer, weights, _copy_rows)
    if init is not None:
        for name, parameter in trainable_parameters(transformer).items():
            if "lora_" in name:
                _copy_rows(parameter.detach(), init(name, parameter.shape))


def _shard(network: nn.Module, mesh: DeviceMesh, units: tuple[str, ...], dtype: torch.dtype, offload: bool) -> None:
    """Apply FSDP2 to each unit and to the rest.

    A unit may mix bf16 frozen and float32 trainable parameters: FSDP2 needs one dtype of the trainable ones only. So
    adapters are sharded along with their layers, which divides their gradients and moments over the ranks too.
    """
    unit_modules = [module for module in network.modules() if type(module).__name__ in units]
    assert unit_modules, f"no module of {type(network.transformer).__name__} is one of {units}"
    # Inputs are not cast: SD3 takes timesteps up to 1000, which bf16 would round to multiples of 4.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload_policy = OffloadPolicy()
    if offload:
        offload_policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())

    # The root reshards after its forward, too. By default it would stay gathered after a no-grad forward, and would use
    # old weights after something other than backward (the EMA, a checkpoint) has written new ones.
    for module in [*unit_modules, network]:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True, offload_policy=offload_policy)
    # The order in which FSDP2 itself prefetches is that of the last forward, and a loss may have several.
    following: list[Any] = [*unit_modules[1:], network]
    for module, preceding in zip(following, unit_modules):
        module.set_modules_to_backward_prefetch([preceding])
    # A view would be a mistake if somebody wrote to it in place. Nobody does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    network.register_forward_hook(_separate)


def _separate(network: nn.Module, inputs: tuple, output: Tensor) -> Tensor | None:
    """Make the backward of a forward one step of the loss's graph."""
    if not output.requires_grad:
        return None
    return _OneForward.apply([output], torch.zeros((), requires_grad=True))


class _OneForward(torch.autograd.Function):
    """Output of one forward, whose whole backward runs before autograd goes on.

    In one graph autograd would hold the whole gradient of every weight until each of the loss's forwards (two, with
    guidance) had added to it. Apart, FSDP2 reduces and shards gradients layer by layer, one forward after the other.
    """

    @staticmethod
    def forward(ctx, output: list[Tensor], _: Tensor) -> Tensor:
        """Return a copy of a forward's output, and keep the output, with its graph, for `backward`.

        Args:
            output: in a list, where autograd does not see its graph.
            _: a scalar that requires grad, without which autograd would not call `backward`.
        """
        ctx.output = output[0]
        # A view of the output could not be written to in place.
        return output[0].clone()

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[None, None]:
        output = ctx.output
        ctx.output = None
        torch.autograd.backward(output, grad_outputs[0])
        return None, None


def _materialise(network: nn.Module, device: torch.device, offload: bool) -> None:
    """Give meta parameters memory and move the rest. Unlike `to_empty` it keeps the values of real buffers."""

    def place(tensor: Tensor) -> Tensor:
        target = torch.device("cpu") if offload and isinstance(tensor, DTensor) else device
        if tensor.is_meta:
            return torch.empty_like(tensor, device=target)
        return tensor.to(target)

    network._apply(place)


def _copy_rows(target: Tensor | QuantisedLinear, source: Any) -> None:
    """Copy this rank's rows of `source`, a tensor or a slice of a safetensors file, changed or not, to `target`."""
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
    """Part of a tensor that a rank holds."""

    tensor: Tensor  # live; the whole one, unless it is sharded
    first: int  # its first row's number in the whole tensor
    copy: int  # which of the copies that ranks have of these rows
    num_copies: int


def rows_of(tensor: Tensor) -> Rows:
    """Return this rank's rows of a tensor in any layout."""
    if not isinstance(tensor, DTensor):
        return Rows(tensor, 0, distributed.rank(), distributed.world_size())
    mesh = tensor.device_mesh
    # FSDP2 splits dim 0 like torch.chunk, in parts of ceil(rows / ranks): the last ranks may get none.
    rows_per_rank = math.ceil(tensor.shape[0] / mesh.size(-1))
    first = mesh.get_local_rank(-1) * rows_per_rank
    if mesh.ndim == 2:
        return Rows(tensor.to_local(), first, copy=mesh.get_local_rank(0), num_copies=mesh.size(0))
    return Rows(tensor.to_local(), first, copy=0, num_copies=1)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients over the ranks, in one all-reduce. FSDP has averaged sharded ones in backward."""
    # A parameter without a gradient has none on any rank (Qwen-Image's last text MLP). Zeros in its place would let
    # weight decay shrink it.
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            gradients.append(parameter.grad)
    if distributed.world_size() == 1 or not gradients:
        return
    means = distributed.average(torch.cat([gradient.flatten() for gradient in gradients]))
    start = 0
    for gradient in gradients:
        stop = start + gradient.numel()
        gradient.copy_(means[start:stop].view_as(gradient))
        start = stop


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a global norm of at most `max_norm`. Returns the norm before, [] f32, without a host sync."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        raise ValueError("no trained weight has a gradient: call backward() on a loss of the transformer before a step")
    norm = full_tensor(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def weight_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of all weights together, [] f32; all ranks must call."""
    return full_tensor(nn.utils.get_total_norm([parameter.detach() for parameter in parameters]))


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, on every rank; all ranks must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def from_local_part(rows: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor of the layout of `whole` whose rows on this rank are `rows`; the inverse of `local_part`."""
    if not isinstance(whole, DTensor):
        return rows
    return DTensor.from_local(
        rows, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the numbers of two tensors of one layout; those that are not sharded exchange their memory."""
    if not isinstance(one, DTensor):
        one.data, other.data = other.data, one.data
        return
    # Sharded weights are gathered from memory that FSDP has noted.
    before = one.clone()
    one.copy_(other)
    other.copy_(before)


def full_state_dict(transformer: nn.Module, trainable_only: bool = True) -> dict[str, Tensor]:
    """Return whole tensors by name, on the CPU of rank 0 and {} elsewhere: those that are trained, or all of them and
    persistent buffers. All ranks must call."""
    tensors = trainable_parameters(transformer) if trainable_only else transformer.state_dict()
    state = {}
    # One tensor at a time: more than one need not fit beside the shards.
    for name, tensor in tensors.items():
        whole = full_tensor(tensor.detach())
        if distributed.is_main():
            state[name] = whole.to("cpu", copy=True)
    return state
