"""Frozen linear layers of a transformer in 8 or 4 bits a weight, through which gradients reach the adapters. With them
in rollout and update alike the transformer is a policy of its own, whose log-probs agree bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from flow_grpo.base.errors import UserError
from flow_grpo.kernels.quantised_linear import EightBitLinear, NF4Linear, QuantisedLinear
from flow_grpo.settings import table
from flow_grpo.settings.sections import Config

# Layers by config.base_precision.
KINDS: dict[str, type[EightBitLinear] | type[NF4Linear]] = {"fp8_weights": EightBitLinear, "nf4": NF4Linear}


def check_device(config: Config, device: torch.device) -> None:
    """Raise UserError where the config asks for 8-bit floats and the GPU has none: their products, and the compiler's
    use of them, came with compute capability 8.9 (Ada, Hopper)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        return
    name = torch.cuda.get_device_name(device)
    if config.base_precision == "fp8_weights" and config.compile:
        raise UserError(f"config.base_precision is 'fp8_weights': {name} compiles no layers of 8-bit floats")
    for key in ("sample.rollout_weights", "train.grad_input_precision"):
        value = table.value_of(config, key)
        if "fp8" in value:
            raise UserError(f"config.{key} is {value!r}: {name} has no products of 8-bit floats")


def quantise_units(transformer: nn.Module, units: tuple[str, ...], precision: str) -> None:
    """Replace the frozen linear layers inside modules of these classes by quantised ones, one at a time. An adapted
    layer is replaced beneath its adapter.

    Args:
        units: class names of modules.
        precision: a key of KINDS; "" changes nothing.
    """
    if not precision:
        return
    # All parents are listed before any is changed.
    parents: list[nn.Module] = []
    for module in transformer.modules():
        if type(module).__name__ in units:
            parents += module.modules()
    for parent in parents:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not child.weight.requires_grad:
                setattr(parent, name, KINDS[precision].of(child))
    assert quantised_layers(transformer), f"no linear layer of {units} is frozen"


def round_gradients(transformer: nn.Module) -> None:
    """Make 8-bit layers compute the gradients of their inputs by products of 8 bits, from here on."""
    for layer in quantised_layers(transformer).values():
        if isinstance(layer, EightBitLinear):
            layer.rounds_gradients = True


def merged_copy(base: nn.Linear | EightBitLinear, change: Tensor) -> EightBitLinear:
    """Return an 8-bit layer whose weight is that of a frozen layer plus a change [out, in]."""
    out_features, in_features = change.shape
    if isinstance(base, EightBitLinear):
        merged = EightBitLinear(out_features, in_features, base.bias, base.dtype, change.device)
        merged.store_sum(base, change)
    else:
        merged = EightBitLinear(out_features, in_features, base.bias, base.weight.dtype, change.device)
        merged.store(base.weight + change)
    return merged


def precision_of(transformer: nn.Module) -> str:
    """Return the precision of the frozen layers, a key of KINDS; "" where none is quantised."""
    for layer in quantised_layers(transformer).values():
        for name, kind in KINDS.items():
            if type(layer) is kind:
                return name
    return ""


def quantised_layers(transformer: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the quantised layers by name."""
    return {name: module for name, module in transformer.named_modules() if isinstance(module, QuantisedLinear)}


def eight_bit_layers(transformer: nn.Module) -> list[EightBitLinear]:
    """Return the layers of 8 bits."""
    return [layer for layer in quantised_layers(transformer).values() if isinstance(layer, EightBitLinear)]


def products_of_8_bits(layers: Sequence[EightBitLinear]) -> AbstractContextManager:
    """Make 8-bit layers round their inputs, too, inside this block, which is faster.

    For forwards whose velocity enters no log-prob.
    """
    return flagged(layers, "rounds_x")


@contextmanager
def flagged(modules: Sequence[nn.Module], name: str) -> Iterator[None]:
    """Set an attribute of these modules to True inside this block, and to False after it."""
    for module in modules:
        setattr(module, name, True)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, name, False)
