"""Quantised weights on a disk: later starts read them instead of a model's own, of which they are a half or a quarter.

A folder holds a folder for each content of a model's files, precision and kind of device. It appears whole or not at
all, and is compared with its checksums before it is read. All ranks read it, or none does.
"""

import hashlib
import json
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import nn

from flow_grpo.base import checksums, distributed, folders
from flow_grpo.base.errors import UserError
from flow_grpo.kernels.quantised_linear import QuantisedLinear
from flow_grpo.weights import quantisation, safetensors_reader

FILES = "*.safetensors"
FORMAT = 3  # of the layers' buffers and their names; files of another are not read


def folder_of(cache: str, weights: Path, precision: str, device: torch.device) -> Path:
    """Of one model's weights: named by the content of their files and what else decides the numbers, nothing of which
    is a machine's own. All ranks call.

    Raises:
        UserError: the machines have different weights.
    """
    own = _key(cache, weights, precision, device) if distributed.is_first_on_node() else ""
    keys = {key for key in distributed.gather_objects([own]) if key}
    if len(keys) > 1:
        raise UserError(f"{weights} has other weights on one machine than on another: copy one of them to all")
    return Path(cache, keys.pop())


def _key(cache: str, weights: Path, precision: str, device: torch.device) -> str:
    files = sorted(Path(weights).glob(FILES))
    digests = checksums.file_digests(files, memory=Path(cache, "digests.json"))
    key = dict(files=[[file.name, digest] for file, digest in zip(files, digests)])
    key |= dict(precision=precision, format=FORMAT, device=device.type)
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()


def check_writable(cache: str) -> None:
    """Raises UserError unless config.weights_cache is a folder or can be made one."""
    try:
        Path(cache).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"config.weights_cache: {cache} cannot be written: {error.strerror}") from error


def on_all_ranks(folder: Path) -> bool:
    """Whether all ranks find the folder; all call. What killed writers left beside it goes.

    Raises:
        UserError: it is damaged; on every rank.
    """
    found, problem = folder.is_dir(), ""
    if distributed.is_first_on_node():
        folders.remove_leftovers(folder.parent)
        problem = checksums.damage(folder) if found else ""
    answers = distributed.gather_objects([(found, problem)])
    for problem in filter(None, (problem for _, problem in answers)):
        raise UserError(f"{folder} is damaged: {problem}; delete it, and the next start makes it again")
    return all(found for found, _ in answers)


@torch.no_grad()
def fill(transformer: nn.Module, folder: Path, device: torch.device) -> None:
    """Fill the quantised layers of a transformer on the meta device from `folder`, and mark them as filled.

    Raises:
        UserError: it holds other layers.
    """
    layers = _layers(transformer)
    safetensors_reader.each_file(partial(_read_file, layers, device), folder.glob(FILES))
    if any(tensor.is_meta for layer in layers.values() for tensor in layer.buffers()):
        raise UserError(f"{folder} lacks weights of this model; delete it")
    for layer in layers.values():
        layer.filled = True


def _layers(transformer: nn.Module) -> dict[str, QuantisedLinear]:
    """By the names that they have without an adapter."""
    layers = quantisation.quantised_layers(transformer)
    return {name.removesuffix(".base_layer"): layer for name, layer in layers.items()}


def _read_file(layers: dict[str, QuantisedLinear], device: torch.device, file: Path) -> None:
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                _set(layers, name, tensors.get_tensor(name))
    except (SafetensorError, KeyError, AttributeError, OSError) as error:
        raise UserError(f"{file} is damaged ({error}); delete {file.parent}") from error


def _set(layers: dict[str, QuantisedLinear], name: str, tensor: torch.Tensor) -> None:
    layer_name, _, key = name.rpartition(".")
    expected = layers[layer_name].get_buffer(key)
    if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
        raise KeyError(f"{name} is {list(tensor.shape)} {tensor.dtype}, not {list(expected.shape)} {expected.dtype}")
    layers[layer_name].register_buffer(key, tensor, persistent=False)


def keep(transformer: nn.Module, folder: Path) -> None:
    """Write the quantised layers where they are not; all ranks call. The main rank does, and then the first one of each
    machine that does not see its folder. Where another run was faster, its files stay.

    Raises:
        UserError: it cannot be written; on every rank.
    """
    for is_writer in (distributed.is_main(), distributed.is_first_on_node()):
        problem = _keep(transformer, folder) if is_writer and not folder.is_dir() else ""
        if problems := [problem for problem in distributed.gather_objects([problem]) if problem]:
            raise UserError(f"config.weights_cache: {folder} cannot be written: {problems[0]}")


def _keep(transformer: nn.Module, folder: Path) -> str:
    """Why it could not be written, "" for nothing."""
    layers = _layers(transformer)
    tensors = {f"{name}.{key}": tensor for name, layer in layers.items() for key, tensor in layer.named_buffers()}
    try:
        with folders.published(folder) as scratch:
            scratch.mkdir(parents=True)
            pattern = "weights{suffix}.safetensors"
            save_torch_state_dict(tensors, scratch, filename_pattern=pattern, max_shard_size="5GB")
            checksums.write(scratch)
    except (OSError, SafetensorError) as error:
        return "" if folder.is_dir() else str(error)
    return ""
