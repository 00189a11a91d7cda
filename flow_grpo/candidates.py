"""What can be evaluated without training: a base model, a LoRA folder, a run's best or last weights."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import init_empty_weights
from ml_collections import ConfigDict
from safetensors import SafetensorError, safe_open

from flow_grpo import best, folders, fsdp_utils, policies, quantised, settings, shipped
from flow_grpo.diffusers_patch.flow_model import FlowModel

OF_A_RUN = (  # top settings that say how a run's policy is evaluated
    *("model", "dataset", "reward_fn", "height", "width", "text_tokens"),
    *("precision", "base_precision", "vae_precision", "vae_batch_size"),
)


@dataclass(frozen=True)
class Candidate:
    """A policy to be evaluated."""

    name: str  # as the user wrote it
    weights: str  # "base", "LoRA", "best, epoch 21" or "last"
    config: ConfigDict  # config.model is its base
    lora: Path | None  # folder of its LoRA file
    transformer: Path | None  # folder of its weights, trained in full


class Adapter(NamedTuple):
    """What a LoRA file adapts."""

    rank: int
    alpha: float
    shapes: dict[str, tuple[int, ...]]  # parameter name -> shape

    @property
    def targets(self) -> tuple[str, ...]:
        """The layers."""
        return tuple(sorted({name.split(".lora_")[0] for name in self.shapes}))


def is_run(folder: Path) -> bool:
    """Whether it is a run's folder."""
    return (folder / "config.json").is_file() and (folder / "metrics.jsonl").is_file()


def run_config(folder: Path) -> ConfigDict:
    """The settings with which a run evaluated; those that are younger than the run have their defaults."""
    config, file = settings.default_config(), folder / "config.json"
    stored = settings.with_defaults(folders.read_json(file), file)
    sections = {"": OF_A_RUN, "lora": ("rank", "alpha"), "eval": list(config.eval), "reward": list(config.reward)}
    with config.unlocked():
        for section, keys in sections.items():
            target, source = (config[section], stored[section]) if section else (config, stored)
            for key in keys:
                target[key] = ConfigDict(source[key]) if isinstance(source[key], dict) else source[key]
    return config


def find(name: str, config: ConfigDict, weights: str) -> Candidate:
    """What a folder or hub id is.

    Args:
        config: of what is no run; its model is the base of a LoRA folder.
        weights: "best" or "last", of a run.

    Raises:
        ValueError: it is nothing that could be evaluated.
    """
    folder = Path(shipped.find(name))
    if is_run(folder):
        return _of_run(name, folder, weights)
    if (folder / policies.LORA_FILE).is_file():
        return Candidate(name, "LoRA", config, folder, None)
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not folder.parent.is_dir()
    if (folder / "model_index.json").is_file() or is_hub_id:
        config = config.copy_and_resolve_references()
        config.model = name
        return Candidate(name, "base", config, None, None)
    what = "does not exist" if not folder.exists() else "is none of these"
    raise ValueError(f"{name!r} {what}: a run's folder, a folder with {policies.LORA_FILE}, or a diffusers model")


def _of_run(name: str, folder: Path, weights: str) -> Candidate:
    config, label = run_config(folder), weights
    if weights == "best":
        source = best.find(folder)
        if source is None:
            raise ValueError(f"{name!r} has no best evaluation; take --weights last")
        label = f"best, epoch {best.read(folder).epoch}"
    else:
        source = folder
    lora, transformer = (source, None) if config.lora.rank else (None, source / "transformer")
    if not ((lora / policies.LORA_FILE).is_file() if lora else transformer.is_dir()):
        raise ValueError(f"{source} holds no weights: the run did not come to its end; take --weights best")
    return Candidate(name, label, config, lora, transformer)


def read_adapter(folder: Path) -> Adapter:
    """What a LoRA file says of itself, without its weights.

    Raises:
        ValueError: it is no LoRA of a diffusers transformer, or its layers have several ranks.
    """
    path = folder / policies.LORA_FILE
    try:
        with safe_open(path, framework="pt") as file:
            stored_settings = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    strange = [name for name in shapes if not re.fullmatch(r"transformer\..+\.lora_[AB]\.weight", name)]
    if strange or not shapes:
        raise ValueError(
            f"{path} is no LoRA of a diffusers transformer: it holds {', '.join(strange[:3]) or 'nothing'}"
        )
    ranks = {shape[0] for name, shape in shapes.items() if ".lora_A." in name}
    if len(ranks) != 1:
        raise ValueError(f"{path} has layers of ranks {sorted(ranks)}; one rank is supported")
    rank = ranks.pop()
    alpha = stored_settings.get("transformer.lora_alpha", rank)
    return Adapter(rank, alpha, {name.removeprefix("transformer."): shape for name, shape in shapes.items()})


def check(candidate: Candidate, family: type[FlowModel]) -> None:
    """Raises ValueError where its LoRA file does not fit its base model, or where a quantised base is asked for and all
    weights were trained. Loads none."""
    precision = candidate.config.base_precision
    if precision and candidate.transformer:
        raise ValueError(
            f"config.base_precision is {precision!r}, but {candidate.name!r} trained all weights: it has no frozen base"
        )
    if candidate.lora is None:
        return
    adapter = read_adapter(candidate.lora)
    transformer = _empty(candidate.config.model, family)
    layers = {name: module for name, module in transformer.named_modules() if hasattr(module, "in_features")}
    for name, shape in adapter.shapes.items():
        layer, part = name.removesuffix(".weight").rsplit(".lora_", 1)
        width = layers.get(layer) and (layers[layer].in_features if part == "A" else layers[layer].out_features)
        if width != shape[1 if part == "A" else 0]:
            problem = f"is {list(shape)}, the layer is {width} wide" if width else "has no layer there"
            raise ValueError(
                f"{candidate.lora} is the LoRA of another model than {candidate.config.model}: {name} {problem}"
            )


def _empty(folder: str, family: type[FlowModel]) -> torch.nn.Module:
    with init_empty_weights():
        config = family.TRANSFORMER.load_config(shipped.find(folder), subfolder="transformer")
        return family.TRANSFORMER.from_config(config)


def load(
    candidate: Candidate,
    family: type[FlowModel],
    device: torch.device,
    before: tuple[Candidate, FlowModel] | None = None,
) -> FlowModel:
    """A model whose transformer carries the candidate.

    Args:
        before: the last candidate and its model, of which a base that did not change is used again.
    """
    config, weights = candidate.config, candidate.transformer
    quantised_base = bool(config.base_precision)  # whose layers take no second adapter
    if before and _base(before[0]) == _base(candidate) and weights is None and not quantised_base:
        model = before[1]
        model.transformer.unload_lora()
    else:
        model = family.load(config.model, device, vae_dtype=fsdp_utils.DTYPES[config.vae_precision])
        weights = weights or family.transformer_folder(config.model)
    _fill(candidate, model, weights)
    return model


def _base(candidate: Candidate) -> tuple:
    config = candidate.config
    return config.model, config.precision, config.base_precision, config.vae_precision, candidate.transformer


def _fill(candidate: Candidate, model: FlowModel, weights: Path | None) -> None:
    """As training lays weights out: what was trained is float32, the rest of config.precision."""
    transformer = model.transformer
    transformer.requires_grad_(candidate.transformer is not None)
    init = None
    if candidate.lora is not None:
        adapter = read_adapter(candidate.lora)
        policies.attach(transformer, ConfigDict(dict(rank=adapter.rank, alpha=adapter.alpha)), adapter.targets)
        init = policies.stored_adapter(candidate.lora)
    quantised.quantise_units(transformer, model.SHARD_UNITS, candidate.config.base_precision)
    fsdp_utils.prepare(
        transformer,
        None,
        units=model.SHARD_UNITS,
        weights=weights,
        init=init,
        device=model.device,
        precision=candidate.config.precision,
    )
