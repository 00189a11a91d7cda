"""Functions of many elementwise operations, each of which would read and write all weights: on GPUs they may become one
kernel."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")

_options: dict[str, Any] | None = None  # of the compiler, once functions are compiled: see `compile_from_now_on`


def one_kernel(function: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
    """Return a function that computes the same, compiled for tensors of any shape where its first argument is on a GPU,
    from `compile_from_now_on` on."""

    # Made at the first call: the compiler takes seconds to import.
    @functools.cache
    def compiled() -> Callable[Inputs, Result]:
        return torch.compile(function, dynamic=True, options=_options)

    @functools.wraps(function)
    def call(*inputs: Inputs.args, **named: Inputs.kwargs) -> Result:
        first = inputs[0]
        assert isinstance(first, Tensor), f"{function.__name__} of {type(first).__name__}"
        if _options is not None and first.is_cuda:
            return compiled()(*inputs, **named)
        return function(*inputs, **named)

    return call


def compile_from_now_on(options: dict[str, Any]) -> None:
    """Compile functions of `one_kernel` at their next calls on GPUs, for the rest of this process.

    Args:
        options: of the compiler.
    """
    global _options
    _options = options
