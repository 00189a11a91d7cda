"""Per-step branch exploration on Qwen-Image: credit every denoising step with the reward of its own noise.

    torchrun --nproc_per_node=8 scripts/train_qwenimage_pr.py --config config/grpo.py:pickscore_qwenimage_pr

Paper: TempFlow-GRPO, arXiv:2508.04324. A deterministic trunk goes from noise to image; at each of its steps noisy
branches leave it and are finished deterministically. They differ in that step's noise alone, so their rewards rank it,
and steps are weighted by how noisy they are. Without arguments it trains the shipped tiny model.
"""

from collections.abc import Iterator

import torch
from ml_collections import ConfigDict
from torch import Tensor
from train_qwenimage import update  # Flow-GRPO's loss, whose rows have several outcomes and the weights of their steps

from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.algorithms.rollout import Rollout, concat, credit, minibatches
from flow_grpo.run import sampling
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.optimization import optimise, recompute_log_probs
from flow_grpo.run.run import Run
from flow_grpo.run.save import save
from flow_grpo.run.startup import start
from flow_grpo.settings import checks, command_line


def rollout(run: Run, epoch: int) -> Iterator[tuple[Rollout, sampling.Scored]]:
    """Sample trunks and their branches; yields, as they are finished, the steps to train and the branches' scores."""
    noisy = range(run.plan.num_trained_steps)  # never the last: its density is a spike
    branching = sampling.Walk(noisy, run.plan.num_branches)
    for batch, branched in sampling.sampled(run, epoch, lambda _: branching):
        groups = groups_of(batch.images, run.plan, run.config.sample.baseline)
        yield sampling.remember(run, branched, batch), sampling.score_images(run, branched, batch, groups)


def groups_of(images: range, plan: BatchPlan, baseline: str) -> Tensor:
    """[B, K, J]: a group is the branches of one trunk's step, or of a prompt's trunks at one step (sample.baseline).

    Its number is the same on any number of ranks.
    """
    steps, trunks = torch.arange(plan.num_trained_steps), torch.tensor(images)
    owners = trunks // plan.group_size if baseline == "prompt" else trunks
    groups = owners[:, None] * len(steps) + steps
    return groups[:, :, None].expand(-1, -1, plan.num_branches)


def main(config: ConfigDict) -> None:
    run = start(config, checks.PR)
    for epoch in range(run.epoch, config.num_epochs):
        evaluate(run, epoch)  # what is due by config.eval_freq
        trunks, scores = zip(*rollout(run, epoch))
        trunks = concat(trunks)
        rewards, steps_of_trunks = sampling.gather_rewards(run, epoch, scores)
        recompute_log_probs(run, trunks)
        credit(trunks, *sampling.advantages(run, rewards, steps_of_trunks))  # a branch's advantage, at its own step
        for inner in range(config.train.inner_epochs):
            optimise(run, minibatches(trunks, run.plan, config.seed, epoch, inner), update)
        log_epoch(run, epoch)
        if is_due(config.save_freq, run.epoch):
            save(run)
        if run.stopped:
            break
    finish(run)


if __name__ == "__main__":
    command_line.run(main, "config/grpo.py:shapes_qwenimage_pr")
