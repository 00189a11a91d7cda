"""Which models there are: the only list of them. model_classes.py imports their classes, and so torch."""

from typing import Any, NamedTuple


class Weights(NamedTuple):
    """What somebody has published."""

    hub_id: str
    licence: str
    download_gb: int


class Entry(NamedTuple):
    """Where a model's class is, imported when it is asked for, and which weights it is for."""

    file: str  # NAME of models/NAME.py and of assets/tiny_NAME; also the model's name in configs
    name: str  # of the class
    weights: tuple[Weights, ...]  # those of configs that are called after the model come first


STABILITY = "Stability AI Community License (free below 1 million USD of yearly revenue)"
MODELS: dict[str, Entry | Any] = {  # class of the diffusers pipeline -> a FlowModel, or where its class is
    "QwenImagePipeline": Entry(
        "qwenimage",
        "QwenImage",
        (Weights("Qwen/Qwen-Image", "Apache-2.0", 57), Weights("Qwen/Qwen-Image-2512", "Apache-2.0", 57)),
    ),
    "QwenImageEditPlusPipeline": Entry(
        "qwenimage_edit",
        "QwenImageEdit",
        (
            Weights("Qwen/Qwen-Image-Edit-2511", "Apache-2.0", 57),
            Weights("Qwen/Qwen-Image-Edit-2509", "Apache-2.0", 57),
        ),
    ),
    "StableDiffusion3Pipeline": Entry(
        "sd3",
        "StableDiffusion3",
        (
            Weights("stabilityai/stable-diffusion-3.5-medium", STABILITY, 16),
            Weights("stabilityai/stable-diffusion-3.5-large", STABILITY, 28),
        ),
    ),
    "FluxPipeline": Entry(
        "flux",
        "Flux",
        (
            Weights("black-forest-labs/FLUX.1-dev", "FLUX.1 [dev] Non-Commercial License", 34),
            Weights("black-forest-labs/FLUX.1-schnell", "Apache-2.0", 34),
        ),
    ),
    "ZImagePipeline": Entry(
        "zimage",
        "ZImage",
        (Weights("Tongyi-MAI/Z-Image", "Apache-2.0", 21), Weights("Tongyi-MAI/Z-Image-Turbo", "Apache-2.0", 33)),
    ),
    "Flux2KleinPipeline": Entry(
        "flux2_klein",
        "Flux2Klein",
        (
            Weights("black-forest-labs/FLUX.2-klein-4B", "Apache-2.0", 16),
            Weights("black-forest-labs/FLUX.2-klein-9B", "FLUX Non-Commercial License", 35),
            Weights("black-forest-labs/FLUX.2-klein-base-4B", "Apache-2.0", 16),
            Weights("black-forest-labs/FLUX.2-klein-base-9B", "FLUX Non-Commercial License", 35),
        ),
    ),
    "QwenImage21Pipeline": Entry(
        "qwenimage_21",
        "QwenImage21",
        (Weights("Qwen/Qwen-Image-2.1", "Qwen Research License (no commercial use)", 33),),
    ),
}


def hub_id(name: str) -> str:
    """Of a model's published weights."""
    return entry(name).weights[0].hub_id


def tiny_folder(name: str) -> str:
    """A diffusers folder of a model at toy size, as it is shipped."""
    return f"flow_grpo/assets/tiny_{entry(name).file}"


def tiny_like(model: str) -> str:
    """The shipped folder of what config.model names: of one itself and of published weights the same model's, else
    Qwen-Image's."""
    known = {name: (tiny_folder(name), *(weights.hub_id for weights in entry(name).weights)) for name in names()}
    alike = [name for name in known if model in known[name]]
    return tiny_folder((alike or names())[0])


def names() -> list[str]:
    """Of all models."""
    return [entry.file for entry in MODELS.values() if isinstance(entry, Entry)]


def entry(name: str) -> Entry:
    """Of a name in configs and tools, such as the first word of a model's file."""
    return next(entry for entry in MODELS.values() if isinstance(entry, Entry) and entry.file == name)


def published(model: str) -> Weights | None:
    """What config.model names, if these are published weights."""
    known = [weights for name in names() for weights in entry(name).weights]
    return next((weights for weights in known if weights.hub_id == model), None)
