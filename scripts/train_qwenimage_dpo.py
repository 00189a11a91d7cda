"""DPO on Qwen-Image: of two images of a prompt, fit the better one more closely than the reference does, not the other.

    torchrun --nproc_per_node=8 scripts/prepare_preferences.py --config config/dpo.py:pickscore_qwenimage_dpo
    torchrun --nproc_per_node=8 scripts/train_qwenimage_dpo.py --config config/dpo.py:pickscore_qwenimage_dpo

Papers: Diffusion-DPO, arXiv:2311.12908, for flows arXiv:2501.13918. Offline, the pairs are read from a disk; online
(NAME,online) they are the best and the worst image of each prompt, just sampled by the policy. Without arguments it
trains the shipped tiny model online.
"""

from flow_grpo.command_line import checks, command_line

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
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.evaluation.evaluation import spread, turns
from flow_grpo.run import rewards, sampling
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.run import Run
from flow_grpo.run.save import save
from flow_grpo.run.startup import start
from flow_grpo.run.update import backward, optimizer_step
from flow_grpo.settings import declared

HELD_OUT_PAIRS = 256  # that are judged, evenly spread
NOISES_PER_PAIR = 4  # noises and levels at which each is judged, always the same


class Source(NamedTuple):
    """Where pairs come from, and what noises them."""

    train: preferences.PairFiles | None  # None = the policy samples them (online)
    held_out: preferences.PairFiles | None
    levels: Tensor  # [1000] f32, timesteps of the whole forward process, shifted as the sampled steps are


def begin(config: ConfigDict) -> tuple[Run, Source]:
    """Open the pairs of config.preferences.path, if it names a folder; then start the run.

    Raises:
        UserError: as `start` does, and for pairs of another model or size, or too few of them.
    """
    checks.check(config, checks.DPO)
    files = stored_pairs(config) if config.preferences.path else {}
    texts = files["train"].prompts if files else None
    light = model_classes.resolve(config).without_weights(config.model)
    levels = light.noise_levels(config.sample.num_steps, training_size(config))
    run = start(config, checks.DPO, reference=True, stored_prompts=texts)
    if files and not files["validation"]:
        run.board.say(f"{config.preferences.path} holds no pair out, so there are no metrics under validation/")
    return run, Source(files.get("train"), files.get("validation"), levels.to(run.device))


def stored_pairs(config: ConfigDict) -> dict[str, preferences.PairFiles]:
    """The pairs of config.preferences.path by split. Raises UserError where an epoch needs more of them."""
    light, size = model_classes.resolve(config).without_weights(config.model), training_size(config)
    light.check_size(size)
    folder, shapes = config.preferences.path, light.row_shapes(size, config.text_tokens)
    if light.MOST_SOURCES:
        shapes |= preferences.source_shapes(folder)
    files = preferences.open_pairs(folder, shapes, config.model, size)
    taken = config.sample.num_prompts_per_epoch // config.train.updates_per_epoch
    if len(files["train"]) < taken:
        raise UserError(f"{folder} holds {len(files['train'])} pairs to train on; an update takes {taken}")
    return files


def read(run: Run, files: preferences.PairFiles, epoch: int) -> preferences.Pairs:
    """This rank's pairs of an epoch, from the disk."""
    batches = []
    with run.board.timed("rollout"):
        for batch in sampling.batches(run, epoch):
            rows = [prompt.metadata["pair"] for prompt in batch.prompts]
            batches.append(files.read(rows, list(batch.image_numbers), run.device))
    run.epoch_metrics["images"] = run.board.latest.get("images", 0) + 2 * run.plan.num_groups
    return preferences.concat(batches)


def rollout(run: Run, epoch: int) -> preferences.Pairs:
    """Sample groups of images without noise in their steps; the best and the worst of each are a pair."""
    images, submitted = {}, []
    for batch, samples in sampling.sample_epoch(run, epoch, lambda _: range(0)):
        submitted.append(rewards.submit(run, samples, batch))
        images |= dict(zip(batch.image_numbers, zip(samples.latents, batch.prompts)))
    scores = rewards.wait(run, epoch, submitted).scores
    numbers = sorted(images)
    latents, prompts = zip(*(images[number] for number in numbers))
    return preferences.best_and_worst(
        torch.stack(latents),
        run.embed(prompts),
        numbers,
        {name: distributed.local_rows(values) for name, values in scores.items()},
        run.config.reward_fn.to_dict(),
        group=run.plan.group_size,
        margin=run.config.preferences.min_margin,
    )


class Errors(NamedTuple):
    """Mean squared errors of velocities, [P] each. Those of the policy have gradients."""

    winner: Tensor
    loser: Tensor
    winner_reference: Tensor
    loser_reference: Tensor


def errors_of(run: Run, pairs: preferences.Pairs, levels: Tensor, streams: list[torch.Generator]) -> Errors:
    """How far policy and reference are from the images of P pairs, at the noise and the level of each one's stream."""
    noise = rng.normal(pairs.winners.shape[1:], streams, run.device).repeat(2, *[1] * (pairs.winners.ndim - 1))
    timesteps = logit_normal_timesteps(levels, streams).repeat(2)
    x_0, condition = torch.cat([pairs.winners, pairs.losers]), pairs.condition.concat([pairs.condition] * 2)
    x_t = noised(x_0, noise, timesteps)
    scale = run.model.unguided(run.config.sample.guidance_scale)

    def of_policy() -> tuple[Tensor, Tensor]:
        return velocity_error(run.velocity(x_t, timesteps, condition, scale), x_0, noise).chunk(2)

    with torch.no_grad(), run.reference.applied():
        reference = of_policy()
    return Errors(*of_policy(), *reference)


def figures(run: Run, errors: Errors) -> dict[str, Tensor]:
    """Per pair: its loss, and what tells learning from collapse."""
    winner_gap, loser_gap = errors.winner - errors.winner_reference, errors.loser - errors.loser_reference
    return dict(
        loss=losses.dpo_loss(*errors, beta=run.config.train.dpo_beta),
        implicit_accuracy=(winner_gap < loser_gap).float(),
        winner_error_gap=winner_gap.detach(),
        loser_error_gap=loser_gap.detach(),
        winner_rise_share=(winner_gap > 0).float(),
    )


@declared.ours("add_gradients")
def add_gradients(run: Run, pairs: preferences.Pairs, levels: Tensor) -> None:
    """Of the DPO loss over a minibatch of pairs; each has one noise and one level for both images."""
    names = "forward noise", run.epoch, pairs.inner_epoch
    streams = [rng.generator(run.config.seed, *names, number) for number in pairs.numbers.tolist()]
    measured = figures(run, errors_of(run, pairs, levels, streams))
    backward(run, measured["loss"], pairs)
    run.meter.add_weighted(pairs.loss_weight, **{name: values for name, values in measured.items() if name != "loss"})


@torch.no_grad()
def validate(run: Run, source: Source, epoch: int) -> None:
    """The same figures on held-out pairs, with the averaged weights, and always the same noises."""
    held_out, measured = source.held_out, []
    if not held_out:
        return
    numbers = torch.tensor(spread(range(len(held_out)), HELD_OUT_PAIRS))
    batches = numbers.split(run.config.sample.batch_size // 2)
    with run.ema.applied(), run.board.timed("eval"):
        for number, counts in turns(len(batches), run.board.bar):
            rows = batches[number].tolist()
            pairs = held_out.read(rows, rows, run.device)
            for draw in range(NOISES_PER_PAIR):
                streams = [rng.generator(0, "validation", row, draw) for row in rows]
                values = figures(run, errors_of(run, pairs, source.levels, streams))
                measured += [{name: value.cpu() for name, value in values.items()}] if counts else []
    measured = distributed.gather_objects(measured)
    means = {f"validation/{key}": torch.cat([part[key] for part in measured]).mean().item() for key in measured[0]}
    run.board.log("validation", means, epoch=epoch, step=run.step)


def main(config: ConfigDict, add_gradients=add_gradients) -> None:
    declared.check(config, add_gradients=add_gradients)
    run, source = begin(config)
    for epoch in range(run.epoch, config.num_epochs):
        evaluate(run, epoch)  # what is due by config.eval_freq
        if is_due(config.eval_freq, epoch):
            validate(run, source, epoch)
        pairs = read(run, source.train, epoch) if source.train else rollout(run, epoch)
        pairs.loss_weight /= distributed.gather(pairs.loss_weight).mean().clamp(min=1e-6)
        with run.board.timed("update"):
            sizes = run.plan.updates_per_epoch, config.sample.batch_size // 2, config.train.inner_epochs
            for minibatches in preferences.minibatches(pairs, *sizes):
                for rows in minibatches:
                    add_gradients(run, rows, source.levels)
                optimizer_step(run)
        log_epoch(run, epoch)
        if is_due(config.save_freq, run.epoch):
            save(run)
        if run.stopped:
            break
    if config.eval_freq:
        validate(run, source, run.epoch)
    finish(run)


if __name__ == "__main__":
    command_line.run(main, config)
