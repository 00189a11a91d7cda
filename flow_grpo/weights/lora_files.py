"""A LoRA file as diffusers writes it: what it says of itself, whether it is whole and fits a model, and its weights.

Rank and alpha are what diffusers makes of the file. What it would compute otherwise than flow_grpo is refused.
"""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from flow_grpo.base import checksums
from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import in_one_line, quoted
from flow_grpo.weights import finite

FILE = "pytorch_lora_weights.safetensors"
METADATA = "lora_adapter_metadata"  # in the file's header: the LoraConfig, as JSON
NAME = re.compile(r"transformer\.(.+)\.lora_[AB]\.weight")
HEEDED = {  # settings that are read, or without effect on what the stored tensors compute
    *("r", "lora_alpha"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "task_type"),
    *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "megatron_core"),
    *("qalora_group_size",),
}
WAY_OUT = "load it in diffusers, and save what it computes as a plain LoRA (save_lora_weights) or as a model"


class Adapter(NamedTuple):
    """What a LoRA file adapts."""

    rank: int
    alpha: float
    shapes: dict[str, tuple[int, ...]]  # parameter name -> shape

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(sorted({name.split(".lora_")[0] for name in self.shapes}))


def read(folder: Path | str) -> Adapter:
    """What a LoRA file says of itself. Raises UserError unless it is diffusers' LoRA, of one rank and one alpha."""
    path = Path(folder, FILE)
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(METADATA)
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{in_one_line(path)} cannot be read: {in_one_line(error)}") from error
    rank = _rank(path, shapes)
    shapes = {name.removeprefix("transformer."): shape for name, shape in shapes.items()}
    return Adapter(rank, _alpha(path, header, rank), shapes)


def check(folder: Path | str) -> Adapter:
    """`read`, and that the weights are finite and, where checksums tell, those that were written; else a UserError."""
    checksums.check(Path(folder))
    adapter = read(folder)
    if problem := finite.problem(weights(folder)):
        raise UserError(f"{in_one_line(Path(folder, FILE))} cannot be used: {problem}")
    return adapter


def weights(folder: Path | str) -> dict[str, Tensor]:
    """Parameter name -> float32, on the CPU."""
    stored = load_file(Path(folder, FILE))
    return {name.removeprefix("transformer."): weight.float() for name, weight in stored.items()}


def check_fits(folder: Path | str, adapter: Adapter, transformer: nn.Module, model: str) -> None:
    """Raises UserError unless every layer that a LoRA adapts is in a transformer, and as wide there."""
    layers = {name: module for name, module in transformer.named_modules() if hasattr(module, "in_features")}
    for name, shape in adapter.shapes.items():
        layer, part = name.removesuffix(".weight").rsplit(".lora_", 1)
        width = layers.get(layer) and (layers[layer].in_features if part == "A" else layers[layer].out_features)
        if width != shape[1 if part == "A" else 0]:
            problem = f"is {list(shape)}, the layer is {width} wide" if width else "has no layer there"
            raise UserError(f"{folder} is the LoRA of another model than {model}: {name} {problem}")


def check_targets(folder: Path | str, adapter: Adapter, targets: tuple[str, ...]) -> None:
    """Raises UserError for layers that a run does not adapt: their names end in none of `targets`."""
    ends = tuple(f".{target}" for target in targets)
    if others := [layer for layer in adapter.layers if not f".{layer}".endswith(ends)]:
        raise UserError(
            f"{in_one_line(Path(folder, FILE))} adapts {len(others)} layers that a run does not train ({others[0]}): "
            "fuse it into the base model (fuse_lora, save_pretrained) and train that"
        )


def _rank(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Raises UserError unless each layer has an A and a B, by diffusers' names, and all are of one rank."""
    file, layers = in_one_line(path), {match[1] for name in shapes if (match := NAME.fullmatch(name))}
    pairs = {f"transformer.{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    if not pairs or shapes.keys() != pairs:
        wrong = ", ".join(sorted(shapes.keys() ^ pairs)[:3]) or "no weight"
        raise UserError(f"{file} is no LoRA of a diffusers transformer, or not whole ({wrong}): {WAY_OUT}")
    ranks = {shape[0 if ".lora_A." in name else 1] if len(shape) == 2 else 0 for name, shape in shapes.items()}
    if len(ranks) != 1 or 0 in ranks:
        raise UserError(f"{file} has layers of ranks {sorted(ranks)}; one rank above 0 is supported: {WAY_OUT}")
    return ranks.pop()


def _alpha(path: Path, header: str | None, rank: int) -> float:
    """By the header; without one it is the rank. Raises UserError where diffusers would scale by more than that."""
    if not header:
        return rank
    file = in_one_line(path)
    try:
        stored = json.loads(header)
        settings = {key.removeprefix("transformer."): stored[key] for key in stored if key.startswith("transformer.")}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file}: {METADATA} in its header cannot be read: {in_one_line(error)}") from error
    stored, alpha = quoted({key: settings.get(key) for key in ("r", "lora_alpha")}), settings.get("lora_alpha")
    if settings.get("r") != rank or type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise UserError(f"{file}: its header has {stored}, its weights have rank {rank}")
    plain = LoraConfig().to_dict()
    others = {key: value for key, value in settings.items() if key not in HEEDED}
    if strange := {key: value for key, value in others.items() if value != plain.get(key)}:
        raise UserError(f"{file}: its header has {quoted(strange)}, which is not supported: {WAY_OUT}")
    return alpha
