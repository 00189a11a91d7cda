"""Files of safetensors: their headers, and a transformer's weights in a folder of diffusers' files."""

import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line
from flow_grpo.kernels.quantised_linear import QuantisedLinear
from flow_grpo.weights import quantisation

# Name of a transformer's only file in diffusers, and the ending that makes it the name of the index of several.
WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = ".index.json"
# Threads; each has a layer in full precision in memory.
READERS = 4
# First letters of safetensors' names of floating-point dtypes.
FLOATS = ("F", "BF")
# Names that a message shows.
MOST_NAMES = 3
# Pattern of weights' names -> the program that writes such names.
FOREIGN = {
    r"\.(absmax|nested_absmax|quant_map|SCB|quant_state\..+)$": "quantised by bitsandbytes",
    r"\.(qweight|qzeros|g_idx)$": "quantised by GPTQ or AWQ",
    r"(^|\.)(scaled_fp8|comfy_quant)$|\.(scale_weight|scale_input|weight_scale|input_scale)$": "of scaled fp8",
    r"\.lora_|\.lokr_|\.hada_": "of a LoRA, which is for lora.path",
    r"^(model\.)?diffusion_model\.": "of ComfyUI's layout (diffusion_model.)",
    r"^(module|_orig_mod|_fsdp_wrapped_module)\.": "of a module that was wrapped by DDP, FSDP or torch.compile",
}

# First bytes of a file -> what it is.
OTHER_KINDS = {
    b"GGUF": "a GGUF file; take the weights in safetensors",
    b"PK\x03\x04": "a zip archive, as torch.save writes; load it in diffusers and save it by save_pretrained",
    b"\x80\x02": "a pickle, as torch.save wrote once; load it in diffusers and save it by save_pretrained",
    b"<": "a page of HTML; fetch the file itself",
}

Shapes = dict[str, tuple[int, ...]]  # name of a tensor -> shape
Targets = dict[str, Tensor | QuantisedLinear]  # name in a file -> where it goes
# (tensor or quantised layer, tensor or slice of a file) -> None; copies this rank's part of the second to the first.
CopyRows = Callable[[Tensor | QuantisedLinear, Any], None]


class Change(Protocol):
    """Something that is added to a weight when it is read."""

    def added_to(self, stored: Any) -> Any:
        """Return the rows of a slice of a file with the change."""


Changes = Mapping[str, Change]  # name in a file -> its change


class StoredWeights(NamedTuple):
    """Weights of a transformer as diffusers stores them, in safetensors."""

    folder: Path
    changes: Changes = MappingProxyType({})  # added when they are read
    unread: frozenset[str] = frozenset()  # names of weights that the transformer has no more


class Header(NamedTuple):
    """Header of a safetensors file."""

    metadata: dict[str, str]
    shapes: Shapes
    dtypes: dict[str, str]  # by name, as safetensors writes them, such as "BF16"


def header_of(file: Path) -> Header:
    """Return the header of a file, which says how long the file is. Raises UserError for a file that is not whole."""
    try:
        if folders.is_pipe_or_device(file):
            raise OSError("no file")
        with safe_open(file, framework="pt") as tensors:
            header = Header(tensors.metadata() or {}, {}, {})
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                rows = tensors.get_slice(name)
                header.shapes[name] = tuple(rows.get_shape())
                header.dtypes[name] = rows.get_dtype()
            return header
    except (SafetensorError, OSError) as error:
        problem = folders.file_problem(file) or _other_kind(file) or _missing_bytes(file)
        problem = problem or f"cannot be read as safetensors: {in_one_line(error)}"
        raise UserError(f"{in_one_line(file)} {problem}") from error


def _other_kind(file: Path) -> str:
    """Return what a file is that was given this name, "" if that is not known."""
    with file.open("rb") as stored:
        start = stored.read(16)
    for first, kind in OTHER_KINDS.items():
        if start.startswith(first):
            return f"is {kind}"
    return ""


def _missing_bytes(file: Path) -> str:
    """Return how much a file lacks of what its header says; "" if the header cannot be read, or nothing is missing."""
    # A file is the header's length in 8 bytes, the header as JSON, and the tensors, whose offsets the header has.
    num_bytes = file.stat().st_size
    with file.open("rb") as stored:
        header_size = int.from_bytes(stored.read(8), "little")
        if header_size >= num_bytes:
            return ""
        header = stored.read(header_size)
    try:
        tensors = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
        num_bytes_when_whole = 8 + header_size + max(ends)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return ""
    if num_bytes >= num_bytes_when_whole:
        return ""
    return f"is cut off: it has {num_bytes:,} of {num_bytes_when_whole:,} bytes; fetch it again"


def fill_transformer(transformer: nn.Module, weights: StoredWeights, copy_rows: CopyRows) -> None:
    """Fill everything but adapters.

    Raises UserError for names or shapes in the folder that are not the transformer's, and for names that are missing.
    """
    targets: Targets = {}
    for name, tensor in transformer.state_dict().items():
        if "lora_" not in name:
            targets[_stored_name(name)] = tensor
    for name, layer in quantisation.quantised_layers(transformer).items():
        targets[_stored_name(f"{name}.weight")] = layer
    files = check_transformer(weights.folder, targets, type(transformer).__name__, weights.unread)
    # One thread copies less than disk and bus can give. The list makes an error of a thread one of this function.
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(partial(_copy_file, targets, copy_rows, weights.changes), files))


def fill_layer(name: str, layer: nn.Module, weights: StoredWeights, copy_rows: CopyRows) -> None:
    """Fill one layer of a transformer, which has this name there, from files that were checked."""
    targets = layer_targets(name, layer)
    for file in weight_files(weights.folder, WEIGHTS):
        _copy_file(targets, copy_rows, weights.changes, file)


def layer_targets(name: str, layer: nn.Module) -> Targets:
    """Return where the stored weights of a layer without an adapter go, by their names in a file."""
    targets: Targets = {f"{name}.{part}": tensor for part, tensor in layer.state_dict().items()}
    if isinstance(layer, QuantisedLinear):
        targets[f"{name}.weight"] = layer
    return targets


def _stored_name(name: str) -> str:
    """Return the name of a parameter in diffusers' files: peft calls an adapted layer's own weights base_layer."""
    return name.replace(".base_layer.", ".")


def _copy_file(targets: Targets, copy_rows: CopyRows, changes: Changes, file: Path) -> None:
    """Copy the weights of one file that have a target, changed where there is a change of that name."""
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
            if name not in targets:
                continue
            stored = tensors.get_slice(name)
            if name in changes:
                stored = changes[name].added_to(stored)
            copy_rows(targets[name], stored)


def check_transformer(
    folder: Path,
    targets: Mapping[str, Tensor | QuantisedLinear],
    class_name: str,
    unread: frozenset[str] = frozenset(),
) -> list[Path]:
    """Return the files of a transformer's folder; only their headers are read. Raises UserError unless they hold
    weights of the names and shapes of `targets`, and beside them only `unread`."""
    files = weight_files(folder, WEIGHTS)
    stored: Shapes = {}
    dtypes: dict[str, str] = {}
    file_of: dict[str, Path] = {}
    for file in files:
        header = header_of(file)
        stored |= header.shapes
        dtypes |= header.dtypes
        file_of |= dict.fromkeys(header.shapes, file)
    missing = sorted(targets.keys() - stored.keys())
    unexpected = sorted(stored.keys() - targets.keys() - unread)
    if missing or unexpected:
        raise UserError(f"{in_one_line(folder)} does not hold this {class_name}: {_difference(missing, unexpected)}")
    for name, target in targets.items():
        shape = stored[name]
        wanted = tuple(target.shape)
        if shape != wanted:
            raise UserError(f"{name} is {list(shape)} in {file_of[name]}, {list(wanted)} in the model")
        if not dtypes[name].startswith(FLOATS):
            raise UserError(
                f"{name} is of {dtypes[name]} in {in_one_line(file_of[name])}, quantised without its scales; "
                "config.base_precision quantises published weights while loading"
            )
    return files


def _difference(missing: list[str], unexpected: list[str]) -> str:
    """Return which names are missing or unexpected, or the program that writes the unexpected ones if it is known."""
    for pattern, origin in FOREIGN.items():
        foreign = [name for name in unexpected if re.search(pattern, name)]
        if foreign:
            return (
                f"its weights are {origin} ({foreign[0]}); it takes diffusers' own names in bf16, fp16 or fp32, "
                "as save_pretrained writes them, and config.base_precision quantises while loading"
            )
    problems = []
    if missing:
        problems.append(f"missing: {first_names(missing)}")
    if unexpected:
        problems.append(f"unexpected: {first_names(unexpected)}")
    return "; ".join(problems)


def first_names(names: list[str]) -> str:
    """Return the first names, and how many others there are, for a message."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} more"


def weight_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a model's weights: those of the index, or the only one, which is called `name`.

    Raises UserError for a missing file, with a hint at what is there.
    """
    names = {name}
    index = folder / (name + INDEX)
    if index.is_symlink() or index.exists():
        names = _names_in_index(index)
    absent = [file for file in sorted(names) if not (folder / file).exists()]
    if absent == [name]:
        raise UserError(f"{in_one_line(folder)} has no {name}{_hint(folder, name)}")
    if absent:
        files = f"of the {len(names)} files that {index.name} names, {len(absent)}"
        raise UserError(f"{in_one_line(folder)} has no {first_names(absent)} ({files})")
    return [folder / file for file in sorted(names)]


def _names_in_index(index: Path) -> set[str]:
    folders.check_file(index)
    weight_map = folders.read_json(index).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not weight_map or not is_map:
        raise UserError(f'{in_one_line(index)} has no "weight_map" of files')
    return set(weight_map.values())


def _hint(folder: Path, name: str) -> str:
    """Return what may have been meant by a folder that lacks `name`, as the rest of a sentence."""
    if (folder / name).is_symlink():
        return " (a link to a file that is gone)"
    # Pattern of names that are there -> hint. The first pattern that fits a name counts.
    stem = name.removesuffix(".safetensors")
    hints = {
        rf"{stem}\.\w+\.safetensors": " but the variant {first}: rename it to {name}",
        rf"{stem}.*\.json": " but the index of a variant, {first}: rename that to {index}",
        rf"{stem}.*-of-\d+\.safetensors": " and no {index} for its {count} parts ({first}): fetch the index, too",
        r".*\.(bin|pt|pth|ckpt)": " but {first}: load the model in diffusers and save it by save_pretrained",
        r".*\.(safetensors|gguf|onnx|msgpack|h5)": "; it has {names}",
    }
    for pattern, hint in hints.items():
        fitting = sorted(path.name for path in folder.iterdir() if re.fullmatch(pattern, path.name))
        if fitting:
            return hint.format(
                name=name, index=name + INDEX, first=fitting[0], count=len(fitting), names=first_names(fitting)
            )
    return ": its download is not whole; fetch it again"
