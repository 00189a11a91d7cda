"""DPO on Qwen-Image: of two images of a prompt, fit the better one more closely than the reference does, not the other.

    torchrun --nproc_per_node=8 scripts/prepare_preferences.py --config config/dpo.py:pickscore_qwenimage_dpo
    torchrun --nproc_per_node=8 scripts/train_qwenimage_dpo.py --config config/dpo.py:pickscore_qwenimage_dpo

Papers: Diffusion-DPO, arXiv:2311.12908, for flows arXiv:2501.13918. Offline, the pairs are read from a disk; online
(NAME,online) they are the best and the worst image of each prompt, just sampled by the policy. Without arguments it
trains the shipped tiny model online.
"""

from functools import partial

import torch
from absl import app
from ml_collections import config_flags

from flow_grpo import fsdp_utils, losses, preferences, rng, sampling
from flow_grpo.batching import plan_pairs
from flow_grpo.evaluation import spread, turns
from flow_grpo.forward import logit_normal_timesteps, noised, velocity_error
from flow_grpo.loop import finish, is_due, log_epoch
from flow_grpo.measuring import evaluate
from flow_grpo.optimization import accumulate, optimise
from flow_grpo.saving import save
from flow_grpo.settings import NFT, RATIO, check_pairs
from flow_grpo.startup import start

IGNORED = (
    *(*NFT, *RATIO),
    *(f"sample.{key}" for key in ("noise_level", "sde_type", "same_latent", "completion_batch_size", "num_branches")),
    *(f"sample.sde_window_{key}" for key in ("size", "range", "schedule", "interval", "stride")),
    *(f"train.{key}" for key in ("adv_clip_max", "reward_aggregation", "filter_groups", "beta", "timestep_fraction")),
    "train.reference_guidance_scale",
)


def read(run, epoch):
    """This rank's pairs of an epoch, from the disk."""
    parts = []
    with run.board.timed("rollout"):
        for batch in sampling.batches(run, epoch):
            rows = [metadata["pair"] for metadata in batch.metadata]
            parts.append(run.pairs["train"].read(rows, list(batch.images), run.device))
    run.epoch_figures["images"] = (epoch + 1) * 2 * run.plan.num_groups
    return preferences.concat(parts)


def rollout(run, epoch):
    """Sample groups of images without noise in their steps; the best and the worst of each are a pair."""
    drawn, scores = {}, []
    for batch, sampled in sampling.sampled(run, epoch, lambda _: sampling.Walk(range(0))):
        scores.append(sampling.score_images(run, sampled, batch, torch.tensor(batch.groups)))
        drawn |= dict(zip(batch.images, zip(sampled.latents, batch.prompts)))
    rewards, _ = sampling.gather_rewards(run, epoch, scores)
    numbers = sorted(drawn)
    latents, texts = zip(*(drawn[number] for number in numbers))
    images = torch.stack(latents), run.embed(texts), numbers, fsdp_utils.mine(rewards["avg"])
    return preferences.best_and_worst(*images, run.plan.group_size, run.config.preferences.min_margin)


def errors(run, pairs, streams):
    """Velocity errors, [P] each: winner's and loser's under the policy, with gradients, and under the reference."""
    noise = rng.normal(pairs.winners.shape[1:], streams, run.device).repeat(2, *[1] * (pairs.winners.ndim - 1))
    timesteps = logit_normal_timesteps(run.levels, streams).repeat(2)
    x_0, embeds = torch.cat([pairs.winners, pairs.losers]), pairs.embeds.concat([pairs.embeds] * 2)
    x_t = noised(x_0, noise, timesteps)

    def of_policy():
        return velocity_error(run.velocity(x_t, timesteps, embeds, guidance_scale=1.0), x_0, noise).chunk(2)

    with torch.no_grad(), run.reference.applied():
        reference = of_policy()
    return *of_policy(), *reference


def figures(run, win, lose, ref_win, ref_lose):
    """Per pair: its loss, and what tells learning from collapse."""
    winner_gap, loser_gap = win - ref_win, lose - ref_lose
    return dict(
        loss=losses.dpo_loss(win, lose, ref_win, ref_lose, run.config.train.dpo_beta),
        implicit_accuracy=(winner_gap < loser_gap).float(),
        winner_error_gap=winner_gap.detach(),
        loser_error_gap=loser_gap.detach(),
        winner_rise_share=(winner_gap > 0).float(),
    )


def update(run, pairs, epoch, inner):
    """Add the gradient of the DPO loss over a minibatch of pairs; each has one noise and one level for both images."""
    names = "forward noise", epoch, inner
    streams = [rng.generator(run.config.seed, *names, number) for number in pairs.numbers.tolist()]
    found = figures(run, *errors(run, pairs, streams))
    accumulate(run, found.pop("loss"), pairs)
    run.meter.add(**{name: values * pairs.kept for name, values in found.items()})


@torch.no_grad()
def validate(run, epoch):
    """The same figures on held-out pairs, with the averaged weights, and always the same noises."""
    if not run.pairs or not len(run.pairs["validation"]):
        return
    held_out, found = run.pairs["validation"], []
    parts = torch.tensor(spread(range(len(held_out)), run.config.eval.num_pairs)).split(
        run.config.sample.batch_size // 2
    )
    with run.ema.applied(), run.board.timed("eval"):
        for number, counts in turns(len(parts), run.rank, run.world_size, run.board.bar):
            rows = parts[number].tolist()
            pairs = held_out.read(rows, rows, run.device)
            for draw in range(run.config.eval.noises_per_pair):
                streams = [rng.generator(0, "validation", row, draw) for row in rows]
                values = figures(run, *errors(run, pairs, streams))
                found += [{name: value.cpu() for name, value in values.items()}] if counts else []
    found = fsdp_utils.gather_objects(found)
    means = {f"validation/{name}": torch.cat([part[name] for part in found]).mean().item() for name in found[0]}
    run.board.log("validation", means, epoch=epoch, step=run.step)


def main(config):
    run = start(config, check_pairs, IGNORED, make_plan=plan_pairs, reference=True)
    for epoch in range(run.epoch, config.num_epochs):
        evaluate(run, epoch)  # what is due by config.eval_freq
        if is_due(config.eval_freq, epoch):
            validate(run, epoch)
        pairs = read(run, epoch) if run.pairs else rollout(run, epoch)
        pairs.kept /= fsdp_utils.gather(pairs.kept).mean().clamp(min=1e-6)
        for inner in range(config.train.inner_epochs):
            updates = preferences.minibatches(pairs, run.plan.updates_per_epoch, config.sample.batch_size // 2)
            optimise(run, updates, partial(update, epoch=epoch, inner=inner))
        log_epoch(run, epoch)
        if is_due(config.save_freq, run.epoch):
            save(run)
        if run.stopped:
            break
    if config.eval_freq:
        validate(run, run.epoch)
    finish(run)


if __name__ == "__main__":
    flag = config_flags.DEFINE_config_file("config", "config/dpo.py:shapes_qwenimage_dpo,online", "What to run.")
    app.run(lambda _: main(flag.value))
