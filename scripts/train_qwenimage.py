"""Flow-GRPO on Qwen-Image: draw a group of images per prompt, score them, make the better ones more likely.

    torchrun --nproc_per_node=8 scripts/train_qwenimage.py --config config/grpo.py:pickscore_qwenimage

Paper: arXiv:2505.05470; noise inside a window of steps, at random as in Flow-GRPO-Fast or moving as in MixGRPO
(arXiv:2507.21802), and GRPO-Guard (arXiv:2510.22319) are configs of it: see docs/algorithms/. `rollout` and `update`
are the algorithm, `main` its loop. Without arguments it trains the shipped tiny model.
"""

from collections.abc import Iterator

import torch
from ml_collections import ConfigDict

from flow_grpo.algorithms import windows
from flow_grpo.algorithms.rollout import Minibatch, Rollout, concat, credit, minibatches
from flow_grpo.data.prompts import Batch
from flow_grpo.run import sampling
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.optimization import accumulate, kl_penalty, optimise, recompute_log_probs, score_rows, surrogate
from flow_grpo.run.run import Run
from flow_grpo.run.save import save
from flow_grpo.run.startup import start
from flow_grpo.settings import checks, command_line


def rollout(run: Run, epoch: int) -> Iterator[tuple[Rollout, sampling.Scored]]:
    """Sample with SDE steps inside the window, ODE steps outside it; yields the steps to train and the scores."""

    def walk(batch: Batch) -> sampling.Walk:
        window = windows.window_at(run.config.sample, run.config.seed, epoch, batch.block, updates=run.step)
        return sampling.windowed(run, batch, epoch, window)

    for batch, images in sampling.sampled(run, epoch, walk):
        groups = torch.tensor(batch.groups)
        yield sampling.remember(run, images, batch), sampling.score_images(run, images, batch, groups)


def update(run: Run, rows: Minibatch) -> None:
    """Add the gradient of Flow-GRPO's loss (eq. 5) over a minibatch of (image, step) rows."""
    step, reference = score_rows(run, rows)
    policy_loss = rows.weights * surrogate(run, step, rows)
    run.meter.add(policy_loss=policy_loss)
    accumulate(run, policy_loss + kl_penalty(run, step, reference), rows, step)


def main(config: ConfigDict) -> None:
    run = start(config, checks.GRPO)
    for epoch in range(run.epoch, config.num_epochs):
        evaluate(run, epoch)  # what is due by config.eval_freq
        images, scores = zip(*rollout(run, epoch))
        images = concat(images)
        rewards, groups = sampling.gather_rewards(run, epoch, scores)
        recompute_log_probs(run, images)
        credit(images, *sampling.advantages(run, rewards, groups))  # an image's advantage, at each of its steps
        for inner in range(config.train.inner_epochs):
            optimise(run, minibatches(images, run.plan, config.seed, epoch, inner), update)
        log_epoch(run, epoch)
        if is_due(config.save_freq, run.epoch):
            save(run)
        if run.stopped:
            break
    finish(run)


if __name__ == "__main__":
    command_line.run(main, "config/grpo.py:shapes_qwenimage")
