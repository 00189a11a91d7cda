"""Policies that are evaluated without training: a base model, a LoRA folder, a run's best or last weights."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flow_grpo.base import folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.checkpoints import best
from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.settings import stored_config, table
from flow_grpo.settings.sections import Config
from flow_grpo.weights import base_lora, finite, fsdp_utils, load_weights, lora_files, model_files, policies

# Settings that an evaluation reads; config.model is each policy's own.
READ = (
    *("model_class", "dataset", "reward_fn", "height", "width", "frames", "text_tokens"),
    *("precision", "base_precision", "vae_precision", "vae_batch_size"),
    *(f"eval.{key}" for key in ("rewards", "num_prompts", "noises_per_prompt", "num_steps")),
    *("eval.guidance_scale", "eval.batch_size"),
    *(setting.key for setting in table.SETTINGS if setting.section == "reward"),
)
OF_A_RUN = ("model", "lora.rank", "lora.alpha", "lora.base", *READ)
# What the command line alone says: a run that saves images does not make each later evaluation save them, and images
# are drawn exactly, as those of a run's test, unless a shortcut is asked for.
SHORTCUTS = ("sample.rollout_weights", "sample.text_multiple")
OF_THE_COMMAND = ("eval.save_images", "eval.image_format", *SHORTCUTS)


@dataclass(frozen=True)
class Candidate:
    """A policy to be evaluated."""

    name: str  # as the user wrote it
    weights: str  # "base", "base with NAME" of lora.base, "LoRA", "best, epoch 21" or "last"
    config: Config  # config.model is its base
    lora: Path | None  # its LoRA file, or a folder of one
    transformer: Path | None  # folder of its weights, trained in full


def run_config(folder: Path) -> Config:
    """Return the settings with which a run evaluated; those that are younger than the run have their defaults."""
    stored = table.of_stored(stored_config.read(folder / "config.json"))
    return table.with_values(Config(), {key: table.value_of(stored, key) for key in OF_A_RUN})


def with_model(config: Config, model: str) -> Config:
    """Return settings of a model. Another model than the settings had is without lora.base, which was added to that
    one, and without a class of one's own for another pipeline."""
    before = Path(locations.resolve(config.model)).resolve()
    if Path(locations.resolve(model)).resolve() != before:
        config = replace(config, lora=replace(config.lora, base=""))
        if config.model_class and loading.pipeline_name(model) != loading.pipeline_name(config.model):
            config = replace(config, model_class="")
    return replace(config, model=model)


def find_candidate(name: str, config: Config, weights: str) -> Candidate:
    """Find out what a folder or hub id is: of a run its `weights`, "best" or "last"; of what is no run a model, or a
    LoRA of config.model. Raises UserError for what cannot be evaluated."""
    try:
        return _candidate(name, config, weights)
    except OSError as error:  # a folder that nobody may look into
        raise UserError(f"{name!r} cannot be read: {error.strerror}") from error


def _candidate(name: str, config: Config, weights: str) -> Candidate:
    """Find out what a folder or hub id is. Arguments and errors as of `find_candidate`."""
    folder = Path(locations.resolve(name))
    run_folder = folders.find_run(name)
    if run_folder is not None:
        return _candidate_of_run(name, run_folder, weights if run_folder == folder else "best")
    is_model = (folder / "model_index.json").is_file()
    if (folder / lora_files.FILE).is_file() or (lora_files.is_lora(folder) and not is_model):
        return Candidate(name, "LoRA", config, lora=folder, transformer=None)
    if is_model or locations.is_hub_id(name):
        config = with_model(config, name)
        added = Path(config.lora.base).name
        return Candidate(name, f"base with {added}" if added else "base", config, lora=None, transformer=None)
    what = "is none of these" if folder.exists() else "does not exist"
    kinds = "a run's folder, a LoRA (a file of safetensors, or a folder with one), or a diffusers model"
    raise UserError(f"{name!r} {what}: {kinds}{lora_files.hint(folder)}")


def _candidate_of_run(name: str, run_folder: Path, weights: str) -> Candidate:
    """Return the "best" or the "last" weights of a run. Raise UserError for a run without them."""
    config = run_config(run_folder)
    folder = run_folder
    label = weights
    if weights == "best":
        best_folder = best.find_best(run_folder)
        chosen = best.read_best(run_folder)
        if best_folder is None or chosen is None:
            raise UserError(f"{name!r} has no best evaluation; take its last weights (--weights last)")
        folder = best_folder
        label = f"best, epoch {chosen.epoch}"
    if config.lora.rank:
        candidate = Candidate(name, label, config, lora=folder, transformer=None)
        has_weights = (folder / lora_files.FILE).is_file()
    else:
        candidate = Candidate(name, label, config, lora=None, transformer=folder / "transformer")
        has_weights = (folder / "transformer").is_dir()
    if not has_weights:
        raise UserError(f"{folder} holds no weights: the run did not come to its end; take --weights best")
    return candidate


def check_candidate(candidate: Candidate, family: type[FlowModel]) -> None:
    """Raise UserError where its model is not whole, where its LoRA file does not fit it, or where a quantised base is
    asked for and all weights were trained. Loads none."""
    model = candidate.config.model
    base_precision = candidate.config.base_precision
    model_files.check_parts(model, family)
    model_files.check_weights(model, family, transformer=candidate.transformer)
    if base_precision and candidate.transformer:
        raise UserError(
            f"config.base_precision is {base_precision!r}, but {candidate.name!r} trained all weights: it has no "
            "frozen base"
        )
    transformer = family.empty_transformer(model)
    if candidate.config.lora.base and not candidate.transformer:
        base_lora.check(candidate.config.lora.base, transformer, family, model)
    if candidate.lora is not None:
        adapter = lora_files.check_adapter(candidate.lora)
        lora_files.check_fits(candidate.lora, adapter.shapes, transformer, model)


def load_candidate(candidate: Candidate, family: type[FlowModel], device: torch.device) -> FlowModel:
    """Load a model whose transformer carries the candidate, laid out as in training: what was trained is float32, the
    rest of config.precision. Raises FloatingPointError: the weights are not finite."""
    config = candidate.config
    model = family.load(config.model, device, vae_dtype=fsdp_utils.DTYPES[config.vae_precision])
    # `fill_model` keeps weights that need a gradient in float32.
    model.transformer.requires_grad_(candidate.transformer is not None)
    init = None
    if candidate.lora is not None:
        adapter = lora_files.read_adapter(candidate.lora)
        policies.attach(model.transformer, adapter, adapter.layers)
        init = policies.stored_adapter(candidate.lora, adapter)
    load_weights.fill_model(config, model, weights=candidate.transformer, init=init)
    finite.check_tensors(dict(model.transformer.named_parameters()), f"the weights of {candidate.name}")
    return model
