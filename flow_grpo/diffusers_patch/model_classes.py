"""Classes of models: one of the registry, or one of a user's own."""

import hashlib
import importlib
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from diffusers import DiffusionPipeline

from flow_grpo.base.errors import UserError
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.loading import pipeline_name
from flow_grpo.settings.sections import Config


def of_folder(folder: str) -> type[FlowModel]:
    """Find the class for a diffusers folder or hub id. Raises UserError unless its pipeline is among the models."""
    return _of_class(pipeline_name(folder), f"config.model {folder!r} holds")


def resolve(model: str, model_class: str) -> type[FlowModel]:
    """Find the class of config.model, or import the one that config.model_class names. Raises UserError where there is
    none, it is for another pipeline, or its source has not the digest that is stored with its name."""
    if not model_class:
        return of_folder(model)
    name, _, stored = model_class.partition("@")
    imported = _imported(name)
    pipeline = pipeline_name(model)
    if imported.PIPELINE.__name__ != pipeline:
        raise UserError(
            f"config.model_class {name!r} is for a {imported.PIPELINE.__name__}; config.model {model!r} "
            f"holds a {pipeline}"
        )
    source = inspect.getfile(imported)
    digest = _source_digest(imported)
    if stored and stored != digest:
        raise UserError(
            f"config.model_class {name!r} was stored with the digest {stored}, but {source} has {digest}: put the old "
            f"source there, or set model_class={name} to take the new one"
        )
    return imported


def with_digest(config: Config, model_class: type[FlowModel]) -> Config:
    """Return the config as a run stores it: a class of one's own is named together with its source's digest."""
    if not config.model_class:
        return config
    name = config.model_class.partition("@")[0]
    return replace(config, model_class=f"{name}@{_source_digest(model_class)}")


def _source_digest(model_class: type[FlowModel]) -> str:
    """Return the digest of the file that a class is written in, 16 hexadecimal digits."""
    source = Path(inspect.getfile(model_class)).read_bytes()
    return hashlib.sha256(source).hexdigest()[:16]


def _imported(name: str) -> type[FlowModel]:
    """Import MODULE:CLASS from Python's path or the working directory. An error of the module's own code is shown as it
    is."""
    module_name, _, class_name = name.partition(":")
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.append(working_directory)
    model_class = getattr(_module_of(module_name), class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, FlowModel)):
        raise UserError(
            f"config.model_class is {name!r}, but Python finds no such FlowModel; it is MODULE:CLASS, in a folder of "
            "PYTHONPATH or in the working directory"
        )
    return model_class


def _module_of(name: str) -> ModuleType | None:
    """Import a module by its dotted name; None if there is no such module."""
    # Python has errors of several kinds for an empty name and for one that is relative.
    if not name or name.startswith("."):
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module may be there, and lack another one that it imports.
        is_itself = error.name is not None and f"{name}.".startswith(f"{error.name}.")
        if not is_itself:
            raise
        return None


def by_name(name: str) -> type[FlowModel]:
    """Find the class by a name of configs and tools, which is that of a model's file."""
    for entry in registry.MODELS.values():
        if isinstance(entry, registry.Entry) and entry.file == name:
            return _load(entry)
    raise KeyError(name)


def of_pipeline(pipeline: DiffusionPipeline) -> FlowModel:
    """Wrap a pipeline that someone else has loaded. Raises UserError where it is not among the models."""
    model_class = _of_class(type(pipeline).__name__, "the pipeline is")
    return model_class(pipeline, pipeline.transformer.device)


def _of_class(pipeline_class: str, subject: str) -> type[FlowModel]:
    """Find the class for a class of pipelines; `subject` begins the sentence of the UserError."""
    if pipeline_class in registry.OTHERS:
        raise UserError(f"{subject} a {pipeline_class}: {registry.OTHERS[pipeline_class]}")
    if pipeline_class not in registry.MODELS:
        raise UserError(f"{subject} a {pipeline_class}; there are {', '.join(registry.MODELS)}")
    return _load(registry.MODELS[pipeline_class])


def _load(entry: registry.Entry | type[FlowModel]) -> type[FlowModel]:
    """Return the class of an entry, imported; a class that a benchmark has put in its place is returned as it is."""
    if isinstance(entry, type):
        return entry
    module = importlib.import_module(f"flow_grpo.diffusers_patch.models.{entry.file}")
    return getattr(module, entry.name)
