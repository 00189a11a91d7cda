"""What a run would be, said without loading the weights that it trains: --dry_run."""

import math

from ml_collections import ConfigDict

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
from flow_grpo.weights import policies

PAGE = "docs/reference/will_it_fit.md"
MOST_DIFFERENCES = 5  # from a measured run that are listed
HEADER_BYTES = 600  # of a file of the cache, at most
GB = 1e9


def describe(
    config: ConfigDict,
    plan: BatchPlan,
    family: type[FlowModel],
    train: list[Prompt],
    evaluated: list[Split],
    num_extra: int,
    guided: bool,
) -> str:
    """Lines.

    Args:
        plan: for config.dry_run GPUs.
        evaluated: each split once, the choosing one first.
        num_extra: number of policies that the script keeps beside the trained one.
        guided: whether negative prompts are encoded, too.
    """
    lines = [*_epochs(config, plan), *evaluations(config, evaluated), gpu(config, plan)]
    lines += [*_memory(config, family, num_extra), _cache(config, family, train, evaluated, guided)]
    lines += [_licence(config.model), overlap(train, evaluated), checks.caution(config)]
    return "\n".join(filter(None, lines))


def _epochs(config: ConfigDict, plan: BatchPlan) -> list[str]:
    branches = f" x {plan.num_trained_steps} steps x {plan.num_branches} branches" if plan.num_branches > 1 else ""
    updates = plan.updates_per_epoch * config.train.inner_epochs
    rows = plan.num_groups * plan.group_size * plan.num_trained_steps // plan.updates_per_epoch
    return [
        f"an epoch on {gpus(config.dry_run)}: {plan.num_groups} prompts x {plan.group_size}{branches} = "
        f"{plan.num_images:,} images, at {training_size(config)} pixels (height x width), in {plan.batches_per_epoch} "
        f"batches of {plan.batch_size} on each GPU; {updates} updates of {rows:,} rows each",
        f"{config.num_epochs} epochs: {config.num_epochs * plan.num_images:,} images, {config.num_epochs * updates:,} "
        "updates",
    ]


def evaluations(config: ConfigDict, evaluated: list[Split]) -> list[str]:
    """A line of the prompts that choose the best policy, and one of the test prompts where these are others."""
    if not checks.evaluates(config):
        return ["no evaluation: eval_freq or eval.num_prompts is 0"]
    noises, steps = config.eval.noises_per_prompt, config.eval.num_steps
    tests = (
        f"every {config.eval.test_freq} epochs" if config.eval.test_freq else "before the first epoch and at the end"
    )
    lines = []
    for split, times in zip(evaluated, (f"every {config.eval_freq} epochs", tests)):
        count = len(part_of(split, config).prompts)
        lines.append(f"an evaluation {times}: {count} {split.name} prompts x {noises} noises x {steps} steps")
    return lines


def gpu(config: ConfigDict, plan: BatchPlan) -> str:
    """Measured memory and speed, where they hold for every setting; else that there are none, and why."""
    found = measured.closest(config)
    if found is None:
        return f"GPU: this run was not measured; {PAGE} has others"
    row, differences = found
    if differences:
        left_out = len(differences) - MOST_DIFFERENCES
        more = f" and {left_out} more" if left_out > 0 else ""
        changes = f"{', '.join(differences[:MOST_DIFFERENCES])}{more}"
        settings = "".join(f" {key}={value}" for key, value in row.settings.items())
        return f"GPU: this run was not measured: it is {row.run}{settings} ({PAGE}) with {changes}"
    if row.images_per_s is None:
        return f"GPU: out of memory on a card of {row.card} ({PAGE})"
    hours = config.num_epochs * plan.num_images / row.images_per_s / 3600 / config.dry_run
    return (
        f"GPU: {row.gib:g} GiB of each, for which the smallest card has {row.card}; {row.images_per_s:g} images/s of "
        f"one H200 or H100, so {hours:.3g} hours without evaluations and rewards with a model ({PAGE})"
    )


def _memory(config: ConfigDict, family: type[FlowModel], num_extra: int) -> list[str]:
    transformer = family.empty_transformer(config.model)
    num_weights = sum(p.numel() for p in transformer.parameters())
    policies.attach(transformer, config.lora, policies.targets(config.lora, family))
    num_trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    checkpoint, disk = stored_bytes(config, 4 * num_trained, num_extra)
    return [
        f"transformer: {num_weights / 1e9:.3g} billion weights; {num_trained / 1e6:,.4g} million are trained",
        f"checkpoints: {checkpoint / GB:.2g} GB each, {disk / GB:.2g} GB while one is written, the best and the last "
        "weights included",
    ]


def stored_bytes(config: ConfigDict, policy: int, num_extra: int) -> tuple[int, int]:
    """Bytes of a checkpoint, and of all that is on the disk while one is written.

    Args:
        policy: bytes of what is trained, in float32.
        num_extra: number of policies that the script keeps beside the trained one.
    """
    copies = 4 + num_extra  # weights, two moments, their average, and the script's own policies
    if config.train.reference_interval:
        copies += 1  # the reference that moves
    state = copies * policy
    checkpoint, best = state, policy
    if config.lora.rank:
        checkpoint += policy  # the LoRA beside them
    if config.health.action == "roll_back":
        best += state
    return checkpoint, (config.keep_checkpoints + 1) * checkpoint + best + policy


def _cache(
    config: ConfigDict, family: type[FlowModel], train: list[Prompt], evaluated: list[Split], guided: bool
) -> str:
    """How large the cache of encoded prompts becomes, at most; "" without one."""
    prompts = {prompt.digest: prompt for prompt in train}
    for split in evaluated:
        prompts |= {prompt.digest: prompt for prompt in split.prompts}
    if not config.cache_dir or not prompts:
        return ""
    size = cached_bytes(config, family, [*prompts.values()], guided)
    return (
        f"{config.cache_dir}: at most {size / GB:.2g} GB of {len(prompts):,} prompts in float32, less in the bf16 of a "
        "GPU"
    )


def cached_bytes(config: ConfigDict, family: type[FlowModel], prompts: list[Prompt], guided: bool) -> int:
    """Bytes of encoded prompts at most: in float32, with the latents of sources and with negatives, of which each
    source has its own."""
    model = family.without_weights(config.model)
    shapes = model.row_shapes(training_size(config), config.text_tokens, prompts[0])  # all sources have one shape
    numbers = sum(math.prod(shape) for name, shape in shapes.items() if name != "latents")
    files = len(prompts)
    if guided:
        files += len(prompts) if family.MOST_SOURCES else 1
    return files * (4 * numbers + HEADER_BYTES)


def _licence(model: str) -> str:
    known = registry.published(model)
    return f"{known.hub_id}: {known.licence}; a download of {known.download_gb} GB" if known else ""


def overlap(train: list[Prompt], evaluated: list[Split]) -> str:
    """What a run says where it trains on prompts that it evaluates; "" where it does not."""
    digests = {prompt.digest for prompt in train}
    shared = {split.name: [p.text for p in split.prompts if p.digest in digests] for split in evaluated}
    parts = [f"{len(texts)} {name} prompts, such as {quoted(texts[0])}" for name, texts in shared.items() if texts]
    return f"prompts that are evaluated are also trained on: {'; '.join(parts)}" if parts else ""
