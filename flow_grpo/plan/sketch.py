"""Published models known by their sizes alone, for a plan on a machine that has no file of them and reaches no hub."""

import inspect
import json

import torch
from diffusers import DiffusionPipeline

from flow_grpo.base import locations
from flow_grpo.diffusers_patch import loading, model_classes, registry
from flow_grpo.diffusers_patch.flow_model import FlowModel

FILE = locations.PACKAGE / "assets" / "published.json"


def transformer_sizes(hub_id: str) -> dict:
    """Return the settings of a published transformer that are not its class's defaults."""
    return json.loads(FILE.read_text())[hub_id]


def have_same_sizes(model: str, other: str) -> bool:
    """Return whether two models are published weights of one class and of one size, as Qwen-Image's of two months."""
    one = registry.published(model)
    another = registry.published(other)
    if one is None or another is None or one.model != another.model:
        return False
    return transformer_sizes(one.hub_id) == transformer_sizes(another.hub_id)


def source_sizes(pipeline_class: type[DiffusionPipeline]) -> dict[str, int]:
    """Return the numbers of pixels at which published weights see a source, by the pipeline's names of them. They are
    its defaults; a tiny model has smaller ones."""
    sizes = {}
    for name, parameter in inspect.signature(pipeline_class.__init__).parameters.items():
        if name.endswith("_pixels"):
            sizes[name] = parameter.default
    return sizes


def family_of(published: registry.Weights) -> type[FlowModel]:
    """Return the class of a published model, whose transformer is made from its sizes. Tokenizers and scheduler are
    those of the shipped tiny model, so prompts cannot be checked with it."""
    family = model_classes.by_name(published.model)
    tiny = registry.tiny_folder(published.model)

    class Sketch(family):
        @classmethod
        def without_weights(cls, folder):
            with loading.empty_weights():
                config = family.TRANSFORMER(**transformer_sizes(published.hub_id)).config
            pipeline = loading.without_weights(cls.PIPELINE, tiny)
            pipeline.register_to_config(**source_sizes(cls.PIPELINE))
            return cls(pipeline, torch.device("cpu"), config)

        @classmethod
        def empty_transformer(cls, folder):
            with loading.empty_weights():
                return family.TRANSFORMER(**transformer_sizes(published.hub_id))

    return Sketch
