"""LoRA adapters of compiled blocks: peft's numbers in fewer passes over a layer's inputs and results."""

from typing import Any, TypeGuard

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn import functional as F


class AdaptedLinear(Linear):
    """LoRA W x + B A x s (arXiv:2106.09685) with the scale s folded into the small A. Scaling the result costs another
    pass: each gradient of a result is written twice, and that of GELU a third time, in float32.

    `compilation.compile_units` gives this class to layers that `suits` accepts.
    """

    def forward(self, x: Tensor, narrow: Tensor | None = None, **base_inputs: Any) -> Tensor:
        """Map [..., in] to [..., out]; `narrow` [..., r] is `down` x, where that is known."""
        result = self.base_layer(x, **base_inputs)
        if self.disable_adapters:
            return result
        if narrow is None:
            narrow = _product(x, self.down)
        return (result + self.lora_B["default"](narrow)).to(result.dtype)

    @property
    def down(self) -> Tensor:
        """Product A s, [r, in]."""
        return self.lora_A["default"].weight * self.scaling["default"]


def suits(layer: nn.Module) -> TypeGuard[Linear]:
    """Tell whether it is peft's own linear layer with a plain adapter `default` and nothing else."""
    return (
        type(layer) is Linear
        and list(layer.lora_A) == layer.active_adapters == ["default"]
        and not (layer.merged or layer.lora_variant or layer.lora_bias["default"])
        and isinstance(layer.lora_dropout["default"], nn.Identity)
    )


def results_of(layers: list[nn.Module], x: Tensor) -> list[Tensor]:
    """Compute each layer's result of one x [..., in]. A x of all adapters is one product, which reads x once."""
    adapted = [layer for layer in layers if isinstance(layer, AdaptedLinear) and not layer.disable_adapters]
    if len(adapted) < len(layers):
        return [layer(x) for layer in layers]
    downs = [layer.down for layer in adapted]
    ranks = [len(down) for down in downs]
    narrows = _product(x, torch.cat(downs)).split(ranks, -1)
    return [layer(x, narrow=narrow) for layer, narrow in zip(adapted, narrows, strict=True)]


def _product(x: Tensor, down: Tensor) -> Tensor:
    return F.linear(x.to(down.dtype), down)
