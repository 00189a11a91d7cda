"""Flow-GRPO on Qwen-Image: draw a group of images per prompt, score them, make the better ones more likely.

    torchrun --nproc_per_node=8 scripts/train_qwenimage.py --config config/grpo.py:pickscore_qwenimage

Paper: arXiv:2505.05470. Other configs make it Flow-GRPO-Fast (noise in a window of steps at a random place), MixGRPO
(a window that moves, arXiv:2507.21802) or GRPO-Guard (another loss, arXiv:2510.22319): see docs/algorithms/. `rollout`
and `add_gradients` are the algorithm, `main` is its loop. Without arguments it trains the shipped tiny model.
minimal_grpo.py is a shorter version.
"""

from flow_grpo.command_line import checks, command_line

config = None
if __name__ == "__main__":  # before torch is imported, so that --help, --list and mistakes are answered at once
    config = command_line.parse("config/grpo.py:shapes_qwenimage", checks.GRPO)

import torch
from ml_collections import ConfigDict

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.advantages import bounded
from flow_grpo.algorithms.rollout import StepRows, StoredSteps, concat
from flow_grpo.base import rng
from flow_grpo.data.prompts import PlannedBatch
from flow_grpo.run import rewards
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.run import Run
from flow_grpo.run.sampling import sample_epoch, to_rollout
from flow_grpo.run.save import save
from flow_grpo.run.startup import start
from flow_grpo.run.update import (
    add_data_gradients,
    backward,
    optimizer_step,
    pull,
    recompute_log_probs,
    recompute_steps,
    record_ratios,
    reference_steps,
    updates,
)
from flow_grpo.settings import declared
from flow_grpo.settings.objectives import OBJECTIVES
from flow_grpo.settings.sections import Sample


@declared.ours("rollout")
def rollout(run: Run, epoch: int) -> tuple[StoredSteps, list[rewards.Submitted]]:
    """Sample with SDE steps inside the window and ODE steps outside it. Returns the noisy steps, and the images that
    are being scored."""

    def window_of(batch: PlannedBatch) -> range:
        return window_at(run.config.sample, run.config.seed, epoch, batch.block, num_updates=run.step)

    # With sample.scouts_per_image, cheap images choose the noises that the epoch's images start from.
    noise_indices = rewards.scout(run, epoch, window_of)

    # Images come in batches as they are finished; their rewards are computed while the next ones are sampled.
    stored = []
    submitted = []
    for batch, samples in sample_epoch(run, epoch, window_of, noise_indices=noise_indices):
        stored.append(to_rollout(run, samples, batch))
        submitted.append(rewards.submit(run, samples, batch))
    return concat(stored), submitted


def window_at(sample: Sample, seed: int, epoch: int, block: int, num_updates: int) -> range:
    """Choose the window of noisy steps for a block of batches.

    A block is the fewest consecutive batches that hold whole groups, so all images of a group share one window.

    Args:
        block: number of the block within the epoch, over all ranks.
        num_updates: optimizer steps taken before the epoch.
    """
    # Flow-GRPO: all steps but the last, which ends at sigma 0 and so adds next to no noise in most models.
    size = sample.sde_window_size
    if size == 0:
        return range(sample.num_steps - 1)

    # MixGRPO: a window that moves by one step every sde_window_interval updates; the end of its range cuts it off.
    first, last = sample.sde_window_range
    if sample.sde_window_interval:
        num_moves = num_updates // sample.sde_window_interval
        start = first + num_moves % (last - first)
        return range(start, min(start + size, last))

    # Flow-GRPO-Fast: a window at a random place.
    generator = rng.generator(seed, "window", epoch, block)
    start = int(torch.randint(first, last - size + 1, (), generator=generator))
    return range(start, start + size)


@declared.ours("add_gradients")
def add_gradients(run: Run, rows: StepRows) -> None:
    """Add the gradients of train.objective (by default Flow-GRPO's, eq. 5) and of the KL to the reference, over a
    minibatch of (image, step) rows."""
    train = run.config.train

    # The stored steps under the reference (None where train.beta is 0) and under the policy, with gradients. The
    # reference comes first: it swaps weights in place, which the policy's graph would not survive.
    reference = reference_steps(run, rows)
    step = recompute_steps(run, rows)

    # The objective's loss of each row; train.step_weight weighs the row's denoising step.
    advantages = bounded(rows.advantages, train)
    surrogate = OBJECTIVES[train.objective].function(step, rows, advantages, train)
    loss = rows.step_weights * surrogate.loss
    run.meter.add(policy_loss=loss, **surrogate.metrics)
    kl = None
    if reference is not None:
        kl = losses.gaussian_kl(step.prev_sample_mean, reference.prev_sample_mean, step.transition_std)
        run.meter.add(kl_reference=kl)
        loss = loss + pull(run, rows, kl)

    # Log-ratios are logged. Before the epoch's first optimizer step all of them must be 0, or optimizer_step ends the
    # run. For an objective without a ratio of its own, the difference of the log-probs stands in.
    log_ratio = surrogate.log_ratio
    if log_ratio is None:
        log_ratio = step.log_prob - rows.log_probs
    record_ratios(run, step, rows, log_ratio, surrogate.beyond, kl)

    # Weighted by rows.loss_weight, and divided by the rows of the whole update: minibatches add up to its mean.
    backward(run, loss, rows)


def main(
    config: ConfigDict,
    rollout=rollout,
    add_gradients=add_gradients,
    advantages=rewards.advantages,
    updates=updates,
    script=checks.GRPO,
) -> None:
    """Train; a fork passes functions of its own."""
    declared.check(config, rollout=rollout, add_gradients=add_gradients, advantages=advantages, updates=updates)
    run = start(config, script)
    for epoch in range(run.epoch, run.config.num_epochs):
        # Every config.eval_freq epochs, score the averaged weights on the prompts that choose best/.
        evaluate(run, epoch)

        # Groups of images per prompt, and how much better each image is than its group.
        stored, submitted = rollout(run, epoch)
        epoch_rewards = rewards.wait(run, epoch, submitted)
        recompute_log_probs(run, stored)  # with train.old_log_prob "recompute"; else they are those of the rollout
        stored.advantages, stored.loss_weight = advantages(run, epoch_rewards)
        stored.beta_gate = rewards.beta_gate(run, epoch_rewards)  # None without train.beta_gate

        # Make the noisy steps of better images more likely, those of worse ones less.
        with run.board.timed("update"):
            for minibatches in updates(run, stored):
                for rows in minibatches:
                    add_gradients(run, rows)
                    add_data_gradients(run, rows.row_ids, rows.num_update_rows, rows.inner_epoch)  # with train.data
                optimizer_step(run)

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
