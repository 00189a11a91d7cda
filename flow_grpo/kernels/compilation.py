"""Compiled blocks, and which of their graphs a forward goes through."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch._functorch import config as functorch

from flow_grpo.kernels import lora_linear, stochastic_rounding
from flow_grpo.kernels.lora_linear import AdaptedLinear
from flow_grpo.kernels.quantised_linear import EightBitLinear

# No form of a sum is chosen by its time, so that a graph compiled again has the same bits. Only as an option does it
# hold for all graphs: torch.use_deterministic_algorithms, which the compiler calls itself, resets the setting.
OPTIONS = dict(deterministic=True)
LOWEST_GELU = -0.172  # below the least of its values, in any rounding


def compile_units(transformer: nn.Module, units: tuple[str, ...], activation_memory: float = 1.0) -> None:
    """Compile the forwards of modules of these classes, on the first one of each shape and mode. One graph serves all
    modules of a class; shapes are fixed, since a graph for any shape would use other kernels.

    Args:
        activation_memory: share of what the backward would keep that it may keep, 0 to 1. Which operations
            are run again is the compiler's choice, by what each costs and frees; in this process, of all graphs.
    """
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 64, True
    stochastic_rounding.compile_for_gpus()
    functorch.activation_memory_budget = activation_memory
    functorch.autograd_cache_allow_custom_autograd_functions = True  # else graphs of quantised layers are made anew
    modules = [module for module in transformer.modules() if type(module).__name__.removeprefix("FSDP") in units]
    _simplify(modules)
    for module in modules:
        forward = MethodType(type(module).forward, module)  # without hooks, which gather its weights
        module.forward = torch.compile(forward, dynamic=False, options=OPTIONS)
    if modules:
        modules[0].forward = _wanting_gradients(modules[0].forward)


def _simplify(units: list[nn.Module]) -> None:
    """Write operations of diffusers in a way that compiles to fewer instructions."""
    for module in (module for unit in units for module in unit.modules()):
        if isinstance(module, FeedForward) and _is_plain(module):
            module.__class__ = _FeedForward  # a functools.partial of each module would be compiled for each
        elif lora_linear.suits(module):
            module.__class__ = AdaptedLinear
        elif isinstance(module, nn.GELU) and module.approximate == "tanh":
            module.forward = gelu


def _is_plain(module: FeedForward) -> bool:
    """Whether it is a layer, GELU by tanh, no dropout, and a layer."""
    first, dropout, *rest = module.net
    return isinstance(first, GELU) and first.approximate == "tanh" and dropout.p == 0 and len(rest) == 1


class _FeedForward(FeedForward):
    """A layer, GELU and a layer. Where the last one multiplies rows of 8 bits, a row's largest GELU is that of its
    largest x: else each GELU would be computed twice."""

    def forward(self, x: Tensor) -> Tensor:
        first, _, last = self.net
        x = first.proj(x)
        if not _rounds_x(last):
            return last(gelu(x))
        largest = gelu(x.detach().amax(-1, keepdim=True)).clamp(min=-LOWEST_GELU)
        return last(gelu(x), largest=largest)


def _rounds_x(layer: nn.Module) -> bool:
    """Whether a linear layer, adapted or not, multiplies rows of 8 bits."""
    base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    return isinstance(base, EightBitLinear) and base.rounds_x


def gelu(x: Tensor) -> Tensor:
    """GELU by tanh (arXiv:1606.08415), with tanh(y) = 2 sigmoid(2 y) - 1: a tanh compiles to many instructions."""
    y = x.float()
    return (y * torch.sigmoid(math.sqrt(8 / math.pi) * (y + 0.044715 * y**3))).to(x.dtype)


def _wanting_gradients(forward: Callable) -> Callable:
    """The first unit's forward, which also computes gradients of its input tokens [B, L, D]. With LoRA this input does
    not require a gradient, so the unit would be compiled separately; so all units share one graph."""

    def call(*inputs, **named):
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        for tensor in tensors if torch.is_grad_enabled() else []:
            if tensor.ndim == 3 and tensor.is_floating_point():
                tensor.requires_grad_()
        return forward(*inputs, **named)

    return call


@contextmanager
def training_graph(network: nn.Module) -> Iterator[None]:
    """Run forwards through the graph of training, whose bits are not those of inference, and free what it saves."""
    let_go = lambda _, inputs, output: output.detach()  # noqa: E731
    hook = network.register_forward_hook(let_go, prepend=True)  # before those of sharded weights see a graph
    try:
        with torch.enable_grad():
            yield
    finally:
        hook.remove()
