"""Flow-GRPO on Qwen-Image: draw a group of images per prompt, score them, make the better ones more likely.

    torchrun --nproc_per_node=8 scripts/train_qwenimage.py --config config/grpo.py:pickscore_qwenimage

Paper: arXiv:2505.05470; noise inside a window of steps, at random as in Flow-GRPO-Fast or moving as in MixGRPO
(arXiv:2507.21802), and GRPO-Guard (arXiv:2510.22319) are configs of it: see docs/algorithms/. `rollout` and
`add_gradients` are the algorithm, `main` its loop. Without arguments it trains the shipped tiny model. minimal_grpo.py
is shorter.
"""

from flow_grpo.command_line import checks, command_line

if __name__ == "__main__":  # before torch is imported, so that --help, --list and mistakes are answered at once
    config = command_line.parse("config/grpo.py:shapes_qwenimage", checks.GRPO)

import torch
from ml_collections import ConfigDict

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.rollout import Minibatch, Rollout, concat
from flow_grpo.base import rng
from flow_grpo.data.prompts import Batch
from flow_grpo.run import rewards
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.run import Run
from flow_grpo.run.sampling import sample_epoch, to_rollout
from flow_grpo.run.save import save
from flow_grpo.run.startup import start
from flow_grpo.run.update import (
    backward,
    optimizer_step,
    recompute_log_probs,
    recompute_steps,
    record_ratios,
    reference_steps,
    updates,
)
from flow_grpo.settings import declared
from flow_grpo.settings.objectives import OBJECTIVES


@declared.ours("rollout")
def rollout(run: Run, epoch: int) -> tuple[Rollout, list[rewards.Submitted]]:
    """Sample with SDE steps inside the window and ODE steps outside it. Returns the noisy steps, and the images that
    are being scored."""

    def window_of(batch: Batch) -> range:
        return window_at(run.config.sample, run.config.seed, epoch, batch.block, updates=run.step)

    stored, submitted = [], []
    noises = rewards.scout(run, epoch, window_of)  # where sample.scouts_per_image asks for it
    for batch, samples in sample_epoch(run, epoch, window_of, noises=noises):
        stored.append(to_rollout(run, samples, batch))
        submitted.append(rewards.submit(run, samples, batch))
    return concat(stored), submitted


def window_at(sample: ConfigDict, seed: int, epoch: int, block: int, updates: int) -> range:
    """The noisy steps of the images of a block (see prompts.Batch): all but the last step, a window at a random place
    (Flow-GRPO-Fast), or one that moves with the number of optimizer steps before the epoch, `updates` (MixGRPO)."""
    if sample.sde_window_size == 0:
        return range(sample.num_steps - 1)
    first, last = sample.sde_window_range
    if sample.sde_window_interval:
        start = first + updates // sample.sde_window_interval % (last - first)
        return range(start, min(start + sample.sde_window_size, last))
    generator = rng.generator(seed, "window", epoch, block)
    start = int(torch.randint(first, last - sample.sde_window_size + 1, (), generator=generator))
    return range(start, start + sample.sde_window_size)


@declared.ours("add_gradients")
def add_gradients(run: Run, rows: Minibatch) -> None:
    """Add the gradients of train.objective (by default Flow-GRPO's, eq. 5) and of the KL to the reference, over a
    minibatch of (image, step) rows."""
    train = run.config.train
    reference = reference_steps(run, rows)
    step = recompute_steps(run, rows)
    advantages = rows.advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    surrogate = OBJECTIVES[train.objective].function(step, rows, advantages, train)
    loss = rows.step_weights * surrogate.loss
    run.meter.add(policy_loss=loss, **surrogate.metrics)
    if reference is not None:
        kl = losses.gaussian_kl(step.prev_sample_mean, reference.prev_sample_mean, step.transition_std)
        run.meter.add(kl_reference=kl)
        loss = loss + train.beta * kl
    log_ratio = step.log_prob - rows.log_probs if surrogate.log_ratio is None else surrogate.log_ratio
    record_ratios(run, step, rows, log_ratio, surrogate.beyond)
    backward(run, loss, rows)


def main(
    config: ConfigDict, rollout=rollout, add_gradients=add_gradients, advantages=rewards.advantages, script=checks.GRPO
) -> None:
    declared.check(config, rollout=rollout, add_gradients=add_gradients, advantages=advantages)
    run = start(config, script)
    for epoch in range(run.epoch, config.num_epochs):
        evaluate(run, epoch)  # what is due by config.eval_freq
        stored, submitted = rollout(run, epoch)
        scores = rewards.wait(run, epoch, submitted)
        recompute_log_probs(run, stored)  # where train.old_log_prob asks for it
        stored.advantages, stored.loss_weight = advantages(run, scores)
        with run.board.timed("update"):
            for minibatches in updates(run, stored):
                for rows in minibatches:
                    add_gradients(run, rows)
                optimizer_step(run)
        log_epoch(run, epoch)
        if is_due(config.save_freq, run.epoch):
            save(run)
        if run.stopped:
            break
    finish(run)


if __name__ == "__main__":
    command_line.run(main, config)
