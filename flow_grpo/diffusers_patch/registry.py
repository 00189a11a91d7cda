"""Which models there are: the only list of them. model_classes.py imports their classes, and so torch."""

from typing import Any, NamedTuple


class Entry(NamedTuple):
    """Where a model's class is, imported when it is asked for."""

    file: str  # NAME of models/NAME.py and of assets/tiny_NAME; also the model's name in configs
    name: str  # of the class
    hub_id: str  # of the published weights
    licence: str  # of these
    download_gb: int
    others: tuple[tuple[str, int], ...] = ()  # further weights of the pipeline and licence: hub id, GB of the download


MODELS: dict[str, Entry | Any] = {  # class of the diffusers pipeline -> a FlowModel, or where its class is
    "QwenImagePipeline": Entry(
        file="qwenimage", name="QwenImage", hub_id="Qwen/Qwen-Image", licence="Apache-2.0", download_gb=57
    ),
    "StableDiffusion3Pipeline": Entry(
        file="sd3",
        name="StableDiffusion3",
        hub_id="stabilityai/stable-diffusion-3.5-medium",
        licence="Stability AI Community License (free below 1 million USD of yearly revenue)",
        download_gb=16,
    ),
    "FluxPipeline": Entry(
        file="flux",
        name="Flux",
        hub_id="black-forest-labs/FLUX.1-dev",
        licence="FLUX.1 [dev] Non-Commercial License",
        download_gb=34,
    ),
    "ZImagePipeline": Entry(
        file="zimage",
        name="ZImage",
        hub_id="Tongyi-MAI/Z-Image",
        licence="Apache-2.0",
        download_gb=21,
        others=(("Tongyi-MAI/Z-Image-Turbo", 33),),
    ),
}


def hub_id(name: str) -> str:
    """Of a model's published weights."""
    return entry(name).hub_id


def tiny_folder(name: str) -> str:
    """A diffusers folder of a model at toy size, as it is shipped."""
    return f"flow_grpo/assets/tiny_{entry(name).file}"


def tiny_like(model: str) -> str:
    """The shipped folder of what config.model names: of published weights the same model's, else Qwen-Image's."""
    known = published(model)
    return tiny_folder(known.file if known else names()[0])


def names() -> list[str]:
    """Of all models."""
    return [entry.file for entry in MODELS.values() if isinstance(entry, Entry)]


def entry(name: str) -> Entry:
    """Of a name in configs and tools, such as the first word of a model's file."""
    return next(entry for entry in MODELS.values() if isinstance(entry, Entry) and entry.file == name)


def published(model: str) -> Entry | None:
    """What config.model names, if these are published weights; with their own hub id and download."""
    for known in map(entry, names()):
        for hub_id, size in ((known.hub_id, known.download_gb), *known.others):
            if hub_id == model:
                return known._replace(hub_id=hub_id, download_gb=size)
    return None
