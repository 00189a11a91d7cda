"""The class of a model: one of the registry, or one of a user's own."""

import hashlib
import importlib
import inspect
import sys
from pathlib import Path

from diffusers import DiffusionPipeline
from ml_collections import ConfigDict

from flow_grpo.base.errors import UserError
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.loading import pipeline_name


def of_folder(folder: str) -> type[FlowModel]:
    """Of a diffusers folder or hub id. Raises UserError unless its pipeline is among the models."""
    return _of_class(pipeline_name(folder), f"config.model {folder!r} holds")


def resolve(config: ConfigDict) -> type[FlowModel]:
    """The class of config.model, or the one that config.model_class names, which gets its source's digest there. Raises
    UserError where there is none, it is for another pipeline, or its source is not the one of a digest there."""
    if not config.model_class:
        return of_folder(config.model)
    name, _, stored = config.model_class.partition("@")
    family = _imported(name)
    if family.PIPELINE.__name__ != (pipeline := pipeline_name(config.model)):
        raise UserError(
            f"config.model_class {name!r} is for a {family.PIPELINE.__name__}; config.model {config.model!r} holds a "
            f"{pipeline}"
        )
    digest = hashlib.sha256(Path(inspect.getfile(family)).read_bytes()).hexdigest()[:16]
    if stored and stored != digest:
        raise UserError(
            f"config.model_class {name!r} was stored with the digest {stored}, but {inspect.getfile(family)} has "
            f"{digest}: put the old source there, or set model_class={name} to take the new one"
        )
    config.model_class = f"{name}@{digest}"
    return family


def _imported(name: str) -> type[FlowModel]:
    """MODULE:CLASS from Python's path or the working directory."""
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except (ModuleNotFoundError, ValueError) as error:  # ValueError: an empty name
        if isinstance(error, ModuleNotFoundError) and not module.startswith(error.name):
            raise
        found = None
    if not (isinstance(found, type) and issubclass(found, FlowModel)):
        raise UserError(
            f"config.model_class is {name!r}, but Python finds no such FlowModel; it is MODULE:CLASS, in a folder of "
            "PYTHONPATH or in the working directory"
        )
    return found


def by_name(name: str) -> type[FlowModel]:
    """Of a name in configs and tools, which is that of a model's file."""
    return _load(next(entry for entry in registry.MODELS.values() if getattr(entry, "file", "") == name))


def of_pipeline(pipeline: DiffusionPipeline) -> FlowModel:
    """A pipeline that someone else has loaded. Raises UserError where it is not among the models."""
    return _of_class(type(pipeline).__name__, "the pipeline is")(pipeline, pipeline.transformer.device)


def _of_class(name: str, what: str) -> type[FlowModel]:
    if name not in registry.MODELS:
        raise UserError(f"{what} a {name}; there are {', '.join(registry.MODELS)}")
    return _load(registry.MODELS[name])


def _load(entry: registry.Entry | type[FlowModel]) -> type[FlowModel]:
    if isinstance(entry, type):
        return entry
    return getattr(importlib.import_module(f"flow_grpo.diffusers_patch.models.{entry.file}"), entry.name)
