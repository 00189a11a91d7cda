"""An epoch's images, drawn by continuous batching: every image or trunk is a request of its own."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from flow_grpo.algorithms.rollout import Rollout, from_trace
from flow_grpo.base import distributed, rng
from flow_grpo.data import prompts
from flow_grpo.data.prompts import Batch, BatchRow
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.denoise_with_logprob import Batching, denoise
from flow_grpo.diffusers_patch.request import Request
from flow_grpo.diffusers_patch.sample_with_logprob import Samples, SamplingJob, post_decode, prepare_encode
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.run.run import Run
from flow_grpo.weights import fsdp_utils, policies

NoisySteps = Callable[[Batch], range]  # a window, or the steps at which branches leave; range(0) = no noise


class EqualForwards:
    """The policy's velocity, computed equally often on every rank, since each forward gathers sharded weights.

    Ranks need different numbers of forwards: one that has finished its images runs dummy forwards in `wait`.
    """

    def __init__(self, run: Run):
        self.run, self.last = run, None

    def __call__(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        distributed.any_rank(True)
        self.last = x, t, condition, guidance_scale, size
        return self.run.velocity(*self.last)

    @torch.no_grad()
    def wait(self) -> None:
        """Until all ranks have finished."""
        while distributed.any_rank(False):
            policies.predict(self.run.model, self.run.config.precision, *self.last)  # run.num_forwards does not count


def batches(run: Run, epoch: int, scouts_per_image: int = 0) -> Iterator[Batch]:
    """This rank's batches of an epoch, under a progress bar: of images, or of so many scouts for each image, in batches
    of the same groups."""
    plan = run.plan
    if scouts_per_image:
        sizes = dict(batch_size=scouts_per_image * plan.batch_size, group_size=scouts_per_image * plan.group_size)
        plan = replace(plan, **sizes)
    of_rank = prompts.epoch_batches(run.train_prompts, plan, run.config.seed, epoch, run.rank, run.world_size)
    name = "scouts" if scouts_per_image else "rollout"
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
    """Draw this rank's images of an epoch; yields some as soon as they are decoded, in whatever order.

    Args:
        num_branches: above 1: so many branches leave each noisy step of a trunk.
        noise_indices: for each image of the epoch, the number of the scout whose noise it starts from. These images are
            sampled by the update's weights, whatever sample.rollout_weights says. None = noise of their own.
        scouts_per_image: above 0: so many scouts of each, with sample.scout_ratio of the forwards after the noise.
    """
    requests = _requests(run, epoch, noisy_steps, num_branches, noise_indices, scouts_per_image)
    fast = nullcontext if noise_indices else policies.fast_forwards(run.config, run.model.transformer)
    images = run.plan.num_images * max(scouts_per_image, 1)
    return _samples(run, requests, fast, images)


def _samples(run: Run, requests: Iterator[Request], fast: Callable, images: int) -> Iterator[tuple[Batch, Samples]]:
    config, step, sharded = run.config, run.step, fsdp_utils.is_sharded(run.model.network)
    velocity = EqualForwards(run) if sharded else run.velocity

    # Forwards and decodes that are not full are filled with copies, so none is larger than the epoch. That is the epoch
    # of all ranks: a forward has one shape on any number of GPUs.
    ode_rows = config.sample.completion_batch_size or config.sample.batch_size
    batching = Batching(config.sample.batch_size, min(ode_rows, images))
    finished = denoise(velocity, requests, batching, run.exact, fast)
    decoded = post_decode(run.model, finished, vae_batch_size=min(config.vae_batch_size, images))
    while True:
        with run.board.timed("rollout"):
            requests, samples = next(decoded, (None, None))
            if requests is None and sharded:
                velocity.wait()
        if requests is None:
            break
        yield prompts.pick(request.name for request in requests), samples
        if run.step != step:
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
    """The requests of all batches in one stream, so that forwards are filled across batches."""
    params, multiple = run.params, run.config.sample.text_multiple
    if scouts_per_image:
        params = replace(params, flash_ratio=run.config.sample.scout_ratio)
    shorten = lru_cache(maxsize=None)(lambda prompt: run.embed_one(prompt).trimmed(multiple))  # waits for the device
    for batch in batches(run, epoch, scouts_per_image):
        numbers = [noise_indices[image] for image in batch.image_numbers] if noise_indices else batch.image_numbers
        generators = [rng.generator(run.config.seed, "noise", epoch, number) for number in numbers]
        shared, latents = run.config.sample.same_latent, None
        if shared:  # what all images of a group start from, on whatever rank: they are one until the window
            of_group = [rng.generator(run.config.seed, "group noise", epoch, group) for group in batch.groups]
            latents = run.model.noise(run.size, of_group)
        yield from prepare_encode(
            SamplingJob(run.model, run.embed(batch.prompts), generators, params, run.size),
            noisy_steps=noisy_steps(batch),
            names=[BatchRow(batch, row) for row in range(len(batch.image_numbers))],
            num_branches=num_branches,
            scheduler=run.scheduler,
            latents=latents,
            groups=batch.groups if shared else None,
            short_conditions=[shorten(prompt) for prompt in batch.prompts] if multiple else None,
        )


def to_rollout(run: Run, samples: Samples, batch: Batch) -> Rollout:
    """The noisy steps of some images, as the update needs them."""
    return from_trace(
        samples.trace,
        run.embed(batch.prompts),
        list(batch.image_numbers),
        num_trained_steps=run.plan.num_trained_steps,
        step_weight=run.config.train.step_weight,
    )
