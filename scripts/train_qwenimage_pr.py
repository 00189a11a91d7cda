"""Per-step branch exploration on Qwen-Image: credit every denoising step with the reward of its own noise.

    torchrun --nproc_per_node=8 scripts/train_qwenimage_pr.py --config config/grpo.py:pickscore_qwenimage_pr

Paper: TempFlow-GRPO, arXiv:2508.04324. A deterministic trunk goes from noise to image; at each of its steps noisy
branches leave it and are finished deterministically. They differ in that step's noise alone, so their rewards rank it,
and steps are weighted by how noisy they are. Without arguments it trains the shipped tiny model.
"""

import torch

from flow_grpo import checks, command_line, loop, sampling, startup
from flow_grpo.diffusers_patch import qwenimage_pipeline_with_logprob as qwenimage
from flow_grpo.optimization import accumulate, kl_penalty, optimizer_step, recompute_log_probs, score_rows, surrogate
from flow_grpo.rollout import concat, credit, minibatches


def rollout(run, epoch):
    """Sample trunks and their branches; yields, as they are finished, the steps to train and the branches' scores."""
    noisy = range(run.plan.num_trained_steps)  # never the last: its density is a spike
    branching = dict(noisy=noisy, num_branches=run.plan.num_branches)
    for batch, branched in sampling.sampled(run, epoch, lambda _: branching):
        groups = groups_of(run, batch.images)
        yield sampling.remember(run, branched, batch), sampling.score_images(run, branched, batch, groups)


def update(run, rows):
    """Add the gradient of a minibatch: the clipped objective of each branch, times its step's noise weight."""
    step, reference = score_rows(run, rows)
    weighted = rows.weights * surrogate(run, step, rows)
    run.meter.add(policy_loss=weighted)
    accumulate(run, weighted + kl_penalty(run, step, reference), rows, step)


def groups_of(run, images):
    """[B, K, J]: a group is the branches of one trunk's step; its number is the same on any number of ranks."""
    steps = torch.arange(run.plan.num_trained_steps)
    groups = torch.tensor(images)[:, None] * len(steps) + steps
    return groups[:, :, None].expand(-1, -1, run.plan.num_branches)


def main(config, model=qwenimage):
    run = startup.start(config, model, checks.PR)
    for epoch in loop.epochs(run):
        trunks, scores = zip(*rollout(run, epoch))
        rewards, step_of_trunk = sampling.gather_rewards(run, epoch, scores)
        trunks = concat(trunks)
        recompute_log_probs(run, trunks)
        credit(trunks, *sampling.advantages(run, rewards, step_of_trunk))

        for inner in range(config.train.inner_epochs):
            for update_rows in minibatches(trunks, run.plan, config.seed, epoch, inner):
                with run.board.timed("update"):
                    for rows in update_rows:
                        update(run, rows)
                    optimizer_step(run)
    loop.finish(run)


if __name__ == "__main__":
    command_line.run(main, "config/grpo.py:shapes_qwenimage_pr")
