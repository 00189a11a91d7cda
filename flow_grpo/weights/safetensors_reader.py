"""Files of safetensors: their headers, and a transformer's weights in a folder of diffusers' files."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line
from flow_grpo.kernels.quantised_linear import QuantisedLinear
from flow_grpo.weights import quantisation

WEIGHTS = "diffusion_pytorch_model.safetensors"  # diffusers' name, also of the index: WEIGHTS + ".index.json"
INDEX = ".index.json"  # behind the name of the only file
READERS = 4  # threads; a layer in full precision is in memory for each
FLOATS = "F", "BF"  # the first letters of safetensors' names of kinds of floats
SHOWN = 3  # names in a sentence
FOREIGN = {  # a pattern of weights' names -> who writes such
    r"\.(absmax|nested_absmax|quant_map|SCB|quant_state\..+)$": "quantised by bitsandbytes",
    r"\.(qweight|qzeros|g_idx)$": "quantised by GPTQ or AWQ",
    r"(^|\.)(scaled_fp8|comfy_quant)$|\.(scale_weight|scale_input|weight_scale|input_scale)$": "of scaled fp8",
    r"\.lora_|\.lokr_|\.hada_": "of a LoRA, which is for lora.path",
    r"^(model\.)?diffusion_model\.": "of ComfyUI's layout (diffusion_model.)",
    r"^(module|_orig_mod|_fsdp_wrapped_module)\.": "of a module that was wrapped by DDP, FSDP or torch.compile",
}


class Header(NamedTuple):
    """What a file of safetensors says of itself."""

    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]  # by name
    dtypes: dict[str, str]  # by name, as safetensors writes them, such as "BF16"


def header_of(file: Path) -> Header:
    """The header of a file, which says how long the file is. Raises UserError for a file that is not whole."""
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {name: part.get_dtype() for name, part in slices.items()}
            return Header(tensors.metadata() or {}, shapes, dtypes)
    except (SafetensorError, OSError) as error:
        problem = folders.problem_of(file) or _how_much_is_missing(file)
        problem = problem or f"cannot be read as safetensors: {in_one_line(error)}"
        raise UserError(f"{in_one_line(file)} {problem}") from error


def _how_much_is_missing(file: Path) -> str:
    """By a header that can be read; "" where it cannot, or nothing is missing."""
    with file.open("rb") as stored:
        header_size = int.from_bytes(stored.read(8), "little")
        size = file.stat().st_size
        try:
            tensors = json.loads(stored.read(header_size if header_size < size else 0))
            ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
            whole = 8 + header_size + max(ends)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return ""
    return f"is cut off: it has {size:,} of {whole:,} bytes; fetch it again" if size < whole else ""


def read(transformer: nn.Module, folder: Path, copy_rows: Callable) -> None:
    """Fill everything but adapters from `folder`, by copy_rows(tensor or quantised layer, slice of a file), which fills
    what this rank has of it. peft calls the adapted layers' own weights base_layer. Raises UserError for names or
    shapes in `folder` that are not the transformer's, and for names that are missing."""
    tensors = {name: tensor for name, tensor in transformer.state_dict().items() if "lora_" not in name}
    tensors |= {f"{name}.weight": layer for name, layer in quantisation.quantised_layers(transformer).items()}
    targets = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
    files = check(folder, {name: tuple(tensor.shape) for name, tensor in targets.items()}, type(transformer).__name__)
    with ThreadPoolExecutor(READERS) as pool:  # one thread copies less than disk and bus can give
        list(pool.map(partial(_read_file, targets, copy_rows), files))


def _read_file(targets: dict[str, Tensor | QuantisedLinear], copy_rows: Callable, file: Path) -> None:
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
            copy_rows(targets[name], tensors.get_slice(name))


def check(folder: Path, wanted: dict[str, tuple[int, ...]], what: str) -> list[Path]:
    """The files of a transformer's folder, whose headers alone are read. Raises UserError unless these hold weights of
    the `wanted` names and shapes. `what`: the transformer's class."""
    files = files_of(folder, WEIGHTS)
    stored, dtypes, file_of = {}, {}, {}
    for file in files:
        header = header_of(file)
        stored |= header.shapes
        dtypes |= header.dtypes
        file_of |= dict.fromkeys(header.shapes, file)
    missing, unexpected = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unexpected:
        raise UserError(f"{in_one_line(folder)} does not hold this {what}: {_difference(missing, unexpected)}")
    for name, shape in stored.items():
        if shape != wanted[name]:
            raise UserError(f"{name} is {list(shape)} in {file_of[name]}, {list(wanted[name])} in the model")
        if not dtypes[name].startswith(FLOATS):
            raise UserError(
                f"{name} is of {dtypes[name]} in {in_one_line(file_of[name])}, quantised without its scales; "
                "config.base_precision quantises published weights while loading"
            )
    return files


def _difference(missing: list[str], unexpected: list[str]) -> str:
    """Which names are not as they should be, and who writes such names where that is known."""
    for pattern, kind in FOREIGN.items():
        if foreign := [name for name in unexpected if re.search(pattern, name)]:
            return (
                f"its weights are {kind} ({foreign[0]}); it takes diffusers' own names in bf16, fp16 or fp32, "
                "as save_pretrained writes them, and config.base_precision quantises while loading"
            )
    problems = {"missing": missing, "unexpected": unexpected}
    return "; ".join(f"{kind}: {some_names(names)}" for kind, names in problems.items() if names)


def some_names(names: list[str]) -> str:
    """The first names, and how many others there are."""
    others = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {others} more" if others > 0 else "")


def files_of(folder: Path, name: str) -> list[Path]:
    """The files of a model's weights: those of the index, or the only one, which is called `name`. Raises UserError for
    one that is not there, with what is."""
    index = folder / (name + INDEX)
    if index.is_symlink() or index.exists():
        names = _shards(index)
    else:
        names = {name}
    absent = [file for file in sorted(names) if not (folder / file).exists()]
    if absent == [name]:
        raise UserError(f"{in_one_line(folder)} has no {name}{_what_is_there(folder, name)}")
    if absent:
        files = f"of the {len(names)} files that {index.name} names, {len(absent)}"
        raise UserError(f"{in_one_line(folder)} has no {some_names(absent)} ({files})")
    return [folder / file for file in sorted(names)]


def _shards(index: Path) -> set[str]:
    if problem := folders.problem_of(index):
        raise UserError(f"{in_one_line(index)} {problem}")
    weight_map = folders.read_json(index).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not weight_map or not is_map:
        raise UserError(f'{in_one_line(index)} has no "weight_map" of files')
    return set(weight_map.values())


def _what_is_there(folder: Path, name: str) -> str:
    """What may have been meant by a folder that lacks `name`, as the rest of a sentence."""
    if (folder / name).is_symlink():
        return " (a link to a file that is gone)"
    stem, names = name.removesuffix(".safetensors"), sorted(path.name for path in folder.iterdir())
    variants = [other for other in names if re.fullmatch(rf"{stem}\.\w+\.safetensors", other)]
    indices = [other for other in names if other.startswith(stem) and other.endswith(".json")]
    shards = [other for other in names if re.fullmatch(rf"{stem}.*-of-\d+\.safetensors", other)]
    pickled = [other for other in names if other.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    others = [other for other in names if other.endswith((".safetensors", ".gguf", ".onnx", ".msgpack", ".h5"))]
    if variants:
        return f" but the variant {variants[0]}: rename it to {name}"
    if indices:
        return f" but the index of a variant, {indices[0]}: rename that to {name}{INDEX}"
    if shards:
        return f" and no {name}{INDEX} for its {len(shards)} parts ({shards[0]}): fetch the index, too"
    if pickled:
        return f" but {pickled[0]}: load the model in diffusers and save it by save_pretrained"
    return f"; it has {some_names(others)}" if others else ": its download is not whole; fetch it again"
