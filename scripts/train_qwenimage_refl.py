"""Direct reward gradients on Qwen-Image: draw images, and move the policy up the gradient of their rewards.

    torchrun --nproc_per_node=8 scripts/train_qwenimage_refl.py --config config/refl.py:pickscore_qwenimage_refl

Papers, by train.gradient_path: ReFL (arXiv:2304.05977), DRaFT (arXiv:2309.17400), LeapAlign (arXiv:2604.15311) and
FlowBP (arXiv:2606.11075). The reward must be differentiable with respect to the image: a network that this process
computes. There are no groups, no advantages and no noise: every image has a gradient of its own. Without arguments it
trains the shipped tiny model.
"""

from flow_grpo.command_line import checks, command_line

config = None
if __name__ == "__main__":  # before torch is imported, so that --help, --list and mistakes are answered at once
    config = command_line.parse("config/refl.py:shapes_proxy_qwenimage_refl", checks.REFL)

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from ml_collections import ConfigDict
from torch import Tensor
from train_qwenimage_nft import reference_distance

from flow_grpo.algorithms.flow_matching import noised
from flow_grpo.algorithms.reward_gradients import PathStep, backpropagate, choose_steps, leap_weights, path_of
from flow_grpo.base import rng
from flow_grpo.data.prompts import PlannedBatch
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.denoise_with_logprob import ForwardContext
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob
from flow_grpo.run import reward_gradients, rewards
from flow_grpo.run.evaluate import evaluate
from flow_grpo.run.loop import finish, is_due, log_epoch
from flow_grpo.run.reward_gradients import DrawnImages
from flow_grpo.run.run import Run
from flow_grpo.run.sampling import batches
from flow_grpo.run.save import save
from flow_grpo.run.startup import start
from flow_grpo.run.update import add_data_gradients, optimizer_step
from flow_grpo.settings import declared
from flow_grpo.weights import policies


def choose_path(run: Run, epoch: int, update: int, batch: PlannedBatch) -> list[PathStep]:
    """Draw the steps that a batch's gradients go through; the draw is the same on any number of GPUs."""
    train = run.config.train
    # The global number of the batch, so that each batch has steps of its own. But ReFL's walk ends at the drawn step,
    # and with sharded weights all ranks must make equally many forwards: there all batches of an update share a draw.
    draw_number = batch.image_numbers[0] // run.plan.batch_size
    if train.gradient_path == "refl":
        draw_number = update
    generator = rng.generator(run.config.seed, "gradient steps", epoch, draw_number)
    steps = choose_steps(train, run.config.sample.num_steps, generator)
    return path_of(train, steps, run.scheduler.sigmas.tolist())


@torch.no_grad()
def velocity_at(run: Run, step: int, x: Tensor, condition: Condition) -> Tensor:
    """Velocity [B, ...] of the policy at a step, without gradients, bit for bit as the update will compute it."""
    with run.exact():
        return run.velocity(x, timesteps_of(run, step, len(x)), condition).detach()


def timesteps_of(run: Run, step: int, num_rows: int) -> Tensor:
    """Timesteps [B] of a step."""
    return run.scheduler.timesteps[step].repeat(num_rows)


def shortened(run: Run, condition: Condition) -> Condition:
    """Condition without the padding that sample.text_multiple leaves out."""
    multiple = run.config.sample.text_multiple
    return condition.trimmed(multiple) if multiple else condition


@declared.ours("rollout")
def rollout(run: Run, epoch: int, update: int, batch: PlannedBatch, fast: ForwardContext) -> DrawnImages:
    """Draw a batch of images by the ODE with the present policy, and keep the states that gradients will go through.

    Args:
        fast: () -> context of forwards through which no gradient goes, as sample.rollout_weights says.
    """
    train = run.config.train
    path = choose_path(run, epoch, update, batch)
    steps = [path_step.step for path_step in path]
    # The walk ends at ReFL's only step, from which one leap leads to the image.
    num_steps = steps[0] + 1 if train.gradient_path == "refl" else run.config.sample.num_steps

    generators = [rng.generator(run.config.seed, "noise", epoch, image) for image in batch.image_numbers]
    condition = run.embed(batch.prompts)
    short_condition = shortened(run, condition)
    x = run.model.noise(run.size, generators)
    states = {}
    velocities = {}
    for step in range(num_steps):
        timesteps = timesteps_of(run, step, len(x))
        if step in steps:
            velocity = velocity_at(run, step, x, condition)
            states[step] = x
            velocities[step] = velocity
        else:
            with torch.no_grad(), fast():
                velocity = run.velocity(x, timesteps, short_condition)
        x = sde_step_with_logprob(run.scheduler, velocity, timesteps, x, noise_level=0.0).prev_sample
    if train.gradient_path == "refl":
        x = states[steps[0]] + path[0].weight * velocities[steps[0]]

    # In the order of the path, from the last step to the first, as gradients meet them.
    states = torch.stack([states[step] for step in steps])
    velocities = torch.stack([velocities[step] for step in steps])
    share = 1 / (1 + train.gradient_noisings)
    loss_weight = torch.ones(len(x), device=run.device)
    if train.gradient_path == "leap":
        loss_weight = leap_weights(path, states, velocities, x, train.leap_tolerance)
        run.meter.add(leap_weight=loss_weight)
    return DrawnImages(batch, condition, path, states, velocities, x, loss_weight, share)


def draw(
    run: Run, epoch: int, update: int, batches_of_update: list[PlannedBatch], rollout: Callable[..., DrawnImages]
) -> list[DrawnImages]:
    """Draw all images of an update with the present policy. A merged copy of its weights is freed at the end, before
    what scores and differentiates the images needs the memory."""
    fast = policies.fast_forwards(run.config.sample.rollout_weights, run.model.transformer)
    return [rollout(run, epoch, update, batch, fast) for batch in batches_of_update]


def noised_anew(run: Run, epoch: int, drawn: DrawnImages) -> Iterator[DrawnImages]:
    """Yield the batch with each image noised anew to the level of the last step, train.gradient_noisings times, and
    denoised from there at once (DRaFT-LV, arXiv:2309.17400)."""
    step = run.config.sample.num_steps - 1
    path = [PathStep(step, -run.scheduler.sigmas[step].item())]
    for number in range(run.config.train.gradient_noisings):
        generators = []
        for image in drawn.batch.image_numbers:
            generators.append(rng.generator(run.config.seed, "forward noise", epoch, number, image))
        noise = rng.normal(drawn.x_0.shape[1:], generators, run.device)
        x = noised(drawn.x_0, noise, timesteps_of(run, step, len(noise)))
        velocity = velocity_at(run, step, x, drawn.condition)
        yield replace(
            drawn,
            path=path,
            states=x[None],
            velocities=velocity[None],
            x_0=x + path[0].weight * velocity,
        )


@declared.ours("add_gradients")
def add_gradients(run: Run, drawn: DrawnImages, gradient: Tensor) -> None:
    """Send a gradient with respect to the images, [B, ...], back through the path's velocities to the weights, and add
    the gradient of the distance to the reference's velocities at the same states."""
    beta = run.config.train.beta
    # Means over the images of an update, and over the steps of the path.
    num_velocities = reward_gradients.images_per_update(run) * len(drawn.path)

    def recompute(place: int, state: Tensor) -> tuple[Tensor, Tensor | float]:
        # The velocity at a place of the path, with gradients, and the loss of its distance to the reference's.
        timesteps = timesteps_of(run, drawn.path[place].step, len(state))
        reference = reference_velocity(run, state, timesteps, drawn.condition)
        velocity = run.velocity(state, timesteps, drawn.condition)
        reward_gradients.record_parity(run, velocity, drawn.velocities[place])
        if reference is None:
            return velocity, 0.0
        distance = reference_distance(run.meter, velocity, reference)
        if run.config.train.beta_gate:
            assert drawn.beta_gate is not None, "`score` makes it"
            distance = drawn.beta_gate * distance
            run.meter.add(beta_gate_share=drawn.beta_gate, gated_distance=distance)
        return velocity, drawn.share * beta * distance.sum() / num_velocities

    backpropagate(drawn.path, drawn.states, gradient, recompute)


@torch.no_grad()
def reference_velocity(run: Run, x: Tensor, timesteps: Tensor, condition: Condition) -> Tensor | None:
    """Velocity [B, ...] of the reference; None where train.beta is 0.

    Call it before the policy's forward: it swaps weights in place, which that forward's graph would not survive.
    """
    if run.reference is None:
        return None
    scale = run.reference.guidance(run.config.sample.guidance_scale)
    with run.reference.applied():
        return run.velocity(x, timesteps, condition, scale)


def batches_of_updates(run: Run, epoch: int) -> Iterator[list[PlannedBatch]]:
    """Yield this rank's batches of each update of an epoch."""
    batches_per_update = run.plan.batches_per_epoch // run.plan.updates_per_epoch
    batches_of_update = []
    for batch in batches(run, epoch):
        batches_of_update.append(batch)
        if len(batches_of_update) == batches_per_update:
            yield batches_of_update
            batches_of_update = []


def main(config: ConfigDict, rollout=rollout, add_gradients=add_gradients, script=checks.REFL) -> None:
    """Train; a fork passes functions of its own."""
    reward_gradients.check(checks.check(config, script))
    declared.check(config, rollout=rollout, add_gradients=add_gradients)
    run = start(config, script)
    loaded = reward_gradients.load_rewards(run)
    run.model.detach_negative = run.config.train.detach_negative
    for epoch in range(run.epoch, run.config.num_epochs):
        # Every config.eval_freq epochs, score the averaged weights on the prompts that choose best/.
        evaluate(run, epoch)

        submitted = []
        for update, batches_of_update in enumerate(batches_of_updates(run, epoch)):
            with run.board.timed("rollout"):
                drawn_batches = draw(run, epoch, update, batches_of_update, rollout)
            for drawn in drawn_batches:
                # The images' rewards, and their gradients with respect to the images' latents.
                with run.board.timed("reward"):
                    scored = reward_gradients.score(run, loaded, drawn)
                submitted.append(scored.submitted)

                # From the latents back to the weights.
                with run.board.timed("update"):
                    add_gradients(run, scored.drawn, scored.gradient)
                    for renoised in noised_anew(run, epoch, scored.drawn):
                        add_gradients(run, renoised, reward_gradients.score(run, loaded, renoised).gradient)
                    add_data_gradients(run, reward_gradients.row_ids_of(drawn), reward_gradients.images_per_update(run))
            with run.board.timed("update"):
                reward_gradients.finish_update(run)
                optimizer_step(run)
        rewards.wait(run, epoch, submitted)

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
