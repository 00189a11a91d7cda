"""DiffusionNFT on Qwen-Image: sample without noise, then learn on the forward process what tells good from bad images.

    torchrun --nproc_per_node=8 scripts/train_qwenimage_nft.py --config config/nft.py:pickscore_qwenimage_nft

Paper: arXiv:2509.16117. An old policy samples deterministically, and its images are noised afresh. The policy is
trained towards good images; its reflection about the old policy (2 v_old - v at beta = 1) towards bad ones. There are
no log-probs, so any solver may sample. Without arguments it trains the shipped tiny model.
"""

from flow_grpo.command_line import checks, command_line

config = None
if __name__ == "__main__":  # before torch is imported, so that --help, --list and mistakes are answered at once
    config = command_line.parse("config/nft.py:shapes_qwenimage_nft", checks.NFT)


import torch
from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo.algorithms import losses, ratio_statistics, schedules
from flow_grpo.algorithms.advantages import bounded
from flow_grpo.algorithms.flow_matching import noised, stratified_timesteps
from flow_grpo.algorithms.rollout import FinishedImages, ImageRows, concat
from flow_grpo.algorithms.surrogates import ForwardStep
from flow_grpo.base import rng
from flow_grpo.data.prompts import Batch
from flow_grpo.diffusers_patch.sample_with_logprob import Samples
from flow_grpo.monitoring.metrics import Meter
from flow_grpo.run import rewards
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.run import Run
from flow_grpo.run.sampling import sample_epoch
from flow_grpo.run.save import save
from flow_grpo.run.startup import start
from flow_grpo.run.update import add_data_gradients, backward, optimizer_step, pull, record_by_step, updates
from flow_grpo.settings import declared
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES

# The policy that samples: an average of the trained one's past.
OLD = "old"
# Another such average, which samples in its place where train.sampler_decay_schedule asks for it.
SAMPLER = "sampler"


@declared.ours("rollout")
def rollout(run: Run, epoch: int) -> tuple[FinishedImages, list[rewards.Submitted]]:
    """Sample without noise, with the old policy or the sampler, and draw the timesteps at which each image will be
    trained. Returns both, and the images that are being scored."""
    stored = []
    submitted = []
    sampler = run.extra_policies.get(SAMPLER, run.extra_policies[OLD])
    with sampler.applied():
        # With sample.scouts_per_image, cheap images choose the noises that the epoch's images start from.
        noise_indices = rewards.scout(run, epoch, without_noise)
        for batch, samples in sample_epoch(run, epoch, without_noise, noise_indices=noise_indices):
            stored.append(finished_images(run, epoch, batch, samples))
            submitted.append(rewards.submit(run, samples, batch))
    return concat(stored), submitted


def without_noise(batch: Batch) -> range:
    """No step of the images of a batch is noisy."""
    return range(0)


def finished_images(run: Run, epoch: int, batch: Batch, samples: Samples) -> FinishedImages:
    """Record of the images of a batch, each with K of the sampled noise levels, drawn from equal shares of these."""
    generators = []
    for image in batch.image_numbers:
        generators.append(rng.generator(run.config.seed, "timesteps", epoch, noise_index(run, image)))
    levels = run.scheduler.timesteps[:-1]
    return FinishedImages(
        image_numbers=torch.tensor(batch.image_numbers),
        condition=run.embed(batch.prompts),
        timesteps=stratified_timesteps(levels, run.plan.num_trained_steps, generators),
        x_0=samples.latents,
        text_widths=torch.tensor(samples.text_widths),
    )


def noise_index(run: Run, image: int) -> int:
    """Return the image number from which an image's noises and levels are seeded: its own, or with train.shared_noise
    that of the first image of its group.

    The advantages of a group add up to 0, so whatever its images have in common cancels in the gradient. With shared
    noise that includes the noise in the velocities' target, noise - x_0.
    """
    if run.config.train.shared_noise:
        return image - image % run.plan.group_size
    return image


def draw_noise(run: Run, rows: ImageRows) -> Tensor:
    """Draw the noise of the rows' images, [R, N, C]: new noise for each image (with train.shared_noise for each group),
    timestep and pass over the rollout."""
    generators = []
    for image, step in rows.row_ids.tolist():
        index = noise_index(run, image)
        generators.append(rng.generator(run.config.seed, "forward noise", run.epoch, rows.inner_epoch, index, step))
    return rng.normal(rows.x_0.shape[1:], generators, run.device)


def frozen_velocities(run: Run, rows: ImageRows, x_t: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Velocities of the old policy (None where the objective does not read it) and of the reference (None where
    train.beta is 0).

    Call it before the trained policy's forward: it swaps weights in place, which that policy's graph would not survive.
    """
    scale = run.update_guidance
    old = None
    reference = None
    with torch.no_grad():
        if FORWARD_OBJECTIVES[run.config.train.forward_objective].old_policy:
            with run.extra_policies[OLD].applied():
                old = run.velocity(x_t, rows.timesteps, rows.condition, scale)
        if run.reference:
            with run.reference.applied():
                reference = run.velocity(x_t, rows.timesteps, rows.condition, run.reference.guidance(scale))
    return old, reference


@declared.ours("add_gradients")
def add_gradients(run: Run, rows: ImageRows) -> None:
    """Add the gradients of train.forward_objective, of flow matching and of the distance to the reference, over a
    minibatch of (image, timestep) rows that are noised afresh."""
    train = run.config.train

    # Noise the images, and ask all policies for their velocities there.
    noise = draw_noise(run, rows)
    x_t = noised(rows.x_0, noise, rows.timesteps)
    old, reference = frozen_velocities(run, rows, x_t)
    velocity = run.velocity(x_t, rows.timesteps, rows.condition, run.update_guidance)
    if old is None:
        old = velocity.detach()
    step = ForwardStep(
        velocity=velocity,
        old_velocity=old,
        x_t=x_t,
        x_0=rows.x_0,
        noise=noise,
        sigma=rows.timesteps / 1000,
        reference_velocity=reference,
        group_size=rows.group_size,
    )

    # The objective's loss of each row, and flow matching on all images alike, which keeps it stable.
    surrogate = FORWARD_OBJECTIVES[train.forward_objective].function(step, rows.advantages, train)
    loss = surrogate.loss
    if train.flow_matching_weight:
        error = losses.self_normalised_error(velocity, x_t, rows.x_0, step.sigma)
        loss = loss + losses.NFT_FACTOR * train.flow_matching_weight * error
    old_distance = (velocity - old).square()
    run.meter.add(policy_loss=loss, old_distance=old_distance, **surrogate.metrics)
    record_by_step(run, rows, policy_loss=loss, old_distance=old_distance.flatten(1).mean(1))
    if reference is not None:
        loss = loss + pull(run, rows, distance_that_counts(run, rows, velocity, reference))
    if surrogate.log_ratio is not None:
        record_forward_ratios(run, surrogate.log_ratio.detach(), surrogate.beyond)
    backward(run, loss, rows)


def distance_that_counts(run: Run, rows: ImageRows, velocity: Tensor, reference: Tensor) -> Tensor:
    """Distance to the reference's velocity for each row, [R], before train.beta; with train.adaptive_beta it counts
    less the better the image is."""
    train = run.config.train
    distance = reference_distance(run.meter, velocity, reference)
    if not train.adaptive_beta:
        return distance
    reward = losses.nft_reward_prob(bounded(rows.advantages, train), train.adv_clip_max)
    return losses.reference_share(reward) * distance


def reference_distance(meter: Meter, velocity: Tensor, reference: Tensor) -> Tensor:
    """Mean squared distance of velocities [R, N, C] to the reference's, [R]; logged with the ratio of their norms."""
    distance = (velocity - reference).square().flatten(1).mean(1)
    norm = velocity.square().flatten(1).mean(1).sqrt()
    reference_norm = reference.square().flatten(1).mean(1).sqrt()
    meter.add(reference_distance=distance, relative_velocity_norm=norm / reference_norm)
    return distance


def record_forward_ratios(run: Run, log_ratio: Tensor, beyond: Tensor | None) -> None:
    """Log the statistics of a minibatch's ratios, as `record_ratios` does."""
    # Before the epoch's first update the ratio must be 1 only if the old policy is a copy of the trained one.
    train = run.config.train
    old_is_a_copy = schedules.old_policy_decay(run.step, train.old_decay_schedule) == 0
    ratio_statistics.add_to_meter(
        run.meter,
        log_ratio,
        gap=log_ratio,
        clip_range=train.clip_range,
        on_policy=run.on_policy and old_is_a_copy,
        beyond=beyond,
    )


def kept_policies(config: ConfigDict) -> tuple[str, ...]:
    """Name the policies that are kept beside the trained one."""
    if config.train.sampler_decay_schedule >= 0:
        return OLD, SAMPLER
    return (OLD,)


def follow(run: Run) -> None:
    """Let the policies that sample and that the loss compares with follow the trained one, each by its schedule."""
    train = run.config.train
    run.extra_policies[OLD].move(1 - schedules.old_policy_decay(run.step, train.old_decay_schedule))
    if SAMPLER in run.extra_policies:
        run.extra_policies[SAMPLER].move(1 - schedules.old_policy_decay(run.step, train.sampler_decay_schedule))


def main(
    config: ConfigDict,
    rollout=rollout,
    add_gradients=add_gradients,
    advantages=rewards.advantages,
    updates=updates,
    script=checks.NFT,
) -> None:
    """Train; a fork passes functions of its own."""
    declared.check(config, rollout=rollout, add_gradients=add_gradients, advantages=advantages, updates=updates)
    run = start(config, script, extra_policies=kept_policies(config))
    for epoch in range(run.epoch, run.config.num_epochs):
        # Every config.eval_freq epochs, score the averaged weights on the prompts that choose best/.
        evaluate(run, epoch)

        # Groups of images per prompt, and how much better each image is than its group.
        stored, submitted = rollout(run, epoch)
        epoch_rewards = rewards.wait(run, epoch, submitted)
        stored.advantages, stored.loss_weight = advantages(run, epoch_rewards)
        stored.beta_gate = rewards.beta_gate(run, epoch_rewards)  # None without train.beta_gate

        # Fit good images, and with the reflected policy bad ones.
        with run.board.timed("update"):
            for minibatches in updates(run, stored):
                for rows in minibatches:
                    add_gradients(run, rows)
                    add_data_gradients(run, rows.row_ids, rows.num_update_rows, rows.inner_epoch)  # with train.data
                optimizer_step(run)

        # The policy that samples follows the trained one.
        follow(run)

        # The epoch counts as completed from here on. config.health may have lowered the learning rate, or have gone
        # back to the best weights.
        log_epoch(run, epoch)
        if is_due(run.config.save_freq, run.epoch):
            save(run)
        if run.stopped:
            break
    finish(run)


if config is not None:
    command_line.run(main, config)
