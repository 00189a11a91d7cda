"""Flow-GRPO on Qwen-Image: draw a group of images per prompt, score them, make the better ones more likely.

    torchrun --nproc_per_node=8 scripts/train_qwenimage.py --config config/grpo.py:pickscore_qwenimage

Paper: arXiv:2505.05470; noise inside a random window of steps as in Flow-GRPO-Fast and MixGRPO (arXiv:2507.21802).
`rollout` and `update` are the algorithm, `main` its loop. Without arguments it trains the shipped tiny model.
"""

import torch
from absl import app
from ml_collections import config_flags

from flow_grpo import fsdp_utils, losses, rng, settings
from flow_grpo.advantages import group_advantages
from flow_grpo.diffusers_patch import qwenimage_pipeline_with_logprob as qwenimage
from flow_grpo.optimization import accumulate, kl_penalty, optimizer_step, policy_step, reference_step
from flow_grpo.rollout import concat, from_trace, minibatches
from flow_grpo.run import batches, epochs, finish, gather_rewards, sampling, score_images, start

IGNORED = ("sample.completion_batch_size",)


def window_of(config, epoch, batch):
    """The steps that are sampled with noise: the same for all images of a group, on whatever rank they are."""
    sample = config.sample
    if sample.sde_window_size == 0:
        return range(sample.num_steps - 1)
    return rng.draw_window(config.seed, epoch, batch.block, sample.sde_window_size, sample.sde_window_range)


def rollout(run, batch, epoch):
    """Sample a batch: SDE steps inside the window, ODE steps outside it."""
    config = run.config
    embeds = run.embed(batch.prompts)
    sampled = run.model.pipeline_with_logprob(
        run.pipeline,
        embeds,
        [rng.generator(config.seed, "noise", epoch, image) for image in batch.images],
        window=window_of(config, epoch, batch),
        velocity=run.velocity,
        **sampling(run),
    )
    kept = dict(num_trained_steps=run.plan.num_trained_steps, step_weight=config.train.step_weight)
    return from_trace(sampled.trace, embeds, batch.images, **kept), sampled.images


def update(run, rows):
    """Add the gradient of Flow-GRPO's loss (eq. 5) over a minibatch of (image, step) rows."""
    train = run.config.train
    reference = reference_step(run, rows)
    step = policy_step(run, rows)
    advantages = rows.advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    surrogate = losses.clipped_surrogate(step.log_prob, rows.log_probs, advantages, train.clip_range)
    run.meter.add(policy_loss=rows.weights * surrogate)
    accumulate(run, rows.weights * surrogate + kl_penalty(run, step, reference), step, rows)


def main(config, model=qwenimage):
    run = start(config, model, settings.check_window, IGNORED)
    for epoch in epochs(run):
        sampled, scores, groups = [], [], []
        for batch in batches(run, epoch):
            with run.board.timed("rollout"):
                kept, images = rollout(run, batch, epoch)
            sampled.append(kept)
            scores.append(score_images(run, images, batch))
            groups += batch.groups

        rewards, groups = gather_rewards(run, epoch, scores, torch.tensor(groups))
        advantages = fsdp_utils.mine(group_advantages(rewards, groups, config.sample.global_std))
        sampled = concat(sampled)
        sampled.advantages += advantages.to(run.device)[:, None, None]  # an image's advantage, at each of its steps

        with run.board.timed("update"):
            for inner in range(config.train.inner_epochs):
                for rows_of_update in minibatches(sampled, run.plan, config.seed, epoch, inner):
                    for rows in rows_of_update:
                        update(run, rows)
                    optimizer_step(run)
    finish(run)


if __name__ == "__main__":
    flag = config_flags.DEFINE_config_file("config", "config/grpo.py:shapes_qwenimage", "Which experiment to run.")
    app.run(lambda _: main(flag.value))
