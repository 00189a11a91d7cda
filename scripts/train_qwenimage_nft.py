"""DiffusionNFT on Qwen-Image: sample without noise, then learn on the forward process what tells good from bad images.

    torchrun --nproc_per_node=8 scripts/train_qwenimage_nft.py --config config/nft.py:pickscore_qwenimage_nft

Paper: arXiv:2509.16117. An old policy samples deterministically, and its images are noised afresh. The policy is
trained towards good images; its reflection about the old policy (2 v_old - v at beta = 1) towards bad ones. There are
no log-probs, so any solver may sample. Without arguments it trains the shipped tiny model.
"""

from collections.abc import Iterator
from functools import partial

import torch
from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.flow_matching import noised
from flow_grpo.algorithms.rollout import CleanMinibatch, Finished, concat, credit, minibatches
from flow_grpo.base import rng
from flow_grpo.run import sampling
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.optimization import accumulate, optimise
from flow_grpo.run.run import Run
from flow_grpo.run.save import save
from flow_grpo.run.startup import start
from flow_grpo.settings import checks, command_line

OLD = "old"  # the policy that samples: an average of the trained one's past


def rollout(run: Run, epoch: int) -> Iterator[tuple[Finished, sampling.Scored]]:
    """Sample with the old policy, without noise, and draw the timesteps at which each image will be trained."""
    grid, num_steps = run.scheduler.timesteps[:-1], run.plan.num_trained_steps
    with run.shadows[OLD].applied():
        for batch, drawn in sampling.sampled(run, epoch, lambda _: sampling.Walk(range(0))):
            streams = [rng.generator(run.config.seed, "timesteps", epoch, noise_of(run, i)) for i in batch.images]
            places = torch.stack([torch.randperm(len(grid), generator=stream)[:num_steps] for stream in streams])
            nothing, numbers = torch.zeros(len(batch.images), 1, 1, device=run.device), torch.tensor(batch.images)
            embeds, timesteps = run.embed(batch.prompts), grid[places.to(run.device)]
            finished = Finished(drawn.latents, timesteps, nothing, nothing + 1, embeds, numbers)
            yield finished, sampling.score_images(run, drawn, batch, torch.tensor(batch.groups))


def noise_of(run: Run, image: int) -> int:
    """The number that names an image's noises and levels: its own, or its group's first image's (train.shared_noise).

    Advantages of a group add up to 0, so what its images have in common cancels in the gradient: the noise that
    velocities are compared with, above all.
    """
    return image - image % run.plan.group_size if run.config.train.shared_noise else image


def own_share(run: Run) -> float:
    """The weight of flow matching on the run's own images."""
    return run.config.train.flow_matching_weight


def velocities(run: Run, rows: CleanMinibatch, x_t: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Of the old policy, of the reference (None where train.beta is 0) and, with gradients, of the trained one."""
    with torch.no_grad():
        with run.shadows[OLD].applied():
            old = run.velocity(x_t, rows.timesteps, rows.embeds)
        reference = None
        if run.reference:
            scale = run.reference.guidance(run.config.sample.guidance_scale)
            with run.reference.applied():
                reference = run.velocity(x_t, rows.timesteps, rows.embeds, scale)
    return old, reference, run.velocity(x_t, rows.timesteps, rows.embeds)


def update(run: Run, rows: CleanMinibatch, epoch: int, inner: int) -> None:
    """Add the gradient of DiffusionNFT's loss over a minibatch of (image, timestep) rows, noised afresh."""
    train, sigma, names = run.config.train, rows.timesteps / 1000, ("forward noise", epoch, inner)
    streams = [rng.generator(run.config.seed, *names, noise_of(run, i), k) for i, k in rows.where.tolist()]
    x_t = noised(rows.latents, rng.normal(rows.latents.shape[1:], streams, run.device), rows.timesteps)
    old, reference, velocity = velocities(run, rows, x_t)
    good = losses.nft_reward_prob(rows.advantages, train.adv_clip_max)
    loss = 5 * losses.nft_loss(velocity, old, x_t, rows.latents, sigma, good, train.nft_beta)
    if share := own_share(run):
        loss = loss + 5 * share * losses.own_flow_matching_loss(velocity, x_t, rows.latents, sigma)
    run.meter.add(policy_loss=loss, old_distance=(velocity - old).square(), advantage_abs_mean=rows.advantages.abs())
    if reference is not None:
        distance = (velocity - reference).square().flatten(1).mean(1)
        norm, reference_norm = (v.square().flatten(1).mean(1).sqrt() for v in (velocity, reference))
        run.meter.add(reference_distance=distance, relative_velocity_norm=norm / reference_norm)
        loss = loss + train.beta * distance
    accumulate(run, loss, rows)


def main(config: ConfigDict) -> None:
    run = start(config, checks.NFT, shadows=(OLD,))
    for epoch in range(run.epoch, config.num_epochs):
        evaluate(run, epoch)  # what is due by config.eval_freq
        images, scores = zip(*rollout(run, epoch))
        images = concat(images)
        rewards, groups = sampling.gather_rewards(run, epoch, scores)
        credit(images, *sampling.advantages(run, rewards, groups))
        for inner in range(config.train.inner_epochs):
            updates = minibatches(images, run.plan, config.seed, epoch, inner)
            optimise(run, updates, partial(update, epoch=epoch, inner=inner))
        if is_due(config.train.old_interval, epoch + 1):
            run.shadows[OLD].move(1 - losses.old_policy_decay(run.step, config.train.old_decay_schedule))
        log_epoch(run, epoch)
        if is_due(config.save_freq, run.epoch):
            save(run)
        if run.stopped:
            break
    finish(run)


if __name__ == "__main__":
    command_line.run(main, "config/nft.py:shapes_qwenimage_nft")
