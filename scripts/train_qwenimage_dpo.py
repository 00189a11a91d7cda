"""DPO on Qwen-Image: of two images of a prompt, fit the better one more closely than the reference does, not the other.

    torchrun --nproc_per_node=8 scripts/prepare_preferences.py --config config/dpo.py:pickscore_qwenimage_dpo
    torchrun --nproc_per_node=8 scripts/train_qwenimage_dpo.py --config config/dpo.py:pickscore_qwenimage_dpo

Papers: Diffusion-DPO, arXiv:2311.12908, for flows arXiv:2501.13918. Offline, the pairs are read from a disk; online
(NAME,online) they are the best and the worst image of each prompt, just sampled by the policy. Without arguments it
trains the shipped tiny model online.
"""

from flow_grpo.base.formatting import counted
from flow_grpo.command_line import checks, command_line

config = None
if __name__ == "__main__":  # before torch is imported, so that --help, --list and mistakes are answered at once
    config = command_line.parse("config/dpo.py:shapes_qwenimage_dpo,online", checks.DPO)

from typing import NamedTuple

import torch
from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.flow_matching import logit_normal_timesteps, noised, velocity_error
from flow_grpo.base import distributed, rng
from flow_grpo.base.errors import UserError
from flow_grpo.data import preferences
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.evaluation.evaluation import spread, turns
from flow_grpo.run import rewards, sampling
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.run import Run
from flow_grpo.run.save import save
from flow_grpo.run.startup import family_of, start
from flow_grpo.run.update import backward, optimizer_step
from flow_grpo.settings import declared
from flow_grpo.settings.sections import Config

# Most held-out pairs that `validate` judges; they are spread evenly over all of them.
HELD_OUT_PAIRS = 256
# Draws of noise and level at which it judges each pair, the same in every epoch.
NOISES_PER_PAIR = 4


class PairSource(NamedTuple):
    """Pairs on the disk, and the noise levels at which pairs are trained."""

    train: preferences.PairFiles | None  # None = the policy samples them (online)
    held_out: preferences.PairFiles | None
    levels: Tensor  # [1000] f32, timesteps of the whole forward process, shifted as the sampled steps are


def begin(config: ConfigDict) -> tuple[Run, PairSource]:
    """Open the pairs of config.preferences.path, if it names a folder; then start the run.

    Raises:
        UserError: as `start` does, and for pairs of another model or size, or too few of them.
    """
    checked = checks.check(config, checks.DPO)
    train = None
    held_out = None
    prompts = None
    if checked.preferences.path:
        files = open_stored_pairs(checked)
        train = files["train"]
        held_out = files["validation"]
        prompts = train.prompts
    model = family_of(checked).without_weights(checked.model)
    levels = model.noise_levels(checked.sample.num_steps, training_size(checked))
    run = start(config, checks.DPO, reference=True, stored_prompts=prompts)
    if train and not held_out:
        run.board.say(f"{checked.preferences.path} holds no pair out, so there are no metrics under validation/")
    return run, PairSource(train, held_out, levels.to(run.device))


def open_stored_pairs(config: Config) -> dict[str, preferences.PairFiles]:
    """Open the pairs of config.preferences.path, by split. Raises UserError if an update takes more than there are."""
    model = family_of(config).without_weights(config.model)
    size = training_size(config)
    model.check_size(size)
    folder = config.preferences.path
    shapes = model.row_shapes(size, config.text_tokens)
    if model.MOST_SOURCES:
        shapes |= preferences.source_shapes(folder)
    files = preferences.open_pairs(folder, shapes, config.model, size)
    pairs_per_update = config.sample.num_prompts_per_epoch // config.train.updates_per_epoch
    if len(files["train"]) < pairs_per_update:
        stored = counted(len(files["train"]), "pairs")
        raise UserError(f"{folder} holds {stored} to train on; an update takes {pairs_per_update}")
    return files


def read_pairs(run: Run, files: preferences.PairFiles, epoch: int) -> preferences.Pairs:
    """Read this rank's pairs of an epoch from the disk."""
    batches = []
    with run.board.timed("rollout"):
        for batch in sampling.batches(run, epoch):
            rows = [prompt.metadata["pair"] for prompt in batch.prompts]
            batches.append(files.read(rows, list(batch.image_numbers), run.device))
    run.epoch_metrics["images"] = run.board.latest.get("images", 0) + run.plan.num_images
    return preferences.concat(batches)


def rollout(run: Run, epoch: int) -> preferences.Pairs:
    """Sample groups of images without noise in their steps; the best and the worst of each are a pair."""
    latents_of = {}
    prompt_of = {}
    submitted = []
    for batch, samples in sampling.sample_epoch(run, epoch, lambda batch: range(0)):
        submitted.append(rewards.submit(run, samples, batch))
        latents_of.update(zip(batch.image_numbers, samples.latents))
        prompt_of.update(zip(batch.image_numbers, batch.prompts))
    scores = rewards.wait(run, epoch, submitted).scores

    # Images come in the order of completion; in that of their numbers a group's are neighbours.
    image_numbers = sorted(latents_of)
    return preferences.best_and_worst(
        torch.stack([latents_of[number] for number in image_numbers]),
        run.embed([prompt_of[number] for number in image_numbers]),
        image_numbers,
        {name: distributed.local_rows(values) for name, values in scores.items()},
        dict(run.config.reward_fn),
        group=run.plan.group_size,
        margin=run.config.preferences.min_margin,
    )


class Errors(NamedTuple):
    """Mean squared errors of velocities on P pairs, [P] each. Those of the policy have gradients."""

    winner: Tensor
    loser: Tensor
    winner_reference: Tensor
    loser_reference: Tensor


def velocity_errors(run: Run, pairs: preferences.Pairs, levels: Tensor, generators: list[torch.Generator]) -> Errors:
    """Errors of policy and reference on P pairs, at a noise and a level of each pair, drawn from its generator."""
    # Both images of a pair have one noise and one level: winners, then losers.
    noise = rng.normal(pairs.winners.shape[1:], generators, run.device)
    noise = torch.cat([noise, noise])
    timesteps = logit_normal_timesteps(levels, generators).repeat(2)
    x_0 = torch.cat([pairs.winners, pairs.losers])
    x_t = noised(x_0, noise, timesteps)
    condition = pairs.condition.concat([pairs.condition, pairs.condition])
    scale = run.model.unguided(run.config.sample.guidance_scale)

    # The reference, which `begin` asks for, comes first: it swaps weights in place, which the policy's graph would not
    # survive.
    assert run.reference is not None
    with torch.no_grad(), run.reference.applied():
        reference_velocity = run.velocity(x_t, timesteps, condition, scale)
    velocity = run.velocity(x_t, timesteps, condition, scale)
    winner, loser = velocity_error(velocity, x_0, noise).chunk(2)
    winner_reference, loser_reference = velocity_error(reference_velocity, x_0, noise).chunk(2)
    return Errors(winner, loser, winner_reference, loser_reference)


def pair_metrics(errors: Errors, beta: float) -> dict[str, Tensor]:
    """Loss of each pair [P], and numbers that tell learning from collapse."""
    winner_gap = errors.winner - errors.winner_reference
    loser_gap = errors.loser - errors.loser_reference
    return dict(
        loss=losses.dpo_loss(*errors, beta),
        implicit_accuracy=(winner_gap < loser_gap).float(),
        winner_error_gap=winner_gap.detach(),
        loser_error_gap=loser_gap.detach(),
        winner_rise_share=(winner_gap > 0).float(),
    )


@declared.ours("add_gradients")
def add_gradients(run: Run, pairs: preferences.Pairs, levels: Tensor) -> None:
    """Add the gradients of the DPO loss over a minibatch of pairs; both images of a pair have one noise and one
    level."""
    generators = []
    for pair in pairs.numbers.tolist():
        generators.append(rng.generator(run.config.seed, "forward noise", run.epoch, pairs.inner_epoch, pair))
    errors = velocity_errors(run, pairs, levels, generators)
    metrics = pair_metrics(errors, run.config.train.dpo_beta)
    backward(run, metrics.pop("loss"), pairs)
    run.meter.add_weighted(pairs.loss_weight, **metrics)


@torch.no_grad()
def validate(run: Run, source: PairSource, epoch: int) -> None:
    """Log the metrics of held-out pairs, with the averaged weights, and always the same noises."""
    if not source.held_out:
        return
    indices = torch.tensor(spread(range(len(source.held_out)), HELD_OUT_PAIRS))
    batches = indices.split(run.config.sample.batch_size // 2)
    metrics_of_batches = []
    with run.ema.applied(), run.board.timed("eval"):
        # A batch that does not count keeps this rank's number of forwards equal to that of the others.
        for number, counts in turns(len(batches), run.board.bar):
            rows = batches[number].tolist()
            pairs = source.held_out.read(rows, rows, run.device)
            for draw in range(NOISES_PER_PAIR):
                generators = [rng.generator(0, "validation", row, draw) for row in rows]
                errors = velocity_errors(run, pairs, source.levels, generators)
                metrics = pair_metrics(errors, run.config.train.dpo_beta)
                if counts:
                    metrics_of_batches.append({name: values.cpu() for name, values in metrics.items()})
    metrics_of_batches = distributed.gather_objects(metrics_of_batches)
    means = {}
    for name in metrics_of_batches[0]:
        values = torch.cat([metrics[name] for metrics in metrics_of_batches])
        means[f"validation/{name}"] = values.mean().item()
    run.board.log("validation", means, epoch=epoch, step=run.step)


def main(config: ConfigDict, add_gradients=add_gradients) -> None:
    """Train; a fork passes a function of its own."""
    declared.check(config, add_gradients=add_gradients)
    run, source = begin(config)
    for epoch in range(run.epoch, run.config.num_epochs):
        # Every config.eval_freq epochs, score the averaged weights on the prompts that choose best/.
        evaluate(run, epoch)
        if is_due(run.config.eval_freq, epoch):
            validate(run, source, epoch)

        # Pairs, from the disk or of images just sampled. Weights are 0 for pairs that differ too little; their mean
        # over all ranks is 1.
        pairs = read_pairs(run, source.train, epoch) if source.train else rollout(run, epoch)
        pairs.loss_weight /= distributed.gather(pairs.loss_weight).mean().clamp(min=1e-6)

        # Fit the winners more closely than the reference does, and the losers less.
        with run.board.timed("update"):
            for minibatches in preferences.minibatches(
                pairs, run.plan.updates_per_epoch, run.config.sample.batch_size // 2, run.config.train.inner_epochs
            ):
                for rows in minibatches:
                    add_gradients(run, rows, source.levels)
                optimizer_step(run)

        # The epoch counts as completed from here on. config.health may have lowered the learning rate, or have gone
        # back to the best weights.
        log_epoch(run, epoch)
        if is_due(run.config.save_freq, run.epoch):
            save(run)
        if run.stopped:
            break
    if run.config.eval_freq:
        validate(run, source, run.epoch)
    finish(run)


if config is not None:
    command_line.run(main, config)
