"""What a run would be, said without loading the weights that it trains: --dry_run."""

import json
import math
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.base import shipped
from flow_grpo.base.prompt import Prompt
from flow_grpo.base.quoting import gpus, quoted
from flow_grpo.data.prompts import Split
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.evaluation.evaluation import part_of
from flow_grpo.settings import table
from flow_grpo.settings.checks import evaluates
from flow_grpo.weights import policies

MEASURED = shipped.PACKAGE / "assets" / "measured.json"  # at full size, random weights; see will_it_fit.md
GB = 1e9


def describe(
    config: ConfigDict, plan: BatchPlan, family: type[FlowModel], train: list[Prompt], evaluated: list[Split]
) -> str:
    """Lines. `plan` is for config.dry_run GPUs; `evaluated` has each split once."""
    lines = [*_epochs(config, plan), _evaluation(config, evaluated), _gpu(config, plan)]
    lines += [*_memory(config, family, train, evaluated), _licence(config.model), overlap(train, evaluated)]
    return "\n".join(filter(None, lines))


def _images(plan: BatchPlan) -> int:
    """Of an epoch, trunks not counted."""
    steps = plan.num_trained_steps if plan.num_branches > 1 else 1
    return plan.num_groups * plan.group_size * plan.num_branches * steps


def _epochs(config: ConfigDict, plan: BatchPlan) -> list[str]:
    branches = f" x {plan.num_trained_steps} steps x {plan.num_branches} branches" if plan.num_branches > 1 else ""
    updates = plan.updates_per_epoch * config.train.inner_epochs
    rows = plan.num_groups * plan.group_size * plan.num_trained_steps // plan.updates_per_epoch
    return [
        f"an epoch on {gpus(config.dry_run)}: {plan.num_groups} prompts x {plan.group_size}{branches} = "
        f"{_images(plan):,} images, at {training_size(config)} pixels (height x width), in {plan.batches_per_epoch} "
        f"batches of {plan.batch_size} on each GPU; {updates} updates of {rows:,} rows each",
        f"{config.num_epochs} epochs: {config.num_epochs * _images(plan):,} images, {config.num_epochs * updates:,} "
        "updates",
    ]


def _evaluation(config: ConfigDict, evaluated: list[Split]) -> str:
    if not evaluates(config):
        return "no evaluation: eval_freq or eval.num_prompts is 0"
    noises, steps = config.eval.noises_per_prompt, config.eval.num_steps
    counts = ", ".join(f"{len(part_of(split, config).prompts)} {split.name}" for split in evaluated)
    return f"an evaluation every {config.eval_freq} epochs: {counts} prompts x {noises} noises x {steps} steps"


def measured(config: ConfigDict) -> dict[str, Any] | None:
    """The row of assets/measured.json for a config's run and variants, that of most settings; None for none."""
    fitting = [
        row
        for row in json.loads(MEASURED.read_text())
        if config.name == f"pickscore_{row['run'].replace(',', '_')}"
        and all(table.value_of(config, key) == value for key, value in row["settings"].items())
    ]
    return max(fitting, key=lambda row: len(row["settings"]), default=None)


def _gpu(config: ConfigDict, plan: BatchPlan) -> str:
    row, source = measured(config), "docs/reference/will_it_fit.md"
    if row is None:
        return f"GPU: this run was not measured; {source} has others"
    if row["images_per_s"] is None:
        return f"GPU: out of memory on {row['card']} ({source})"
    hours = config.num_epochs * _images(plan) / row["images_per_s"] / 3600 / config.dry_run
    return (
        f"GPU: {row['gib']:g} GiB of each, {row['images_per_s']:g} images/s of one H200 or H100, so {hours:.3g} hours "
        f"without evaluations and rewards with a model ({source})"
    )


def _memory(config: ConfigDict, family: type[FlowModel], train: list[Prompt], evaluated: list[Split]) -> list[str]:
    transformer = family.empty_transformer(config.model)
    num_weights = sum(p.numel() for p in transformer.parameters())
    policies.attach(transformer, config.lora, policies.targets(config.lora, family))
    num_trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    stored = 4 * num_trained  # float32
    checkpoint = (4 if not config.lora.rank else 5) * stored  # weights, two moments, their average; a LoRA beside them
    disk = (config.keep_checkpoints + 1) * checkpoint + 2 * stored
    lines = [
        f"transformer: {num_weights / 1e9:.3g} billion weights; {num_trained / 1e6:,.4g} million are trained",
        f"checkpoints: {checkpoint / GB:.2g} GB each, {disk / GB:.2g} GB while one is written, the best and the last "
        "weights included",
    ]
    if config.cache_dir:
        texts = {prompt.digest for split in evaluated for prompt in split.prompts} | {prompt.digest for prompt in train}
        numbers = math.prod(family.without_weights(config.model).text_shapes(config.text_tokens)["text_embeds"])
        lines.append(
            f"{config.cache_dir}: at most {2 * numbers * len(texts) / GB:.2g} GB of {len(texts):,} prompts in bf16"
        )
    return lines


def _licence(model: str) -> str:
    known = registry.published(model)
    return f"{known.hub_id}: {known.licence}; a download of {known.download_gb} GB" if known else ""


def overlap(train: list[Prompt], evaluated: list[Split]) -> str:
    """What a run says where it trains on prompts that it evaluates; "" where it does not."""
    digests = {prompt.digest for prompt in train}
    shared = {split.name: [p.text for p in split.prompts if p.digest in digests] for split in evaluated}
    parts = [f"{len(texts)} {name} prompts, such as {quoted(texts[0])}" for name, texts in shared.items() if texts]
    return f"prompts that are evaluated are also trained on: {'; '.join(parts)}" if parts else ""
