"""Sampling of an epoch's images by continuous batching: every image or trunk is a request of its own."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from flow_grpo.algorithms.rollout import StoredSteps, from_trace
from flow_grpo.base import distributed, rng
from flow_grpo.base.prompt import Prompt
from flow_grpo.data import prompts
from flow_grpo.data.prompts import Batch, BatchRow, PlannedBatch
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.denoise_with_logprob import Batching, ForwardContext, denoise
from flow_grpo.diffusers_patch.request import Request
from flow_grpo.diffusers_patch.sample_with_logprob import Samples, SamplingJob, post_decode, prepare_encode
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.run.run import Run
from flow_grpo.settings.objectives import OBJECTIVES
from flow_grpo.weights import fsdp_utils, policies

# A window, or the steps at which branches leave; range(0) = no noise.
NoisySteps = Callable[[PlannedBatch], range]


class EqualForwards:
    """The policy's velocity, computed equally often on every rank, since each forward gathers sharded weights.

    Ranks need different numbers of forwards: one that has finished its images runs dummy forwards in `wait`.
    """

    def __init__(self, run: Run):
        self.run = run
        self.last_inputs: tuple[Tensor, Tensor, Condition, float, Size] | None = None

    def __call__(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        # Ranks that have finished learn in `wait` that this one has not.
        distributed.any_rank(True)
        self.last_inputs = (x, t, condition, guidance_scale, size)
        return self.run.velocity(*self.last_inputs)

    @torch.no_grad()
    def wait(self) -> None:
        """Repeat the last forward until all ranks have finished; run.num_forwards does not count these."""
        assert self.last_inputs is not None, "every rank has images to sample"
        while distributed.any_rank(False):
            policies.predict(self.run.model, self.run.config.precision, *self.last_inputs)


def batches(run: Run, epoch: int, scouts_per_image: int = 0) -> Iterable[PlannedBatch]:
    """Return this rank's batches of an epoch, under a progress bar.

    Args:
        scouts_per_image: above 0: batches of the same groups, with this many scouts in place of each image.
    """
    plan = run.plan
    name = "rollout"
    if scouts_per_image:
        name = "scouts"
        plan = replace(
            plan,
            batch_size=scouts_per_image * plan.batch_size,
            group_size=scouts_per_image * plan.group_size,
        )
    of_rank = prompts.epoch_batches(
        run.prompts.train, plan, run.config.seed, epoch, run.rank, run.world_size, run.prompt_weights
    )
    return run.board.bar(of_rank, f"epoch {epoch + 1}, {name}", total=plan.batches_per_epoch)


def sample_epoch(
    run: Run,
    epoch: int,
    noisy_steps: NoisySteps,
    num_branches: int = 1,
    *,
    noise_indices: list[int] | None = None,
    scouts_per_image: int = 0,
) -> Iterator[tuple[Batch, Samples]]:
    """Draw this rank's images of an epoch; yields some as soon as they are decoded, in any order.

    Args:
        noisy_steps: of a batch: its window, or the steps at which branches leave; range(0) = no noise.
        num_branches: above 1: number of branches that leave each noisy step of a trunk.
        noise_indices: for each image of the epoch, the number of the scout whose noise it starts from; None = noise of
            its own. Images that follow scouts are sampled by the update's weights, whatever sample.rollout_weights
            says.
        scouts_per_image: above 0: draw this many scouts of each image, with sample.scout_ratio of the forwards after
            the noise.
    """
    requests = _requests(run, epoch, noisy_steps, num_branches, noise_indices, scouts_per_image)
    fast = nullcontext
    if not noise_indices:
        fast = policies.fast_forwards(run.config.sample.rollout_weights, run.model.transformer)
    num_images = run.plan.num_images * max(scouts_per_image, 1)
    return _sample_requests(run, requests, fast, num_images)


def _sample_requests(
    run: Run, requests: Iterator[Request], fast: ForwardContext, num_images: int
) -> Iterator[tuple[Batch, Samples]]:
    """Denoise and decode requests; yield some images at a time, with the batch that these make, as soon as they are
    decoded. Raises RuntimeError if the weights are updated before all have been yielded.

    Args:
        fast: () -> context of the forwards whose velocity enters no log-prob.
        num_images: of the epoch, over all ranks.
    """
    config = run.config
    updates_before = run.step
    equal_forwards = EqualForwards(run) if fsdp_utils.is_sharded(run.model.network) else None
    velocity = equal_forwards or run.velocity

    # A batch that is not full is filled up with copies of a row, so more rows than the epoch has images are wasted. All
    # ranks' images count, not this rank's: so a forward has the same shape on any number of GPUs.
    ode_rows = config.sample.completion_batch_size or config.sample.batch_size
    batching = Batching(config.sample.batch_size, min(ode_rows, num_images))
    finished = denoise(velocity, requests, batching, run.exact, fast)
    decoded = post_decode(run.model, finished, vae_batch_size=min(config.vae_batch_size, num_images * run.size.frames))
    while True:
        with run.board.timed("rollout"):
            part = next(decoded, None)
            if part is None and equal_forwards:
                equal_forwards.wait()
        if part is None:
            break
        decoded_requests, samples = part
        yield prompts.pick(request.name for request in decoded_requests), samples

        # The caller has run in between. After an update the rest would be sampled by another policy.
        if run.step != updates_before:
            raise RuntimeError(f"update {run.step} came before its epoch had drawn all of its images")
    run.epoch_metrics["batch_occupancy"] = batching.occupancy


def _requests(
    run: Run,
    epoch: int,
    noisy_steps: NoisySteps,
    num_branches: int,
    noise_indices: list[int] | None,
    scouts_per_image: int,
) -> Iterator[Request]:
    """Yield the requests of all batches in one stream, so that forwards are filled across batches."""
    sample = run.config.sample
    params = run.params
    if scouts_per_image:
        params = replace(params, flash_ratio=sample.scout_ratio)

    @cache
    def shorten(prompt: Prompt) -> Condition:
        # Cached, since its length makes the host wait for the device.
        return run.embed_one(prompt).trimmed(sample.text_multiple)

    for batch in batches(run, epoch, scouts_per_image):
        indices = batch.image_numbers
        if noise_indices:
            indices = [noise_indices[image] for image in batch.image_numbers]
        generators = [rng.generator(run.config.seed, "noise", epoch, index) for index in indices]
        yield from prepare_encode(
            SamplingJob(run.model, run.embed(batch.prompts), generators, params, run.size),
            noisy_steps=noisy_steps(batch),
            names=[BatchRow(batch, row) for row in range(len(batch.image_numbers))],
            num_branches=num_branches,
            scheduler=run.scheduler,
            latents=_group_noise(run, epoch, batch) if sample.same_latent else None,
            groups=batch.groups if sample.same_latent else None,
            short_conditions=[shorten(prompt) for prompt in batch.prompts] if sample.text_multiple else None,
        )


def _group_noise(run: Run, epoch: int, batch: Batch) -> Tensor:
    """Noise of a batch's images, one for each group, on whatever ranks its images are: they are equal until the
    window."""
    generators = [rng.generator(run.config.seed, "group noise", epoch, group) for group in batch.groups]
    return run.model.noise(run.size, generators)


def to_rollout(run: Run, samples: Samples, batch: Batch, num_trained_steps: int | None = None) -> StoredSteps:
    """Record the noisy steps of a batch's images as the update needs them.

    Args:
        num_trained_steps: the first so many of the noisy steps are trained; None = those of the run's plan.
    """
    if num_trained_steps is None:
        num_trained_steps = run.plan.num_trained_steps
    rollout = from_trace(
        samples.trace,
        run.embed(batch.prompts),
        list(batch.image_numbers),
        num_trained_steps=num_trained_steps,
        step_weight=run.config.train.step_weight,
    )
    if OBJECTIVES[run.config.train.objective].final_images:
        rollout.x_0 = samples.latents
    return rollout
