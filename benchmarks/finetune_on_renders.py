"""Supervised fine-tuning of the tiny Qwen-Image on renders of its training prompts: what a study of RL compares with.

    python benchmarks/finetune_on_renders.py --config config/grpo.py:shapes_qwenimage \
        --config.lora.rank=0 --config.sample.batch_size=64

Flow matching (arXiv:2210.02747) with the loss and the renderer that trained the base (build_tiny_qwenimage.py), on new
pictures in every update. Evaluation, checkpoints and metrics.jsonl are those of any run. Left out: dropped prompts, so
guidance is not trained. An update has sample.batch_size renders, an epoch train.updates_per_epoch updates.
"""

import itertools
import sys
from functools import lru_cache
from pathlib import Path

import torch

from flow_grpo import checks, command_line, rng, settings
from flow_grpo.batching import BatchPlan
from flow_grpo.loop import finish, is_due, log_epoch
from flow_grpo.measuring import evaluate
from flow_grpo.optimization import optimizer_step
from flow_grpo.saving import save
from flow_grpo.startup import start

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from build_tiny_qwenimage import clean_latents, flow_matching_loss, rendered

RENDERS = checks.Script(
    settings.GRPO,
    check=lambda sample: None,  # nothing of it is read but batch_size
    ignored=(
        *(*settings.ignored_by(settings.GRPO), "embeddings_cache"),
        *(setting.key for setting in settings.SETTINGS if setting.scripts == settings.RATIO),
        *(f"sample.{key}" for key in ("guidance_scale", "global_std", "same_latent")),
        *(f"sample.{key}" for key in ("num_branches", "flash_ratio", "engine", "merge_adapter")),
        *(f"train.{key}" for key in ("adv_clip_max", "beta", "filter_groups", "inner_epochs", "timestep_fraction")),
    ),
)


def plan_renders(config, world_size):
    """Every picture is a group of its own. Raises ValueError on several ranks, which would draw the same pictures."""
    if world_size > 1:
        raise ValueError(f"finetune_on_renders.py runs on one GPU, not on {world_size}")
    if config.height != 64 or config.width != 64:
        raise ValueError(f"config.height and config.width are {config.height} and {config.width}; renders are 64 x 64")
    updates, size = config.train.updates_per_epoch, config.sample.batch_size
    return BatchPlan(updates * size, 1, size, updates, 1, 1, updates)


def renders(run, metadata, epoch):
    """An epoch's batches: x_0 [B, N, C] and the prompts' numbers [B]; and the generator of the noise."""
    seed = rng.generator(run.config.seed, "renders", epoch).initial_seed()
    generator = torch.Generator(run.device).manual_seed(seed)
    for index, images in itertools.islice(
        rendered(metadata, run.plan.batch_size, generator), run.plan.updates_per_epoch
    ):
        yield clean_latents(run.pipeline, images), index.tolist(), generator


def update(run, x_0, embeds, generator):
    """Add the gradient of the flow-matching loss."""
    loss = flow_matching_loss(run.pipeline, x_0, embeds.text, embeds.mask, generator)
    run.num_forwards += len(x_0)
    run.meter.add(loss=loss)
    (loss * run.loss_scale.item()).backward()


def main(config):
    run = start(config, RENDERS, make_plan=plan_renders)
    metadata = [{"prompt": prompt.text} | prompt.metadata for prompt in run.train_prompts]
    embed_one = lru_cache(maxsize=None)(run.embed_one)  # the run's own keeps 1024, a third of them
    for epoch in range(run.epoch, config.num_epochs):
        evaluate(run, epoch)
        with run.board.timed("update"):
            for x_0, index, generator in renders(run, metadata, epoch):
                rows = [embed_one(run.train_prompts[number].text) for number in index]
                update(run, x_0, rows[0].concat(rows), generator)
                optimizer_step(run)
        run.epoch_figures["images"] = (epoch + 1) * run.plan.num_groups
        log_epoch(run, epoch)
        if is_due(config.save_freq, run.epoch):
            save(run)
        if run.stopped:
            break
    finish(run)


if __name__ == "__main__":
    command_line.run(main, "config/grpo.py:shapes_qwenimage")
