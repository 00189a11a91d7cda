"""Variants: changes that runs of several files take; those of one script are in its own file.

A function here takes a config and returns it. `VARIANTS` of a file lists those that its runs take.
"""

import math
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from flow_grpo.algorithms.batch_plan import loss_of_whole_groups, smaller_batch
from flow_grpo.base import locations
from flow_grpo.base.metric_table import names_score
from flow_grpo.diffusers_patch import registry
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES, OBJECTIVES
from flow_grpo.settings.table import BY_KEY, NFT, default_config


class Task(NamedTuple):
    """Task of prompts that are shipped."""

    rewards: tuple[str, ...]  # that score them, the rule first
    dataset: str
    text_tokens: int


SHAPES = Task(("shapes", "shapes_proxy"), "dataset/shapes", default_config().text_tokens)
EDITS = Task(("edits",), "dataset/edits", 25)
MOTIONS = Task(("motions",), "dataset/motions", 32)

# By the folder of the model that has learned it. The other tiny models have learned nothing.
TASKS = {
    registry.tiny_folder("qwenimage"): SHAPES,
    registry.tiny_folder("qwenimage_edit"): EDITS,
    registry.tiny_folder("wan"): MOTIONS,
}

# Rewards of ours that need neither weights from the hub nor a server.
SELF_CONTAINED = (
    "shapes",
    "shapes_proxy",
    "edits",
    "motions",
    "ocr",
    "jpeg_compressibility",
    "frame_difference",
)

# Of videos of tiny models: three latents, as the tiny Wan has learned.
SMOKE_FRAMES = 9


def flash(config: ConfigDict) -> ConfigDict:
    """MixGRPO-Flash: DPM-Solver++ after the noise, in 0.4 of the steps."""
    config.sample.flash_ratio = 0.4
    return config


def large_gpu(config: ConfigDict) -> ConfigDict:
    """Published sizes on a large GPU: faster, in 110 GiB with Qwen-Image.

    A batch has 8 rows, forwards without a log-prob use a merged copy of the weights, and compiled blocks store half of
    their activations. A source to be edited has four times the tokens of an image of 512 px: 4 rows then, and nothing
    is stored.
    """
    config.sample.batch_size = 8
    config.fsdp.activation_checkpointing = 0.5
    if _entry_of(config).edits:
        config.sample.batch_size = 4
        config.fsdp.activation_checkpointing = 1.0
    # Full weights have no adapter to merge.
    config.sample.rollout_weights = "merged" if config.lora.rank else "exact"
    config.compile = True
    return config


def gpu_80gb(config: ConfigDict) -> ConfigDict:
    """Qwen-Image at 512 px on a card of 80 GB that multiplies 8 bits, such as the H100.

    As `large_gpu`, with tables in the place of a third of the weights. Where updates are guided, each row has two
    graphs: frozen weights have 8 bits then, and four fifths of the activations are computed again.
    """
    config = large_gpu(config)
    config.precompute_modulation = True
    if config.sample.guidance_scale > 1:
        config.base_precision = "fp8_weights"
        config.sample.rollout_weights = "merged_fp8"
        config.fsdp.activation_checkpointing = max(config.fsdp.activation_checkpointing, 0.8)
    return config


def _entry_of(config: ConfigDict) -> registry.Entry:
    """Return the registry's entry of the model, which need not be on this machine; Qwen-Image's for one that is not
    known."""
    entry = registry.entry_of(config.model) or registry.entry_of(registry.tiny_like(config.model))
    assert entry is not None, "each shipped model has an entry"
    return entry


def signal(config: ConfigDict) -> ConfigDict:
    """Prompts are drawn by how much their images' rewards differ, for rewards such as 0 and 1 that may all be alike."""
    config.sample.prompt_weights = "signal"
    return config


def four_bit_base(config: ConfigDict) -> ConfigDict:
    """Frozen weights in 4 bits, for Qwen-Image on a card of 24 GB.

    Batches are small, and the optimizer state is in host memory between steps.
    """
    config.base_precision = "nf4"
    config.sample.rollout_weights = "exact"
    config.sample.batch_size = 4
    config.fsdp.offload = "optimizer"
    return config


def px1024(config: ConfigDict) -> ConfigDict:
    """Images of 1024 x 1024 pixels, four times as many as 512 x 512: a quarter of the rows, half of the clip range."""
    return _of_side(config, 1024)


def px1328(config: ConfigDict) -> ConfigDict:
    """Images of 1328 x 1328 pixels, Qwen-Image's own size: a seventh of the rows, 0.39 of the clip range."""
    return _of_side(config, 1328)


def _of_side(config: ConfigDict, side: int) -> ConfigDict:
    """Make images square. Forwards have as many tokens as before, and the clip range is one for means over more
    numbers."""
    growth = side * side / (config.height * config.width)
    config.height = side
    config.width = side
    sample = config.sample
    sample.batch_size = smaller_batch(sample, config.train, sample.batch_size / growth)
    if sample.completion_batch_size:
        sample.completion_batch_size = max(int(sample.completion_batch_size / growth), 1)
    config.eval.batch_size = max(int(config.eval.batch_size / growth), 1)
    config.vae_batch_size = max(int(config.vae_batch_size / growth), 1)

    # Log-ratios are means over the numbers of a latent, and spread as 1 / sqrt(numbers): docs/algorithms/flow_grpo.md.
    if _reads_clip_range(config):
        clip_range = config.train.clip_range / math.sqrt(growth)
        # Two digits, as a person would set it.
        config.train.clip_range = float(f"{clip_range:.2g}")
    return config


def _reads_clip_range(config: ConfigDict) -> bool:
    """Return whether the chosen loss clips a ratio."""
    if config.algorithm not in BY_KEY["train.clip_range"].used_by:
        return False
    loss = OBJECTIVES[config.train.objective]
    if config.algorithm == NFT:
        loss = FORWARD_OBJECTIVES[config.train.forward_objective]
    return "clip_range" in loss.reads


def smoke(config: ConfigDict) -> ConfigDict:
    """The same algorithm in seconds: two epochs, two prompts, fewer steps. What is not on this machine is replaced."""
    _replace_model(config)
    _replace_task(config)
    config.num_epochs = 2
    config.save_freq = 1
    config.eval_freq = 1
    config.sample.num_prompts_per_epoch = 2
    config.sample.num_images_per_prompt = 4
    config.sample.batch_size = 4
    config.sample.num_steps = 4
    config.eval.num_steps = 4
    config.eval.num_prompts = 8
    # The second update has ratios other than 1. A loss of whole groups is computed in one.
    config.train.updates_per_epoch = 1 if loss_of_whole_groups(config.train) else 2
    if config.sample.num_branches == 1 and config.sample.sde_window_size:
        config.sample.sde_window_range = (0, 3)
        config.sample.sde_window_size = min(config.sample.sde_window_size, 2)
    return config


def _replace_model(config: ConfigDict) -> None:
    """Put the tiny model of the same class in the place of one that is not on this machine."""
    tiny = default_config()
    if Path(locations.resolve(config.model)).is_dir():
        # Another size than its own was chosen by a variant.
        if config.model == registry.tiny_like(config.model):
            config.height = tiny.height
            config.width = tiny.width
        return
    config.model = registry.tiny_like(config.model)
    for key in ("height", "width", "precision", "vae_precision", "attention", "compile", "cache_dir"):
        config[key] = tiny[key]
    config.frames = min(config.frames, SMOKE_FRAMES)
    config.sample.text_multiple = tiny.sample.text_multiple
    # Only compiled blocks can store half of their activations.
    config.fsdp.activation_checkpointing = round(config.fsdp.activation_checkpointing)


def _replace_task(config: ConfigDict) -> None:
    """Put a data set and rewards that are shipped in the place of those that are not on this machine.

    Prompts have images to be edited where the model takes such, and ask for motions where it draws videos.
    """
    task = _task_of(_entry_of(config))
    if not Path(locations.resolve(config.dataset)).is_dir():
        config.dataset = task.dataset
        config.text_tokens = task.text_tokens
    fitting = _fitting_rewards(config, task)
    unfitting = set()
    for other in TASKS.values():
        unfitting.update(set(other.rewards) - set(fitting))
    config.reward_fn = {name: weight for name, weight in config.reward_fn.items() if is_here(name)}
    if not config.reward_fn or not unfitting.isdisjoint(config.reward_fn):
        # In the few steps of such a run hardly a video moves as asked, so that rewards are alike.
        is_flat = task == MOTIONS and not _needs_range(config)
        chosen = "jpeg_compressibility"
        if fitting and not is_flat:
            chosen = fitting[0]
        config.reward_fn = {chosen: 1.0}
    _drop_watched(config)


def _task_of(entry: registry.Entry) -> Task:
    """Return the shipped task whose prompts a model takes."""
    if entry.videos:
        return MOTIONS
    if entry.edits:
        return EDITS
    return SHAPES


def _fitting_rewards(config: ConfigDict, task: Task) -> tuple[str, ...]:
    """Return the rewards of a task that may score its model's images. A task's rewards refuse other prompts, and score
    images alike of a model that has not learned the task."""
    if config.dataset != task.dataset:
        return ()
    has_learned = TASKS.get(config.model) == task
    if has_learned or _needs_range(config):
        return task.rewards
    return ()


def _needs_range(config: ConfigDict) -> bool:
    """Return whether prompts are drawn by the signal of a reward with a range, which the rule of a task has."""
    return config.sample.prompt_weights == "signal"


def _drop_watched(config: ConfigDict) -> None:
    """Drop watched rewards that are not on this machine, and what is said of rewards that are not measured any more."""
    config.eval.rewards = tuple(name for name in config.eval.rewards if is_here(name))
    measured = [*config.reward_fn, *config.eval.rewards]
    config.reward.args = {name: args for name, args in config.reward.args.items() if name in measured}
    if not names_score(config.eval.best_by, measured):
        config.eval.best_by = default_config().eval.best_by


def is_here(reward: str) -> bool:
    """Return whether a reward needs neither weights from the hub nor a server. One of the user's own is taken to need
    none."""
    is_ours = (locations.PACKAGE / "rewards" / f"{reward}.py").exists()
    return not is_ours or reward in SELF_CONTAINED
