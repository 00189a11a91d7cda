"""Per-step branch exploration on Qwen-Image: credit every denoising step with the reward of its own noise.

    torchrun --nproc_per_node=8 scripts/train_qwenimage_pr.py --config config/grpo.py:pickscore_qwenimage_pr

Paper: TempFlow-GRPO, arXiv:2508.04324 ("pr" = per-step reward). A deterministic trunk goes from noise to image; at each
of its steps noisy branches leave it and are finished deterministically. They differ in that step's noise alone, so
their rewards rank it, and steps are weighted by how noisy they are. The loss and the loop are train_qwenimage.py's,
whose rows have several outcomes here. Without arguments it trains the shipped tiny model.
"""

from flow_grpo.command_line import checks, command_line

config = None
if __name__ == "__main__":  # before torch is imported, so that --help, --list and mistakes are answered at once
    config = command_line.parse("config/grpo.py:shapes_qwenimage_pr", checks.PR)

from collections.abc import Sequence

import torch
import train_qwenimage
from ml_collections import ConfigDict
from torch import Tensor
from train_qwenimage import add_gradients

from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.algorithms.rollout import StoredSteps, concat
from flow_grpo.run import rewards
from flow_grpo.run.run import Run
from flow_grpo.run.sampling import sample_epoch, to_rollout
from flow_grpo.run.update import updates
from flow_grpo.settings import declared


@declared.ours("rollout")
def rollout(run: Run, epoch: int) -> tuple[StoredSteps, list[rewards.Submitted]]:
    """Sample trunks and their branches. Returns the steps at which branches leave, and the branches that are being
    scored."""
    # Never the last step: its density is a spike.
    branching_steps = range(run.plan.num_trained_steps)

    # Trunks come in batches as their branches are finished; rewards are computed while the next ones are sampled.
    stored = []
    submitted = []
    for batch, samples in sample_epoch(run, epoch, lambda batch: branching_steps, run.plan.num_branches):
        groups = groups_of(batch.image_numbers, run.plan, run.config.sample.baseline)
        stored.append(to_rollout(run, samples, batch))
        submitted.append(rewards.submit(run, samples, batch, groups))
    return concat(stored), submitted


def groups_of(trunk_numbers: Sequence[int], plan: BatchPlan, baseline: str) -> Tensor:
    """Return the group of each branch, [B, K, J] int64: branches compete that leave one trunk at one step or, with
    sample.baseline "prompt", all trunks of a prompt at one step."""
    # Numbers within the whole epoch, so that groups have the same ids on any number of ranks.
    owners = torch.tensor(trunk_numbers)
    if baseline == "prompt":
        owners = owners // plan.group_size
    steps = torch.arange(plan.num_trained_steps)
    groups = owners[:, None] * plan.num_trained_steps + steps
    return groups[:, :, None].expand(-1, -1, plan.num_branches)


def main(
    config: ConfigDict,
    rollout=rollout,
    add_gradients=add_gradients,
    advantages=rewards.advantages,
    updates=updates,
) -> None:
    """Train by Flow-GRPO's loop and loss, whose rows have several outcomes here."""
    train_qwenimage.main(config, rollout, add_gradients, advantages, updates, script=checks.PR)


if config is not None:
    command_line.run(main, config)
