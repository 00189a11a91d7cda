"""Quantised weights on a disk: later starts read them instead of a model's own, of which they are a half or a quarter.

A folder holds a folder for each content of a model's files, precision and kind of device. It appears whole or not at
all, and is compared with its checksums before it is read. All ranks read it, or none does.
"""

import hashlib
import json
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
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


def on_all_ranks(folder: Path) -> bool:
    """Whether all ranks find the folder; all call. What killed writers left beside it goes.

    Raises:
        UserError: it is damaged; on every rank.
    """
    if distributed.is_first_on_node():
        folders.remove_leftovers(folder.parent)
    distributed.on_all(_check, folder)
    return all(distributed.gather_objects([folder.is_dir()]))


def _check(folder: Path) -> None:
    if distributed.is_first_on_node() and folder.is_dir() and (problem := checksums.damage(folder)):
        raise UserError(f"{folder} is damaged: {problem}; delete it, and the next start makes it again")


@torch.no_grad()
def fill(transformer: nn.Module, folder: Path, device: torch.device) -> None:
    """Fill the quantised layers of a transformer on the meta device from `folder`, and mark them as filled."""
    layers, filled = _layers(transformer), set()

    def read_file(file: Path) -> None:
        for name, tensor in load_file(file, device=str(device)).items():
            layer_name, _, key = name.rpartition(".")
            layers[layer_name].register_buffer(key, tensor, persistent=False)
            filled.add(layer_name)

    safetensors_reader.each_file(read_file, folder.glob(FILES))
    assert filled == layers.keys(), f"{folder} holds other layers: FORMAT has to change with what is stored"
    for layer in layers.values():
        layer.filled = True


def _layers(transformer: nn.Module) -> dict[str, QuantisedLinear]:
    """By the names that they have without an adapter."""
    layers = quantisation.quantised_layers(transformer)
    return {name.removesuffix(".base_layer"): layer for name, layer in layers.items()}


def keep(transformer: nn.Module, folder: Path) -> None:
    """Write the quantised layers where they are not; all ranks call. The main rank does, and then the first one of each
    machine that does not see its folder.

    Raises:
        UserError: it cannot be written; on every rank.
    """
    distributed.on_all(_write, transformer, folder, distributed.is_main())
    distributed.on_all(_write, transformer, folder, distributed.is_first_on_node())


def _write(transformer: nn.Module, folder: Path, is_writer: bool) -> None:
    if folder.is_dir() or not is_writer:
        return
    layers = _layers(transformer)
    tensors = {f"{name}.{key}": tensor for name, layer in layers.items() for key, tensor in layer.named_buffers()}
    try:
        with folders.published(folder) as scratch:
            scratch.mkdir(parents=True)
            pattern = "weights{suffix}.safetensors"
            save_torch_state_dict(tensors, scratch, filename_pattern=pattern, max_shard_size="5GB")
            checksums.write(scratch)
    except (OSError, SafetensorError) as error:
        if not folder.is_dir():  # another run was not faster
            raise UserError(f"config.cache_dir: {folder} cannot be written: {error}") from error
