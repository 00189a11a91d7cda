"""Dry run: describe a run without loading the weights that it would train."""

import math

from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.base.formatting import gpus, quoted
from flow_grpo.base.prompt import Prompt
from flow_grpo.command_line import checks
from flow_grpo.data.prompts import Split
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.evaluation.evaluation import part_of
from flow_grpo.run import measured
from flow_grpo.run.run import Experiment
from flow_grpo.settings.sections import Config
from flow_grpo.weights import policies

PAGE = "docs/reference/will_it_fit.md"

# Differences from a measured run that are listed.
MOST_DIFFERENCES = 5

# Of a file of the cache, at most.
HEADER_BYTES = 600
GB = 1e9


def describe(experiment: Experiment, num_extra: int) -> str:
    """Return the lines that --dry_run prints.

    Args:
        experiment: planned for config.dry_run GPUs.
        num_extra: number of policies that the script keeps beside the trained one.
    """
    config, family, plan, prompts = experiment
    lines = [
        *_epochs(config, plan),
        *evaluations(config, prompts.evaluated),
        gpu(config, plan),
        *_memory(config, family, num_extra),
        _cache(experiment),
        _licence(config.model),
        overlap(prompts.train, prompts.evaluated),
        checks.caution(config),
    ]
    return "\n".join(line for line in lines if line)


def _epochs(config: Config, plan: BatchPlan) -> list[str]:
    """Lines about images and updates, of an epoch and of the run."""
    branches = ""
    if plan.num_branches > 1:
        branches = f" x {plan.num_trained_steps} steps x {plan.num_branches} branches"
    updates = plan.updates_per_epoch * config.train.inner_epochs
    # A row is a trained step of an image or trunk; the branches of a step share it.
    rows = plan.num_groups * plan.group_size * plan.num_trained_steps // plan.updates_per_epoch
    return [
        f"an epoch on {gpus(config.dry_run)}: {plan.num_groups} prompts x {plan.group_size}{branches} = "
        f"{plan.num_images:,} images, at {training_size(config)} pixels (height x width), in {plan.batches_per_epoch} "
        f"batches of {plan.batch_size} on each GPU; {updates} updates of {rows:,} rows each",
        f"{config.num_epochs} epochs: {config.num_epochs * plan.num_images:,} images, {config.num_epochs * updates:,} "
        "updates",
    ]


def evaluations(config: Config, evaluated: list[Split]) -> list[str]:
    """Lines about the prompts that choose the best policy, and about the test prompts if these are others."""
    if not config.evaluates:
        return ["no evaluation: eval_freq or eval.num_prompts is 0"]
    noises = config.eval.noises_per_prompt
    steps = config.eval.num_steps
    choosing_times = f"every {config.eval_freq} epochs"
    test_times = "before the first epoch and at the end"
    if config.eval.test_freq:
        test_times = f"every {config.eval.test_freq} epochs"
    lines = []
    for split, times in zip(evaluated, (choosing_times, test_times)):
        count = len(part_of(split, config.eval.num_prompts).prompts)
        lines.append(f"an evaluation {times}: {count} {split.name} prompts x {noises} noises x {steps} steps")
    return lines


def gpu(config: Config, plan: BatchPlan) -> str:
    """Return measured memory and speed, if they hold for every setting; else that there are none, and why."""
    closest = measured.closest(config)
    if closest is None:
        return f"GPU: this run was not measured; {PAGE} has others"
    row, differences = closest
    if differences:
        changes = ", ".join(differences[:MOST_DIFFERENCES])
        left_out = len(differences) - MOST_DIFFERENCES
        if left_out > 0:
            changes += f" and {left_out} more"
        settings = "".join(f" {key}={value}" for key, value in row.settings.items())
        return f"GPU: this run was not measured: it is {row.run}{settings} ({PAGE}) with {changes}"
    if row.images_per_s is None:
        return f"GPU: out of memory on a card of {row.card} ({PAGE})"
    hours = config.num_epochs * plan.num_images / row.images_per_s / 3600 / config.dry_run
    return (
        f"GPU: {row.gib:g} GiB of each, for which the smallest card has {row.card}; {row.images_per_s:g} images/s of "
        f"one H200 or H100, so {hours:.3g} hours without evaluations and rewards with a model ({PAGE})"
    )


def _memory(config: Config, family: type[FlowModel], num_extra: int) -> list[str]:
    """Lines about the number of weights, and about the space that checkpoints take."""
    transformer = family.empty_transformer(config.model)
    num_weights = sum(weight.numel() for weight in transformer.parameters())
    policies.attach(transformer, config.lora, policies.targets(config.lora, family))
    num_trained = sum(weight.numel() for weight in transformer.parameters() if weight.requires_grad)

    # In float32.
    policy_bytes = 4 * num_trained
    checkpoint = checkpoint_bytes(config, policy_bytes, num_extra)
    disk = disk_bytes(config, policy_bytes, num_extra)
    return [
        f"transformer: {num_weights / 1e9:.3g} billion weights; {num_trained / 1e6:,.4g} million are trained",
        f"checkpoints: {checkpoint / GB:.2g} GB each, {disk / GB:.2g} GB while one is written, the best and the last "
        "weights included",
    ]


def _state_bytes(config: Config, policy_bytes: int, num_extra: int) -> int:
    """Bytes of a training state: weights, their two moments and their average, the policies that the script keeps, and
    the reference if it moves."""
    copies = 4 + num_extra
    if config.train.reference_interval:
        copies += 1
    return copies * policy_bytes


def checkpoint_bytes(config: Config, policy_bytes: int, num_extra: int) -> int:
    """Return the bytes of a checkpoint: a training state, and with an adapter its LoRA file.

    Args:
        policy_bytes: bytes of the trained weights, in float32.
        num_extra: number of policies that the script keeps beside the trained one.
    """
    state = _state_bytes(config, policy_bytes, num_extra)
    return state + policy_bytes if config.lora.rank else state


def disk_bytes(config: Config, policy_bytes: int, num_extra: int) -> int:
    """Return the bytes of all that is on the disk while a checkpoint is written: those kept and the new one, the best
    policy, with its training state if health.action may go back to it, and the last policy. Arguments as in
    `checkpoint_bytes`."""
    checkpoints = (config.keep_checkpoints + 1) * checkpoint_bytes(config, policy_bytes, num_extra)
    best = policy_bytes
    if config.health.action == "roll_back":
        best += _state_bytes(config, policy_bytes, num_extra)
    return checkpoints + best + policy_bytes


def _cache(experiment: Experiment) -> str:
    """Line about the size that the cache of encoded prompts has at most; "" without one."""
    config = experiment.config
    prompts = {prompt.digest: prompt for prompt in experiment.prompts.train}
    for split in experiment.prompts.evaluated:
        prompts |= {prompt.digest: prompt for prompt in split.prompts}
    if not config.cache_dir or not prompts:
        return ""
    size = cached_bytes(config, experiment.family, [*prompts.values()], experiment.is_guided)
    return (
        f"{config.cache_dir}: at most {size / GB:.2g} GB of {len(prompts):,} prompts in float32, less in the bf16 of a "
        "GPU"
    )


def cached_bytes(config: Config, family: type[FlowModel], prompts: list[Prompt], guided: bool) -> int:
    """Return the bytes of encoded prompts at most: in float32, with the latents of sources and with negatives."""
    # All sources have one shape.
    model = family.without_weights(config.model)
    shapes = model.row_shapes(training_size(config), config.text_tokens, prompts[0])
    numbers = 0
    for name, shape in shapes.items():
        if name != "latents":
            numbers += math.prod(shape)

    # A negative prompt with a source is another file for each source.
    files = len(prompts)
    if guided:
        files += len(prompts) if family.MOST_SOURCES else 1
    return files * (4 * numbers + HEADER_BYTES)


def _licence(model: str) -> str:
    """Line about a published model's licence and size; "" for one that is not known."""
    published = registry.published(model)
    if not published:
        return ""
    return f"{published.hub_id}: {published.licence}; a download of {published.download_gb} GB"


def overlap(train: list[Prompt], evaluated: list[Split]) -> str:
    """Say how many evaluated prompts a run also trains on; "" if none."""
    digests = {prompt.digest for prompt in train}
    parts = []
    for split in evaluated:
        texts = [prompt.text for prompt in split.prompts if prompt.digest in digests]
        if texts:
            parts.append(f"{len(texts)} {split.name} prompts, such as {quoted(texts[0])}")
    if not parts:
        return ""
    return f"prompts that are evaluated are also trained on: {'; '.join(parts)}"
