"""Which models there are: the only list of them."""

import importlib
from typing import NamedTuple

from diffusers import DiffusionPipeline

from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.loading import pipeline_name


class Entry(NamedTuple):
    """Where a model's class is, imported when it is asked for."""

    file: str  # NAME of NAME_pipeline_with_logprob.py; also the model's name in configs
    name: str  # of the class


MODELS: dict[str, Entry | type[FlowModel]] = {  # class of the diffusers pipeline -> model, or where its class is
    "QwenImagePipeline": Entry("qwenimage", "QwenImage"),
    "StableDiffusion3Pipeline": Entry("sd3", "StableDiffusion3"),
    "FluxPipeline": Entry("flux", "Flux"),
}


def model_class(folder: str) -> type[FlowModel]:
    """Of a diffusers folder or hub id: what config.model names.

    Raises:
        ValueError: it is none, or its pipeline is not among the models.
    """
    name = pipeline_name(folder)
    if name not in MODELS:
        raise ValueError(f"config.model {folder!r} holds a {name}; there are {', '.join(MODELS)}")
    return _load(MODELS[name])


def by_name(name: str) -> type[FlowModel]:
    """Of a name in configs and tools, such as the first word of a model's file."""
    return _load(next(entry for entry in MODELS.values() if isinstance(entry, Entry) and entry.file == name))


def of_pipeline(pipeline: DiffusionPipeline) -> FlowModel:
    """A pipeline that someone else has loaded.

    Raises:
        ValueError: it is not among the models.
    """
    name = type(pipeline).__name__
    if name not in MODELS:
        raise ValueError(f"the pipeline is a {name}; there are {', '.join(MODELS)}")
    return _load(MODELS[name])(pipeline, pipeline.transformer.device)


def names() -> list[str]:
    """Of all models."""
    return [entry.file for entry in MODELS.values() if isinstance(entry, Entry)]


def _load(entry: Entry | type[FlowModel]) -> type[FlowModel]:
    if isinstance(entry, type):
        return entry
    return getattr(importlib.import_module(f"flow_grpo.diffusers_patch.{entry.file}_pipeline_with_logprob"), entry.name)
