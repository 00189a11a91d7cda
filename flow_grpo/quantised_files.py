"""Quantised weights on a disk: later starts read them instead of a model's own, of which they are a half or a quarter.

A folder holds a folder for each model and precision. It appears whole or not at all.
"""

import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import nn

from flow_grpo import distributed, folders, quantised, stored_weights
from flow_grpo.frozen_linear import QuantisedLinear

FILES = "*.safetensors"
FORMAT = 2  # of the layers' buffers; files of another are not read


def folder_of(cache: str, weights: Path, precision: str) -> Path:
    """Of one model's weights: named by the precision and what tells their files from others, also from those that take
    their place: size, time of the last change, and path, which of a hub's files holds their digest."""
    files = [path.resolve() for path in sorted(Path(weights).glob(FILES))]
    key = dict(files=[[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files])
    key |= dict(precision=precision, format=FORMAT)
    return Path(cache, hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest())


def check_writable(cache: str) -> None:
    """Raises ValueError unless config.weights_cache is a folder or can be made one."""
    try:
        Path(cache).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"config.weights_cache: {cache} cannot be written: {error.strerror}") from error


@torch.no_grad()
def fill(transformer: nn.Module, folder: Path, device: torch.device) -> bool:
    """Fill the quantised layers of a transformer on the meta device from `folder`, and mark them as filled; whether the
    folder is there.

    Raises:
        ValueError: it is damaged.
    """
    files, layers = list(folder.glob(FILES)), quantised.quantised_layers(transformer)
    if not files:
        return False
    stored_weights.each_file(partial(_read_file, layers, device), files)
    if any(tensor.is_meta for layer in layers.values() for tensor in layer.buffers()):
        raise ValueError(f"{folder} lacks weights of this model; delete it")
    for layer in layers.values():
        layer.filled = True
    return True


def _read_file(layers: dict[str, QuantisedLinear], device: torch.device, file: Path) -> None:
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                _set(layers, name, tensors.get_tensor(name))
    except (SafetensorError, KeyError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete {file.parent}") from error


def _set(layers: dict[str, QuantisedLinear], name: str, tensor: torch.Tensor) -> None:
    layer_name, _, buffer = name.rpartition(".")
    layers[layer_name].register_buffer(buffer, tensor, persistent=False)


def keep(transformer: nn.Module, folder: Path) -> None:
    """Write the quantised layers; the main rank does. Where another run was faster, its files stay."""
    distributed.on_main(_keep, transformer, folder)


def _keep(transformer: nn.Module, folder: Path) -> None:
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    layers = quantised.quantised_layers(transformer)
    tensors = {f"{name}.{key}": tensor for name, layer in layers.items() for key, tensor in layer.named_buffers()}
    try:
        scratch.mkdir(parents=True)
        save_torch_state_dict(tensors, scratch, filename_pattern="weights{suffix}.safetensors", max_shard_size="5GB")
        for file in scratch.iterdir():
            folders.as_any_new_file(file)
        scratch.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise ValueError(f"config.weights_cache: {folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
