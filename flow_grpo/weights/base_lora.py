"""A LoRA that is added to a model's own weights when they are loaded, such as that of a few-step model.

It becomes a part of the frozen base: the run trains an adapter, or all weights, of the model that it makes.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from flow_grpo.base import checksums, folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, in_one_line
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.settings import stored_config, table
from flow_grpo.settings.sections import Lora
from flow_grpo.weights import finite, lora_files, safetensors_reader
from flow_grpo.weights.safetensors_reader import Shapes

KEY = "config.lora.base"
PREFIX = "transformer."
# Ends of the names that programs give to A.
DOWN = (".lora_A.weight", ".lora_down.weight", ".lora_A.default.weight", ".lora.down.weight")


class Change(NamedTuple):
    """Addition of a LoRA to a weight: scale B A."""

    down: Tensor  # A, [rank, in] f32
    up: Tensor  # scale B, [out, rank] f32

    def added_to(self, stored: Any) -> "ChangedRows":
        """Return the rows of a tensor, or of a slice of a file, with the change."""
        return ChangedRows(stored, self)


class ChangedRows(NamedTuple):
    """A stored weight whose rows are changed when they are read."""

    stored: Any
    change: Change

    def __getitem__(self, rows: slice) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # as a slice's
        return self.stored[rows].float() + self.change.up[rows] @ self.change.down


Changes = Mapping[str, Change]  # name of a weight in the model's files -> its change


def read(path: Path | str, family: type[FlowModel]) -> Changes:
    """Return the changes that a LoRA makes. Raises UserError for a file that is no LoRA of a transformer alone, or is
    damaged."""
    try:
        file = lora_files.find_file(path)
        checksums.check_files(file.parent)
        weights = _read_weights(file, family)
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from error
    changes = {}
    for name, down in weights.items():
        if ".lora_A." in name:
            up = weights[name.replace(".lora_A.", ".lora_B.")]
            changes[name.replace(".lora_A.", ".")] = Change(down, up)
    return changes


def other_bases(lora: Lora, teachers: tuple[str, ...]) -> str:
    """Name the LoRAs that a run begins with or learns from and that other runs trained on another lora.base; "" where
    there is none."""
    here = _words(lora.base)
    trained_elsewhere = []
    for path in (lora.path, *teachers):
        base = base_of_run(path)
        if base is not None and not _is_same(base, lora.base):
            trained_elsewhere.append(f"{in_one_line(path)} was trained {_words(base)}")
    if not trained_elsewhere:
        return ""
    return f"{'; '.join(trained_elsewhere)}, this run is {here}: an adapter fits the weights that it was trained on"


def _is_same(base: str, other: str) -> bool:
    """Return whether two values of lora.base name one file: a folder and the file in it, or a path and a longer one."""
    if base == other or not base or not other:
        return base == other
    try:
        return lora_files.find_file(base).samefile(lora_files.find_file(other))
    except (UserError, OSError):
        return False


def _words(base: str) -> str:
    return f"with lora.base {in_one_line(base)}" if base else "without lora.base"


def base_of_run(path: str) -> str | None:
    """Return lora.base of the run that exported a LoRA; None where no run's folder has it, or it is not there."""
    if not path:
        return None
    # A plan needs no file of a teacher.
    try:
        folder = lora_files.find_file(path).parent
    except UserError:
        return None
    run_folder = folders.run_of(folder)
    if run_folder is None:
        return None
    return table.of_stored(stored_config.read(run_folder / "config.json")).lora.base


def check(path: Path | str, transformer: nn.Module, family: type[FlowModel], model: str) -> None:
    """Raise UserError for a LoRA that cannot be added to a model's transformer. Reads the LoRA alone."""
    changes = read(path, family)
    shapes: Shapes = {}
    for name, change in changes.items():
        layer = name.removesuffix(".weight")
        shapes[f"{layer}.lora_A.weight"] = tuple(change.down.shape)
        shapes[f"{layer}.lora_B.weight"] = tuple(change.up.shape)
    lora_files.check_fits(f"{KEY} {in_one_line(path)}", shapes, transformer, model)


def _read_weights(file: Path, family: type[FlowModel]) -> dict[str, Tensor]:
    """Return A and scale B of each layer, f32, on the CPU, by diffusers' names without their prefix."""
    if lora_files.has_known_names(file):
        adapter = lora_files.check_adapter(file)
        weights = lora_files.read_weights(file)
        for name, weight in weights.items():
            if ".lora_B." in name:
                weights[name] = weight * (adapter.alpha / adapter.rank)
        return weights
    return _converted(file, family)


def _converted(file: Path, family: type[FlowModel]) -> dict[str, Tensor]:
    """Return the weights of a file with another program's names, as diffusers reads it."""
    place = in_one_line(file)
    stored = safetensors_reader.header_of(file).shapes
    if any("dora_scale" in name for name in stored):
        raise UserError(f"{place} is a DoRA, whose scales diffusers leaves out: {lora_files.WAY_OUT}")
    try:
        named, alphas = _by_diffusers(file, family)
    except Exception as error:
        reason = f"{type(error).__name__}: {in_one_line(error, 200)}"
        raise UserError(f"{place} is no LoRA that diffusers' {family.PIPELINE.__name__} reads ({reason})") from error
    weights = {}
    for name, weight in named.items():
        if lora_files.NAME.fullmatch(name) is None:
            raise UserError(f"{place} holds {name}, which is no part of a LoRA of a transformer alone")
        weights[name.removeprefix(PREFIX)] = weight.float()
    layers = {name.split(".lora_")[0] for name in weights}
    _check_whole(place, weights, layers, stored)
    if alphas:
        _scale(place, weights, layers, alphas)
    problem = finite.problem_of_tensors(weights)
    if problem:
        raise UserError(f"{place} cannot be used: {problem}")
    return weights


def _by_diffusers(file: Path, family: type[FlowModel]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return a file's weights by diffusers' names, and the alphas of their layers where the scale is not in them."""
    pipeline: Any = family.PIPELINE
    if "return_alphas" not in inspect.signature(pipeline.lora_state_dict).parameters:
        return pipeline.lora_state_dict(str(file)), {}
    # FLUX.1's pipeline takes alphas out of some files, and leaves them to its caller.
    weights, left_alphas = pipeline.lora_state_dict(str(file), return_alphas=True)
    alphas = {}
    for name, alpha in (left_alphas or {}).items():
        alphas[name.removeprefix(PREFIX).removesuffix(".alpha")] = float(alpha)
    return weights, alphas


def _scale(place: str, weights: dict[str, Tensor], layers: set[str], alphas: dict[str, float]) -> None:
    """Multiply each layer's B by alpha / rank. Raise UserError for a layer without an alpha."""
    for layer in sorted(layers):
        if layer not in alphas:
            raise UserError(f"{place} has an alpha for some layers, and none for {layer}: {lora_files.WAY_OUT}")
        rank = len(weights[f"{layer}.lora_A.weight"])
        weights[f"{layer}.lora_B.weight"] *= alphas[layer] / rank


def _check_whole(place: str, weights: dict[str, Tensor], layers: set[str], stored: Shapes) -> None:
    """Raise UserError unless each layer has an A and a B, and there are as many layers as in the file, or more where it
    has several as one: diffusers passes over names that it does not know."""
    for layer in sorted(layers):
        for part in ("lora_A", "lora_B"):
            if f"{layer}.{part}.weight" not in weights:
                raise UserError(f"{place} is not whole: {layer} has no {part}")
    num_stored = len([name for name in stored if name.endswith(DOWN)])
    if not layers or len(layers) < num_stored:
        raise UserError(
            f"{place}: diffusers reads {len(layers)} of its {counted(num_stored, 'layers')}; name them all as "
            "diffusers' transformer does"
        )
