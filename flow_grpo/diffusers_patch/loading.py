"""Loading of a diffusers folder or hub id into a pipeline that can be trained, for any pipeline class."""

import copy
import gc
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.models.modeling_utils import no_init_weights

from flow_grpo.base import folders, locations
from flow_grpo.base.errors import RunFailed, UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.diffusers_patch.sde_with_logprob import Schedule
from flow_grpo.kernels import compilation
from flow_grpo.kernels.single_frame_vae import convolve_in_2d

# Outside a terminal each progress bar would be many lines of a log.
if not sys.stderr.isatty():
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
# Beginnings of the names of parts that have no weights.
WITHOUT_WEIGHTS = ("scheduler", "tokenizer", "feature_extractor")
EULER = FlowMatchEulerDiscreteScheduler.__name__
UNIPC = UniPCMultistepScheduler.__name__
# Settings of UniPC's class with which its sigmas are those of flow matching with one shift.
UNIPC_OF_FLOWS = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "final_sigmas_type": "zero",
}
NUM_TIMESTEPS = 1000  # timestep = 1000 * sigma


@contextmanager
def empty_weights() -> Iterator[None]:
    """Give modules that are made in this block real buffers, and weights on the meta device.

    Weights without values need no initial ones: to draw them takes most of the time.
    """
    with init_empty_weights(), no_init_weights():
        yield


def pipeline_name(folder: str) -> str:
    """Read the class of the pipeline in a folder or hub id from its index. Raises UserError if there is none."""
    locations.check_hub_connection(folder)
    place = Path(locations.resolve(folder))
    _check_place(folder, place)
    try:
        name = read_index(DiffusionPipeline, str(place)).get("_class_name")
    except OSError as error:
        sentence = (
            f"config.model {quoted(folder)} is no diffusers folder here, in the Hugging Face cache or on the hub: "
            f"{in_one_line(error)}"
        )
        if locations.is_hub_id(folder):
            sentence += f"; if it is a LoRA{locations.download_hint(folder)}"
        raise UserError(sentence) from error
    if not isinstance(name, str):
        raise UserError(
            f"config.model {quoted(folder)}: _class_name of its model_index.json is {quoted(name)}, not the name of a "
            "diffusers pipeline; pipelines that bring their own code are not supported"
        )
    return name


def read_index(pipeline_class: type[DiffusionPipeline], folder: str) -> dict[str, Any]:
    """Read the model_index.json of a folder or hub id: its parts, [library, class] each, and settings."""
    index = pipeline_class.load_config(folder)
    assert isinstance(index, dict), "without options diffusers returns the settings alone"
    return index


def _check_place(model: str, place: Path) -> None:
    """Raise UserError for a file, or a folder on this disk that holds no pipeline."""
    try:
        if place.is_file():
            raise UserError(
                f"config.model {quoted(model)} is a single file; a diffusers folder is needed: load the file by the "
                "pipeline's from_single_file and save it by save_pretrained"
            )
        if model.startswith(("http://", "https://")):
            raise UserError(f"config.model {quoted(model)} is an address: a model of the hub is named OWNER/NAME")
        if place.is_absolute() and not place.is_dir():
            raise UserError(f"config.model {quoted(model)} is no folder on this machine")
        if not place.is_dir():
            return
        names = sorted(path.name for path in place.iterdir())
    except OSError as error:
        raise UserError(f"config.model {quoted(model)} cannot be read: {error.strerror}") from error
    index = "model_index.json"
    if index not in names:
        content = f"it has {', '.join(names[:6])}" if names else "it is empty"
        raise UserError(f"config.model {quoted(model)} is no diffusers pipeline, whose folder has a {index}; {content}")
    problem = folders.file_problem(place / index)
    if problem:
        raise UserError(f"config.model {quoted(model)}: its {index} {problem}")
    folders.read_json(place / index)


@contextmanager
def foreign(folder: str, what: str) -> Iterator[None]:
    """Guard the reading of a user's files by diffusers and transformers: whatever they raise becomes a UserError."""
    try:
        yield
    except (UserError, RunFailed, AssertionError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {in_one_line(error, 300)}"
        raise UserError(f"config.model {quoted(folder)}: its {what} cannot be read ({problem})") from error


def without_weights(pipeline_class: type[DiffusionPipeline], folder: str, **components: Any) -> DiffusionPipeline:
    """Load the pipeline's tokenizers and scheduler alone, for checks that need no weight, with `components` beside
    them."""
    folder = locations.resolve(folder)
    index = read_index(pipeline_class, folder)
    _, scheduler_class = index["scheduler"]
    model = f"config.model {quoted(folder)}"
    # By name first: another class may not even take its settings.
    _check_steps_of(scheduler_class, model)
    # A part that is given as None is not loaded.
    parts = dict.fromkeys(parts_with_weights(index)) | components
    with foreign(folder, "tokenizers and scheduler"):
        pipeline = pipeline_class.from_pretrained(folder, **parts)
    check_scheduler(pipeline.scheduler, model)
    return pipeline


def check_scheduler(scheduler, model: str = "this model") -> None:
    """Raise UserError for a scheduler other than the Euler scheduler of flow matching, whose steps and sigmas are what
    training computes with, and for settings of it that training does not follow. Of UniPC's scheduler the sigmas are
    taken. `model` begins the sentence."""
    config = as_euler(scheduler, model).config
    for setting in ("stochastic_sampling", "invert_sigmas"):
        if config[setting]:
            raise UserError(f"{model}: its scheduler's {setting} is true, which training does not support; set false")
    if config["num_train_timesteps"] != NUM_TIMESTEPS:
        raise UserError(
            f"{model}: its scheduler's num_train_timesteps is {config['num_train_timesteps']}; training takes "
            f"{NUM_TIMESTEPS} alone"
        )
    ignored = _ignored_settings(config)
    if ignored:
        values = ", ".join(f"{name} = {quoted(value)}" for name, value in ignored.items())
        raise UserError(
            f"{model}: {EULER} ignores {values} of scheduler/scheduler_config.json; say by its own settings (shift, "
            "use_dynamic_shifting, base_shift, max_shift) what is meant, and remove the others"
        )


def as_euler(scheduler: Any, model: str = "this model") -> FlowMatchEulerDiscreteScheduler:
    """Return the scheduler whose steps training takes: the pipeline's own or, of UniPC's for flow matching, Euler's
    with its shift. Raise UserError for any other; `model` begins the sentence."""
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return scheduler
    _check_steps_of(type(scheduler).__name__, model)
    config = scheduler.config
    for name, value in UNIPC_OF_FLOWS.items():
        if config[name] != value:
            raise UserError(
                f"{model} has the scheduler {UNIPC} with {name} = {quoted(config[name])}; training takes the sigmas of "
                f"one with {name} = {quoted(value)}"
            )
    return FlowMatchEulerDiscreteScheduler(config["num_train_timesteps"], config["flow_shift"])


def unipc_sigmas(num_levels: int) -> list[float]:
    """Return the sigmas that UniPC's scheduler shifts: from 1 on, in steps that would end at 1 / 1000."""
    return np.linspace(1.0, 1 / NUM_TIMESTEPS, num_levels + 1)[:-1].tolist()


def caution(scheduler: Any) -> str:
    """Return a sentence where a pipeline's scheduler takes other steps than training does; "" otherwise."""
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return ""
    return (
        f"the model's scheduler is {type(scheduler).__name__}: here images take Euler's steps on its sigmas, so its "
        "pipeline draws others from the same noise"
    )


def _check_steps_of(scheduler_class: str | None, model: str) -> None:
    """Raise UserError unless a scheduler's class is one whose sigmas training takes."""
    if scheduler_class not in (EULER, UNIPC):
        raise UserError(
            f"{model} has the scheduler {scheduler_class}; training takes the steps of {EULER} alone: name it in "
            "model_index.json and scheduler/scheduler_config.json, with the model's shift"
        )


def _ignored_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Find settings of a scheduler's config that would move its sigmas in another class, and do nothing in Euler's."""
    read = set(inspect.signature(FlowMatchEulerDiscreteScheduler.__init__).parameters)
    if config["use_karras_sigmas"] or config["use_exponential_sigmas"] or config["use_beta_sigmas"]:
        # These spacings of sigmas have ends.
        read |= {"sigma_min", "sigma_max"}
    # What Euler's class does without these settings.
    harmless = {"use_flow_sigmas": True, "final_sigmas_type": "zero"}
    ignored = {}
    for name, value in config.items():
        is_of_sigmas = "shift" in name or "sigma" in name
        is_unset = value is None or value is False
        if is_of_sigmas and name not in read and not is_unset and harmless.get(name) != value:
            ignored[name] = value
    return ignored


def is_part(value: Any) -> bool:
    """Tell a part of model_index.json, [library, class], from its settings, which may be lists, too, of numbers."""
    return isinstance(value, list | tuple) and all(name is None or isinstance(name, str) for name in value)


def parts_with_weights(index: Mapping[str, Any]) -> list[str]:
    """Return the names of a pipeline's parts but for those of WITHOUT_WEIGHTS, from its model_index.json."""
    names = []
    for name, value in index.items():
        if is_part(value) and not name.startswith(WITHOUT_WEIGHTS):
            names.append(name)
    return names


def text_encoders(names: Iterable[str]) -> list[str]:
    """Select the text encoders among the names of a pipeline's parts."""
    return [name for name in names if name.startswith("text_encoder")]


def drop_text_encoders(pipeline: DiffusionPipeline) -> None:
    """Give the memory of the text encoders back."""
    pipeline.register_modules(**dict.fromkeys(text_encoders(pipeline.components)))
    free_memory()


def free_memory() -> None:
    """Give the memory of all that nothing refers to any more back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_parallelism(transformer: Any) -> None:
    """Raise UserError for a transformer on which diffusers' context or tensor parallelism was enabled.

    The attention that we put in the place of diffusers' knows nothing of it: under context parallelism a rank would
    attend to its own tokens alone, and every velocity be wrong.
    """
    parallel = getattr(transformer, "_parallel_config", None)
    if parallel is None:
        return
    kind = "context" if parallel.context_parallel_config is not None else "tensor"
    raise UserError(
        f"{type(transformer).__name__} has diffusers' {kind} parallelism (enable_parallelism), which this program does "
        "not compute with: its ranks draw other images each, and a split image's tokens would attend to those of their "
        "own rank alone; load it without, and split weights by config.fsdp.mode 'shard'"
    )


def compile_decoder(pipeline: DiffusionPipeline) -> None:
    """Have the decoder compiled on its first use; from now on FlowModel.decode gives it one shape."""
    if pipeline.vae is not None:
        pipeline.vae.decoder.compile(dynamic=False, options=compilation.OPTIONS)


def frozen(pipeline: DiffusionPipeline, device: torch.device) -> DiffusionPipeline:
    """Move everything but the transformer to the device, without gradients, and make the VAE fast."""
    for name, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module) and name != "transformer":
            part.to(device).requires_grad_(False).eval()
    convolve_in_2d(pipeline.vae)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def chat_length(tokenizer: Any, text: str, thinks: bool) -> int:
    """Count the tokens of a prompt with the chat template, as pipelines of Qwen3 fill it."""
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinks)
    return len(tokenizer(chat).input_ids)


def schedule(
    scheduler: FlowMatchEulerDiscreteScheduler | UniPCMultistepScheduler,
    num_steps: int,
    num_tokens: int,
    device: torch.device,
    *,
    sigmas: bool | list[float],
    shift: float | None = None,
) -> Schedule:
    """Copy a pipeline's scheduler, with `timesteps` [T] and `sigmas` [T + 1] set for images of `num_tokens`.

    Args:
        scheduler: of UniPC's the sigmas are taken, for Euler's steps.
        sigmas: what the scheduler shifts; True = 1, ..., 1 / num_steps, False = sigmas of its own.
        shift: of a scheduler with dynamic shifts; None = linear in the tokens, as its config has it.
    """
    check_scheduler(scheduler)
    copied: Any = copy.deepcopy(as_euler(scheduler))
    config = copied.config
    if config["use_dynamic_shifting"] and shift is None:
        # Larger images have noisier steps: the shift is linear in the tokens.
        base_tokens = config["base_image_seq_len"]
        slope = (config["max_shift"] - config["base_shift"]) / (config["max_image_seq_len"] - base_tokens)
        shift = config["base_shift"] + slope * (num_tokens - base_tokens)
    if num_steps == 1:
        # diffusers stretches sigmas so that the last is the terminal one. 1, the only one, cannot be moved: 0 / 0.
        copied.register_to_config(shift_terminal=None)
    if sigmas is True:
        unshifted = np.linspace(1.0, 1 / num_steps, num_steps)
    elif sigmas:
        unshifted = sigmas
    elif isinstance(scheduler, UniPCMultistepScheduler):
        unshifted = unipc_sigmas(num_steps)
    else:
        unshifted = None
    copied.set_timesteps(num_steps, sigmas=unshifted, mu=shift, device=device)
    copied.sigmas = copied.sigmas.to(device)
    return copied
