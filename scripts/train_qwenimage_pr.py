"""Per-step branch exploration on Qwen-Image: credit every denoising step with the reward of its own noise.

    torchrun --nproc_per_node=8 scripts/train_qwenimage_pr.py --config config/grpo.py:pickscore_qwenimage_pr

Paper: TempFlow-GRPO, arXiv:2508.04324. A deterministic trunk goes from noise to image; at each of its steps noisy
branches leave it and are finished deterministically. They differ in that step's noise alone, so their rewards rank it,
and steps are weighted by how noisy they are. Without arguments it trains the shipped tiny model.
"""

import torch
from absl import app
from ml_collections import config_flags

from flow_grpo import run as runs
from flow_grpo.advantages import group_advantages
from flow_grpo.diffusers_patch import qwenimage_pipeline_with_logprob as qwenimage
from flow_grpo.fsdp_utils import mine
from flow_grpo.losses import clipped_surrogate
from flow_grpo.optimization import accumulate, kl_penalty, optimizer_step, policy_step, reference_step
from flow_grpo.rng import generator
from flow_grpo.rollout import concat, from_trace, minibatches
from flow_grpo.settings import check_branches

IGNORED = ("sample.sde_window_size", "sample.sde_window_range")


def rollout(run, batch, epoch):
    """Sample a trunk per row and its branches: the steps to train, and the branches' images [B, K, J, 3, H, W]."""
    sample, embeds = run.config.sample, run.embed(batch.prompts)
    branched = run.model.pipeline_with_logprob_perstep(
        run.pipeline,
        embeds,
        [generator(run.config.seed, "noise", epoch, image) for image in batch.images],
        steps=range(run.plan.num_trained_steps),  # never the last: its density is a spike
        num_branches=sample.num_branches,
        completion_batch_size=sample.completion_batch_size,
        velocity=run.velocity,
        **runs.sampling(run),
    )
    how = dict(num_trained_steps=run.plan.num_trained_steps, step_weight=run.config.train.step_weight)
    return from_trace(branched.trace, embeds, batch.images, **how), branched.images


def update(run, rows):
    """Add the gradient of a minibatch: the clipped objective of each branch, times its step's noise weight."""
    train, reference = run.config.train, reference_step(run, rows)
    step = policy_step(run, rows)
    clamped = rows.advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    weighted = rows.weights * clipped_surrogate(step.log_prob, rows.log_probs, clamped, train.clip_range)
    run.meter.add(policy_loss=weighted)
    accumulate(run, weighted + kl_penalty(run, step, reference), step, rows)


def main(config, model=qwenimage):
    run = runs.start(config, model, check_branches, IGNORED)
    for epoch in runs.epochs(run):
        trunks, scores, steps = [], [], []
        for batch in runs.batches(run, epoch):
            with run.board.timed("rollout"):
                kept, images = rollout(run, batch, epoch)
            trunks.append(kept)
            scores.append(runs.score_images(run, images, batch))
            step_of_trunk = kept.images[:, None] * run.plan.num_trained_steps + torch.arange(run.plan.num_trained_steps)
            steps.append(
                step_of_trunk[:, :, None].expand(-1, -1, run.plan.num_branches)
            )  # a group: one step's branches

        rewards, groups = runs.gather_rewards(run, epoch, scores, torch.cat(steps))
        advantages = group_advantages(rewards, groups, config.sample.global_std)
        trunks = concat(trunks)
        trunks.advantages += mine(advantages).view(trunks.advantages.shape).to(run.device)

        for inner in range(config.train.inner_epochs):
            for update_rows in minibatches(trunks, run.plan, config.seed, epoch, inner):
                with run.board.timed("update"):
                    for rows in update_rows:
                        update(run, rows)
                    optimizer_step(run)
    runs.finish(run)


if __name__ == "__main__":
    flag = config_flags.DEFINE_config_file("config", "config/grpo.py:shapes_qwenimage_pr", "Which experiment to run.")
    app.run(lambda _: main(flag.value))
