"""A LoRA file as diffusers or peft writes it: what it says of itself, whether it is whole and fits a model, and its
weights.

Rank and alpha are what diffusers or peft makes of the file. What they would compute otherwise than flow_grpo is
refused. A path may be the file itself, or a folder with one.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn

from flow_grpo.base import checksums, folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.weights import finite, safetensors_reader

FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # what peft's save_pretrained writes
PEFT_PREFIX = "base_model.model."  # of each name in it, where diffusers has "transformer."
METADATA = "lora_adapter_metadata"  # in the file's header: the LoraConfig, as JSON
NAME = re.compile(r"transformer\.(.+)\.lora_[AB]\.weight")
HEEDED = {  # settings that are read, or without effect on what the stored tensors compute
    *("r", "lora_alpha"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "task_type"),
    *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "megatron_core"),
    *("qalora_group_size",),
}
FIRST_WEIGHTS = True, False, "gaussian", "orthogonal", "eva"  # init_lora_weights that leave the base as it is
WAY_OUT = "load it in diffusers, and save what it computes as a plain LoRA (save_lora_weights) or as a model"
PEFT_WAY_OUT = "merge it into its transformer in peft (merge_and_unload) and save that by save_pretrained"


class Adapter(NamedTuple):
    """What a LoRA file adapts."""

    rank: int
    alpha: float
    shapes: dict[str, tuple[int, ...]]  # parameter name -> shape

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(sorted({name.split(".lora_")[0] for name in self.shapes}))


def find(path: Path | str) -> Path:
    """The file of a LoRA: the path itself, or in a folder diffusers' file, peft's, or else the only one. Raises
    UserError where there is none or several."""
    try:
        return _found(Path(path))
    except OSError as error:  # a folder that nobody may look into
        raise UserError(f"{in_one_line(path)} cannot be read: {error.strerror}") from error


def _found(folder: Path) -> Path:
    """As `find` says. Raises OSError, too."""
    if folder.is_file():
        return folder
    for name in (FILE, PEFT_FILE):
        if (folder / name).is_file() or (folder / name).is_symlink():
            return folder / name
    files = [file for file in sorted(folder.glob("*.safetensors")) if _may_be_a_lora(file)]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:3])
        raise UserError(f"{in_one_line(folder)} holds {len(files)} LoRA files ({names}): name one of them")
    raise UserError(f"{in_one_line(folder / FILE)} does not exist{what_is_there(folder)}")


def is_lora(path: Path | str) -> bool:
    """Whether a path is a LoRA file's, or a folder's that holds such a file."""
    if Path(path).is_file():
        return Path(path).suffix == ".safetensors"
    return any(_may_be_a_lora(file) for file in Path(path).glob("*.safetensors"))


def files_of(path: Path | str) -> list[Path]:
    """The files that are read of a LoRA."""
    file = find(path)
    return [file, file.with_name(PEFT_CONFIG)] if _is_pefts(file) else [file]


def _may_be_a_lora(file: Path) -> bool:
    """By the names in its header, which need not be those of diffusers. Of one that cannot be read, `read` says why."""
    if file.name in (FILE, PEFT_FILE):
        return True
    try:
        return any("lora_" in name for name in safetensors_reader.header_of(file).shapes)
    except UserError:
        return True


def _is_pefts(file: Path) -> bool:
    return file.name == PEFT_FILE or (file.name != FILE and file.with_name(PEFT_CONFIG).is_file())


def what_is_there(folder: Path) -> str:
    """What may have been meant by a path without a LoRA file, as the rest of a sentence."""
    if locations.is_hub_id(str(folder)):
        return f"; `hf download {folder} --local-dir FOLDER` fetches it from the hub, and FOLDER is then its path"
    inside = [file for name in (FILE, PEFT_FILE) for file in sorted(folder.glob(f"*/{name}"))]
    if inside:
        return f"; there is {in_one_line(inside[0])}"
    pickled = [name for name in ("adapter_model.bin", "pytorch_lora_weights.bin") if (folder / name).is_file()]
    return f"; there is {pickled[0]}: save it by safe_serialization=True" if pickled else ""


def read(path: Path | str) -> Adapter:
    """What a LoRA file says of itself. Raises UserError unless it is diffusers' or peft's LoRA, of one rank and one
    alpha."""
    file = find(path)
    header = safetensors_reader.header_of(file)
    shapes = {_diffusers_name(name): shape for name, shape in header.shapes.items()}
    rank = _rank(file, shapes)
    settings = _peft_settings(file) if _is_pefts(file) else _diffusers_settings(file, header.metadata)
    alpha = rank if settings is None else _alpha(file, settings, rank)
    return Adapter(rank, alpha, {name.removeprefix("transformer."): shape for name, shape in shapes.items()})


def _diffusers_name(name: str) -> str:
    if not name.startswith(PEFT_PREFIX):
        return name
    return f"transformer.{name.removeprefix(PEFT_PREFIX).removeprefix('transformer.')}"


def check(path: Path | str) -> Adapter:
    """`read`, and that the weights are finite and, where checksums tell, those that were written; else a UserError."""
    file = find(path)
    checksums.check(file.parent)
    adapter = read(file)
    if problem := finite.problem(weights(file)):
        raise UserError(f"{in_one_line(file)} cannot be used: {problem}")
    return adapter


def weights(path: Path | str) -> dict[str, Tensor]:
    """Parameter name -> float32, on the CPU."""
    stored = load_file(find(path))
    return {_diffusers_name(name).removeprefix("transformer."): weight.float() for name, weight in stored.items()}


def check_fits(path: Path | str, adapter: Adapter, transformer: nn.Module, model: str) -> None:
    """Raises UserError unless every layer that a LoRA adapts is in a transformer, and as wide there."""
    layers = {name: module for name, module in transformer.named_modules() if hasattr(module, "in_features")}
    for name, shape in adapter.shapes.items():
        layer, part = name.removesuffix(".weight").rsplit(".lora_", 1)
        width = layers.get(layer) and (layers[layer].in_features if part == "A" else layers[layer].out_features)
        if width != shape[1 if part == "A" else 0]:
            problem = f"is {list(shape)}, the layer is {width} wide" if width else "has no layer there"
            raise UserError(f"{path} is the LoRA of another model than {model}: {name} {problem}")


def check_targets(path: Path | str, adapter: Adapter, targets: tuple[str, ...]) -> None:
    """Raises UserError for layers that a run does not adapt: their names end in none of `targets`."""
    ends = tuple(f".{target}" for target in targets)
    if others := [layer for layer in adapter.layers if not f".{layer}".endswith(ends)]:
        raise UserError(
            f"{in_one_line(find(path))} adapts {len(others)} layers that a run does not train ({others[0]}): "
            "fuse it into the base model (fuse_lora, save_pretrained) and train that"
        )


def _way_out(file: Path) -> str:
    return PEFT_WAY_OUT if _is_pefts(file) else WAY_OUT


def _rank(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Raises UserError unless each layer has an A and a B, by diffusers' names, and all are of one rank."""
    file, layers = in_one_line(path), {match[1] for name in shapes if (match := NAME.fullmatch(name))}
    pairs = {f"transformer.{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    if not pairs or shapes.keys() != pairs:
        wrong = ", ".join(sorted(shapes.keys() ^ pairs)[:3]) or "no weight"
        raise UserError(f"{file} is no LoRA of a diffusers transformer, or not whole ({wrong}): {_way_out(path)}")
    ranks = {shape[0 if ".lora_A." in name else 1] if len(shape) == 2 else 0 for name, shape in shapes.items()}
    if len(ranks) != 1 or 0 in ranks:
        raise UserError(f"{file} has layers of ranks {sorted(ranks)}; one rank above 0 is supported: {_way_out(path)}")
    return ranks.pop()


def _diffusers_settings(file: Path, metadata: dict[str, str]) -> dict[str, Any] | None:
    """The LoraConfig in a file's header; None where it has none. Raises UserError for one that cannot be read."""
    header = metadata.get(METADATA)
    if not header:
        return None
    try:
        stored = json.loads(header)
        return {key.removeprefix("transformer."): stored[key] for key in stored if key.startswith("transformer.")}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{in_one_line(file)}: {METADATA} in its header cannot be read: {in_one_line(error)}"
        ) from error


def _peft_settings(file: Path) -> dict[str, Any]:
    """The LoraConfig beside a file. Raises UserError where there is none."""
    config = file.with_name(PEFT_CONFIG)
    if problem := folders.problem_of(config):
        raise UserError(f"{in_one_line(config)}, which has the alpha of {file.name}, {problem}")
    return folders.read_json(config)


def _alpha(file: Path, settings: dict[str, Any], rank: int) -> float:
    """Raises UserError where diffusers or peft would scale by more than alpha / rank."""
    place = f"{in_one_line(file)}: its header"
    if _is_pefts(file):
        place = in_one_line(file.with_name(PEFT_CONFIG))
    stored, alpha = quoted({key: settings.get(key) for key in ("r", "lora_alpha")}), settings.get("lora_alpha")
    if settings.get("r") != rank or type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise UserError(f"{place} has {stored}, its weights have rank {rank}")
    plain = LoraConfig().to_dict()
    if settings.get("init_lora_weights") in FIRST_WEIGHTS:
        plain["init_lora_weights"] = settings["init_lora_weights"]
    strange = {}
    for key, value in settings.items():
        is_off = key not in plain and not value  # of another version of peft
        if key not in HEEDED and not is_off and value != plain.get(key):
            strange[key] = value
    if strange:
        raise UserError(f"{place} has {quoted(strange)}, which is not supported: {_way_out(file)}")
    return alpha
