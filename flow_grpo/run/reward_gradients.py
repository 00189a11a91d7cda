"""Rewards with gradients: the loss of an update's images and its gradient with respect to their latents, the check of
rewards that have no gradient, and the parity of velocities between rollout and update.

Decoder and rewards keep their activations for config.vae_batch_size images at a time, while the transformer keeps none:
when its forwards begin, the gradient with respect to the latents is all that is left of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo import rewards as reward_files
from flow_grpo.algorithms.disagreement import overrated
from flow_grpo.algorithms.ratio_statistics import ParityError
from flow_grpo.algorithms.reward_gradients import PathStep, reward_loss
from flow_grpo.algorithms.rollout import TrainedRows
from flow_grpo.base import distributed
from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt, texts_of
from flow_grpo.data.prompts import Batch
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.sample_with_logprob import Samples
from flow_grpo.run import rewards, save
from flow_grpo.run.run import Run
from flow_grpo.run.startup import family_of
from flow_grpo.scoring.settings import check_gradients, split_settings
from flow_grpo.settings.sections import Config

PARITY = "parity/velocity_abs_diff_max"
# Unit of train.parity_limit for velocities, whose elements are about 1.
PARITY_UNIT = 1e-3

# (images [B, 3, H, W] in [0, 1], texts, metadata) -> [B] f32, with a graph back to the images.
ScorePixels = Callable[[Tensor, list[str], list[dict]], Tensor]


class LoadedReward(NamedTuple):
    """Reward with a gradient."""

    score_pixels: ScorePixels
    device: torch.device
    weight: float  # in the sum of all rewards


LoadedRewards = dict[str, LoadedReward]


@dataclass(frozen=True)
class DrawnImages:
    """B images of one batch, and the states that gradients of their rewards go through. K steps of the path."""

    batch: Batch
    condition: Condition  # B rows
    path: list[PathStep]  # K, from the last to the first
    states: Tensor  # [K, B, ...] f32, of the walk at these steps
    velocities: Tensor  # [K, B, ...] f32, the rollout's there
    x_0: Tensor  # [B, ...] f32, what is decoded and scored
    loss_weight: Tensor  # [B] f32
    share: float  # of this record in the gradient of its batch: less than 1 where images are noised anew
    beta_gate: Tensor | None = None  # [B] f32, weight in the pull to the reference; None = 1


class Scored(NamedTuple):
    """Scores of drawn images."""

    gradient: Tensor  # [B, ...] f32, of the update's mean loss with respect to x_0
    submitted: rewards.Submitted  # for the epoch's metrics
    drawn: DrawnImages  # with what train.beta_gate lets pull


def check(config: Config) -> None:
    """Raise UserError for rewards without a gradient, and for settings that would be ignored or cannot be met. Loads no
    weight."""
    check_gradients(config.reward_fn, config.reward)
    train = config.train
    if train.gradient_path != "leap" and train.gradient_steps > config.sample.num_steps:
        raise UserError(
            f"config.train.gradient_steps is {train.gradient_steps}, but config.sample.num_steps is "
            f"{config.sample.num_steps}: there are no more steps than these"
        )
    if train.detach_negative and not family_of(config).is_guided(config.sample.guidance_scale):
        raise UserError(
            f"config.train.detach_negative is True, but with config.sample.guidance_scale "
            f"{config.sample.guidance_scale} velocities have no negative forward"
        )
    if train.detach_negative and config.batched_guidance:
        raise UserError(
            "config.train.detach_negative and config.batched_guidance are True, but a negative forward without a "
            "gradient is one of its own: set batched_guidance to False"
        )


def load_rewards(run: Run) -> LoadedRewards:
    """Load the rewards that are trained on. Evaluations score by the pool's own copies."""
    loaded = {}
    for name, weight in run.config.reward_fn.items():
        settings, options = split_settings(name, run.config.reward)
        device = torch.device(settings.device or run.device)
        score_pixels = reward_files.load_differentiable(name, device, options)
        loaded[name] = LoadedReward(score_pixels, device, weight)
    return loaded


def images_per_update(run: Run) -> int:
    """Return the number of images of an update, on each rank."""
    return run.plan.batch_size * run.plan.batches_per_epoch // run.plan.updates_per_epoch


@contextmanager
def repeatable_convolutions() -> Iterator[None]:
    """Let cuDNN take only algorithms that add up in a fixed order.

    Those that it prefers for the gradient of a convolution's input may not: two runs of one seed, on two GPUs of a
    kind, had other image gradients in their first update.
    """
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def score(run: Run, loaded: LoadedRewards, drawn: DrawnImages) -> Scored:
    """Decode and score B images, config.vae_batch_size at a time, and compute the gradient of the loss with respect to
    their latents. Logs the losses."""
    batch_size = run.config.vae_batch_size
    gradients = []
    images = []
    losses = []
    scores: dict[str, list[Tensor]] = {name: [] for name in (*loaded, "avg")}
    for start in range(0, len(drawn.x_0), batch_size):
        rows = slice(start, start + batch_size)
        latents = drawn.x_0[rows].detach().requires_grad_()
        with repeatable_convolutions():
            pixels = run.model.decode_with_gradients(latents, run.size)
            row_scores = score_images(loaded, pixels, drawn.batch.prompts[rows])
            loss = drawn.loss_weight[rows] * reward_loss(row_scores["avg"], run.config.train.reward_target)

            # This frees the graph of these images.
            part_of_mean = drawn.share * loss.sum() / images_per_update(run)
            (row_gradient,) = torch.autograd.grad(part_of_mean, latents)
        gradients.append(row_gradient)
        images.append(pixels.detach())
        losses.append(loss.detach())
        for name, values in row_scores.items():
            scores[name].append(values.detach())
    gradient = torch.cat(gradients)
    _record(run, drawn, torch.cat(losses), gradient)

    def scores_on_cpu() -> dict[str, Tensor]:
        # Called at the end of the epoch, so that the host does not wait for the device before.
        return {name: torch.cat(parts).cpu() for name, parts in scores.items()}

    samples = Samples(torch.cat(images), drawn.x_0, trace=[])
    submitted = rewards.submit(run, samples, drawn.batch, scores=scores_on_cpu)
    # An image that is noised anew has the gate of the image that was drawn.
    if run.config.train.gates_the_pull and drawn.beta_gate is None:
        drawn = replace(drawn, beta_gate=_beta_gate(run, drawn, samples.images))
    return Scored(gradient, submitted, drawn)


def _beta_gate(run: Run, drawn: DrawnImages, images: Tensor) -> Tensor:
    """Return which of a batch's images [B, 3, H, W] are pulled to the reference, [B], 1 or 0.

    Rewards that are not trained on need no gradient, and are waited for. Images are compared within their batch.
    """
    config = run.config
    pending = run.pool.submit(images, drawn.batch.prompts, everything=True)
    scores = pending()
    watched = [scores[name] for name in config.watched_rewards]
    one_group = torch.zeros(len(drawn.batch.prompts), dtype=torch.int64)
    return overrated(scores["avg"], watched, one_group, config.train.beta_gate).float().to(run.device)


def score_images(loaded: LoadedRewards, images: Tensor, prompts: list[Prompt]) -> dict[str, Tensor]:
    """Score images [B, 3, H, W] in [0, 1] by each reward, and by their weighted sum, "avg"; [B] each, with a graph."""
    texts = texts_of(prompts)
    metadata = [prompt.metadata for prompt in prompts]
    scores = {}
    total = images.new_zeros(len(images))
    for name, reward in loaded.items():
        values = reward.score_pixels(images.to(reward.device), texts, metadata)
        scores[name] = values.to(images.device)
        total = total + reward.weight * scores[name]
    scores["avg"] = total
    return scores


def _record(run: Run, drawn: DrawnImages, loss: Tensor, gradient: Tensor) -> None:
    """Log the losses [B] of images and the root mean square of their gradients [B, ...]; keep what names an image whose
    loss is not finite."""
    # `gradient` is that of the image's part in the update's mean; what is logged is that of the image's own loss.
    rms = gradient.square().flatten(1).mean(1).sqrt() * images_per_update(run) / drawn.share
    run.meter.add(policy_loss=loss, image_gradient=rms)
    if run.config.train.reward_target:
        run.meter.add(target_reached_share=loss == 0)
    run.trained_rows.append(TrainedRows(loss, row_ids_of(drawn)))


def row_ids_of(drawn: DrawnImages) -> Tensor:
    """Return the names of a batch's images, [B, 2] int64 on the CPU, as in Minibatch."""
    last_step = torch.full((len(drawn.x_0),), drawn.path[0].step)
    return torch.stack([torch.tensor(drawn.batch.image_numbers), last_step], 1)


def finish_update(run: Run) -> None:
    """Check the parity of an update's velocities, and log its loss. Call it before `optimizer_step`."""
    _check_parity(run)
    _record_loss(run)


def _record_loss(run: Run) -> None:
    """Log the loss of an update, with train.beta times the distance to the reference."""
    # Ranks have equally many images and steps, so that the mean of their means is that of all.
    loss = run.meter.mean("policy_loss")
    distance = "gated_distance" if "gated_distance" in run.meter.sums else "reference_distance"
    if distance in run.meter.sums:
        loss = loss + run.config.train.beta * run.meter.mean(distance)
    run.meter.add(loss=loss)


@torch.no_grad()
def record_parity(run: Run, velocity: Tensor, stored: Tensor) -> None:
    """Log how far velocities [B, ...] are from those that the rollout computed at the same states and weights."""
    run.meter.add_max(**{PARITY: (velocity - stored).abs()})


def _check_parity(run: Run) -> None:
    """Raise ParityError, on all ranks alike, if an update's velocities are further from the rollout's than
    train.parity_limit. What is saved is saved first, where no weight has moved."""
    largest = run.meter.maxima.get(PARITY)
    limit = run.config.train.parity_limit * PARITY_UNIT
    if largest is None or not limit:
        return
    _, gap = distributed.over_ranks(torch.zeros_like(largest)[None], largest[None])

    # A NaN exceeds no limit here: the error about its loss or gradient names its image.
    if not gap.item() > limit:
        return
    if run.epoch > run.saved_epoch and run.step == run.first_step:
        save.save(run)
    raise ParityError(
        f"epoch {run.epoch + 1}: velocities of the update differ from the rollout's at the same states by up to "
        f"{gap.item():.3g} (limit {limit:g}, train.parity_limit in thousandths); docs/design/parity.md has the ways "
        f"out. This was found in update {run.step + 1}{save.state_after_failure(run)}"
    )
