"""Checks of a diffusers model on the disk, before any of its weights is loaded: all parts are there and their files are
whole. Only the headers of weights are read.

A model on the hub is checked only if the cache is offline: otherwise the hub has what the cache lacks.
"""

import functools
import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from huggingface_hub import constants, try_to_load_from_cache

from flow_grpo.base import folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.loading import WITHOUT_WEIGHTS
from flow_grpo.weights import safetensors_reader
from flow_grpo.weights.safetensors_reader import Shapes

# Name of a part's file of weights, and of the pickle that is read in its place, by the part's library.
WEIGHTS = {"diffusers": safetensors_reader.WEIGHTS, "transformers": "model.safetensors"}
PICKLES = {"diffusers": "diffusion_pytorch_model.bin", "transformers": "pytorch_model.bin"}
# JSON files that diffusers and transformers read.
SETTINGS = re.compile(r"(\w+_)?config\.json|tokenizer\.json|vocab\.json|special_tokens_map\.json|added_tokens\.json")
MOST_LAYERS = 1000  # of one kind
# Parts without which no pipeline works that has an argument of this name.
NEEDED = ("scheduler", "transformer", "vae", "text_encoder", "tokenizer")
# A tokenizer has one of these.
TOKENS = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")


class Part(NamedTuple):
    """Entry of model_index.json."""

    library: str  # "diffusers", "transformers" or a module of the pipeline's own
    class_name: str


def check_parts(model: str, family: type[FlowModel]) -> None:
    """Raise UserError for a model that lacks a part, or whose tokenizers, scheduler or transformer's settings cannot
    be read. Opens no file of weights."""
    folder = _folder_of(model)
    if folder is None or not family.ON_DISK:
        return
    parts = _parts(folder)
    arguments, _ = family.PIPELINE._get_signature_keys(family.PIPELINE)
    absent = [name for name in NEEDED if name in arguments and name not in parts]
    if absent:
        raise UserError(f"config.model {quoted(model)} is not whole: its model_index.json names no {', '.join(absent)}")
    for name, part in parts.items():
        if not _is_known(part.library):
            raise UserError(
                f"config.model {quoted(model)}: its model_index.json says that {name} is of {quoted(part.library)}, "
                "which is not installed; install it, or take a model whose parts are of diffusers and transformers"
            )
        if name == "transformer" or _is_without_weights(name):
            _check_part(folder / name)


def check_weights(
    model: str, family: type[FlowModel], *, transformer: Path | None = None, frozen_parts: bool = True
) -> None:
    """Raise UserError for weights that are missing, cut off or another model's: names and shapes of each part are
    compared with its config.

    Args:
        transformer: folder of weights that replace the model's own.
        frozen_parts: whether text encoders and the VAE will be loaded.
    """
    folder = _folder_of(model)
    if folder is None or not family.ON_DISK:
        return
    empty = family.empty_transformer(model)
    weights = transformer or folder / "transformer"
    safetensors_reader.check_transformer(weights, empty.state_dict(), type(empty).__name__)
    if not frozen_parts:
        return
    for name, part in _parts(folder).items():
        if name != "transformer" and part.library in WEIGHTS and not _is_without_weights(name):
            _check_part(folder / name)
            _check_frozen(folder / name, part)


def _folder_of(model: str) -> Path | None:
    """Return a model's folder, or its snapshot in an offline cache; None for a model that may still be downloaded."""
    folder = Path(locations.resolve(model))
    if folder.is_dir():
        return folder
    if not constants.is_offline_mode():
        return None
    # The cache returns a path, or something else for a file that it lacks.
    index = try_to_load_from_cache(model, "model_index.json")
    return Path(index).parent if isinstance(index, str) else None


def _parts(folder: Path) -> dict[str, Part]:
    """Return the parts that model_index.json names."""
    index = folder / "model_index.json"
    folders.check_file(index)
    parts = {}
    for name, entry in folders.read_json(index).items():
        # Other entries are settings of the pipeline, and an absent part is [null, null].
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str) for word in entry):
            parts[name] = Part(*entry)
    return parts


def _is_known(library: str) -> bool:
    """Return whether diffusers finds a library of model_index.json: a package, or the module of a pipeline."""
    if hasattr(diffusers.pipelines, library):
        return True
    try:
        return importlib.util.find_spec(library) is not None
    except (ImportError, ValueError):
        return False


def _is_without_weights(name: str) -> bool:
    return name.startswith(WITHOUT_WEIGHTS) or name.endswith("processor")


def _check_part(folder: Path) -> None:
    """Raise UserError for a part that is missing, or whose settings or tokenizer cannot be read."""
    try:
        if not folder.is_dir():
            raise UserError(f"{in_one_line(folder)} is no folder, but model_index.json names this part of the model")
        files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise UserError(f"{in_one_line(folder)} cannot be read: {error.strerror}") from error
    is_tokenizer = folder.name.startswith("tokenizer")
    if is_tokenizer and not any(path.name in TOKENS for path in files):
        raise UserError(f"{in_one_line(folder)} holds no tokenizer: it has none of {', '.join(TOKENS)}")
    # The config must be there; other files are read only if they are.
    if folder.name == "scheduler":
        files.append(folder / "scheduler_config.json")
    elif not _is_without_weights(folder.name):
        files.append(folder / "config.json")
    for path in files:
        _check_settings(path)


def _check_settings(path: Path) -> None:
    is_json = SETTINGS.fullmatch(path.name) is not None
    if not is_json and path.suffix not in (".txt", ".model"):
        return
    folders.check_file(path)
    problem = _json_problem(path) if is_json else ""
    if problem:
        raise UserError(f"{in_one_line(path)} {problem}")


def _json_problem(path: Path) -> str:
    """Return why a file of settings cannot be used, as the rest of a sentence: it is no JSON object, or the config of a
    part with too many layers. Returns "" for one that can be used."""
    try:
        # As diffusers reads it. From bytes, json would take a byte order mark and UTF-16, too.
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"is no JSON: {in_one_line(error)}"
    if not isinstance(stored, dict):
        return "holds no JSON object"
    return _depth_problem(stored) if path.name == "config.json" else ""


def _depth_problem(config: dict[str, Any]) -> str:
    """Return why a part cannot have the layers of its config, "" if it can. Modules are made before any of the weights'
    names can be compared with them: a damaged number would take hours."""
    for name, value in config.items():
        if name.endswith("_layers") and isinstance(value, int) and value > MOST_LAYERS:
            return f"has {name} = {quoted(value)}; no model has more than {MOST_LAYERS} layers"
    return ""


def _check_frozen(folder: Path, part: Part) -> None:
    """Raise UserError for weights of a text encoder or a VAE that are missing, not whole, quantised already, or not
    those of its class."""
    config_file = folder / "config.json"
    config = folders.read_json(config_file)
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        raise UserError(
            f"{in_one_line(config_file)} says that its weights are quantised ({quoted(method)}), which is "
            "not supported: take the model's published weights"
        )
    name = WEIGHTS[part.library]
    pickle = folder / PICKLES[part.library]
    is_pickled = not any((folder / file).exists() for file in (name, name + safetensors_reader.INDEX))
    # A pickle's names and shapes are known only when it is loaded.
    if is_pickled and pickle.is_file():
        folders.check_file(pickle)
        return
    shapes: Shapes = {}
    for file in safetensors_reader.weight_files(folder, name):
        shapes |= safetensors_reader.header_of(file).shapes
    with loading.foreign(str(folder), "config.json"):
        lacking = _lacking(folder, part, config_file.read_bytes(), tuple(shapes.items()))
    if lacking:
        raise UserError(
            f"{in_one_line(folder)} does not hold this {part.class_name}: missing, or of another shape: "
            f"{safetensors_reader.first_names(lacking)}"
        )


@functools.lru_cache(maxsize=32)
def _lacking(folder: Path, part: Part, config: bytes, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> list[str]:
    """Return the names of a part's weights that are not stored, or in another shape.

    The answer is cached for processes that load several policies of one model. `config`, the bytes of config.json, is
    an argument only so that a changed file is compared again.
    """
    return LACKING[part.library](folder, part.class_name, dict(shapes))


def _lacking_in_diffusers(folder: Path, class_name: str, shapes: Shapes) -> list[str]:
    """Return the names of a class's weights that are not stored, or in another shape. As in diffusers, stored weights
    that the class does not have are ignored."""
    family = getattr(diffusers, class_name)
    with loading.empty_weights():
        wanted = family.from_config(family.load_config(folder)).state_dict()
    return sorted(name for name, weight in wanted.items() if shapes.get(name) != tuple(weight.shape))


def _lacking_in_transformers(folder: Path, class_name: str, shapes: Shapes) -> list[str]:
    """Return what transformers' own loader reports as missing or mismatched, given weights without values.

    Only the loader knows by which names it stores some weights; those that it misses it would draw at random.
    """
    family = getattr(transformers, class_name)
    with _silent():
        _, report = family.from_pretrained(
            None,
            config=family.config_class.from_pretrained(folder),
            state_dict={name: torch.empty(shape, device="meta") for name, shape in shapes.items()},
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    names = set(report["missing_keys"])
    for name, *_ in report["mismatched_keys"]:
        names.add(name)
    return sorted(names)


@contextmanager
def _silent() -> Iterator[None]:
    """Let transformers print neither its report nor a progress bar inside this block."""
    log = transformers.utils.logging
    level = log.get_verbosity()
    has_bars = log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if has_bars:
            log.enable_progress_bar()


LACKING = {"diffusers": _lacking_in_diffusers, "transformers": _lacking_in_transformers}
