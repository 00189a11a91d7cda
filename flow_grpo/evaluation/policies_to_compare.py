"""What can be evaluated without training: a base model, a LoRA folder, a run's best or last weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from ml_collections import ConfigDict

from flow_grpo.base import locations
from flow_grpo.base.errors import UserError
from flow_grpo.checkpoints import best
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.settings import stored_config, table
from flow_grpo.weights import finite, fsdp_utils, load_weights, lora_files, model_files, policies

OF_A_RUN = (  # top settings that say how a run's policy is evaluated
    *("model", "model_class", "dataset", "reward_fn", "height", "width", "text_tokens"),
    *("precision", "base_precision", "vae_precision", "vae_batch_size"),
)


@dataclass(frozen=True)
class Candidate:
    name: str  # as the user wrote it
    weights: str  # "base", "LoRA", "best, epoch 21" or "last"
    config: ConfigDict  # config.model is its base
    lora: Path | None  # its LoRA file, or a folder of one
    transformer: Path | None  # folder of its weights, trained in full


def is_run(folder: Path) -> bool:
    """Whether it is a run's folder."""
    return (folder / "config.json").is_file() and (folder / "metrics.jsonl").is_file()


def run_config(folder: Path) -> ConfigDict:
    """The settings with which a run evaluated; those that are younger than the run have their defaults."""
    config, stored = table.default_config(), stored_config.read(folder / "config.json")
    sections = {"": OF_A_RUN, "lora": ("rank", "alpha"), "eval": list(config.eval), "reward": list(config.reward)}
    with config.unlocked():
        for section, keys in sections.items():
            target, source = (config[section], stored[section]) if section else (config, stored)
            for key in keys:
                target[key] = ConfigDict(source[key]) if isinstance(source[key], dict) else source[key]
    return config


def find(name: str, config: ConfigDict, weights: str) -> Candidate:
    """What a folder or hub id is: of a run its `weights`, "best" or "last"; of what is no run a model, or a LoRA of
    config.model. Raises UserError for what cannot be evaluated."""
    try:
        return _found(name, config, weights)
    except OSError as error:  # a folder that nobody may look into
        raise UserError(f"{name!r} cannot be read: {error.strerror}") from error


def _found(name: str, config: ConfigDict, weights: str) -> Candidate:
    """As `find` says. Raises OSError, too."""
    folder = Path(locations.resolve(name))
    if is_run(folder):
        return _of_run(name, folder, weights)
    if folder.name == best.NAME and is_run(folder.parent):
        return _of_run(name, folder.parent, "best")
    is_model = (folder / "model_index.json").is_file()
    if (folder / lora_files.FILE).is_file() or (lora_files.is_lora(folder) and not is_model):
        return Candidate(name, "LoRA", config, folder, None)
    if is_model or locations.is_hub_id(name):
        config = config.copy_and_resolve_references()
        config.model = name
        return Candidate(name, "base", config, None, None)
    what = "does not exist" if not folder.exists() else "is none of these"
    kinds = "a run's folder, a LoRA (a file of safetensors, or a folder with one), or a diffusers model"
    raise UserError(f"{name!r} {what}: {kinds}{lora_files.hint(folder)}")


def _of_run(name: str, folder: Path, weights: str) -> Candidate:
    config, source, label = run_config(folder), folder, weights
    if weights == "best":
        if (source := best.find_best(folder)) is None:
            raise UserError(f"{name!r} has no best evaluation; take --weights last")
        label = f"best, epoch {best.read_best(folder).epoch}"
    lora, transformer = (source, None) if config.lora.rank else (None, source / "transformer")
    if not ((lora / lora_files.FILE).is_file() if lora else transformer.is_dir()):
        raise UserError(f"{source} holds no weights: the run did not come to its end; take --weights best")
    return Candidate(name, label, config, lora, transformer)


def check(candidate: Candidate, family: type[FlowModel]) -> None:
    """Raises UserError where its model is not whole, where its LoRA file does not fit it, or where a quantised base is
    asked for and all weights were trained. Loads none."""
    precision, model = candidate.config.base_precision, candidate.config.model
    model_files.check_parts(model, family)
    model_files.check_weights(model, family, transformer=candidate.transformer)
    if precision and candidate.transformer:
        raise UserError(
            f"config.base_precision is {precision!r}, but {candidate.name!r} trained all weights: it has no frozen base"
        )
    if candidate.lora is None:
        return
    adapter = lora_files.check_adapter(candidate.lora)
    lora_files.check_fits(candidate.lora, adapter, family.empty_transformer(model), model)


def load(candidate: Candidate, family: type[FlowModel], device: torch.device) -> FlowModel:
    """A model whose transformer carries the candidate, laid out as in training: what was trained is float32, the rest
    of config.precision. Raises FloatingPointError: the weights are not finite."""
    config, init = candidate.config, None
    model = family.load(config.model, device, vae_dtype=fsdp_utils.DTYPES[config.vae_precision])
    model.transformer.requires_grad_(candidate.transformer is not None)
    if candidate.lora is not None:
        adapter = lora_files.read_adapter(candidate.lora)
        policies.attach(model.transformer, ConfigDict(dict(rank=adapter.rank, alpha=adapter.alpha)), adapter.layers)
        init = policies.stored_adapter(candidate.lora)
    load_weights.fill_model(config, model, weights=candidate.transformer, init=init)
    finite.check_tensors(dict(model.transformer.named_parameters()), f"the weights of {candidate.name}")
    return model
