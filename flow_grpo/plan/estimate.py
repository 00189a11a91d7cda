"""Memory and time of a run by a formula, whose constants were fitted to the runs of assets/measured.json.

benchmarks/fit_rates.py fits them and says how far off the formula is. A card, a precision or a model that was measured
later is a row there, and no code here.
"""

import json
from typing import NamedTuple

from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.base import locations
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sampling_params import Shortcuts
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.plan import row_cost
from flow_grpo.plan.forwards import Forwards, has_reference, of_epoch, of_evaluation, update_guidance
from flow_grpo.plan.row_cost import ModelSize, RowCost
from flow_grpo.settings import table
from flow_grpo.settings.sections import Config
from flow_grpo.weights import modulation, policies

FILE = locations.PACKAGE / "assets" / "rates.json"
GIB = 2**30

# Bytes of a frozen weight. Four bits have a scale for each block of weights.
BASE_BYTES = {"fp8_weights": 1.0, "nf4": 0.53}

# Of a trained weight in float32: itself, its gradient and its average; and its two moments.
STATE_BYTES = 12
MOMENT_BYTES = 8
# Of a trained weight in another policy, in float32.
COPY_BYTES = 4


class Rates(NamedTuple):
    """Constants of the formula, for one H200 or H100. Factors multiply the time of a fast bf16 forward."""

    tflops: float  # of fast forwards through very wide blocks
    half_width: float  # width of the tokens at which half of that is reached
    exact: float  # forwards that enter a log-prob
    frozen: float  # forwards of the update without gradients
    trained: float  # a forward or a backward of the update
    recomputed: float  # further forwards of it where the compiler recomputes half of what the backward needs
    adapter: float  # fast forwards with an adapter that is not merged
    fp8: float  # fast forwards with products of 8 bits
    flash_4: float  # forwards with FlashAttention-4
    eager: float  # everything without compile
    full_weights: float  # everything where all weights are trained
    offloaded: float  # everything with weights in host memory
    ms_bf16: float  # ms of each forward per billion weights, whatever its rows
    ms_fp8_weights: float  # the same of weights that are kept in 8 bits
    ms_nf4: float  # and in 4 bits
    s_decode: float  # s per image of 512 x 512 pixels: its decoding, and what else an image takes
    kept_half: float  # share of the products' results that a compiled block keeps with checkpointing 0.5
    kept_all: float  # share that it keeps without checkpointing
    kept_block: float  # share of one block's products' results that are there while a checkpointed one is recomputed
    gib_fixed: float  # GiB of the CUDA context, the VAE and work space
    reserved: float  # what PyTorch reserves, as a factor of what is used


class Work(NamedTuple):
    """Amount of what an epoch computes."""

    cost: RowCost
    model_size: ModelSize
    forwards: Forwards
    num_images: int
    guided: bool  # whether a row of the update takes two forwards with gradients
    are_drawn: bool = True  # whether the images are drawn, and scored; not those of stored pairs


def work_of(config: Config, plan: BatchPlan, family: type[FlowModel], prompt: Prompt | None = None) -> Work:
    """Count what an epoch computes, on the shapes of the transformer.

    Args:
        prompt: an example, for models that take sources.
    """
    model = family.without_weights(config.model)
    transformer = family.empty_transformer(config.model)
    size = training_size(config)
    shapes = model.row_shapes(size, config.text_tokens, prompt)
    cost, width = row_cost.count(model, transformer, size, shapes)
    saving = modulation.saving(config, model, transformer)
    model_size = row_cost.model_size(transformer, config.lora, family, width)
    return Work(
        cost=cost,
        model_size=model_size._replace(freed=saving.weights, table=saving.numbers),
        forwards=of_epoch(config, plan, family),
        num_images=plan.num_images,
        guided=family.is_guided(update_guidance(config)) and not config.train.detach_negative,
        are_drawn=not plan.pairs_are_stored,
    )


def rates() -> Rates:
    """Return the fitted constants."""
    return Rates(**json.loads(FILE.read_text())["rates"])


def gib(config: Config, work: Work, rates: Rates) -> float:
    """Return the GiB that an epoch takes of each of config.dry_run GPUs at its peak."""
    model_size = work.model_size
    is_sharded = config.fsdp.mode != "replicate"
    share = _share(config)
    number_bytes = _number_bytes(config)
    block_weights = model_size.held / max(model_size.blocks, 1)

    # Weights: frozen ones in their precision, trained ones with their gradients, moments and average.
    frozen = model_size.held if config.lora.rank else 0
    total = frozen * BASE_BYTES.get(config.base_precision, number_bytes) * share
    total += model_size.trained * _state_bytes(config) * share
    if config.fsdp.offload == "weights":
        # The block that computes, and the next one on its way.
        total = 2 * block_weights * number_bytes
    elif not config.lora.rank and is_sharded:
        # Gathered blocks, and the gradient of one before it is reduced.
        total += 3 * block_weights * number_bytes
    total += model_size.table * number_bytes

    # A merged copy is there while a compiled forward with a log-prob keeps what its backward would need.
    if config.compile and "merged" in config.sample.rollout_weights and work.forwards.exact:
        merged_bytes = 1 if "fp8" in config.sample.rollout_weights else number_bytes
        total += model_size.adapted * merged_bytes

    rows = config.sample.batch_size * (2 if work.guided else 1)
    total += rows * _activation_numbers(config, work, rates) * number_bytes
    return total / GIB + rates.gib_fixed


def freed_gib(config: Config, model_size: ModelSize) -> float:
    """Return the GiB of each GPU that tables of the modulation save."""
    number_bytes = _number_bytes(config)
    freed = model_size.freed * BASE_BYTES.get(config.base_precision, number_bytes) * _share(config)
    return (freed - model_size.table * number_bytes) / GIB


def _number_bytes(config: Config) -> int:
    """Bytes of a number in the run's precision."""
    return 4 if config.precision == "fp32" else 2


def _share(config: Config) -> float:
    """Share of the weights that lies on each of config.dry_run GPUs."""
    is_sharded = config.fsdp.mode != "replicate"
    if is_sharded and config.dry_run:
        return 1 / config.dry_run
    return 1.0


def _state_bytes(config: Config) -> int:
    """Bytes on the GPU of a trained weight, of its gradient, moments and average, and of copies beside it."""
    total = STATE_BYTES
    if config.fsdp.offload != "optimizer":
        total += MOMENT_BYTES
    return total + COPY_BYTES * _num_copies(config)


def _num_copies(config: Config) -> int:
    """Number of policies that lie on the GPU as copies of the trained weights: old ones, teachers and the reference."""
    copies = len(config.train.teachers)
    if config.algorithm == table.NFT:
        copies += 1
        if config.train.sampler_decay_schedule >= 0:
            copies += 1
    is_copied = config.train.moves_reference or not policies.begins_as_base(config.lora)
    if has_reference(config) and is_copied:
        copies += 1
    return copies


def _activation_numbers(config: Config, work: Work, rates: Rates) -> float:
    """Numbers that the backward of a row needs, at the peak."""
    cost = work.cost
    in_all = cost.block_numbers + rates.kept_block * cost.product_numbers / max(work.model_size.blocks, 1)
    in_half = rates.kept_half * cost.product_numbers
    in_none = rates.kept_all * cost.product_numbers
    return _by_checkpointing(config.fsdp.activation_checkpointing, in_none, in_half, in_all)


def _by_checkpointing(share: float, in_none: float, in_half: float, in_all: float) -> float:
    """Return a figure where activations are checkpointed in this share of the backward, on straight lines between its
    three measured values."""
    if share <= 0.5:
        return in_none + (in_half - in_none) * share / 0.5
    return in_half + (in_all - in_half) * (share - 0.5) / 0.5


def epoch_s(config: Config, work: Work, rates: Rates) -> float:
    """Return the seconds that one GPU would take for an epoch's rollout, decoding and update."""
    model_size = work.model_size
    forwards = work.forwards
    trained = forwards.trained * _passes(config, rates)
    rows = forwards.fast * _fast_factor(config, config.sample.rollout_weights, rates)
    rows += forwards.exact * rates.exact + forwards.frozen * rates.frozen + trained * rates.trained
    seconds = rows * _row_s(config, work, rates)
    if not config.compile:
        seconds *= rates.eager
    if not config.lora.rank:
        seconds *= rates.full_weights
    if config.fsdp.offload == "weights":
        seconds *= rates.offloaded

    # Each forward reads all weights, and makes quantised ones whole again, for however many rows.
    batch_size = config.sample.batch_size
    fast_rows = config.sample.completion_batch_size or batch_size
    weights_ms = _weights_ms(config, rates)
    fast_ms = rates.ms_bf16 if "merged" in config.sample.rollout_weights else weights_ms
    milliseconds = weights_ms * (forwards.exact + forwards.frozen + trained) / batch_size
    milliseconds += fast_ms * forwards.fast / fast_rows
    seconds += milliseconds * model_size.held / 1e12
    if work.are_drawn:
        seconds += work.num_images * _decode_s(config, rates)
    return seconds


def evaluation_s(config: Config, work: Work, num_prompts: int, family: type[FlowModel], shortcuts: Shortcuts) -> float:
    """Return the seconds that one GPU would take for an evaluation of this many prompts."""
    constants = rates()
    rows = of_evaluation(config, num_prompts, family, shortcuts)
    seconds = rows * _fast_factor(config, shortcuts.weights, constants) * _row_s(config, work, constants)
    if not config.compile:
        seconds *= constants.eager
    num_images = num_prompts * config.eval.noises_per_prompt
    return seconds + num_images * _decode_s(config, constants)


def _row_s(config: Config, work: Work, rates: Rates) -> float:
    """Seconds of a row of a fast forward in bf16."""
    # The share width / (width + half_width) of the best rate is reached: half of it at half_width.
    width = work.model_size.width
    seconds = work.cost.flops / (rates.tflops * 1e12) * (width + rates.half_width) / width
    if config.attention == "flash_4":
        seconds *= rates.flash_4
    return seconds


def _decode_s(config: Config, rates: Rates) -> float:
    """Seconds of an image beside its forwards."""
    return rates.s_decode * config.frames * config.height * config.width / 512**2


def _passes(config: Config, rates: Rates) -> float:
    """Forwards, or as much as one, of a trained row: forward, backward, what is recomputed, and weights' gradients."""
    passes = 2.0 + _by_checkpointing(config.fsdp.activation_checkpointing, 0.0, rates.recomputed, 1.0)
    if not config.lora.rank:
        passes += 1
    return passes


def _fast_factor(config: Config, rollout_weights: str, rates: Rates) -> float:
    """Factor of the time of a forward without a log-prob, by the weights that it takes."""
    factor = 1.0
    if config.lora.rank and "merged" not in rollout_weights:
        factor *= rates.adapter
    if "fp8" in rollout_weights:
        factor *= rates.fp8
    return factor


def _weights_ms(config: Config, rates: Rates) -> float:
    """Milliseconds of each forward per billion weights, by the precision in which they are kept."""
    if config.base_precision == "fp8_weights":
        return rates.ms_fp8_weights
    if config.base_precision == "nf4":
        return rates.ms_nf4
    return rates.ms_bf16
