"""Frozen linear layers of a transformer in 8 or 4 bits a weight, through which gradients reach the adapters. With them
in rollout and update alike the transformer is a policy of its own, whose log-probs agree bit for bit.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn

from flow_grpo.base.errors import UserError
from flow_grpo.kernels.quantised_linear import EightBitLinear, NF4Linear, QuantisedLinear

KINDS = {"fp8_weights": EightBitLinear, "nf4": NF4Linear}  # by config.base_precision


def check_device(config: ConfigDict, device: torch.device) -> None:
    """Raises UserError where config asks for 8-bit floats and the GPU cannot: their products, and the compiler's use
    of them, came with compute capability 8.9 (Ada, Hopper)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        return
    name = torch.cuda.get_device_name(device)
    if config.base_precision == "fp8_weights" and config.compile:
        raise UserError(f"config.base_precision is 'fp8_weights': {name} compiles no layers of 8-bit floats")
    if "fp8" in config.sample.rollout_weights:
        weights = config.sample.rollout_weights
        raise UserError(f"config.sample.rollout_weights is {weights!r}: {name} has no products of 8-bit floats")


def quantise_units(transformer: nn.Module, units: tuple[str, ...], precision: str) -> None:
    """Put quantised layers in the place of the frozen linear layers inside modules of these classes, one at a time:
    those that have an adapter, beneath it, and those that have none. `precision`: of KINDS; "" changes nothing."""
    if not precision:
        return
    inside = [unit for unit in transformer.modules() if type(unit).__name__ in units]
    for parent in [module for unit in inside for module in unit.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not child.weight.requires_grad:
                setattr(parent, name, KINDS[precision].of(child))
    assert quantised_layers(transformer), f"no linear layer of {units} is frozen"


def merged_copy(base: nn.Linear | EightBitLinear, change: Tensor) -> EightBitLinear:
    """A layer of 8 bits whose W is that of a frozen one plus a change [out, in]."""
    is_quantised = isinstance(base, EightBitLinear)
    dtype = base.dtype if is_quantised else base.weight.dtype
    copy = EightBitLinear(*change.shape, base.bias, dtype, change.device)
    if is_quantised:
        copy.store_sum(base, change)
    else:
        copy.store(base.weight + change)
    return copy


def precision_of(transformer: nn.Module) -> str:
    """Of its frozen layers, as in KINDS; "" where none is quantised."""
    kinds = {type(layer) for layer in quantised_layers(transformer).values()}
    return next((name for name, kind in KINDS.items() if kind in kinds), "")


def quantised_layers(transformer: nn.Module) -> dict[str, QuantisedLinear]:
    """By name."""
    return {name: module for name, module in transformer.named_modules() if isinstance(module, QuantisedLinear)}


def products_of_8_bits(transformer: nn.Module) -> AbstractContextManager:
    """Inside, layers that store 8 bits round x as well: faster. For forwards whose velocity enters no log-prob."""
    layers = [layer for layer in quantised_layers(transformer).values() if isinstance(layer, EightBitLinear)]
    return flagged(layers, "rounds_x")


@contextmanager
def flagged(modules: list[nn.Module], name: str) -> Iterator[None]:
    """Inside, an attribute of these modules is True; outside it is False."""
    for module in modules:
        setattr(module, name, True)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, name, False)
