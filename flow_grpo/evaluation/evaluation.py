"""Evaluating a policy: deterministic images of fixed prompts from fixed noises, and their scores.

A run's evaluations and scripts/evaluate.py draw by the same function, `score`. S noises of each of P prompts.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.base import distributed, rng
from flow_grpo.base.prompt import Prompt
from flow_grpo.data.prompts import Split
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.denoise_with_logprob import ForwardContext, Velocity
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sample_with_logprob import Samples, SamplingJob, sample
from flow_grpo.diffusers_patch.sampling_params import EXACT, SamplingParams, Shortcuts
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.evaluation import estimates, variety
from flow_grpo.evaluation.estimates import Estimate
from flow_grpo.evaluation.saved_images import SavedImages
from flow_grpo.rewards.scores import join_scores
from flow_grpo.scoring.pool import Pending, Pool
from flow_grpo.settings.sections import Eval
from flow_grpo.weights import policies

NUM_SHOWN = 12  # images that trackers and samples.png show
NUM_VIDEOS_SHOWN = 4  # whose frames are all kept until they are shown
Item = TypeVar("Item")


@dataclass(frozen=True)
class Sampler:
    """A policy, and what its images are drawn and scored with."""

    model: FlowModel
    embed: Callable[[list[Prompt]], Condition]  # B prompts -> B rows
    velocity: Velocity  # the policy
    pool: Pool  # of the rewards
    bar: Callable  # (iterable, description) -> the same under a progress bar
    size: Size
    settings: Eval
    vae_batch_size: int
    shortcuts: Shortcuts = EXACT


class Scores(NamedTuple):
    """Scores of S noises of each of P prompts."""

    values: dict[str, Tensor]  # name -> [S, P] float32, "avg" among them; NaN where a reward failed that may
    # Number of the prompt -> its image [3, H, W] or video [f, 3, H, W] of the first noise, of those to be shown.
    images: dict[int, Tensor]
    variety: dict[str, Estimate]  # how different a prompt's images are; {} of one noise
    masked_shares: dict[str, float]  # of the images without a score, of each reward that may fail


class _Batch(NamedTuple):
    """Neighbours among the S * P rows, which are drawn together."""

    start: int  # the first row
    scores: dict[str, Tensor]  # name -> [b] float32
    images: dict[int, Tensor]  # as in Scores
    labels: dict[str, Tensor]  # kind -> [b] int64; {} where no variety is measured


@torch.no_grad()
def score(
    sampler: Sampler, split: Split, seeds: range | list[int], num_shown: int = 0, saved: SavedImages | None = None
) -> Scores:
    """Draw one image per noise and prompt, and score it by every reward; the same on every rank. Raises RewardFailed.

    Noise s of prompt i does not depend on the run or its seed, and batches are the same on any number of ranks.

    Args:
        seeds: S numbers; the first noise of all prompts is drawn first, so that one noise more changes no batch.
        num_shown: of how many prompts, evenly spread, the image of the first noise is returned.
        saved: writes images as files; its table is written here, too.
    """
    num_prompts = len(split.prompts)
    batch_size = sampler.settings.batch_size
    rows = list(itertools.product(seeds, range(num_prompts)))
    shown = spread(range(num_prompts), num_shown)
    distances = variety.Distances(num_prompts)
    # Of the weights that the transformer has now, the averaged ones in a run.
    fast = policies.fast_forwards(sampler.shortcuts.weights, sampler.model.transformer)
    batches = []
    pending = []
    for turn, counts in turns(-(-len(rows) // batch_size), sampler.bar):
        start = turn * batch_size
        batch_rows = rows[start : start + batch_size]
        sampled, scores = _draw(sampler, split, batch_rows, fast)
        # Batches that only keep step with other ranks add nothing, but make the same calls.
        measured = [number for _, number in batch_rows] if counts and len(seeds) > 1 else []
        labels = _labels(sampler, sampled.images, [split.prompts[i] for i in measured])
        distances.add(sampler.model.features(sampled.latents, sampler.size), measured)
        if counts:
            batches.append(_Batch(start, {}, _shown_of(sampled.images, start, shown), labels))
            pending.append(scores)
            if saved:
                saved.write(batch_rows, sampled.images)
    # Scores are waited for when all images are drawn.
    batches = [batch._replace(scores=wait()) for batch, wait in zip(batches, pending, strict=True)]
    gathered = _gathered(batches, distances, len(seeds))
    if saved and distributed.is_main():
        saved.write_table(list(seeds), gathered.values)
    return gathered._replace(masked_shares=sampler.pool.masked_shares(gathered.values))


def _labels(sampler: Sampler, images: Tensor, prompts: list[Prompt]) -> dict[str, Tensor]:
    """Label images as their rewards tell them apart; videos have no labels."""
    labelled = prompts if sampler.size.frames == 1 else []
    return rewards.image_labels(sampler.pool.scorers, images, labelled)


def num_shown(size: Size) -> int:
    """Return how many images or videos of an evaluation are shown."""
    return NUM_SHOWN if size.frames == 1 else NUM_VIDEOS_SHOWN


def images_to_save(folder: Path, split: Split, settings: Eval) -> SavedImages | None:
    """Make the folder of the images that eval.save_images asks for; None without any."""
    if not settings.save_images:
        return None
    numbers = spread(range(len(split.prompts)), settings.save_images)
    return SavedImages(folder, split.prompts, numbers, settings.image_format)


def _shown_of(images: Tensor, start: int, shown: list[int]) -> dict[int, Tensor]:
    """Return the images to be shown of a batch [b, 3, H, W], on the CPU. Of the first noise row i is prompt i."""
    numbers = [number for number in shown if start <= number < start + len(images)]
    if not numbers:
        return {}
    rows = torch.tensor(numbers, device=images.device) - start
    return dict(zip(numbers, images[rows].cpu(), strict=True))


def _gathered(batches: list[_Batch], distances: variety.Distances, num_noises: int) -> Scores:
    """Join the batches of all ranks; without the masked shares."""
    batches = sorted(distributed.gather_objects(batches), key=lambda batch: batch.start)
    values = {}
    for name, column in join_scores([batch.scores for batch in batches]).items():
        values[name] = column.view(num_noises, -1)
    images = {}
    for batch in batches:
        images |= batch.images
    # One image of a prompt differs from nothing.
    if num_noises == 1:
        return Scores(values, images, {}, {})
    return Scores(values, images, _variety(distances, batches, num_noises), {})


def _variety(distances: variety.Distances, batches: list[_Batch], num_noises: int) -> dict[str, Estimate]:
    """Return by name: the distance between a prompt's images, and the entropy of each kind of labels."""
    estimates_of = {"distance": distances.estimate(num_noises)}
    for name in batches[0].labels:
        column = torch.cat([batch.labels[name] for batch in batches]).view(num_noises, -1)
        bits = variety.entropy_bits(column)
        if not math.isnan(bits):
            estimates_of[f"{name}_bits"] = Estimate(bits, math.nan, column.shape[1])
    return estimates_of


def means(scores: Scores, best_by: str, watched: Sequence[str] = ()) -> dict[str, float]:
    """Return the mean of each score over prompts and noises, those that failed left out, and the variety.

    Where there are several prompts, also standard errors: of the mean of `best_by` as std_error, and of what is
    compared where rewards are watched, the average and each of them, as NAME_std_error.
    """
    figures = {}
    for name, values in scores.values.items():
        figures[name] = values.nanmean().item()
    for name, estimate in scores.variety.items():
        figures[name] = estimate.mean
    chosen = scores.values.get(best_by)
    if chosen is not None and chosen.shape[1] > 1:
        figures["std_error"] = estimates.mean(chosen).error
    compared = ["avg", *watched] if watched else []
    for name in compared:
        values = scores.values[name]
        if values.shape[1] > 1:
            figures[f"{name}_std_error"] = estimates.mean(values).error
    return figures


def means_by_category(scores: Scores, split: Split) -> dict[str, float]:
    """Return the mean of each score that says right or wrong over the prompts of each category, as NAME/TAG."""
    tags = [prompt.metadata.get("tag", "") for prompt in split.prompts]
    if not any(tags):
        return {}
    figures = {}
    for name, values in scores.values.items():
        if estimates.is_binary(values):
            for tag, estimate in estimates.by_category(values, tags).items():
                figures[f"{name}/{tag}"] = estimate.mean
    return figures


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` items at equal distances, all of them if there are fewer: test sets are often sorted by kind."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def turns(count: int, bar: Callable) -> Iterator[tuple[int, bool]]:
    """Yield this rank's numbers below `count`, under a progress bar, and whether each counts. They are filled up, so
    that all ranks make equally many forwards: sharded ones wait for each other."""
    rank = distributed.rank()
    for turn in bar(range(0, count, distributed.world_size()), "evaluation"):
        yield min(turn + rank, count - 1), turn + rank < count


def noise_generator(split: str, seed: int, number: int) -> torch.Generator:
    """Return the generator of noise `seed` of prompt `number`. Prompts that choose the best policy have other noises
    than those that choose nothing."""
    stream = "eval validation" if split == "validation" else "eval"
    return rng.generator(seed, stream, number)


def _draw(sampler: Sampler, split: Split, rows: list[tuple[int, int]], fast: ForwardContext) -> tuple[Samples, Pending]:
    """Draw the images of (seed, number of the prompt) rows, all forwards inside `fast`, and begin to score them."""
    settings = sampler.settings
    shortcuts = sampler.shortcuts
    prompts = []
    generators = []
    for seed, number in rows:
        prompts.append(split.prompts[number])
        generators.append(noise_generator(split.name, seed, number))
    condition = sampler.embed(prompts)
    if shortcuts.text_multiple:
        condition = condition.trimmed(shortcuts.text_multiple)
    params = SamplingParams(
        settings.num_steps,
        settings.guidance_scale,
        flash_ratio=shortcuts.flash_ratio,
        flash_solver=shortcuts.flash_solver,
    )
    job = SamplingJob(sampler.model, condition, generators, params, sampler.size)
    # A compiled decode is filled up with copies to its batch size, so it is no larger than there are images.
    decoded_together = min(sampler.vae_batch_size, settings.batch_size * sampler.size.frames)
    sampled = sample(job, noisy_steps=range(0), velocity=sampler.velocity, vae_batch_size=decoded_together, fast=fast)
    return sampled, sampler.pool.submit(sampled.images, prompts, everything=True)


def part_of(split: Split, num_prompts: int) -> Split:
    """Return a split with at most this many of its prompts, evenly spread."""
    return split._replace(prompts=spread(split.prompts, num_prompts))
