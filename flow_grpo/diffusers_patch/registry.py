"""Registry of models: the only list of them. model_classes.py imports their classes, and so torch."""

from pathlib import Path
from typing import Any, NamedTuple

from flow_grpo.base import folders, locations


class Entry(NamedTuple):
    """Place of a model's class, which is imported when it is asked for."""

    file: str  # NAME of models/NAME.py and of assets/tiny_NAME; also the model's name in configs
    name: str  # of the class
    edits: bool = False  # whether a prompt may have images to be edited, as its MOST_SOURCES says
    videos: bool = False  # whether it draws videos, as its FRAMES_PER_LATENT says


class Weights(NamedTuple):
    """Weights that somebody has published."""

    model: str  # its file
    hub_id: str
    licence: str
    download_gb: int


# By the class of the diffusers pipeline. Benchmarks put a class in an entry's place.
MODELS: dict[str, Entry | Any] = {
    "QwenImagePipeline": Entry("qwenimage", "QwenImage"),
    "QwenImageEditPlusPipeline": Entry("qwenimage_edit", "QwenImageEdit", edits=True),
    "QwenImageEditPipeline": Entry("qwenimage_edit_first", "QwenImageEditFirst", edits=True),
    "StableDiffusion3Pipeline": Entry("sd3", "StableDiffusion3"),
    "FluxPipeline": Entry("flux", "Flux"),
    "FluxKontextPipeline": Entry("flux_kontext", "FluxKontext", edits=True),
    "ZImagePipeline": Entry("zimage", "ZImage"),
    "Flux2KleinPipeline": Entry("flux2_klein", "Flux2Klein"),
    "Krea2Pipeline": Entry("krea2", "Krea2"),
    "QwenImage21Pipeline": Entry("qwenimage_21", "QwenImage21"),
    "WanPipeline": Entry("wan", "Wan", videos=True),
}
# Pipelines that look like some of these, and why they are not trained.
OTHERS = {
    "WanImageToVideoPipeline": "its videos begin with a given picture, which no condition here holds; take Wan 2.1's "
    "weights for text to video, whose pipeline is WanPipeline",
}
STABILITY = "Stability AI Community License (free below 1 million USD of yearly revenue)"
KREA = "Krea 2 Community License (larger companies need another one)"

# A config that is called after a model takes the first of that model's.
PUBLISHED = (
    Weights("qwenimage", "Qwen/Qwen-Image", "Apache-2.0", 57),
    Weights("qwenimage", "Qwen/Qwen-Image-2512", "Apache-2.0", 57),
    Weights("qwenimage_edit", "Qwen/Qwen-Image-Edit-2511", "Apache-2.0", 57),
    Weights("qwenimage_edit", "Qwen/Qwen-Image-Edit-2509", "Apache-2.0", 57),
    Weights("qwenimage_edit_first", "Qwen/Qwen-Image-Edit", "Apache-2.0", 57),
    Weights("sd3", "stabilityai/stable-diffusion-3.5-medium", STABILITY, 16),
    Weights("sd3", "stabilityai/stable-diffusion-3.5-large", STABILITY, 28),
    Weights("flux", "black-forest-labs/FLUX.1-dev", "FLUX.1 [dev] Non-Commercial License", 34),
    Weights("flux", "black-forest-labs/FLUX.1-schnell", "Apache-2.0", 34),
    Weights("flux_kontext", "black-forest-labs/FLUX.1-Kontext-dev", "FLUX.1 [dev] Non-Commercial License", 34),
    Weights("zimage", "Tongyi-MAI/Z-Image", "Apache-2.0", 21),
    Weights("zimage", "Tongyi-MAI/Z-Image-Turbo", "Apache-2.0", 33),
    Weights("flux2_klein", "black-forest-labs/FLUX.2-klein-4B", "Apache-2.0", 16),
    Weights("flux2_klein", "black-forest-labs/FLUX.2-klein-9B", "FLUX Non-Commercial License", 35),
    Weights("flux2_klein", "black-forest-labs/FLUX.2-klein-base-4B", "Apache-2.0", 16),
    Weights("flux2_klein", "black-forest-labs/FLUX.2-klein-base-9B", "FLUX Non-Commercial License", 35),
    Weights("krea2", "krea/Krea-2-Raw", KREA, 35),
    Weights("krea2", "krea/Krea-2-Turbo", KREA, 35),
    Weights("qwenimage_21", "Qwen/Qwen-Image-2.1", "Qwen Research License (no commercial use)", 33),
    Weights("wan", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Apache-2.0", 29),
    Weights("wan", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "Apache-2.0", 81),
)


def names() -> list[str]:
    """Names of all models, as configs have them."""
    return [entry.file for entry in MODELS.values() if isinstance(entry, Entry)]


def hub_id(name: str) -> str:
    """Hub id of a model's published weights."""
    return next(weights.hub_id for weights in PUBLISHED if weights.model == name)


def published(model: str) -> Weights | None:
    """Look up the published weights that config.model names, if it names some."""
    for weights in PUBLISHED:
        if weights.hub_id == model:
            return weights
    return None


def entry_of(folder: str) -> Entry | None:
    """Return the entry of the model in a diffusers folder, None if there is none. Imports no class."""
    index = Path(locations.resolve(folder), "model_index.json")
    if not index.is_file():
        return None
    entry = MODELS.get(str(folders.read_json(index).get("_class_name")))
    return entry if isinstance(entry, Entry) else None


def tiny_folder(name: str) -> str:
    """Diffusers folder of a model at toy size, as it is shipped."""
    return f"flow_grpo/assets/tiny_{name}"


def tiny_like(model: str) -> str:
    """Choose the shipped folder for config.model: itself if it is one, the same model's for published weights, else
    Qwen-Image's."""
    if model in [tiny_folder(name) for name in names()]:
        return model
    weights = published(model)
    return tiny_folder("qwenimage" if weights is None else weights.model)
