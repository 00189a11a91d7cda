"""A transformer's weights in a folder of diffusers' safetensors."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from flow_grpo.base.errors import UserError
from flow_grpo.kernels.quantised_linear import QuantisedLinear
from flow_grpo.weights import quantisation

WEIGHTS = "diffusion_pytorch_model.safetensors"  # diffusers' name, also of the index: WEIGHTS + ".index.json"
READERS = 4  # threads; a layer in full precision is in memory for each


def read(transformer: nn.Module, folder: Path, copy_rows: Callable) -> None:
    """Fill everything but adapters from `folder`, by copy_rows(tensor or quantised layer, slice of a file), which fills
    what this rank has of it. peft calls the adapted layers' own weights base_layer. Raises UserError for names or
    shapes in `folder` that are not the transformer's, and for names that are missing."""
    tensors = {name: tensor for name, tensor in transformer.state_dict().items() if "lora_" not in name}
    tensors |= {f"{name}.weight": layer for name, layer in quantisation.quantised_layers(transformer).items()}
    targets = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
    stored = _names(folder)
    wrong = {"missing": targets.keys() - stored.keys(), "unexpected": stored.keys() - targets.keys()}
    if any(wrong.values()):
        problems = "; ".join(f"{what}: {', '.join(sorted(names))}" for what, names in wrong.items() if names)
        raise UserError(f"{folder} does not hold this {type(transformer).__name__}: {problems}")
    with ThreadPoolExecutor(READERS) as pool:  # one thread copies less than disk and bus can give
        list(pool.map(partial(_read_file, targets, copy_rows), sorted(set(stored.values()))))


def _read_file(targets: dict[str, Tensor | QuantisedLinear], copy_rows: Callable, file: Path) -> None:
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
            rows = tensors.get_slice(name)
            if rows.get_shape() != list(targets[name].shape):
                raise UserError(f"{name} is {rows.get_shape()} in {file}, {list(targets[name].shape)} in the model")
            copy_rows(targets[name], rows)


def _names(folder: Path) -> dict[str, Path]:
    """Each weight's file, from the index or from the only file."""
    index = folder / (WEIGHTS + ".index.json")
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {WEIGHTS}
    absent = [name for name in sorted(names) if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{folder} has no {', '.join(absent)}")
    stored = {}
    for file in names:
        with safe_open(folder / file, framework="pt") as tensors:
            stored |= dict.fromkeys(tensors.keys(), folder / file)
    return stored
