"""An epoch's images: drawn in batches or in slots, scored meanwhile, and what their rewards say about each."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo.algorithms.advantages import combined_advantages, group_stats, kept_rows
from flow_grpo.algorithms.rollout import Rollout, from_trace
from flow_grpo.base import distributed, rng
from flow_grpo.data import prompts
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.denoise_with_logprob import Request, Slots, Velocity, walk
from flow_grpo.diffusers_patch.sample_with_logprob import Branching, Sampled, Start, post_decode, prepare_encode, sample
from flow_grpo.evaluation.evaluation import NUM_SHOWN
from flow_grpo.monitoring import health
from flow_grpo.run.run import Run
from flow_grpo.scoring.pool import Pending
from flow_grpo.scoring.scorers import joined
from flow_grpo.weights import fsdp_utils, policies


class Walk(NamedTuple):
    """How the images of a batch are drawn."""

    noisy: range  # the window, or the steps at which branches leave; range(0) = no noise
    num_branches: int = 0  # of each step in `noisy`; 0 = a window
    latents: Tensor | None = None  # to start from; None = each image's own noise
    groups: list[int] | None = None  # images of one number are one until the window; None = each for itself


class Scored(NamedTuple):
    """Some images whose scores are being made."""

    images: list[int]  # b, their global numbers within the epoch
    groups: Tensor  # [b, ...] int64, which of them compete
    scores: Pending  # name -> [b, ...] float32 on the CPU
    shown: list[tuple[int, Tensor, str]]  # row, its first image, its prompt; of the rows that images/ is to keep


def batches(run: Run, epoch: int) -> Iterator[prompts.Batch]:
    """This rank's batches of an epoch, under a progress bar."""
    dealt = prompts.epoch_batches(run.train_prompts, run.plan, run.config.seed, epoch, run.rank, run.world_size)
    return run.board.bar(dealt, f"epoch {epoch + 1}, rollout", total=run.plan.batches_per_epoch)


def sampled(run: Run, epoch: int, walk_of: Callable[[prompts.Batch], Walk]) -> Iterator[tuple[prompts.Batch, Sampled]]:
    """Draw this rank's images of an epoch; yields some as soon as they are finished, in whatever order.

    Args:
        walk_of: batch -> its Walk.

    Raises:
        RuntimeError: weights were updated before the last image was drawn.
    """
    updates = run.step
    velocity, wait = _together(run) if fsdp_utils.is_sharded(run.model.network) else (run.velocity, nullcontext)
    slots = slots_of(run.config.sample)
    if slots is None:
        drawn = _in_batches(run, epoch, walk_of, velocity)
    else:
        drawn = _in_slots(run, epoch, walk_of, velocity, slots)
    while True:
        with run.board.timed("rollout"):
            finished = next(drawn, None)
            if finished is None:
                wait()
                break
        yield finished
        if run.step != updates:
            raise RuntimeError(f"update {run.step} came before epoch {epoch + 1} had drawn all of its images")
    if slots is not None:
        run.epoch_figures["slot_use"] = slots.use


def _together(run: Run) -> tuple[Callable, Callable]:
    """The policy, and a function that runs dummy forwards until all ranks have finished.

    FSDP needs every rank to run the same number of forwards, and ranks with windows or slots of their own need
    different numbers. A rank calls the function when it has finished.
    """
    last = []

    def velocity(x, t, condition, guidance_scale, size):
        distributed.any_rank(True)
        last[:] = x, t, condition, guidance_scale, size
        return run.velocity(x, t, condition, guidance_scale, size)

    @torch.no_grad()
    def wait():
        while distributed.any_rank(False):
            policies.predict(run.model, run.config.precision, *last)  # which run.num_forwards does not count

    return velocity, wait


def _modes(run: Run) -> tuple[Callable, Callable]:
    """() -> context of the forwards whose velocity enters a log-prob, and of the others."""
    return run.exact, policies.fast_forwards(run.config, run.model.transformer)


def _start(run: Run, epoch: int, batch: prompts.Batch) -> Start:
    generators = [rng.generator(run.config.seed, "noise", epoch, image) for image in batch.images]
    return Start(run.model, run.embed(batch.prompts), generators, run.sampling_params, run.size)


def _in_batches(
    run: Run, epoch: int, walk_of: Callable[[prompts.Batch], Walk], velocity: Velocity
) -> Iterator[tuple[prompts.Batch, Sampled]]:
    """A batch's rows walk together, step by step."""
    exact, fast = _modes(run)
    for batch in batches(run, epoch):
        drawn = walk_of(batch)
        branching = Branching(drawn.num_branches, _free_rows(run.config.sample))
        images = sample(
            _start(run, epoch, batch),
            noisy=drawn.noisy,
            branching=branching if drawn.num_branches else None,
            velocity=velocity,
            latents=drawn.latents,
            groups=drawn.groups,
            vae_batch_size=run.config.vae_batch_size,
            exact=exact,
            fast=fast,
        )
        yield batch, images


def _in_slots(
    run: Run, epoch: int, walk_of: Callable[[prompts.Batch], Walk], velocity: Velocity, slots: Slots
) -> Iterator[tuple[prompts.Batch, Sampled]]:
    """Every row is a request; those of a batch follow those of the one before without a gap."""
    multiple = run.config.sample.text_multiple
    shorten = lru_cache(maxsize=None)(lambda prompt: run.embed_one(prompt).trimmed(multiple))  # waits for the device

    def requests() -> Iterator[Request]:
        for batch in batches(run, epoch):
            short = [shorten(prompt) for prompt in batch.prompts] if multiple else None
            yield from _requests(run, epoch, batch, walk_of(batch), short)

    finished = walk(velocity, requests(), slots, *_modes(run))
    for decoded, images in post_decode(run.model, finished, vae_batch_size=run.config.vae_batch_size):
        yield prompts.pick(request.name for request in decoded), images


def _requests(run: Run, epoch: int, batch: prompts.Batch, drawn: Walk, short: list[Condition] | None) -> list[Request]:
    return prepare_encode(
        _start(run, epoch, batch),
        noisy=drawn.noisy,
        names=[(batch, row) for row in range(len(batch.images))],
        num_branches=drawn.num_branches,
        scheduler=run.scheduler,
        latents=drawn.latents,
        groups=drawn.groups,
        short=short,
    )


def slots_of(sample: ConfigDict) -> Slots | None:
    """As many for log-probs as the update's forwards have rows; None where a batch's rows walk together."""
    return Slots(sample.batch_size, _free_rows(sample)) if sample.engine == "stepwise" else None


def _free_rows(sample: ConfigDict) -> int:
    return sample.completion_batch_size or sample.batch_size


def windowed(run: Run, batch: prompts.Batch, epoch: int, window: range) -> Walk:
    """Noise in a window; where sample.same_latent asks for it, all images of a group start from one noise, on whatever
    rank, and are one image until the window."""
    if not run.config.sample.same_latent:
        return Walk(window)
    generators = [rng.generator(run.config.seed, "group noise", epoch, group) for group in batch.groups]
    return Walk(window, latents=run.model.noise(run.size, generators), groups=batch.groups)


def remember(run: Run, sampled: Sampled, batch: prompts.Batch) -> Rollout:
    """What the update needs of some images."""
    train = run.config.train
    return from_trace(
        sampled.trace,
        run.embed(batch.prompts),
        batch.images,
        num_trained_steps=run.plan.num_trained_steps,
        step_weight=train.step_weight,
        keep_means=train.objective == "guard",
    )


def score_images(run: Run, sampled: Sampled, batch: prompts.Batch, groups: Tensor) -> Scored:
    """Begin to score images [b, ..., 3, H, W].

    groups: [b, ...] int64, which of them compete.
    """
    images, shape = sampled.images, sampled.images.shape[1:-3]
    latents = run.model.features(sampled.latents.flatten(0, len(shape)), run.size)
    run.signs.append(health.measure(latents, groups.flatten()))
    repeats = shape.numel()
    asked = [prompt for prompt in batch.prompts for _ in range(repeats)]
    with run.board.timed("reward"):
        scores = run.pool.submit(images.flatten(0, -4), asked)
    shape = (len(batch.prompts), *shape)
    pending = Pending(lambda: {name: values.view(shape) for name, values in scores.result().items()})
    return Scored(list(batch.images), groups, pending, _shown(run, images, batch))


def _shown(run: Run, images: Tensor, batch: prompts.Batch) -> list[tuple[int, Tensor, str]]:
    """In an epoch that is kept, an image of each of the first prompts; images: [b, ..., 3, H, W]."""
    freq, size = run.config.rollout_images_freq, run.plan.group_size
    if not freq or run.epoch % freq:
        return []
    rows = [row for row, image in enumerate(batch.images) if image % size == 0]
    rows = [row for row in rows if batch.images[row] // size < NUM_SHOWN]
    return [(row, images[row].reshape(-1, *images.shape[-3:])[0].cpu(), batch.prompts[row].text) for row in rows]


def _keep_shown(run: Run, scored: list[Scored]) -> None:
    """Put the images that all ranks show into images/, each with its reward."""
    rows = [
        (batch.images[row], image, text, batch.scores.result()["avg"][row].flatten()[0].item())
        for batch in scored
        for row, image, text in batch.shown
    ]
    if rows := sorted(distributed.gather_objects(rows), key=lambda row: row[0]):
        _, images, texts, values = zip(*rows)
        run.log_images("rollout", torch.stack(images), texts, values)


def gather_rewards(run: Run, epoch: int, scored: list[Scored]) -> tuple[dict[str, Tensor], Tensor]:
    """Wait for the epoch's rewards: name -> [all] and their groups [all], over all ranks, each rank's in the order of
    its images; NaN where one was masked. Logs what there is to see in them.

    Raises:
        RewardFailed: one failed that must not, or too often.
    """
    start = time.perf_counter()
    with run.board.timed("reward"):
        scores = [batch.scores.result() for batch in scored]
    waited = time.perf_counter() - start
    run.epoch_figures["time/reward_hidden_s"] = max(0.0, run.pool.clock.pop() - waited)
    order = torch.tensor([image for batch in scored for image in batch.images]).argsort()
    names = distributed.gather_objects([name for by_name in scores for name in by_name])
    everyone = {name: distributed.gather(values[order]).flatten() for name, values in joined(scores, names).items()}
    groups = distributed.gather(torch.cat([batch.groups for batch in scored])[order]).flatten()
    if run.config.sample.baseline == "all":
        groups = torch.zeros_like(groups)
    for name, share in run.pool.masked_shares(everyone).items():
        run.epoch_figures[f"reward/{name}_masked_share"] = share
    for name, values in everyone.items():
        valid, prefix = values.isfinite(), "" if name == "avg" else f"{name}_"
        values, stats = values[valid], group_stats(values[valid], groups[valid])
        run.epoch_figures |= {
            f"reward/{name}": values.double().mean().item(),
            f"reward/{prefix}group_std": stats.std.mean().item(),
            f"reward/{prefix}zero_std_share": (stats.std == 0).float().mean().item(),
        }
    run.epoch_figures["images"] = (epoch + 1) * len(groups)
    if run.config.rollout_images_freq:
        _keep_shown(run, scored)
    if run.epoch_figures["reward/zero_std_share"] == 1:
        score = run.epoch_figures["reward/avg"]
        run.board.say(f"epoch {epoch + 1}: the images of each group score alike ({score:.4g} on average): no gradient")
    return everyone, groups


def advantages(run: Run, everyone: dict[str, Tensor], groups: Tensor) -> tuple[Tensor, Tensor]:
    """Of this rank's images: their advantages, and their shares in the mean that is the loss; flat, 0 where masked."""
    config = run.config
    weights = config.reward_fn.to_dict()
    scored = torch.stack([everyone[name].isfinite() for name in weights]).all(0)
    everyone, groups = {name: everyone[name][scored] for name in weights}, groups[scored]
    values, loss_weight = torch.zeros(len(scored)), scored.float()
    values[scored] = combined_advantages(
        everyone, weights, groups, config.train.reward_aggregation, config.sample.global_std
    )
    if config.train.filter_groups:
        loss_weight[scored] *= kept_rows(everyone, weights, groups)
    loss_weight /= loss_weight.mean().clamp(min=1 / len(loss_weight))
    return distributed.local_rows(values), distributed.local_rows(loss_weight)
