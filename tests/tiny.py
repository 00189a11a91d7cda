"""A tiny Qwen-Image with random weights, for tests that must not depend on the shipped ones."""

from pathlib import Path

import make_shapes_dataset
from build_tiny_qwenimage import build_pipeline, save


def tiny_qwenimage(folder: Path, seed: int = 0) -> Path:
    """Save it to `folder` for `QwenImagePipeline.from_pretrained`: the shipped one, but for its weights."""
    train, test = make_shapes_dataset.split(make_shapes_dataset.all_prompts())
    save(build_pipeline([p["prompt"] for p in train + test], seed), folder)
    return folder
