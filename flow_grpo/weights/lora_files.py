"""LoRA files as diffusers or peft writes them: their settings and weights, and whether they are whole and fit a model.

Rank and alpha are those that diffusers or peft would use. A file from which they would compute something else than
flow_grpo is refused. A path may be the file itself, or a folder with one.
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
from flow_grpo.base.formatting import counted, in_one_line, quoted
from flow_grpo.weights import finite, safetensors_reader
from flow_grpo.weights.safetensors_reader import Shapes

FILE = "pytorch_lora_weights.safetensors"
# Pattern of other names. macOS lays a hidden ._NAME beside each file on another system's disk.
WEIGHTS = "[!.]*.safetensors"
# Files of peft's save_pretrained. Names in the first begin with PEFT_PREFIX, where diffusers has "transformer.".
PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
# Entry of the file's header with the LoraConfig, as JSON.
METADATA = "lora_adapter_metadata"
NAME = re.compile(r"transformer\.(.+)\.lora_[AB]\.weight")
# Entries of a LoraConfig that may have any value: those that are read, and those that have no effect on what the
# stored tensors compute.
HEEDED = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "task_type",
}
# Values of init_lora_weights that leave the base as it is.
FIRST_WEIGHTS = (True, False, "gaussian", "orthogonal", "eva")
WAY_OUT = "load it in diffusers, and save what it computes as a plain LoRA (save_lora_weights) or as a model"
PEFT_WAY_OUT = "merge it into its transformer in peft (merge_and_unload) and save that by save_pretrained"


class Adapter(NamedTuple):
    """Settings and layout of a LoRA file."""

    rank: int
    alpha: float
    shapes: Shapes  # parameter name -> shape

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the adapted layers."""
        return tuple(sorted({name.split(".lora_")[0] for name in self.shapes}))


def find_file(path: Path | str) -> Path:
    """Return the file of a LoRA: the path itself, or in a folder diffusers' file, peft's, or else the only one. Raises
    UserError where there is none or several."""
    try:
        return _find_file(Path(path))
    except OSError as error:  # a folder that this user may not read
        raise UserError(f"{in_one_line(path)} cannot be read: {error.strerror}") from error


def _find_file(folder: Path) -> Path:
    """Return what `find_file` does. Raises OSError for a folder that cannot be read."""
    if folder.exists() and not folder.is_dir():
        return folder
    # A link to a file that is gone counts, too: the error should be about that link.
    for name in (FILE, PEFT_FILE):
        if (folder / name).is_symlink() or (folder / name).exists():
            return folder / name
    files = [file for file in sorted(folder.glob(WEIGHTS)) if _may_be_a_lora(file)]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:3])
        raise UserError(f"{in_one_line(folder)} holds {len(files)} LoRA files ({names}): name one of them")
    raise UserError(f"{in_one_line(folder / FILE)} does not exist{hint(folder)}")


def is_lora(path: Path | str) -> bool:
    """Return whether a path is that of a LoRA file, or of a folder with one."""
    if Path(path).is_file():
        return Path(path).suffix == ".safetensors"
    return any(_may_be_a_lora(file) for file in Path(path).glob(WEIGHTS))


def files_of(path: Path | str) -> list[Path]:
    """Return the files that are read of a LoRA."""
    file = find_file(path)
    return [file, file.with_name(PEFT_CONFIG)] if _is_of_peft(file) else [file]


def _may_be_a_lora(file: Path) -> bool:
    """Judge by the names in a file's header, which need not be those of diffusers. A file that cannot be read may be
    one, so that `read_adapter` says why."""
    if file.name in (FILE, PEFT_FILE):
        return True
    try:
        return any("lora_" in name for name in safetensors_reader.header_of(file).shapes)
    except UserError:
        return True


def _is_of_peft(file: Path) -> bool:
    return file.name == PEFT_FILE or (file.name != FILE and file.with_name(PEFT_CONFIG).is_file())


def hint(folder: Path) -> str:
    """Return what may have been meant by a path without a LoRA file, as the rest of a sentence."""
    if locations.is_hub_id(str(folder)):
        return locations.download_hint(str(folder))
    for name in (FILE, PEFT_FILE):
        for file in sorted(folder.glob(f"*/{name}")):
            return f"; there is {in_one_line(file)}"
    for name in ("adapter_model.bin", "pytorch_lora_weights.bin"):
        if (folder / name).is_file():
            return f"; there is {name}: save it by safe_serialization=True"
    return ""


def read_adapter(path: Path | str) -> Adapter:
    """Return the settings and the layout of a LoRA file. Raises UserError unless it is one of diffusers or peft, of one
    rank and one alpha."""
    file = find_file(path)
    header = safetensors_reader.header_of(file)
    shapes = {_diffusers_name(name): shape for name, shape in header.shapes.items()}
    rank = _rank(file, shapes)
    settings = _peft_settings(file) if _is_of_peft(file) else _diffusers_settings(file, header.metadata)
    alpha = rank if settings is None else _alpha(file, settings, rank)
    return Adapter(rank, alpha, {name.removeprefix("transformer."): shape for name, shape in shapes.items()})


def _diffusers_name(name: str) -> str:
    if not name.startswith(PEFT_PREFIX):
        return name
    return f"transformer.{name.removeprefix(PEFT_PREFIX).removeprefix('transformer.')}"


def check_adapter(path: Path | str) -> Adapter:
    """Return `read_adapter`. Also raises UserError unless all weights are finite and, if there are checksums, the bytes
    are those that were written."""
    file = find_file(path)
    checksums.check_files(file.parent)
    adapter = read_adapter(file)
    problem = finite.problem_of_tensors(read_weights(file))
    if problem:
        raise UserError(f"{in_one_line(file)} cannot be used: {problem}")
    return adapter


def has_known_names(file: Path) -> bool:
    """Return whether all tensors have the names of diffusers or peft. Raises UserError for a file that is not whole."""
    return all(NAME.fullmatch(_diffusers_name(name)) for name in safetensors_reader.header_of(file).shapes)


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Return the weights by parameter name, float32, on the CPU."""
    weights = {}
    for name, weight in load_file(find_file(path)).items():
        weights[_diffusers_name(name).removeprefix("transformer.")] = weight.float()
    return weights


def check_fits(path: Path | str, shapes: Shapes, transformer: nn.Module, model: str) -> None:
    """Raise UserError unless every layer that a LoRA adapts is in a transformer, and as wide there."""
    modules = dict(transformer.named_modules())
    for name, shape in shapes.items():
        layer_name, part = name.removesuffix(".weight").rsplit(".lora_", 1)
        # A is [rank, features that the layer takes], B is [features that it returns, rank].
        attribute, side = {"A": ("in_features", 1), "B": ("out_features", 0)}[part]
        width = getattr(modules.get(layer_name), attribute, None)
        if width != shape[side]:
            problem = f"is {list(shape)}, the layer is {width} wide" if width else "has no layer there"
            raise UserError(f"{path} is the LoRA of another model than {model}: {name} {problem}")


def check_trained(path: Path | str, adapter: Adapter, targets: tuple[str, ...]) -> None:
    """Raise UserError if a LoRA adapts layers that a run does not: their names end in none of `targets`."""
    ends = tuple(f".{target}" for target in targets)
    untrained = [layer for layer in adapter.layers if not f".{layer}".endswith(ends)]
    if untrained:
        raise UserError(
            f"{in_one_line(find_file(path))} adapts {counted(len(untrained), 'layers')} that a run does not train "
            f"({untrained[0]}): fuse it into the base model (fuse_lora, save_pretrained) and train that"
        )


def _way_out(file: Path) -> str:
    return PEFT_WAY_OUT if _is_of_peft(file) else WAY_OUT


def _rank(path: Path, shapes: Shapes) -> int:
    """Return the rank. Raises UserError unless each layer has an A and a B, by diffusers' names, all of one rank."""
    file = in_one_line(path)
    pairs = set()
    for name in shapes:
        if (match := NAME.fullmatch(name)) is not None:
            pairs |= {f"transformer.{match[1]}.lora_A.weight", f"transformer.{match[1]}.lora_B.weight"}
    if not pairs or shapes.keys() != pairs:
        wrong = ", ".join(sorted(shapes.keys() ^ pairs)[:3]) or "no weight"
        raise UserError(f"{file} is no LoRA of a diffusers transformer, or not whole ({wrong}): {_way_out(path)}")
    # A is [rank, in] and B is [out, rank]. A convolution's adapter has more dimensions; 0 stands for it.
    ranks = set()
    for name, shape in shapes.items():
        side = 0 if ".lora_A." in name else 1
        ranks.add(shape[side] if len(shape) == 2 else 0)
    if len(ranks) != 1 or 0 in ranks:
        raise UserError(f"{file} has layers of ranks {sorted(ranks)}; one rank above 0 is supported: {_way_out(path)}")
    return ranks.pop()


def _diffusers_settings(file: Path, metadata: dict[str, str]) -> dict[str, Any] | None:
    """Return the LoraConfig in a file's header; None where it has none. Raises UserError if it cannot be read."""
    header = metadata.get(METADATA)
    if not header:
        return None
    try:
        stored = json.loads(header)
        return {key.removeprefix("transformer."): stored[key] for key in stored if key.startswith("transformer.")}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        place = f"{in_one_line(file)}: {METADATA} in its header"
        raise UserError(f"{place} cannot be read: {in_one_line(error)}") from error


def _peft_settings(file: Path) -> dict[str, Any]:
    """Return the LoraConfig beside a file. Raises UserError where there is none."""
    config = file.with_name(PEFT_CONFIG)
    problem = folders.file_problem(config)
    if problem:
        raise UserError(f"{in_one_line(config)}, which has the alpha of {file.name}, {problem}")
    return folders.read_json(config)


def _alpha(file: Path, settings: dict[str, Any], rank: int) -> float:
    """Return alpha. Raises UserError where diffusers or peft would scale by something else than alpha / rank."""
    place = f"{in_one_line(file)}: its header"
    if _is_of_peft(file):
        place = in_one_line(file.with_name(PEFT_CONFIG))
    alpha: Any = settings.get("lora_alpha")
    if settings.get("r") != rank or type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        stored = quoted({"r": settings.get("r"), "lora_alpha": alpha})
        raise UserError(f"{place} has {stored}, its weights have rank {rank}")
    plain = LoraConfig().to_dict()
    if settings.get("init_lora_weights") in FIRST_WEIGHTS:
        plain["init_lora_weights"] = settings["init_lora_weights"]
    unsupported = {}
    for key, value in settings.items():
        # Another version of peft may have more settings; one that is off changes nothing.
        is_off = key not in plain and not value
        if key not in HEEDED and not is_off and value != plain.get(key):
            unsupported[key] = value
    if unsupported:
        raise UserError(f"{place} has {quoted(unsupported)}, which is not supported: {_way_out(file)}")
    return alpha
