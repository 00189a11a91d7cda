"""DiffusionNFT on Qwen-Image: sample without noise, then learn on the forward process what tells good from bad images.

    torchrun --nproc_per_node=8 scripts/train_qwenimage_nft.py --config config/nft.py:pickscore_qwenimage_nft

Paper: arXiv:2509.16117. An old policy samples deterministically, and its images are noised afresh. The policy is
trained towards good images; its reflection about the old policy (2 v_old - v at beta = 1) towards bad ones. There are
no log-probs, so any solver may sample. Without arguments it trains the shipped tiny model.
"""

from flow_grpo.command_line import checks, command_line

if __name__ == "__main__":  # before torch is imported, so that --help, --list and mistakes are answered at once
    config = command_line.parse("config/nft.py:shapes_qwenimage_nft", checks.NFT)


import torch
from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo.algorithms import losses, ratio_statistics, schedules
from flow_grpo.algorithms.flow_matching import noised, stratified_timesteps
from flow_grpo.algorithms.rollout import Minibatch, Rollout, concat
from flow_grpo.algorithms.surrogates import ForwardStep
from flow_grpo.base import rng
from flow_grpo.run import rewards
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.run import Run
from flow_grpo.run.sampling import sample_epoch
from flow_grpo.run.save import save
from flow_grpo.run.startup import start
from flow_grpo.run.update import backward, optimizer_step, update_guidance, updates
from flow_grpo.settings import declared
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES

OLD = "old"  # the policy that samples: an average of the trained one's past


@declared.ours("rollout")
def rollout(run: Run, epoch: int) -> tuple[Rollout, list[rewards.Submitted]]:
    """Sample with the old policy, without noise, and draw the timesteps at which each image will be trained. Returns
    both, and the images that are being scored."""
    timesteps, num_steps = run.scheduler.timesteps[:-1], run.plan.num_trained_steps
    images, submitted = [], []
    with run.extra_policies[OLD].applied():
        noises = rewards.scout(run, epoch, lambda _: range(0))
        for batch, samples in sample_epoch(run, epoch, lambda _: range(0), noises=noises):
            numbers, condition = batch.image_numbers, run.embed(batch.prompts)
            streams = [rng.generator(run.config.seed, "timesteps", epoch, noise_of(run, image)) for image in numbers]
            trained = stratified_timesteps(timesteps, num_steps, streams)
            images.append(Rollout(torch.tensor(numbers), condition, trained, x_0=samples.latents))
            submitted.append(rewards.submit(run, samples, batch))
    return concat(images), submitted


def noise_of(run: Run, image: int) -> int:
    """The number that names an image's noises and levels: its own, or its group's first image's (train.shared_noise).

    Advantages of a group add up to 0, so what its images have in common cancels in the gradient: the noise that
    velocities are compared with, above all.
    """
    return image - image % run.plan.group_size if run.config.train.shared_noise else image


def frozen_velocities(run: Run, rows: Minibatch, x_t: Tensor) -> tuple[Tensor, Tensor | None]:
    """Of the old policy and of the reference (None where train.beta is 0). Before the trained policy's: full weights
    are swapped in place, which no waiting graph would survive."""
    inputs, reference, scale = (x_t, rows.timesteps, rows.condition), None, update_guidance(run.config)
    with torch.no_grad():
        with run.extra_policies[OLD].applied():
            old = run.velocity(*inputs, scale)
        if run.reference:
            with run.reference.applied():
                reference = run.velocity(*inputs, run.reference.guidance(scale))
    return old, reference


@declared.ours("add_gradients")
def add_gradients(run: Run, rows: Minibatch) -> None:
    """Add the gradients of train.forward_objective, of flow matching and of the distance to the reference, over a
    minibatch of (image, timestep) rows that are noised afresh."""
    train, names = run.config.train, ("forward noise", run.epoch, rows.inner_epoch)
    streams = [rng.generator(run.config.seed, *names, noise_of(run, i), k) for i, k in rows.row_ids.tolist()]
    noise = rng.normal(rows.x_0.shape[1:], streams, run.device)
    x_t = noised(rows.x_0, noise, rows.timesteps)
    old, reference = frozen_velocities(run, rows, x_t)
    velocity = run.velocity(x_t, rows.timesteps, rows.condition, update_guidance(run.config))
    policies = velocity, old, x_t, rows.x_0, noise, rows.timesteps / 1000, reference
    step = ForwardStep(*policies, group_size=run.plan.images_together)
    surrogate = FORWARD_OBJECTIVES[train.forward_objective].function(step, rows.advantages, train)
    loss = surrogate.loss
    if train.flow_matching_weight:
        own = losses.self_normalised_error(velocity, x_t, rows.x_0, step.sigma)
        loss = loss + 5 * train.flow_matching_weight * own
    run.meter.add(policy_loss=loss, old_distance=(velocity - old).square(), **surrogate.metrics)
    if reference is not None:
        distance = (velocity - reference).square().flatten(1).mean(1)
        norm, reference_norm = (v.square().flatten(1).mean(1).sqrt() for v in (velocity, reference))
        run.meter.add(reference_distance=distance, relative_velocity_norm=norm / reference_norm)
        loss = loss + train.beta * distance
    if surrogate.log_ratio is not None:
        is_old = run.on_policy and not schedules.old_policy_decay(run.step, train.old_decay_schedule)  # the trained one
        gap, how = surrogate.log_ratio.detach(), dict(on_policy=is_old, beyond=surrogate.beyond)
        ratio_statistics.add_to_meter(run.meter, gap, gap, train.clip_range, **how)
    backward(run, loss, rows)


def main(
    config: ConfigDict, rollout=rollout, add_gradients=add_gradients, advantages=rewards.advantages, script=checks.NFT
) -> None:
    declared.check(config, rollout=rollout, add_gradients=add_gradients, advantages=advantages)
    run = start(config, script, extra_policies=(OLD,))
    for epoch in range(run.epoch, config.num_epochs):
        evaluate(run, epoch)  # what is due by config.eval_freq
        stored, submitted = rollout(run, epoch)
        scores = rewards.wait(run, epoch, submitted)
        stored.advantages, stored.loss_weight = advantages(run, scores)
        with run.board.timed("update"):
            for minibatches in updates(run, stored):
                for rows in minibatches:
                    add_gradients(run, rows)
                optimizer_step(run)
        run.extra_policies[OLD].move(1 - schedules.old_policy_decay(run.step, config.train.old_decay_schedule))
        log_epoch(run, epoch)
        if is_due(config.save_freq, run.epoch):
            save(run)
        if run.stopped:
            break
    finish(run)


if __name__ == "__main__":
    command_line.run(main, config)
