"""Modulation by the timestep alone, precomputed: tables for the timesteps of a run stand in for the weights.

A third of Qwen-Image's weights map the timestep to shifts, scales and gates. Where they are frozen, these are constants
of each timestep. They are looked up on the device, so that no forward waits; a timestep that is not in the tables gets
NaN.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.diffusers_patch.flow_model import FlowModel, Modulation
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.settings import table
from flow_grpo.settings.sections import Config
from flow_grpo.weights import fsdp_utils, policies, safetensors_reader
from flow_grpo.weights.safetensors_reader import StoredWeights

KEY = "config.precompute_modulation"


class RowNumbers(nn.Module):
    """Stand in for the embedding of the timestep: the numbers of rows in the tables."""

    times: Tensor  # [T]

    def __init__(self, times: Tensor):
        super().__init__()
        self.register_buffer("times", times, persistent=False)

    def forward(self, times: Tensor, tokens: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return the numbers [B] int64 of times [B]: T, that of the row of NaN, for one that is not among them."""
        assert condition is None, "the modulation is the timestep's alone"
        matches = times[:, None] == self.times
        return torch.where(matches.any(1), matches.int().argmax(1), len(self.times))


class Rows(nn.Module):
    """Stand in for an activation and a linear layer: what they return for each time."""

    rows: Tensor  # [T + 1, out]; the last is NaN

    def __init__(self, rows: Tensor):
        super().__init__()
        self.register_buffer("rows", torch.cat([rows, torch.full_like(rows[:1], torch.nan)]), persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.rows[numbers]


class Pair(NamedTuple):
    """Names of an activation and of the linear layer behind it."""

    activation: str
    layer: str


class Saving(NamedTuple):
    """Numbers of weights that tables stand in for, and of the tables."""

    weights: int = 0
    numbers: int = 0


def check(config: Config, family: type[FlowModel]) -> None:
    """Raise UserError, before any weight is loaded, where the setting is on and the modulation is not the timestep's
    alone, or is trained."""
    if not config.precompute_modulation:
        return
    if family.MODULATION is None:
        raise UserError(
            f"{KEY} is True, but the modulation of {family.NAME} depends on more than the timestep, or has few "
            "weights; set False"
        )
    transformer = family.empty_transformer(config.model)
    _check_parts(family, transformer, family.MODULATION)
    names = []
    for name, layer in _layers(transformer, family.MODULATION).items():
        names += [f"{name}.{part}".rstrip(".") for part, _ in layer.named_modules()]
    for target in policies.targets(config.lora, family):
        trained = [name for name in names if f".{name}".endswith(f".{target}")]
        if trained:
            raise UserError(
                f"{KEY} is True, but config.lora.targets has {quoted(target)}, which trains {trained[0]}: take it out, "
                "or set False"
            )


def _check_parts(family: type[FlowModel], transformer: nn.Module, modulation: Modulation) -> None:
    """Raise UserError unless the transformer has the parts that a model class, which may be the user's own, names."""
    modules = dict(transformer.named_modules())
    place = f"{KEY} is True, but MODULATION of {family.__name__} names"
    kind = type(transformer).__name__
    if modulation.embedding not in modules:
        raise UserError(f"{place} {quoted(modulation.embedding)}, and {kind} has no such module")
    for activation, _ in modulation.layers:
        if not any(f".{name}".endswith(f".{activation}") for name in modules):
            raise UserError(f"{place} {quoted(activation)}, and no module of {kind} ends in that")
    for pair in _pairs(transformer, modulation):
        layer = modules.get(pair.layer)
        if not isinstance(layer, nn.Linear):
            has = "has no such module" if layer is None else f"has a {type(layer).__name__} there"
            raise UserError(f"{place} the linear layer {quoted(pair.layer)}, and {kind} {has}")


def precompute(config: Config, model: FlowModel, stored: StoredWeights | None) -> StoredWeights | None:
    """Replace a transformer's modulation by tables, before its other weights get memory. Its layers are on the device
    one by one, each read by a thread of its own.

    Args:
        model: its transformer has adapters and quantised layers already.
        stored: the weights; None where the transformer has them.

    Returns:
        The weights that are still to be read.
    """
    assert model.MODULATION is not None, "`check` refuses it"
    transformer = model.transformer
    unread = _names_of_weights(transformer, model.MODULATION)
    model.known_timesteps = _timesteps(config, model).cpu()
    times = _times(config, model)
    rows_of_forward = _rows_of_forward(config, model)

    def compute(name: str, function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        layer = transformer.get_submodule(name)
        fsdp_utils.fill_layer(name, layer, model.device, config.precision, stored)
        with torch.no_grad(), policies.autocast(config.precision, model.device):
            return _in_batches(function, inputs, rows_of_forward)

    # Of the tokens the embedding reads the dtype alone.
    embed = transformer.get_submodule(model.MODULATION.embedding)
    embeddings = compute(model.MODULATION.embedding, lambda batch: embed(batch, batch), times)
    transformer.set_submodule(model.MODULATION.embedding, RowNumbers(times))

    def replace_pair(pair: Pair) -> None:
        layers = nn.Sequential(*(transformer.get_submodule(name) for name in pair))
        rows = compute(pair.layer, layers, embeddings)
        transformer.set_submodule(pair.activation, Rows(rows))
        transformer.set_submodule(pair.layer, nn.Identity())

    with ThreadPoolExecutor(safetensors_reader.READERS) as pool:
        list(pool.map(replace_pair, _pairs(transformer, model.MODULATION)))
    return None if stored is None else stored._replace(unread=unread)


def _names_of_weights(transformer: nn.Module, modulation: Modulation) -> frozenset[str]:
    """Return the names, in files, of the weights that tables replace."""
    names: set[str] = set()
    for name, layer in _layers(transformer, modulation).items():
        names |= safetensors_reader.layer_targets(name, layer).keys()
    return frozenset(names)


def saving(config: Config, model: FlowModel, transformer: nn.Module) -> Saving:
    """Return what the tables of a run save. Needs no weight."""
    if not config.precompute_modulation or model.MODULATION is None:
        return Saving()
    layers = _layers(transformer, model.MODULATION)
    weights = 0
    for layer in layers.values():
        weights += sum(parameter.numel() for parameter in layer.parameters())
    width = 0
    for pair in _pairs(transformer, model.MODULATION):
        layer = layers[pair.layer]
        assert isinstance(layer, nn.Linear), "quantised layers replace it later"
        width += layer.out_features
    return Saving(weights, numbers=(len(_times(config, model)) + 1) * width)


def _pairs(transformer: nn.Module, modulation: Modulation) -> list[Pair]:
    """Find the activations and layers that are replaced."""
    pairs = []
    for name, _ in transformer.named_modules():
        for activation, layer in modulation.layers:
            if f".{name}".endswith(f".{activation}"):
                pairs.append(Pair(name, name.removesuffix(activation) + layer))
    return pairs


def _layers(transformer: nn.Module, modulation: Modulation) -> dict[str, nn.Module]:
    """Return the parts with weights by name: the embedding and the linear layers."""
    names = [modulation.embedding, *(pair.layer for pair in _pairs(transformer, modulation))]
    return {name: transformer.get_submodule(name) for name in names}


def _timesteps(config: Config, model: FlowModel) -> Tensor:
    """Return the timesteps [T] f32 of all schedules of a run. Those of solvers of fewer forwards are among them."""
    size = training_size(config)
    schedules = [
        model.schedule(config.sample.num_steps, size).timesteps,
        model.schedule(config.eval.num_steps, size).timesteps,
    ]
    if config.algorithm == table.DPO:
        schedules.append(model.noise_levels(config.sample.num_steps, size))
    return torch.cat(schedules).unique()


def _times(config: Config, model: FlowModel) -> Tensor:
    """Return the times [T] that the transformer embeds in a run, in its precision, in which levels may coincide."""
    times = model.transformer_times(_timesteps(config, model))
    return times.to(fsdp_utils.DTYPES[config.precision]).unique()


def _rows_of_forward(config: Config, model: FlowModel) -> int:
    """Return the rows of a forward of the run's rollouts."""
    if config.batched_guidance and model.is_guided(config.sample.guidance_scale):
        return 2 * config.sample.batch_size
    return config.sample.batch_size


def _in_batches(compute: Callable[[Tensor], Tensor], inputs: Tensor, rows_of_forward: int) -> Tensor:
    """Compute rows [T, ...] in batches of the rows of a forward: kernels, and so the last bits, depend on it."""
    num_rows = len(inputs)
    num_filled = -(-num_rows // rows_of_forward) * rows_of_forward
    filled_up = torch.arange(num_filled, device=inputs.device).clamp(max=num_rows - 1)
    rows = [compute(part) for part in inputs[filled_up].split(rows_of_forward)]
    return torch.cat(rows)[:num_rows]
