"""Weights as diffusers loads them: a LoRA file, or a whole transformer. Equal weights make files of equal bytes."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from huggingface_hub import save_torch_state_dict
from peft import get_peft_model_state_dict
from torch import Tensor, nn

from flow_grpo.base import distributed, folders
from flow_grpo.weights import fsdp_utils, lora_files, quantisation, safetensors_reader

# The hub's client announces every file that it writes.
logging.getLogger("huggingface_hub").setLevel(logging.WARNING)


def save_lora(pipeline: Any, folder: Path | str, dtype: str = "float32") -> None:
    """Write an adapter as the safetensors file that `pipeline.load_lora_weights(folder)` reads.

    B is stored times alpha / rank, and the header has alpha = rank: a program that reads the tensors alone computes the
    same. Where alpha / rank is a power of two, B keeps every bit. With any other ratio each of its weights is rounded
    once more, by up to 6e-8 of itself, so that figures of the file may differ from the run's own in their last digits.

    The header says "base_precision" where the base is quantised.

    Args:
        dtype: of the stored weights, as torch calls it.
    """
    weights = fsdp_utils.full_state_dict(pipeline.transformer)
    distributed.on_main(_save_lora, pipeline, folder, weights, getattr(torch, dtype))


def _save_lora(pipeline: Any, folder: Path | str, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write the adapter's file, on the main rank. `weights` are the trained ones, whole, by the transformer's names."""
    layers = get_peft_model_state_dict(pipeline.transformer, state_dict=weights, adapter_name="default")
    settings = pipeline.transformer.peft_config["default"].to_dict()
    scale = settings["lora_alpha"] / settings["r"]
    for name, weight in layers.items():
        factor = scale if ".lora_B." in name else 1.0
        layers[name] = (weight * factor).to(dtype)
    settings["lora_alpha"] = settings["r"]
    metadata = {}
    precision = quantisation.precision_of(pipeline.transformer)
    if precision:
        metadata["base_precision"] = precision
    # A set has no order in JSON: equal adapters would make files of different bytes.
    for key, value in settings.items():
        if isinstance(value, set):
            settings[key] = sorted(value)
    with folders.published(Path(folder, lora_files.FILE)) as scratch:
        type(pipeline).save_lora_weights(
            folder,
            weight_name=scratch.name,
            transformer_lora_layers=layers,
            transformer_lora_adapter_metadata=settings,
        )
        _complete_header(scratch, metadata)


def strength(folder: Path) -> float:
    """Return the factor at which programs that read a LoRA's tensors alone compute what was trained: 1, but for files
    of earlier versions. Raises UserError for a file that is no LoRA."""
    if not (folder / lora_files.FILE).is_file():
        return 1.0
    adapter = lora_files.read_adapter(folder)
    return adapter.alpha / adapter.rank


def save_transformer(transformer: nn.Module, folder: Path | str) -> None:
    """Write all weights as diffusers does, for its `from_pretrained` and for `fsdp_utils.prepare`.

    A failure leaves the folder as it was.
    """
    weights = fsdp_utils.full_state_dict(transformer, trainable_only=False)
    distributed.on_main(_save_transformer, transformer, Path(folder), weights)


def _save_transformer(transformer: nn.Module, folder: Path, weights: dict[str, Tensor]) -> None:
    """Write the transformer's folder, on the main rank. `weights` are all of its weights, whole."""
    assert isinstance(transformer, ConfigMixin), "only diffusers' own transformers have a config"
    config = json.loads(transformer.to_json_string())
    # fully_shard gives the transformer a subclass whose name begins with FSDP; diffusers knows the class itself.
    config["_class_name"] = config["_class_name"].removeprefix("FSDP")
    pattern = safetensors_reader.WEIGHTS.replace(".", "{suffix}.")
    folders.recover(folder)
    with folders.published(folder, replaces=True) as scratch:
        scratch.mkdir(parents=True)
        (scratch / "config.json").write_text(json.dumps(config, indent=2))
        save_torch_state_dict(weights, scratch, filename_pattern=pattern, max_shard_size="5GB")


def _complete_header(file: Path, metadata: dict[str, str]) -> None:
    """Add metadata to the header of a safetensors file, and sort it, since safetensors writes it in any order."""
    # A file is the header's length in 8 bytes, the header as JSON, padded to a multiple of 8 bytes, and the tensors.
    stored = file.read_bytes()
    end = 8 + int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8:end])
    completed = header["__metadata__"] | metadata
    header["__metadata__"] = dict(sorted(completed.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + stored[end:])
