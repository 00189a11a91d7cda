"""Compilation of a transformer's blocks, and the choice of the graph that a forward goes through."""

import math
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch._functorch import config as functorch

from flow_grpo.kernels import lora_linear, one_kernel
from flow_grpo.kernels.lora_linear import AdaptedLinear
from flow_grpo.kernels.quantised_linear import EightBitLinear

if TYPE_CHECKING:
    from torch._inductor.choices import InductorChoices


def _rows_of_4096() -> "InductorChoices":
    # Its module imports the compiler.
    from flow_grpo.kernels.row_reductions import RowsInRegisters

    return RowsInRegisters()


# Every graph of this process has this option, since a thread keeps the choices of the first graph that it compiles. A
# global setting would not reach backward graphs: autograd compiles them in its own threads, and since torch 2.12 each
# thread has settings of its own. The key of a kept graph holds the choices' `uuid`, in torch 2.11 the function's name.
CHOICES: dict[str, Any] = dict(inductor_choices_class=_rows_of_4096)
# The compiler shall not choose among kernels of a sum by measured times, so that a graph compiled again has the same
# bits. It is an option of each graph, since a global setting would not last: the compiler itself calls
# torch.use_deterministic_algorithms, which resets it.
OPTIONS: dict[str, Any] = dict(deterministic=True, **CHOICES)
# GELU is nowhere below this, in any rounding.
LOWEST_GELU = -0.172


def compile_units(transformer: nn.Module, units: tuple[str, ...], activation_memory: float = 1.0) -> None:
    """Compile the forwards of modules of these classes, on the first one of each shape and mode. One graph serves all
    modules of a class; shapes are fixed, since a graph for any shape would use other kernels.

    Args:
        activation_memory: share of the backward's activations that graphs may keep, 0 to 1; for all graphs of this
            process. The compiler chooses which operations to run again, by what each costs and frees.
    """
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    one_kernel.compile_from_now_on(CHOICES)
    functorch.activation_memory_budget = activation_memory
    # Without it, graphs of quantised layers are made anew in every process.
    functorch.autograd_cache_allow_custom_autograd_functions = True
    modules = modules_of(transformer, units)
    for module in modules:
        _simplify(module)
    for module in modules:
        # The forward without hooks: these gather sharded weights, which no graph may hold.
        forward = MethodType(type(module).forward, module)
        module.forward = torch.compile(forward, dynamic=False, options=OPTIONS)
    if modules:
        modules[0].forward = _wanting_gradients(modules[0].forward)


def keep_graphs(folder: Path, device: torch.device) -> None:
    """Keep the graphs of this process and their kernels in a folder, those of a kind of device and of PyTorch's version
    in a folder of their own. Call it before anything is compiled.

    PyTorch reads graphs by pickle: whoever can write to the folder can run a program in this process.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    kind = re.sub(r"[^\w.+-]+", "_", f"{name}_torch_{torch.__version__}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute() / kind)


def modules_of(network: nn.Module, units: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules of these classes, sharded or not, in the order of the network."""
    return [module for module in network.modules() if type(module).__name__.removeprefix("FSDP") in units]


def _simplify(unit: nn.Module) -> None:
    """Replace operations of diffusers by some that compile to fewer instructions."""
    for module in unit.modules():
        # A class that is shared has one graph; a functools.partial of each module would be compiled for each.
        if _is_plain_mlp(module):
            module.__class__ = _FeedForward
        elif lora_linear.suits(module):
            module.__class__ = AdaptedLinear
        elif _is_gelu_by_tanh(module):
            module.forward = gelu


def _is_gelu_by_tanh(module: nn.Module) -> bool:
    return isinstance(module, nn.GELU) and module.approximate == "tanh"


def _is_plain_mlp(module: nn.Module) -> TypeGuard[FeedForward]:
    """Tell whether it is an MLP of a layer, GELU by tanh, no dropout, and a layer."""
    if not isinstance(module, FeedForward):
        return False
    layers: Any = module.net
    first, dropout, *rest = layers
    return isinstance(first, GELU) and first.approximate == "tanh" and dropout.p == 0 and len(rest) == 1


class _FeedForward(FeedForward):
    """MLP of a layer, GELU and a layer. Where the last one multiplies rows of 8 bits, the row's maximum is taken before
    GELU: after it, each GELU would be computed twice."""

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.net
        first, _, last = layers
        x = first.proj(x)
        if not _rounds_x(last):
            return last(gelu(x))
        # GELU falls, down to LOWEST_GELU, before it rises: a row's largest |GELU| is at most this.
        largest = gelu(x.detach().amax(-1, keepdim=True)).clamp(min=-LOWEST_GELU)
        return last(gelu(x), largest=largest)


def _rounds_x(layer: nn.Module) -> bool:
    """Tell whether a linear layer, adapted or not, multiplies rows of 8 bits."""
    base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    return isinstance(base, EightBitLinear) and base.rounds_x


def gelu(x: Tensor) -> Tensor:
    """GELU by tanh (arXiv:1606.08415), 0.5 y (1 + tanh(sqrt(2 / pi) (y + 0.044715 y^3))).

    A tanh compiles to many instructions, so it is written as tanh(z) = 2 sigmoid(2 z) - 1.
    """
    y = x.float()
    return (y * torch.sigmoid(math.sqrt(8 / math.pi) * (y + 0.044715 * y**3))).to(x.dtype)


def _wanting_gradients(forward: Callable) -> Callable:
    """Make the first unit's forward compute gradients of its input tokens [B, L, D], as the other units' forwards do.

    With LoRA the first unit's input requires no gradient, so the unit would be compiled into a graph of its own.
    """

    def call(*inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            for value in (*inputs, *named.values()):
                if isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point():
                    value.requires_grad_()
        return forward(*inputs, **named)

    return call


def _detach_output(network: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    return output.detach()


def _cut_graph(unit: nn.Module, inputs: tuple, output: Any) -> Any:
    """Return a unit's output, one tensor or several, without its graph. The next unit computes gradients of it, as in
    training, so that both share one compiled graph."""
    if isinstance(output, tuple):
        return tuple(_cut_graph(unit, inputs, part) for part in output)
    if isinstance(output, Tensor) and output.requires_grad:
        return output.detach().requires_grad_()
    return output


@contextmanager
def training_graph(network: nn.Module, units: list[nn.Module]) -> Iterator[None]:
    """Run forwards inside this block through the graph of training, since that of inference computes other bits.

    What the graph saves for a backward is freed after each of the modules `units`.
    """
    # Prepended, so that they run before the hooks of sharded weights, which must see no graph.
    hooks = [network.register_forward_hook(_detach_output, prepend=True)]
    for module in units:
        hooks.append(module.register_forward_hook(_cut_graph, prepend=True))
    try:
        with torch.enable_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()
