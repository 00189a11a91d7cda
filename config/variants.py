"""Changes that runs of several files take; those of one script are in its own file.

A function here takes a config and returns it. `VARIANTS` of a file lists those that its runs take.
"""

from pathlib import Path
from typing import NamedTuple

from flow_grpo.base import locations
from flow_grpo.diffusers_patch import registry
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES
from flow_grpo.settings.table import default_config


class Task(NamedTuple):
    """What a shipped model has learned."""

    reward: str
    dataset: str
    text_tokens: int


TASKS = {  # by folder; the other tiny models have learned nothing
    registry.tiny_folder("qwenimage"): Task("shapes", "dataset/shapes", default_config().text_tokens),
    registry.tiny_folder("qwenimage_edit"): Task("edits", "dataset/edits", 25),
}


def flash(config):
    """MixGRPO-Flash: DPM-Solver++ after the noise, in 0.4 of the steps."""
    config.sample.flash_ratio = 0.4
    return config


def large_gpu(config):
    """For published sizes: faster, in 110 GiB with Qwen-Image. A batch has 8 rows, forwards without a log-prob use a
    merged copy of the weights, and compiled blocks store half of their activations."""
    config.sample.batch_size, config.sample.rollout_weights = 8, "merged" if config.lora.rank else "exact"
    config.compile, config.fsdp.activation_checkpointing = True, 0.5
    return config


def four_bit_base(config):
    """The frozen weights in 4 bits, for Qwen-Image on a card of 24 GB: small batches, and the optimizer state in host
    memory between steps."""
    config.base_precision, config.sample.rollout_weights = "nf4", "exact"
    config.sample.batch_size, config.fsdp.offload = 4, "optimizer"
    return config


def smoke(config):
    """The same algorithm in seconds: two epochs, two prompts, fewer steps. What is not on this machine is replaced."""
    tiny = default_config()
    if not Path(locations.resolve(config.model)).is_dir():
        config.model = registry.tiny_like(config.model)
        for key in ("height", "width", "precision", "vae_precision", "attention", "compile", "cache_dir"):
            config[key] = tiny[key]
        config.sample.text_multiple = tiny.sample.text_multiple
        config.fsdp.activation_checkpointing = round(config.fsdp.activation_checkpointing)  # 0.5 becomes 0
    task = TASKS.get(config.model, Task("", tiny.dataset, tiny.text_tokens))
    if not Path(locations.resolve(config.dataset)).is_dir():
        config.dataset, config.text_tokens = task.dataset, task.text_tokens
    learned = task.reward if config.dataset == task.dataset else ""
    others = {known.reward for known in TASKS.values()} - {learned}
    config.reward_fn = {name: weight for name, weight in config.reward_fn.items() if is_here(name)}
    if not config.reward_fn or others & {*config.reward_fn}:
        config.reward_fn = {learned or "jpeg_compressibility": 1.0}
    config.num_epochs, config.save_freq, config.eval_freq = 2, 1, 1
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt, config.sample.batch_size = 2, 4, 4
    config.sample.num_steps, config.eval.num_steps, config.eval.num_prompts = 4, 4, 8
    config.train.updates_per_epoch = 1 if FORWARD_OBJECTIVES[config.train.forward_objective].whole_groups else 2
    if config.sample.num_branches == 1:
        config.sample.sde_window_range = (0, 3) if config.sample.sde_window_size else config.sample.sde_window_range
        config.sample.sde_window_size = min(config.sample.sde_window_size, 2)
    return config


def is_here(reward):
    """Whether a reward needs neither weights from the hub nor a server: one of one's own may need anything."""
    ours = (locations.PACKAGE / "rewards" / f"{reward}.py").exists()
    return not ours or reward in ("shapes", "edits", "ocr", "jpeg_compressibility")
