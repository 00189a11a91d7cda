"""A diffusers model on the disk, looked through before any of its weights is loaded: whether each part is there, and
whether its files are whole. Headers alone are read of weights.

Of a hub id only what an offline cache has is looked at: elsewhere the hub has the rest.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import constants, try_to_load_from_cache

from flow_grpo.base import folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.loading import WITHOUT_WEIGHTS
from flow_grpo.weights import safetensors_reader

WEIGHTS = {"diffusers": safetensors_reader.WEIGHTS, "transformers": "model.safetensors"}  # by a part's library
PICKLES = {"diffusers": "diffusion_pytorch_model.bin", "transformers": "pytorch_model.bin"}  # read, too
SETTINGS = re.compile(  # JSON files that diffusers and transformers read
    r"(\w+_)?config\.json|tokenizer\.json|vocab\.json|special_tokens_map\.json|added_tokens\.json"
)
TOKENS = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")  # a tokenizer has one


def check_parts(model: str, family: type[FlowModel]) -> None:
    """Raises UserError for a model that lacks a part, or whose tokenizers, scheduler or transformer's settings cannot
    be read. Opens no file of weights."""
    if (folder := _folder_of(model)) is None:
        return
    named = _parts(folder)
    if absent := [part for part in _needed(family) if part not in named]:
        raise UserError(f"config.model {quoted(model)} is not whole: its model_index.json names no {', '.join(absent)}")
    for part in named:
        if part == "transformer" or _is_without_weights(part):
            _check_part(folder / part)


def check_weights(
    model: str, family: type[FlowModel], *, transformer: Path | None = None, frozen_parts: bool = True
) -> None:
    """Raises UserError for weights that are missing, cut off or another model's: names and shapes of each part are
    compared with its config.

    Args:
        transformer: folder of weights that take the place of the model's own.
        frozen_parts: whether text encoders and the VAE will be loaded.
    """
    if (folder := _folder_of(model)) is None:
        return
    empty = family.empty_transformer(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    safetensors_reader.check(transformer or folder / "transformer", shapes, type(empty).__name__)
    if not frozen_parts:
        return
    for part, (library, kind) in _parts(folder).items():
        if part != "transformer" and library in WEIGHTS and not _is_without_weights(part):
            _check_part(folder / part)
            _check_frozen(folder / part, library, kind)


def _folder_of(model: str) -> Path | None:
    """A folder, or a snapshot in the cache that nothing can be added to; None of what may still be downloaded."""
    folder = Path(locations.resolve(model))
    if folder.is_dir():
        return folder
    index = try_to_load_from_cache(model, "model_index.json") if constants.is_offline_mode() else None
    return Path(index).parent if isinstance(index, str) else None


def _parts(folder: Path) -> dict[str, tuple[str, str]]:
    """Name -> library and class of each part that model_index.json names."""
    index = folder / "model_index.json"
    if problem := folders.problem_of(index):
        raise UserError(f"{in_one_line(index)} {problem}")
    entries = {part: entry for part, entry in folders.read_json(index).items() if isinstance(entry, list)}
    is_part = lambda entry: len(entry) == 2 and all(isinstance(name, str) for name in entry)  # noqa: E731
    return {part: tuple(entry) for part, entry in entries.items() if is_part(entry)}


def _needed(family: type[FlowModel]) -> list[str]:
    """Parts without which no pipeline of a model works."""
    parts, _ = family.PIPELINE._get_signature_keys(family.PIPELINE)
    return [part for part in ("scheduler", "transformer", "vae", "text_encoder", "tokenizer") if part in parts]


def _is_without_weights(part: str) -> bool:
    return part.startswith(WITHOUT_WEIGHTS) or part.endswith("processor")


def _check_part(folder: Path) -> None:
    """Raises UserError for a part that is not there, or a file of it, other than weights, that cannot be read."""
    try:
        if not folder.is_dir():
            raise UserError(f"{in_one_line(folder)} is no folder, but model_index.json names this part of the model")
        files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise UserError(f"{in_one_line(folder)} cannot be read: {error.strerror}") from error
    names = {path.name for path in files}
    if folder.name.startswith("tokenizer") and not names & {*TOKENS}:
        raise UserError(f"{in_one_line(folder)} holds no tokenizer: it has none of {', '.join(TOKENS)}")
    config = "scheduler_config.json" if folder.name == "scheduler" else "config.json"
    if not _is_without_weights(folder.name) or folder.name == "scheduler":
        files.append(folder / config)
    for path in files:
        _check_settings(path)


def _check_settings(path: Path) -> None:
    is_json = SETTINGS.fullmatch(path.name)
    if is_json or path.suffix in (".txt", ".model"):
        problem = folders.problem_of(path)
        if not problem and is_json:
            problem = _json_problem(path)
        if problem:
            raise UserError(f"{in_one_line(path)} {problem}")


def _json_problem(path: Path) -> str:
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"is no JSON: {in_one_line(error)}"
    return "" if isinstance(stored, dict) else "holds no JSON object"


def _check_frozen(folder: Path, library: str, kind: str) -> None:
    """Raises UserError for weights of a text encoder or a VAE that are not there, not whole, quantised already, or not
    those of its class."""
    config = folders.read_json(folder / "config.json")
    if quantisation := config.get("quantization_config"):
        kind = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        raise UserError(
            f"{in_one_line(folder / 'config.json')} says that its weights are quantised ({quoted(kind)}), which is not "
            "supported: take the model's published weights"
        )
    pickle, name = folder / PICKLES[library], WEIGHTS[library]
    is_pickled = not any((folder / file).exists() for file in (name, name + safetensors_reader.INDEX))
    if is_pickled and pickle.is_file():
        if problem := folders.problem_of(pickle):
            raise UserError(f"{in_one_line(pickle)} {problem}")
        return
    shapes = {}
    for file in safetensors_reader.files_of(folder, name):
        shapes |= safetensors_reader.header_of(file).shapes
    with loading.foreign(str(folder), "config.json"):
        lacking = LACKING[library](folder, kind, shapes)
    if lacking:
        raise UserError(
            f"{in_one_line(folder)} does not hold this {kind}: missing, or of another shape: "
            f"{safetensors_reader.some_names(lacking)}"
        )


def _lacking_in_diffusers(folder: Path, kind: str, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """The names of a class's weights that are not stored, or in another shape. What it has no name for is ignored, as
    diffusers does."""
    family = getattr(diffusers, kind)
    with init_empty_weights():
        wanted = family.from_config(family.load_config(folder)).state_dict()
    return sorted(name for name, weight in wanted.items() if shapes.get(name) != tuple(weight.shape))


def _lacking_in_transformers(folder: Path, kind: str, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """As transformers itself reports it, which stores some weights by other names than the class has, and draws those
    that it misses at random. Its loader gets weights without values."""
    family = getattr(transformers, kind)
    stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    how = dict(state_dict=stored, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True)
    with _silent():
        _, report = family.from_pretrained(None, config=family.config_class.from_pretrained(folder), **how)
    return sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})


@contextmanager
def _silent() -> Iterator[None]:
    """Transformers prints neither its report nor a bar."""
    log = transformers.utils.logging
    level, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if has_bars:
            log.enable_progress_bar()


LACKING = {"diffusers": _lacking_in_diffusers, "transformers": _lacking_in_transformers}
