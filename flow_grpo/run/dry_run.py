"""Dry run: describe a run without loading the weights that it would train."""

import json
import math
from typing import NamedTuple

import torch

from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.base.formatting import counted, quoted
from flow_grpo.base.prompt import Prompt
from flow_grpo.command_line import checks
from flow_grpo.data.prompts import Split
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sampling_params import EXACT, Shortcuts, of_validation
from flow_grpo.diffusers_patch.size import Size, training_size
from flow_grpo.evaluation.evaluation import part_of
from flow_grpo.plan import estimate, forwards, measured
from flow_grpo.run import evaluate
from flow_grpo.run.run import Experiment
from flow_grpo.settings import table
from flow_grpo.settings.sections import Config
from flow_grpo.weights import base_lora

PAGE = "docs/reference/will_it_fit.md"

# GiB that a program can use, by the size by which a card is sold.
CARD_GIB = {"24 GB": 23.0, "32 GB": 31.0, "48 GB": 46.0, "80 GB": 78.0, "141 GB": 139.0}
# GiB that PyTorch reports for cards of 80 GB, from the least to the most.
LEAST_OF_80_GB = 75.0
MOST_OF_80_GB = 81.0

# Weights of the smallest model that the formula is for.
SMALLEST_ESTIMATED = 10**9
OUT_OF_MEMORY = "out of memory"
# Most by which the proportions of an image may differ from those of what it edits.
MOST_STRETCH = 1.1

# Widths of text that are named are multiples of this; the least share of padding in a row's tokens for which one is.
TEXT_STEP = 16
LEAST_PADDING = 0.03

# Upper bounds: the header of a file in the cache; that of a picture, and what a PNG of noise takes over its pixels.
HEADER_BYTES = 600
PICTURE_HEADER_BYTES = 1024
PNG_OVERHEAD = 1.01
MB = 1e6
GB = 1e9
GIB = 2**30


class Drawing(NamedTuple):
    """Images that a run's evaluations draw."""

    split: Split
    epochs: int  # between two of them; 0 = only before the first epoch and after the last
    shortcuts: Shortcuts
    times: int  # in the whole run, at most


class MemoryAndSpeed(NamedTuple):
    """Memory and speed of a run, and where the figures are from."""

    source: str  # "measured", "estimated", OUT_OF_MEMORY, or "" = there are no figures
    gib: float | None = None  # of each GPU
    card: str | None = None  # the smallest that does; "" = none
    images_per_s: float | None = None  # of each GPU, an H200 or H100


class GpuFigures(NamedTuple):
    """Memory and time of a run."""

    figures: str  # where the others are from: MemoryAndSpeed.source
    gib: float | None  # of each GPU
    card: str | None  # the smallest that does; "" = none
    images_per_s: float | None  # of each GPU, an H200 or H100
    hours: float | None  # of all epochs, without evaluations and without waiting for rewards
    evaluation_hours: float | None
    scored_images_per_s: float | None  # that rewards must keep up with, of all GPUs together


class Plan(NamedTuple):
    """Figures of a run that is planned. With dry_run_format "json" they are printed by these names."""

    run: str
    gpus: int
    epochs: int
    images_per_epoch: int
    updates_per_epoch: int
    prompts: int  # that are trained on
    looks_per_prompt: float  # epochs in which a prompt is drawn
    weights: int
    trained_weights: int
    freed_weights: int  # by precompute_modulation
    freed_gib: float  # of each GPU, less the tables in their place
    checkpoint_gb: float
    disk_gb: float  # of all weights
    saved_images_gb: float  # of eval.save_images, at most
    gpu: GpuFigures

    def to_json(self) -> str:
        """Write all figures as one line."""
        figures = self._asdict()
        figures |= figures.pop("gpu")._asdict()
        return json.dumps(figures)


def plan_of(experiment: Experiment, num_extra: int) -> Plan:
    """Compute the figures of a run for config.dry_run GPUs.

    Args:
        num_extra: number of policies that the script keeps beside the trained one.
    """
    config, family, plan, prompts = experiment
    example = prompts.example if family.MOST_SOURCES else None
    work = estimate.work_of(config, plan, family, example)
    policy_bytes = 4 * work.model_size.trained
    num_prompts = len(prompts.train)
    return Plan(
        run=config.name,
        gpus=config.dry_run,
        epochs=config.num_epochs,
        images_per_epoch=plan.num_images,
        updates_per_epoch=plan.updates_per_epoch * config.train.inner_epochs,
        prompts=num_prompts,
        looks_per_prompt=config.num_epochs * plan.num_groups / num_prompts if num_prompts else 0.0,
        weights=work.model_size.weights,
        trained_weights=work.model_size.trained,
        freed_weights=work.model_size.freed,
        freed_gib=estimate.freed_gib(config, work.model_size),
        checkpoint_gb=checkpoint_bytes(config, policy_bytes, num_extra) / GB,
        disk_gb=disk_bytes(config, policy_bytes, num_extra) / GB,
        saved_images_gb=num_saved_images(config, prompts.evaluated) * picture_bytes(training_size(config)) / GB,
        gpu=gpu_figures(experiment, work),
    )


def describe(experiment: Experiment, num_extra: int) -> str:
    """Return what --dry_run prints: lines of text, or with dry_run_format "json" the plan as one line.

    Args:
        experiment: planned for config.dry_run GPUs.
        num_extra: number of policies that the script keeps beside the trained one.
    """
    config, _, batch_plan, prompts = experiment
    plan = plan_of(experiment, num_extra)
    if config.dry_run_format == "json":
        return plan.to_json()
    lines = [
        f"an epoch on {counted(config.dry_run, 'GPUs')}: {epoch(config, batch_plan, 'each GPU')}",
        run_length(config, batch_plan),
        *evaluations(config, prompts.evaluated),
        *gpu(config, plan.gpu),
        variant_notice(config, experiment.family, _gib_here()),
        _looks(config, plan),
        _data(experiment),
        f"transformer: {plan.weights / 1e9:.3g} billion weights; {_millions(plan.trained_weights)} million are trained",
        _modulation(plan),
        f"checkpoints: {rounded(plan.checkpoint_gb)} GB each, at most {rounded(plan.disk_gb)} GB while one is "
        "written, the best and the last weights included",
        _saved_images(config, prompts.evaluated),
        _cache(experiment),
        _licence(config.model),
        overlap_notice(prompts.train, prompts.evaluated),
        stretch_notice(prompts.example, training_size(config)),
        padding_notice(experiment),
        base_lora.other_bases(config.lora, config.train.teachers),
        checks.caution(config),
    ]
    return "\n".join(line for line in lines if line)


def epoch(config: Config, plan: BatchPlan, processes: str) -> str:
    """Return the images and updates of an epoch in words; `processes` have batches of their own: "each GPU"."""
    branches = ""
    if plan.num_branches > 1:
        branches = f" x {counted(plan.num_trained_steps, 'steps')} x {plan.num_branches} branches"
    updates = counted(_updates(config, plan), "updates")
    size = f"{training_size(config)} pixels (height x width)"
    if config.frames > 1:
        size = f"{training_size(config)} (height x width x frames)"
    images = counted(plan.num_images, config.drawn)
    groups = f"{counted(plan.num_groups, 'prompts')} x {plan.group_size}{branches} = {images}"
    batches = f"{counted(plan.batches_per_epoch, 'batches')} of {plan.batch_size}"
    if plan.pairs_are_stored:
        groups = f"{counted(plan.num_groups, 'stored pairs')} = {images}"
        batches = f"{counted(plan.batches_per_epoch, 'batches')} of {counted(plan.batch_size, 'pairs')}"
    return f"{groups}, at {size}, in {batches} on {processes}; {updates} of {_update_size(config, plan)} each"


def _update_size(config: Config, plan: BatchPlan) -> str:
    """Return what an update trains on in words: pairs, or rows."""
    if config.algorithm == table.DPO:
        return counted(plan.num_groups // plan.updates_per_epoch, "pairs")
    # A row is a trained step of an image or trunk; the branches of a step share it.
    rows = plan.num_groups * plan.group_size * plan.num_trained_steps // plan.updates_per_epoch
    return counted(rows, "rows")


def run_length(config: Config, plan: BatchPlan) -> str:
    """Return the images and updates of the whole run in words."""
    images = counted(config.num_epochs * plan.num_images, config.drawn)
    updates = counted(config.num_epochs * _updates(config, plan), "updates")
    return f"{counted(config.num_epochs, 'epochs')}: {images}, {updates}"


def _updates(config: Config, plan: BatchPlan) -> int:
    """Return the number of updates of an epoch."""
    return plan.updates_per_epoch * config.train.inner_epochs


def evaluations(config: Config, evaluated: list[Split]) -> list[str]:
    """Lines about the prompts that choose the best policy, and about the test prompts if these are others."""
    if not config.evaluates:
        return ["no evaluation: eval_freq or eval.num_prompts is 0"]
    noises = counted(config.eval.noises_per_prompt, "noises")
    steps = config.eval.num_steps
    lines = []
    for split, epochs, shortcuts, _ in drawings(config, evaluated):
        times = f"every {counted(epochs, 'epochs')}" if epochs else "before the first epoch and at the end"
        prompts = counted(len(part_of(split, config.eval.num_prompts).prompts), f"{split.name} prompts")
        line = f"an evaluation {times}: {prompts} x {noises} x {steps} steps"
        if shortcuts.solver:
            line += f", of which {shortcuts.solver}"
        if shortcuts.weights != EXACT.weights:
            line += f", by {shortcuts.weights} weights"
        lines.append(line)
    return lines


def drawings(config: Config, evaluated: list[Split]) -> list[Drawing]:
    """Return how the evaluations of a run draw: the choosing prompts, and those of the test where these are others, or
    where the choosing ones are not drawn exactly."""
    due = _due_kinds(config)
    shortcuts = of_validation(config)
    if len(evaluated) == 1 and shortcuts == EXACT:
        return [Drawing(evaluated[0], config.eval_freq, EXACT, times=len([kinds for kinds in due if kinds]))]
    num_choosing = len([kinds for kinds in due if "eval" in kinds])
    # The best weights are tested at the end, where they are not the last ones.
    num_tests = len([kinds for kinds in due if "test" in kinds]) + 1
    return [
        Drawing(evaluated[0], config.eval_freq, shortcuts, num_choosing),
        Drawing(evaluated[-1], config.eval.test_freq, EXACT, num_tests),
    ]


def _due_kinds(config: Config) -> list[set[str]]:
    """Return which kinds of evaluations are due before each epoch, and after the last one."""
    due = [evaluate.due_kinds(config, epoch) for epoch in range(config.num_epochs)]
    due.append(evaluate.due_kinds(config, config.num_epochs, last=True))
    return due


def gpu(config: Config, figures: GpuFigures) -> list[str]:
    """Lines about memory, speed and hours: measured where every setting that costs is that of a measured run, estimated
    elsewhere."""
    if not figures.figures:
        return [f"GPU: no figures: the formula is for models of a billion weights and more, not for this one ({PAGE})"]
    if figures.figures == OUT_OF_MEMORY:
        return [f"GPU, measured: out of memory on a card of {figures.card} ({PAGE})"]
    parts = []
    if figures.gib:
        parts.append(f"{figures.gib:.3g} GiB of each, {_cards(figures)}")
        if config.algorithm == table.REFL:
            parts.append("beside it what decoder and rewards keep for vae_batch_size images, which is not known here")
    if figures.images_per_s:
        parts.append(
            f"{figures.images_per_s:.3g} {config.drawn}/s of one H200 or H100, so {figures.hours:.3g} hours without "
            "evaluations and without waiting for rewards"
        )
    lines = [f"GPU, {figures.figures}: {'; '.join(parts)} ({PAGE})"]
    if config.evaluates and figures.evaluation_hours is not None:
        lines.append(
            f"evaluations, estimated: {rounded(figures.evaluation_hours)} hours on {counted(config.dry_run, 'GPUs')}"
        )
    if figures.scored_images_per_s:
        scored = f"{figures.scored_images_per_s:.3g} {config.drawn}/s"
        lines.append(f"rewards: {scored} to be scored while others are drawn")
    return lines


def _cards(figures: GpuFigures) -> str:
    """Name the smallest card with enough memory, and say whether this machine's cards have it."""
    sentence = f"for which the smallest card has {figures.card}" if figures.card else "more than an H200 has"
    here = _gib_here()
    if here is None or figures.gib is None:
        return sentence
    verdict = "more than that" if figures.gib <= here else "which is too little"
    return f"{sentence}; this machine's have {here:.3g} GiB, {verdict}"


def _gib_here() -> float | None:
    """Return the memory of this machine's first GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory / GIB


def variant_notice(config: Config, family: type[FlowModel], gib_here: float | None) -> str:
    """Name the variant for cards of 80 GB where this machine has one and the run, of one of its models, is without."""
    if gib_here is None or not LEAST_OF_80_GB <= gib_here <= MOST_OF_80_GB:
        return ""
    is_published = registry.published(config.model) is not None
    if family.MODULATION is None or not is_published or not config.lora.rank or config.precompute_modulation:
        return ""
    return f"this machine's cards have {gib_here:.3g} GiB: the variant gpu_80gb is for them (docs/howto/faster.md)"


def _smallest_card(gib: float) -> str:
    """Return the smallest card with room for what a run uses and what PyTorch reserves beside it; "" = none."""
    reserved = gib * estimate.rates().reserved
    for card, card_gib in CARD_GIB.items():
        if reserved <= card_gib:
            return card
    return ""


def rounded(value: float, digits: int = 2) -> str:
    """Write a number with so many significant digits, without an exponent."""
    nearest = float(f"{value:.{digits}g}")
    return f"{nearest:,.10g}"


def _millions(count: int) -> str:
    """Write a count in millions, with four significant digits."""
    return rounded(count / 1e6, digits=4)


def _modulation(plan: Plan) -> str:
    """Line about what a precomputed modulation saves; "" without one."""
    if not plan.freed_weights:
        return ""
    return (
        f"modulation: tables in the place of {plan.freed_weights / 1e9:.3g} billion weights, {plan.freed_gib:.3g} GiB "
        "less of each GPU"
    )


def _looks(config: Config, plan: Plan) -> str:
    """Line about how often a prompt is drawn, or a stored pair read; "" without prompts."""
    if not plan.prompts:
        return ""
    if config.preferences.path:
        return f"pairs: each of {plan.prompts:,} is read {rounded(plan.looks_per_prompt)} times in the run"
    line = f"prompts: each of {plan.prompts:,} is drawn {rounded(plan.looks_per_prompt)} times in the run"
    if config.sample.prompt_weights == "signal":
        line += " on average, those whose images score differently more often"
    return line


def _data(experiment: Experiment) -> str:
    """Line about the images of train.data; "" without them."""
    images = experiment.prompts.data
    if not images:
        return ""
    rows = forwards.of_data(experiment.config, experiment.plan)
    folder = experiment.config.train.data
    return f"data: {counted(len(images), 'images')} of {folder}; {rows:,.0f} forwards an epoch, with gradients"


def gpu_figures(experiment: Experiment, work: estimate.Work) -> GpuFigures:
    """Look up or estimate memory and time of a run for config.dry_run GPUs."""
    config = experiment.config
    source, gib, card, images_per_s = memory_and_speed(config, work)
    hours = None
    scored = None
    evaluation_hours = None
    if images_per_s:
        num_images = config.num_epochs * work.num_images
        hours = num_images / images_per_s / 3600 / config.dry_run
        # Rewards with gradients are computed between the forwards, in this process.
        if config.algorithm != table.REFL and work.are_drawn:
            scored = images_per_s * config.dry_run * (1 + config.sample.scouts_per_image)
    if source:
        evaluation_s = _evaluation_s(config, experiment.family, experiment.prompts.evaluated, work)
        evaluation_hours = evaluation_s / 3600 / config.dry_run
    return GpuFigures(source, gib, card, images_per_s, hours, evaluation_hours, scored)


def memory_and_speed(config: Config, work: estimate.Work) -> MemoryAndSpeed:
    """Look up a measured run with these settings, or else estimate, if the transformer is not too small for that."""
    row = measured.of_config(config)
    if row:
        source = OUT_OF_MEMORY if row.out_of_memory else "measured"
        return MemoryAndSpeed(source, row.gib, row.card.rpartition(" x ")[2], row.images_per_s)
    if work.model_size.weights < SMALLEST_ESTIMATED:
        return MemoryAndSpeed(source="")
    rates = estimate.rates()
    images_per_s = work.num_images / estimate.epoch_s(config, work, rates)
    gib = estimate.gib(config, work, rates)
    return MemoryAndSpeed("estimated", gib, _smallest_card(gib), images_per_s)


def _evaluation_s(config: Config, family: type[FlowModel], evaluated: list[Split], work: estimate.Work) -> float:
    """Seconds that one GPU would take for all evaluations of a run."""
    if not config.evaluates:
        return 0.0
    seconds = 0.0
    for drawing in drawings(config, evaluated):
        num_prompts = len(part_of(drawing.split, config.eval.num_prompts).prompts)
        seconds += drawing.times * estimate.evaluation_s(config, work, num_prompts, family, drawing.shortcuts)
    return seconds


def _state_bytes(config: Config, policy_bytes: int, num_extra: int) -> int:
    """Bytes of a training state: weights, their two moments and their average, the policies that the script keeps, and
    the reference if it moves."""
    copies = 4 + num_extra
    if config.train.moves_reference:
        copies += 1
    return copies * policy_bytes


def checkpoint_bytes(config: Config, policy_bytes: int, num_extra: int) -> int:
    """Return the bytes of a checkpoint: a training state, and with an adapter its LoRA file.

    Args:
        policy_bytes: bytes of the trained weights, in float32.
        num_extra: number of policies that the script keeps beside the trained one.
    """
    state = _state_bytes(config, policy_bytes, num_extra)
    return state + _exported_bytes(config, policy_bytes) if config.lora.rank else state


def disk_bytes(config: Config, policy_bytes: int, num_extra: int) -> int:
    """Return the bytes of all weights that are at most on the disk while a checkpoint is written: the checkpoints that
    are kept and the new one, their best policies, and the last policy. Arguments as in `checkpoint_bytes`."""
    num_checkpoints = config.keep_checkpoints + 1
    last = _exported_bytes(config, policy_bytes)
    # A checkpoint holds the best policy of its time. Where evaluations rise, each has another one, the new one's is
    # that of the run, and none shares its bytes.
    best = 0
    if config.evaluates:
        best = last
        # The training state is there for health.action to go back to.
        if config.health.action == "roll_back":
            best += _state_bytes(config, policy_bytes, num_extra)
    return num_checkpoints * (checkpoint_bytes(config, policy_bytes, num_extra) + best) + last


def _exported_bytes(config: Config, policy_bytes: int) -> int:
    """Bytes of the trained weights as `save.export` writes them."""
    return policy_bytes // 2 if config.lora.export_dtype == "bfloat16" else policy_bytes


def _saved_images(config: Config, evaluated: list[Split]) -> str:
    """Line about the files of eval.save_images; "" without any."""
    count = num_saved_images(config, evaluated)
    if not count:
        return ""
    num_bytes = picture_bytes(training_size(config))
    files = f"{count:,} {config.eval.image_format} files" if count > 1 else f"1 {config.eval.image_format} file"
    return (
        f"images/: {files} of eval.save_images, at most {rounded(num_bytes / MB)} MB each and "
        f"{rounded(count * num_bytes / GB)} GB together, the size of noise, which cannot be compressed"
    )


def num_saved_images(config: Config, evaluated: list[Split]) -> int:
    """Return how many images, or videos, the evaluations of a run write as files."""
    if not config.evaluates:
        return 0
    num_evaluations = len([kinds for kinds in _due_kinds(config) if "eval" in kinds])
    choosing = part_of(evaluated[0], config.eval.num_prompts)
    num_prompts = min(config.eval.save_images, len(choosing.prompts))
    return num_evaluations * num_prompts * config.eval.noises_per_prompt


def picture_bytes(size: Size) -> float:
    """Return the bytes of an image's file at most, of any format of eval.image_format: those of noise, which cannot be
    compressed. Frames of a video are images."""
    pixel_bytes = 3 * size.height * size.width
    return size.frames * (PNG_OVERHEAD * pixel_bytes + PICTURE_HEADER_BYTES)


def _cache(experiment: Experiment) -> str:
    """Line about the size that a run's prompts have in the cache at most; "" where it encodes none for one."""
    config = experiment.config
    prompts = {prompt.digest: prompt for prompt in experiment.encoded_prompts}
    if not config.cache_dir or not prompts:
        return ""
    num_bytes = cached_bytes(config, experiment.family, [*prompts.values()], experiment.is_guided)
    return (
        f"{config.cache_dir}: at most {rounded(num_bytes / GB)} GB of {counted(len(prompts), 'prompts')} in float32, "
        "less in the bf16 of a GPU"
    )


def cached_bytes(config: Config, family: type[FlowModel], prompts: list[Prompt], guided: bool) -> int:
    """Return the bytes of encoded prompts at most: in float32, with the latents of sources and with negatives."""
    # All sources have one shape.
    model = family.without_weights(config.model)
    shapes = model.row_shapes(training_size(config), config.text_tokens, prompts[0])
    numbers_per_file = 0
    for name, shape in shapes.items():
        if name != "latents":
            numbers_per_file += math.prod(shape)

    # One negative prompt serves all, but with sources it is another file for each source.
    num_files = len(prompts)
    if guided:
        num_files += len(prompts) if family.MOST_SOURCES else 1
    return num_files * (4 * numbers_per_file + HEADER_BYTES)


def _licence(model: str) -> str:
    """Line about a published model's licence and size; "" for one that is not known."""
    published = registry.published(model)
    if not published:
        return ""
    return f"{published.hub_id}: {published.licence}; a download of {published.download_gb} GB"


def stretch_notice(prompt: Prompt | None, size: Size) -> str:
    """Say that edited images have other proportions than their sources; "" if they have the same.

    Args:
        prompt: any of the run's, since the sources of all prompts have the same proportions.
    """
    if prompt is None or not prompt.sources:
        return ""
    width, height = prompt.source_sizes()[0]
    ratio = width / height / (size.width / size.height)
    if max(ratio, 1 / ratio) <= MOST_STRETCH:
        return ""
    return (
        f"sources such as that of {quoted(prompt.text)} have {width} x {height} pixels, images {size.width} x "
        f"{size.height}: what is edited comes out stretched; set config.width and config.height in their proportions"
    )


def padding_notice(experiment: Experiment) -> str:
    """Name the width of text that all prompts fit into, where forwards with a log-prob have many tokens of padding.

    Other forwards leave padding out by themselves, as sample.text_multiple says.
    """
    config, family, plan, prompts = experiment
    has_exact = forwards.of_epoch(config, plan, family).exact > 0
    if not family.CUTS_PADDING or not has_exact or not prompts.most_tokens:
        return ""
    width = math.ceil(prompts.most_tokens / TEXT_STEP) * TEXT_STEP
    image_tokens = family.without_weights(config.model).num_tokens(training_size(config))
    if config.text_tokens - width < LEAST_PADDING * (image_tokens + config.text_tokens):
        return ""
    return (
        f"the longest prompt has {prompts.most_tokens} tokens, which forwards with a log-prob pad to "
        f"{config.text_tokens}: config.text_tokens={width} makes them shorter"
    )


def overlap_notice(train: list[Prompt], evaluated: list[Split]) -> str:
    """Say how many evaluated prompts a run also trains on; "" if none."""
    digests = {prompt.digest for prompt in train}
    parts = []
    for split in evaluated:
        texts = [prompt.text for prompt in split.prompts if prompt.digest in digests]
        if texts:
            parts.append(f"{counted(len(texts), f'{split.name} prompts')}, such as {quoted(texts[0])}")
    if not parts:
        return ""
    return f"prompts that are evaluated are also trained on: {'; '.join(parts)}"
