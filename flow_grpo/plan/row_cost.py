"""The cost of one row of a transformer's forward, counted on its shapes: no weight is loaded."""

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.settings.sections import Lora
from flow_grpo.weights import policies

META = torch.device("meta")


class RowCost(NamedTuple):
    """Cost of a row without guidance and adapters. Numbers are elements of tensors, whatever their dtype."""

    flops: int  # multiply-adds times two of products and attention
    product_numbers: int  # results of all products and attentions, which a backward keeps or computes again
    block_numbers: int  # what enters the blocks, summed over them, which checkpointing keeps


class ModelSize(NamedTuple):
    """Numbers of weights of a transformer."""

    weights: int
    adapted: int  # of the layers that an adapter adapts
    trained: int
    blocks: int
    width: int  # of the widest tokens that enter a block
    freed: int = 0  # weights that tables of the modulation stand in for
    table: int = 0  # numbers of these tables

    @property
    def held(self) -> int:
        """Number of weights that a forward reads."""
        return self.weights - self.freed


def count(
    model: FlowModel, transformer: nn.Module, size: Size, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[RowCost, int]:
    """Count one row's forward. Returns its cost, and the channels of the tokens that enter its blocks.

    Args:
        model: without weights.
        transformer: on the meta device but for its position tables; it is moved there.
        shapes: of one row, as the model's row_shapes has them.
    """
    pipeline = copy.copy(model.pipeline)
    pipeline.transformer = transformer.to(META)
    empty = type(model)(pipeline, META)
    fields = {}
    for name, shape in shapes.items():
        dtype = torch.bool if name == "mask" else torch.float32
        fields[name] = torch.empty(1, *shape, dtype=dtype, device=META)
    latents = fields.pop("latents")

    blocks = _Blocks()
    hooks = []
    for block in _blocks_of(transformer, type(model)):
        hooks.append(block.register_forward_pre_hook(blocks.enter, with_kwargs=True))
    products = _Products()
    with torch.no_grad(), _Attention(products), products:
        empty.forward(latents, torch.empty(1, device=META), Condition(**fields), 1.0, size)
    for hook in hooks:
        hook.remove()
    return RowCost(products.flops, products.numbers, blocks.numbers), blocks.width


def model_size(transformer: nn.Module, lora: Lora, family: type[FlowModel], width: int) -> ModelSize:
    """Count the weights of a transformer on the meta device, to which the adapter is attached.

    Args:
        width: of the tokens, as `count` returns it.
    """
    weights = 0
    for parameter in transformer.parameters():
        weights += parameter.numel()
    policies.attach(transformer, lora, policies.targets(lora, family))
    adapted = 0
    for layer in policies.adapted_layers(transformer):
        adapted += layer.get_base_layer().weight.numel()
    trained = 0
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            trained += parameter.numel()
    num_blocks = len(_blocks_of(transformer, family))
    return ModelSize(weights, adapted, trained, num_blocks, width)


def _blocks_of(transformer: nn.Module, family: type[FlowModel]) -> list[nn.Module]:
    """Return the blocks of a transformer, as the model's class names them."""
    return [module for module in transformer.modules() if type(module).__name__ in family.SHARD_UNITS]


class _Blocks:
    """Add up the token tensors [B, L, D] that enter blocks."""

    def __init__(self) -> None:
        self.numbers = 0
        self.width = 0

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        """Add what a block is called with; a hook of its forward."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point():
                self.numbers += value.numel()
                self.width = max(self.width, value.shape[-1])


class _Products(TorchDispatchMode):
    """Count the arithmetic and the results of matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
            self.numbers += result.numel()
        return result


class _Attention(TorchFunctionMode):
    """Count attention by its formula, and compute none: on the meta device it would be a product of all scores, which
    no attention of a GPU stores."""

    def __init__(self, products: _Products):
        super().__init__()
        self.products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attention(*args, **kwargs)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *mask_and_more: Any, **options: Any) -> Tensor:
        """Return an empty result of attention [..., L, D], and count its two products: of scores, and of values."""
        query_width = query.shape[-1]
        value_width = value.shape[-1]
        num_queries = math.prod(query.shape[:-1])
        num_scores = num_queries * key.shape[-2]
        self.products.flops += 2 * num_scores * (query_width + value_width)
        result = query.new_empty(*query.shape[:-1], value_width)
        self.products.numbers += result.numel()
        return result
