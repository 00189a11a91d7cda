"""The update: stored steps under the present policy, gradients, the optimizer's step, and the checks before it."""

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor

from flow_grpo.algorithms import ratio_statistics, schedules
from flow_grpo.algorithms.flow_matching import noised, velocity_error
from flow_grpo.algorithms.rollout import Minibatch, Rollout, Rows, StepRows, StoredSteps, TrainedRows, shuffled_updates
from flow_grpo.base import distributed, rng
from flow_grpo.base.formatting import quoted
from flow_grpo.data import captioned_images
from flow_grpo.data.preferences import Pairs
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep, sde_step_with_logprob
from flow_grpo.monitoring import metrics
from flow_grpo.run import save
from flow_grpo.run.run import Run
from flow_grpo.settings import declared
from flow_grpo.weights import fsdp_utils, offload

LATENTS_BYTES = 2**30  # of images of train.data in memory: 4,096 of Qwen-Image's of 512 pixels


@torch.no_grad()
def recompute_log_probs(run: Run, rollout: StoredSteps) -> None:
    """Replace the rollout's log-probs and means by the training forward's, and log the difference, if
    train.old_log_prob is "recompute"."""
    if run.config.train.old_log_prob == "rollout":
        return
    stored = rollout.log_probs.clone()
    num_rows = len(rollout.image_numbers) * rollout.num_steps

    # Views [num_rows, J] and [num_rows, N, C], through which the rollout is overwritten.
    log_probs_by_row = rollout.log_probs.view(num_rows, -1)
    means_by_row = rollout.means.flatten(0, 1)
    with run.board.timed("update"):
        for rows in torch.arange(num_rows).split(run.plan.batch_size):
            with run.exact():
                step = recompute_steps(run, rollout.take(rows, num_rows))
            row_index = rows.to(stored.device)
            log_probs_by_row[row_index] = step.log_prob.detach().view(len(rows), -1)

            # The J outcomes of a row share its mean: the first one's stands for all.
            means_by_row[row_index] = step.prev_sample_mean.detach()[:: rollout.num_outcomes]
    gaps = distributed.gather((rollout.log_probs - stored).abs().flatten())
    run.epoch_metrics["parity/recomputed_abs_diff_mean"] = gaps.mean().item()
    run.epoch_metrics["parity/recomputed_abs_diff_max"] = gaps.max().item()


@declared.ours("updates")
def updates(run: Run, rollout: Rollout[Rows]) -> Iterator[list[Rows]]:
    """Yield the minibatches of each optimizer step of the epoch, all inner epochs, under a progress bar.

    One of a fork's own takes minibatches of at most run.plan.batch_size rows by `rollout.take`. Every rank yields
    equally many.
    """
    train = run.config.train
    for inner_epoch in range(train.inner_epochs):
        shuffled = shuffled_updates(rollout, run.plan, run.config.seed, run.epoch, inner_epoch)
        yield from run.board.bar(shuffled, f"epoch {run.epoch + 1}, update", train.updates_per_epoch)


def reference_steps(run: Run, rows: StepRows) -> SDEStep | None:
    """Score the stored outcomes under the reference; None, without a forward, where train.beta is 0.

    Call it before `recompute_steps`: full weights are swapped in place, which no waiting graph would survive.
    """
    if run.reference is None:
        return None
    scale = run.reference.guidance(run.update_guidance)
    with torch.no_grad(), run.reference.applied():
        return recompute_steps(run, rows, scale)


def recompute_steps(run: Run, rows: StepRows, guidance_scale: float | None = None) -> SDEStep:
    """Score the stored outcomes under the policy that the transformer carries: one forward of R rows, R * J log-probs.

    An update's last minibatch may be smaller than a batch of the rollout. It is filled up with copies of its last row:
    kernels depend on the shape, and only in the rollout's shape does a row get the rollout's bits.
    """
    if guidance_scale is None:
        guidance_scale = run.update_guidance
    filled_up = torch.arange(run.plan.batch_size, device=run.device).clamp(max=len(rows.timesteps) - 1)
    latents = rows.latents[filled_up]
    timesteps = rows.timesteps[filled_up]
    velocity = run.velocity(latents, timesteps, rows.condition.take(filled_up), guidance_scale)

    # The J outcomes of a row share its velocity.
    num_outcomes = rows.num_outcomes
    next_latents = rows.next_latents.unflatten(0, (-1, num_outcomes))[filled_up].flatten(0, 1)
    if num_outcomes > 1:
        latents = latents.repeat_interleave(num_outcomes, 0)
        timesteps = timesteps.repeat_interleave(num_outcomes, 0)
        velocity = velocity.repeat_interleave(num_outcomes, 0)
    step = sde_step_with_logprob(
        run.scheduler,
        velocity,
        timesteps,
        latents,
        noise_level=run.params.noise_level,
        sde_type=run.params.sde_type,
        prev_sample=next_latents,
    )
    # Without the copies that filled the batch up.
    num_scored = len(rows.log_probs)
    return SDEStep(*(values[:num_scored] for values in step))


@torch.no_grad()
def record_ratios(
    run: Run,
    step: SDEStep,
    rows: StepRows,
    log_ratio: Tensor,
    beyond: Tensor | None = None,
    kl_reference: Tensor | None = None,
) -> None:
    """Log the statistics of a minibatch's ratios; before the epoch's first optimizer step also keep the log-ratios that
    `optimizer_step` compares with train.parity_limit.

    Args:
        log_ratio: [R * J], the objective's own.
        beyond: [R * J] bool, rows outside of its trust region; None = ratios outside of train.clip_range.
        kl_reference: [R * J], KL to the reference, for its figures by step.
    """
    gap = step.log_prob - rows.log_probs
    clip_range = run.config.train.clip_range
    values = ratio_statistics.add_to_meter(
        run.meter, log_ratio, gap, clip_range, on_policy=run.on_policy, beyond=beyond
    )
    values |= {"log_ratio": log_ratio, "transition_std": step.transition_std.flatten(), "weight": rows.step_weights}
    if kl_reference is not None:
        values["kl_reference"] = kl_reference
    record_by_step(run, rows, **values)

    # One entry for each outcome, as the log-ratios have.
    if run.on_policy:
        row_ids = rows.row_ids.repeat_interleave(rows.num_outcomes, 0)
        timesteps = rows.timesteps.repeat_interleave(rows.num_outcomes)
        run.first_ratios.append(ratio_statistics.FirstRatios(log_ratio.detach(), row_ids, timesteps))


@torch.no_grad()
def record_by_step(run: Run, rows: Minibatch, **values: Tensor) -> None:
    """Keep values of a minibatch's rows, whose means for each denoising step are logged after the epoch.

    Args:
        values: [R * J] each.
    """
    timesteps = rows.timesteps.repeat_interleave(rows.num_outcomes)
    columns = {name: column.detach() for name, column in values.items()}
    run.row_values.append(metrics.RowValues(timesteps, columns | {"advantage": rows.advantages}))


def log_by_step(run: Run) -> None:
    """Add the means for each denoising step to the epoch's metrics, and ratios and advantages to its distributions."""
    rows = metrics.gather_rows(run.row_values)
    run.row_values.clear()
    if rows is None:
        return
    run.epoch_metrics |= metrics.by_step(rows, run.scheduler.timesteps.cpu())
    for name in metrics.HISTOGRAMS:
        if name in rows.values:
            run.distributions[name] = rows.values[name]


def backward(run: Run, loss: Tensor, rows: Minibatch | Pairs) -> None:
    """Add the gradient of a minibatch's part of the update's mean loss; log the loss and the advantages.

    Args:
        loss: [R * J], not yet multiplied by rows.loss_weight, which is 0 for what is masked or filtered.
    """
    loss = loss * rows.loss_weight
    run.trained_rows.append(TrainedRows(loss.detach(), rows.row_ids))
    (loss.sum() / (rows.num_update_rows * rows.num_outcomes)).backward()
    run.meter.add(loss=loss)

    # Pairs have no advantages.
    if isinstance(rows, Minibatch):
        run.meter.add(advantage_abs_mean=rows.advantages.abs(), advantage_positive_share=rows.advantages > 0)


def add_data_gradients(run: Run, row_ids: Tensor, num_update_rows: int, inner_epoch: int = 0) -> None:
    """Add the gradient of train.data_weight mean[(v - (eps - x_0))^2] over images of train.data, if it is set (DDRL,
    arXiv:2512.04332).

    For each row of a minibatch it draws an image, a noise and one of the rollout's noise levels. The draws are seeded
    by the row's image and step, so that they are the same on any number of GPUs. Call it after the minibatch's own
    `backward`, so that there is only one graph in memory at a time.

    Args:
        row_ids: [R, 2] int64 on the CPU, as in Minibatch.
        num_update_rows: rows of the whole update, on this rank.
        inner_epoch: passes over the rollout before this one.
    """
    images = run.prompts.data
    if not images:
        return
    generators = []
    chosen = []
    levels = []
    for image, step in row_ids.tolist():
        generator = rng.generator(run.config.seed, "data", run.epoch, inner_epoch, image, step)
        generators.append(generator)
        chosen.append(images[int(torch.randint(len(images), (), generator=generator))])
        levels.append(int(torch.randint(run.config.sample.num_steps, (), generator=generator)))

    x_0 = torch.cat([_latents_of(run, image) for image in chosen]).to(run.device)
    noise = rng.normal(x_0.shape[1:], generators, run.device)
    timesteps = run.scheduler.timesteps[torch.tensor(levels).to(run.device)]

    # Without guidance, as flow matching trains velocities.
    scale = run.model.unguided(run.config.sample.guidance_scale)
    condition = run.embed([image.prompt for image in chosen])
    velocity = run.velocity(noised(x_0, noise, timesteps), timesteps, condition, scale)
    error = velocity_error(velocity, x_0, noise)
    (run.config.train.data_weight * error.sum() / num_update_rows).backward()
    run.meter.add(data_error=error)


def _latents_of(run: Run, image: captioned_images.CaptionedImage) -> Tensor:
    """Return the latents of an image of train.data, [1, ...] f32 on the CPU; the first LATENTS_BYTES are remembered."""
    latents = run.data_latents.get(image.path)
    if latents is None:
        # By itself, so that its latents do not depend on its neighbors.
        pixels = captioned_images.load(image, run.size).to(run.device)
        latents = run.model.encode_images(pixels[None]).cpu()
        if (len(run.data_latents) + 1) * latents.nbytes <= LATENTS_BYTES:
            run.data_latents[image.path] = latents
    return latents


def pull(run: Run, rows: Minibatch, distance: Tensor) -> Tensor:
    """Return the loss of distances to the reference [R * J]: train.beta times those that train.beta_gate lets pull."""
    train = run.config.train
    if not train.beta_gate:
        return train.beta * distance
    assert rows.beta_gate is not None, "`main` asks rewards.beta_gate for it"
    run.meter.add(beta_gate_share=rows.beta_gate)
    return train.beta * rows.beta_gate * distance


def optimizer_step(run: Run) -> None:
    """Average the gradients over the ranks, clip them, step, update the EMA, and log. Raises ParityError, or
    FloatingPointError for a loss or gradient that is not finite, before any weight is moved."""
    if run.on_policy:
        _check_parity(run)
    parameters = run.parameters
    fsdp_utils.average_gradients(parameters)

    # The norm is that of all ranks, so they decide alike.
    grad_norm = fsdp_utils.clip_grad_norm(parameters, run.config.train.max_grad_norm)
    if not grad_norm.isfinite():
        _raise_not_finite(run, grad_norm)
    if run.step == run.first_step:
        save.keep_epoch_start(run)
    move_weights(run)
    run.optimizer.zero_grad()
    run.step += 1
    run.on_policy = False
    run.ema.update(run.step)
    run.trained_rows.clear()
    figures = run.meter.pop(distributed.over_ranks)
    if run.reference:
        # Losses of noisy steps log a KL, others a distance of velocities, and DPO neither.
        distance = figures.get("reference_distance", 0.0)
        if "kl_reference" in figures:
            distance = figures["kl_reference"]
        run.reference.follow(run.step, distance)
        if run.reference.moves:
            figures["reference_moves"] = run.reference.num_moves
    figures |= {"grad_norm": grad_norm.item(), "learning_rate": run.optimizer.param_groups[0]["lr"]}
    run.board.log("update", figures, epoch=run.epoch, step=run.step)


def move_weights(run: Run) -> None:
    """Take the optimizer's step, at the present learning rate."""
    offloads = run.config.fsdp.offload == "optimizer"
    if offloads:
        offload.reload_optimizer_state(run.optimizer)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run)
    run.optimizer.step()
    if offloads:
        offload.offload_optimizer_state(run.optimizer)


def learning_rate(run: Run) -> float:
    """Return the learning rate of the next update: train.learning_rate, times its schedule's share, times the factor
    that health.action may have lowered."""
    train = run.config.train
    per_epoch = train.inner_epochs * train.updates_per_epoch

    # Epochs are counted, not all updates: where this run branched off another one, that may have had more or fewer
    # updates in each epoch.
    update = run.epoch * per_epoch + run.step - run.first_step
    num_updates = run.config.num_epochs * per_epoch
    share = schedules.learning_rate_share(update, num_updates, train.learning_rate_schedule, train.warmup_updates)
    return train.learning_rate * share * run.learning_rate_factor


def _check_parity(run: Run) -> None:
    """Forget the epoch's first ratios; raise ParityError, on all ranks alike, if they are further from 1 than
    train.parity_limit. The epochs before this one are saved first: no weight has moved after them."""
    train = run.config.train
    first_ratios = run.first_ratios
    run.first_ratios = []
    if not first_ratios:
        return
    log_ratios = torch.cat([part.log_ratios for part in first_ratios])
    # Statistics of all ranks, so that all of them raise or none.
    problems = ratio_statistics.parity_problems(log_ratios, train.clip_range, train.parity_limit)
    if not problems:
        return
    image, step = _place_of_largest(run, first_ratios, log_ratios)
    if run.epoch > run.saved_epoch:
        save.save(run)
    raise ratio_statistics.ParityError(
        f"epoch {run.epoch + 1}: the update disagrees with the rollout before the first optimizer step. Log-ratios are "
        f"{', '.join(problems)}; the largest is at denoising step {step} of {_image_name(run, image)}. "
        f"tools/check_parity.py names the cause; docs/design/parity.md has the ways out. This was found in update "
        f"{run.step + 1}{save.state_after_failure(run)}"
    )


def _place_of_largest(
    run: Run, first_ratios: list[ratio_statistics.FirstRatios], log_ratios: Tensor
) -> tuple[int, int]:
    """Return the global image and the denoising step of the largest of all ranks' first log-ratios.

    Args:
        log_ratios: those of `first_ratios`, joined.
    """
    row_ids = torch.cat([part.row_ids for part in first_ratios])
    timesteps = torch.cat([part.timesteps for part in first_ratios])
    largest, outcome = log_ratios.abs().max(0)
    image = int(row_ids[int(outcome), 0])
    step = int((timesteps[outcome] - run.scheduler.timesteps).abs().argmin())

    # Tuples are compared by their first elements: the largest tuple is that of the largest log-ratio.
    largest_of_ranks = distributed.gather_objects([(largest.item(), image, step)])
    _, image, step = max(largest_of_ranks)
    return image, step


def _raise_not_finite(run: Run, grad_norm: Tensor) -> NoReturn:
    """Raise FloatingPointError with image and step of the first row whose loss is not finite, or for the gradient."""
    for part in run.trained_rows:
        outcomes = (~part.loss.isfinite()).nonzero().flatten()
        if len(outcomes):
            image, step = part.row_id(outcomes[0])
            hint = ""
            if run.config.precompute_modulation:
                hint = "; config.precompute_modulation gives NaN at a timestep that is in no schedule of the run"
            raise FloatingPointError(
                f"the loss is {part.loss[outcomes[0]].item()} for {_image_name(run, image)}, trained step {step}, in "
                f"update {run.step + 1}{hint}{save.state_after_failure(run)}"
            )
    raise FloatingPointError(
        f"the gradient norm is {grad_norm.item()} in update {run.step + 1}{save.state_after_failure(run)}"
    )


def _image_name(run: Run, image: int) -> str:
    """Name an image of the epoch by its global number and its prompt."""
    prompt = run.prompts.train[run.picks[image // run.plan.group_size]]
    return f"image {image} ({quoted(prompt.text)})"
