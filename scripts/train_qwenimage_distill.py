"""On-policy distillation on Qwen-Image: an adapter learns from several teachers at the states that it reaches.

    torchrun --nproc_per_node=8 scripts/train_qwenimage_distill.py \\
        --config config/grpo.py:pickscore_qwenimage,distill --config.train.teachers="('runs/a/best', 'runs/b/best')"

Idea: arXiv:2306.13649, with a denoising step in the place of a token. The rollout is Flow-GRPO's. Each of its noisy
steps is a Gaussian under the student and under each teacher, of one std: the loss is the mean of their KL. Rewards are
measured and not trained on. Teachers are adapters of the student's rank, such as other runs' best/.
"""

from flow_grpo.command_line import checks, command_line

config = None
if __name__ == "__main__":  # before torch is imported, so that --help, --list and mistakes are answered at once
    config = command_line.parse("config/grpo.py:shapes_qwenimage,distill", checks.DISTILL)

from dataclasses import replace
from pathlib import Path

import torch
from ml_collections import ConfigDict
from torch import Tensor
from train_qwenimage import rollout

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.rollout import StepRows
from flow_grpo.base import locations
from flow_grpo.base.errors import UserError
from flow_grpo.checkpoints import best
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.run import rewards
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.run import Run
from flow_grpo.run.save import save
from flow_grpo.run.startup import published_without_files, start
from flow_grpo.run.update import backward, optimizer_step, recompute_steps, updates
from flow_grpo.settings import declared
from flow_grpo.settings.sections import Config, Lora
from flow_grpo.weights import fsdp_utils, load_weights, policies
from flow_grpo.weights.ema import Ema


def check_teachers(config: Config) -> None:
    """Raise UserError unless there are teachers, each of which the student could start from."""
    if not config.train.teachers:
        raise UserError(
            "config.train.teachers is (); name folders of LoRA adapters to learn from, such as best/ of runs"
        )
    # Adapters are compared with the files of the model.
    if published_without_files(config):
        return
    family = model_classes.resolve(config.model, config.model_class)
    for folder in config.train.teachers:
        try:
            load_weights.check_model(config.model, replace(config.lora, path=folder), family)
        except UserError as error:
            raise UserError(f"config.train.teachers: {error}".replace("lora.path", "a teacher")) from error


def load_teacher(transformer: torch.nn.Module, lora: Lora, folder: str) -> Ema:
    """Load the policy of a LoRA folder, in the layout of the student's adapter, which `lora` describes."""
    policy = Ema(fsdp_utils.trainable_parameters(transformer))
    with policy.applied():
        fsdp_utils.fill_weights(transformer, None, policies.stored_adapter(folder, lora))
    return policy


@torch.no_grad()
def teacher_means(run: Run, rows: StepRows, teachers: list[Ema]) -> list[Tensor]:
    """Mean of each teacher's steps from the stored latents, [R, ...].

    Call it before the student's forward: it swaps weights in place, which the student's graph would not survive.
    """
    means = []
    for policy in teachers:
        with policy.applied():
            means.append(recompute_steps(run, rows).prev_sample_mean)
    return means


@declared.ours("add_gradients")
def add_gradients(run: Run, rows: StepRows, teachers: list[Ema]) -> None:
    """Add the gradients of the KL from the student's step to the teachers', over a minibatch of (image, step) rows."""
    means = teacher_means(run, rows, teachers)
    step = recompute_steps(run, rows)
    kls = [losses.gaussian_kl(step.prev_sample_mean, mean, step.transition_std) for mean in means]
    kl = torch.stack(kls).mean(0)
    run.meter.add(policy_loss=kl)
    backward(run, rows.step_weights * kl, rows)


def main(config: ConfigDict, rollout=rollout, add_gradients=add_gradients, updates=updates) -> None:
    """Train; a fork passes functions of its own."""
    check_teachers(checks.check(config, checks.DISTILL))
    declared.check(config, rollout=rollout, add_gradients=add_gradients, updates=updates)
    run = start(config, checks.DISTILL)
    teachers = [load_teacher(run.model.transformer, run.config.lora, folder) for folder in run.config.train.teachers]
    for folder in run.config.train.teachers:
        run.board.say(best.caution(Path(locations.resolve(folder))))
    for epoch in range(run.epoch, run.config.num_epochs):
        # Every config.eval_freq epochs, score the averaged weights on the prompts that choose best/.
        evaluate(run, epoch)

        # States that the student reaches. Their rewards are logged; only their weights, 0 for masked images, are used.
        stored, submitted = rollout(run, epoch)
        epoch_rewards = rewards.wait(run, epoch, submitted)
        stored.advantages, stored.loss_weight = rewards.advantages(run, epoch_rewards)

        # Move the student's steps from these states towards the teachers'.
        with run.board.timed("update"):
            for minibatches in updates(run, stored):
                for rows in minibatches:
                    add_gradients(run, rows, teachers)
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
