"""Make a model of the published size with random weights, as one that a script loads: no download, nothing on a disk.

`random_model` is to be `registered` under the pipeline's name that `random_folder` gives, with a run's `full_config`.
"""

import contextlib
import gc
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import build_random_pipeline as random_pipeline
import torch

from flow_grpo.diffusers_patch import loading, model_classes, registry
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.weights import fsdp_utils, policies


def model_of(run: str) -> str:
    """Return the model of a published run, such as pickscore_sd3_pr."""
    names = [name for name in registry.names() if f"_{name}" in run]
    # A name may begin another one.
    return max(names, key=len)


def random_model(name: str, sizes: Mapping[str, dict] = MappingProxyType({})) -> type[FlowModel]:
    """Return the class of a model with weights of the published size, which are random and never on a disk.

    Args:
        name: of the registry, or of another size in `build_random_pipeline.OTHERS`.
        sizes: in the place of those of `build_random_pipeline.PUBLISHED`.
    """
    model, changes = random_pipeline.OTHERS.get(name, (name, {}))
    sizes = random_pipeline.PUBLISHED | changes | sizes
    family = model_classes.by_name(model)
    build = partial(random_pipeline.BUILDERS[model], sizes)

    class Random(family):
        ON_DISK = False

        @classmethod
        def load(cls, folder, device, *, vae_dtype=torch.float32, alone=False, text=True):
            pipeline = loading.frozen(build(random_pipeline.large_random(device)), device)
            pipeline.vae.to(vae_dtype)
            if alone:
                drop_frozen_parts(pipeline)
            return cls(pipeline, device)

        @classmethod
        def without_weights(cls, folder):
            return cls(build(random_pipeline.empty), torch.device("cpu"))

        @classmethod
        def empty_transformer(cls, folder):
            return cls.without_weights(folder).transformer

        @staticmethod
        def text_version(folder, digests_file=None):
            return {}

    return Random


def drop_frozen_parts(pipeline) -> None:
    """Take text encoders and VAE out of a pipeline, as for pairs from a disk."""
    frozen = [part for part in pipeline.components if part.startswith(("vae", "text"))]
    pipeline.register_modules(**dict.fromkeys(frozen))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def registered(family: type[FlowModel], pipeline_name: str):
    """Make `family` the model of pipelines of this name inside the block."""
    before = dict(registry.MODELS)
    registry.MODELS[pipeline_name] = family
    try:
        yield
    finally:
        registry.MODELS.clear()  # in the order in which messages list them
        registry.MODELS |= before


def random_folder(folder: Path) -> str:
    """Make a diffusers folder of nothing, whose pipeline is called "Random"; return its path."""
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Random"}))
    return str(folder)


def attach_adapters(model: FlowModel, lora) -> None:
    """Attach adapters as a run does on one GPU, by config.lora, in bf16."""
    policies.attach(model.transformer, lora, model.LORA_TARGETS)
    fsdp_utils.prepare(
        model.network,
        None,
        units=model.SHARD_UNITS,
        weights=None,
        init=policies.adapter_init(lora, 0),
        device=model.device,
        precision="bf16",
    )


def full_config(config, kind: str, edits: bool = False):
    """Return the published run of a script on the shapes task or on that of `edits`, with fewer prompts or pairs."""
    if not edits:
        config.text_tokens = 48
    elif config.text_tokens < 1024:
        # The source of an edit takes about 200 of them; the first Qwen-Image-Edit needs those of its run, for 1,400.
        config.text_tokens = 256
    task = "edits" if edits else "shapes"
    config.dataset = f"dataset/{task}"
    # The rule of the shapes task has no gradient, the network that has learned it has.
    config.reward_fn = {"shapes_proxy" if kind == "refl" else task: 1.0}
    config.sample.num_prompts_per_epoch = {"pr": 1, "nft": 1, "dpo": 64, "refl": 8}.get(kind, 2)
    return config
