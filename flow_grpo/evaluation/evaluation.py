"""How good a policy is: deterministic images of fixed prompts from fixed noises, and their scores.

A run's evaluations and scripts/evaluate.py draw by the same function, `score`. S noises of each of P prompts.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.base import distributed, rng
from flow_grpo.data.prompts import Split
from flow_grpo.diffusers_patch.denoise_with_logprob import Velocity
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sample_with_logprob import Samples, SamplingJob, sample
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.evaluation import estimates, variety
from flow_grpo.evaluation.estimates import Estimate
from flow_grpo.scoring.pool import Pending, Pool
from flow_grpo.scoring.scorers import joined

NUM_SHOWN = 12  # images that trackers and samples.png show


@dataclass(frozen=True)
class Sampler:
    """What draws and scores the images of a policy."""

    model: FlowModel
    embed: Callable  # B prompts -> their Condition
    velocity: Velocity  # the policy
    pool: Pool  # of the rewards
    bar: Callable  # (iterable, description) -> the same under a progress bar
    config: ConfigDict  # of which height, width, vae_batch_size and eval are read


class Scores(NamedTuple):
    """Scores of S noises of each of P prompts."""

    values: dict[str, Tensor]  # name -> [S, P] float32, "avg" among them; NaN where a reward failed that may
    images: dict[int, Tensor]  # number of the prompt -> its image [3, H, W] of the first noise, of those to be shown
    variety: dict[str, Estimate]  # how different a prompt's images are; {} of one noise


@torch.no_grad()
def score(sampler: Sampler, split: Split, seeds: range | list[int], num_shown: int = 0) -> Scores:
    """Draw one image per noise and prompt, and score it by every reward; the same on every rank.

    Noise s of prompt i does not depend on the run or its seed, and batches are the same on any number of ranks.

    Args:
        seeds: S numbers; the first noise of all prompts is drawn first, so that one noise more changes no batch.
        num_shown: of how many prompts, evenly spread, the image of the first noise is returned.
    """
    numbers, size, batches = range(len(split.prompts)), sampler.config.eval.batch_size, []
    rows, shown = [(seed, number) for seed in seeds for number in numbers], torch.tensor(spread(numbers, num_shown))
    varies, distances = len(seeds) > 1, variety.Distances(len(numbers))
    for turn, counts in turns(-(-len(rows) // size), sampler.bar):
        start = turn * size
        sampled, pending = _draw(sampler, split, batch_rows := rows[start : start + size])
        shown_now = shown[(shown >= start) & (shown < start + size)]
        panel = sampled.images[(shown_now - start).to(sampled.images.device)].cpu() if len(shown_now) else []
        drawn = [number for _, number in batch_rows] if counts and varies else []
        labels = rewards.image_labels(sampler.pool.scorers, sampled.images, [split.prompts[i] for i in drawn])
        distances.add(sampler.model.features(sampled.latents, training_size(sampler.config)), drawn)
        batches += [(start, pending, dict(zip(shown_now.tolist(), panel)), labels)] if counts else []
    batches = [(start, pending(), *others) for start, pending, *others in batches]
    batches = sorted(distributed.gather_objects(batches), key=lambda batch: batch[0])
    _, values, panels, labels = zip(*batches)
    values = {name: column.view(len(seeds), -1) for name, column in joined(values).items()}
    images = {number: image for panel in panels for number, image in panel.items()}
    return Scores(values, images, _variety(distances, labels, len(seeds)) if varies else {})


def _variety(distances: variety.Distances, labels: list[dict[str, Tensor]], num_noises: int) -> dict[str, Estimate]:
    """By name: the distance between a prompt's images, and the entropy of each kind of labels, of all batches."""
    found = {"distance": distances.estimate(num_noises)}
    for name in labels[0]:
        column = torch.cat([part[name] for part in labels]).view(num_noises, -1)
        if not math.isnan(bits := variety.entropy_bits(column)):
            found[f"{name}_bits"] = Estimate(bits, math.nan, column.shape[1])
    return found


def means(scores: Scores, best_by: str) -> dict[str, float]:
    """The mean of each score over prompts and noises, those that failed left out; as std_error the standard error of
    that of `best_by`, where there are several prompts."""
    figures = {name: values.nanmean().item() for name, values in scores.values.items()}
    chosen = scores.values.get(best_by)
    known = chosen is not None and chosen.shape[1] > 1
    figures |= {name: estimate.mean for name, estimate in scores.variety.items()}
    return figures | ({"std_error": estimates.mean(chosen).error} if known else {})


def means_by_category(scores: Scores, split: Split) -> dict[str, float]:
    """The mean of each score that says right or wrong over the prompts of each category, as NAME/TAG."""
    tags = [prompt.metadata.get("tag", "") for prompt in split.prompts]
    binary = {name: values for name, values in scores.values.items() if any(tags) and estimates.is_binary(values)}
    return {
        f"{name}/{tag}": part.mean
        for name, values in binary.items()
        for tag, part in estimates.by_category(values, tags).items()
    }


def spread(items, count: int) -> list:
    """`count` items at equal distances, all of them if there are fewer: test sets are often sorted by kind."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def turns(count: int, bar: Callable) -> Iterator[tuple[int, bool]]:
    """This rank's numbers below `count`, under a progress bar, and whether each counts: every rank makes equally many,
    so that sharded forwards meet."""
    rank = distributed.rank()
    for turn in bar(range(0, count, distributed.world_size()), "evaluation"):
        yield min(turn + rank, count - 1), turn + rank < count


def noise(split: str, seed: int, number: int) -> torch.Generator:
    """Noise `seed` of prompt `number`. The prompts that choose have other noises than those that choose nothing."""
    return rng.generator(seed, "eval validation" if split == "validation" else "eval", number)


def _draw(sampler: Sampler, split: Split, rows: list[tuple[int, int]]) -> tuple[Samples, Pending]:
    """Images of (seed, number of the prompt) rows, and their scores to be."""
    config, drawn_prompts = sampler.config, [split.prompts[number] for _, number in rows]
    start = SamplingJob(
        sampler.model,
        sampler.embed(drawn_prompts),
        [noise(split.name, seed, number) for seed, number in rows],
        SamplingParams(config.eval.num_steps, config.eval.guidance_scale),
        training_size(config),
    )
    decoded_together = min(config.vae_batch_size, config.eval.batch_size)  # a compiled decode is filled with copies
    sampled = sample(start, noisy_steps=range(0), velocity=sampler.velocity, vae_batch_size=decoded_together)
    return sampled, sampler.pool.submit(sampled.images, drawn_prompts, everything=True)


def part_of(split: Split, config: ConfigDict) -> Split:
    """The eval.num_prompts of it that are drawn."""
    return split._replace(prompts=spread(split.prompts, config.eval.num_prompts))
