"""From a minibatch to an optimizer step: what the policy says of stored steps, the gradient, and the checks before it
moves any weight.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from flow_grpo.algorithms import losses, ratio_statistics
from flow_grpo.algorithms.rollout import Minibatch, Rollout, TrainedRows
from flow_grpo.base import distributed
from flow_grpo.base.quoting import quoted
from flow_grpo.checkpoints import checkpoints
from flow_grpo.data import prompts
from flow_grpo.diffusers_patch.sde_with_logprob import SDEStep, sde_step_with_logprob
from flow_grpo.run import save
from flow_grpo.run.run import Run
from flow_grpo.weights import finite, fsdp_utils, offload


def policy_step(run: Run, rows: Minibatch, guidance_scale: float | None = None) -> SDEStep:
    """Score the stored outcomes under the present policy: one forward for R rows, R * J log-probs.

    An update's last minibatch may be smaller than a batch of the rollout. It is filled up with copies of its last row:
    kernels depend on the shape, and only in the rollout's shape does a row get the rollout's bits.
    """
    size, outcomes = run.plan.batch_size, run.plan.num_branches
    row = torch.arange(size, device=run.device).clamp(max=len(rows.timesteps) - 1)
    latents, timesteps = rows.latents[row], rows.timesteps[row]
    velocity = run.velocity(latents, timesteps, rows.embeds.take(row), guidance_scale)
    if outcomes > 1:
        latents, timesteps, velocity = (x.repeat_interleave(outcomes, 0) for x in (latents, timesteps, velocity))
    step = sde_step_with_logprob(
        run.scheduler,
        velocity,
        timesteps,
        latents,
        noise_level=run.config.sample.noise_level,
        sde_type=run.config.sample.sde_type,
        prev_sample=rows.next_latents.unflatten(0, (-1, outcomes))[row].flatten(0, 1),
    )
    return SDEStep(*(part[: len(rows.log_probs)] for part in step))


@torch.no_grad()
def recompute_log_probs(run: Run, rollout: Rollout) -> None:
    """With train.old_log_prob = "recompute": replace the log-probs that the rollout noted by ones recomputed with
    the training forward, so that the first ratio is 1. Logs the difference."""
    if run.config.train.old_log_prob == "rollout":
        return
    noted, num_rows = rollout.log_probs.clone(), len(rollout.images) * rollout.shape[0]
    with run.board.timed("update"):
        for rows in torch.arange(num_rows).split(run.plan.batch_size):
            with run.exact():
                step = policy_step(run, rollout.take(rows, num_rows))
            row_index = rows.to(noted.device)
            rollout.log_probs.view(num_rows, -1)[row_index] = step.log_prob.detach().view(len(rows), -1)
            if rollout.means is not None:
                rollout.means.flatten(0, 1)[row_index] = step.prev_sample_mean.detach()[:: rollout.shape[1]]
    gaps = distributed.gather((rollout.log_probs - noted).abs().flatten())
    run.epoch_figures |= {"parity/recomputed_abs_diff_mean": gaps.mean().item()}
    run.epoch_figures |= {"parity/recomputed_abs_diff_max": gaps.max().item()}


def score_rows(run: Run, rows: Minibatch) -> tuple[SDEStep, SDEStep | None]:
    """The stored outcomes under the policy, with gradients, and under the reference: None, and no forward, where
    train.beta is 0."""
    reference = None
    if run.reference is not None:  # first: full weights are swapped in place, which no waiting graph would survive
        scale = run.reference.guidance(run.config.sample.guidance_scale)
        with torch.no_grad(), run.reference.applied():
            reference = policy_step(run, rows, scale)
    return policy_step(run, rows), reference


def log_ratio(run: Run, step: SDEStep, rows: Minibatch) -> Tensor:
    """What the objective clips the exponential of, [R * J]: the policy's log-prob of an outcome less the rollout's, as
    it is or as GRPO-Guard frees it of bias and scale."""
    if run.config.train.objective == "clip":
        return step.log_prob - rows.log_probs
    return losses.guard_log_ratio(step.log_prob, rows.log_probs, step.prev_sample_mean, rows.means, step.transition_std)


def surrogate(run: Run, step: SDEStep, rows: Minibatch) -> Tensor:
    """The policy objective of each outcome, [R * J], as train.objective says: PPO's, or GRPO-Guard's."""
    train = run.config.train
    run.meter.add(advantage_abs_mean=rows.advantages.abs())
    advantages = rows.advantages.clamp(-train.adv_clip_max, train.adv_clip_max)
    if train.objective == "clip":
        return losses.clipped_surrogate(step.log_prob, rows.log_probs, advantages, train.clip_range)
    means = step.prev_sample_mean, rows.means
    scales = step.transition_std, step.dt
    return losses.guard_surrogate(step.log_prob, rows.log_probs, *means, *scales, advantages, train.clip_range)


def kl_penalty(run: Run, step: SDEStep, reference: SDEStep | None) -> Tensor | float:
    """train.beta * KL(policy || reference) of each outcome, [R * J]."""
    if reference is None:
        return 0.0
    kl = losses.gaussian_kl(step.prev_sample_mean, reference.prev_sample_mean, step.transition_std)
    run.meter.add(kl_reference=kl)
    return run.config.train.beta * kl


def accumulate(run: Run, loss: Tensor, rows, step: SDEStep | None = None) -> None:
    """Add the gradient of loss [R * J], a part of the update's mean; of a scored step, record its ratio."""
    loss = loss * rows.loss_weight
    ratios = None if step is None else _record_ratios(run, step, rows)
    run.trained_rows.append(TrainedRows(loss.detach(), rows.where, ratios))
    share = run.loss_scale.item() * loss.sum() / (rows.num_rows * run.plan.num_branches)
    share.backward()
    run.meter.add(loss=loss)


@torch.no_grad()
def _record_ratios(run: Run, step: SDEStep, rows: Minibatch) -> Tensor:
    """Record what the ratios and densities of a scored step say; the log-ratios, [R * J]."""
    compared = log_ratio(run, step, rows), step.log_prob - rows.log_probs, run.config.train.clip_range
    ratio_statistics.record(run.meter, *compared, on_policy=run.on_policy)
    run.meter.add(entropy=losses.gaussian_entropy(step.transition_std))
    if run.on_policy:
        number = (rows.timesteps[:, None] - run.scheduler.timesteps).abs().argmin(1)
        run.gaps.add(number.repeat_interleave(run.plan.num_branches), *compared)
    return compared[0]


def optimise(run: Run, updates: Iterable[list], update: Callable) -> None:
    """Train on minibatches: `updates` holds a list of them for every optimizer step.

    Args:
        update: (run, rows) adds the gradient of a minibatch.
    """
    with run.board.timed("update"):
        count = run.config.train.updates_per_epoch
        for rows_of_update in run.board.bar(updates, f"epoch {run.epoch + 1}, update", count):
            for rows in rows_of_update:
                update(run, rows)
            optimizer_step(run)


def optimizer_step(run: Run) -> None:
    """Average over ranks, clip by the norm over all of them, step, average the weights, log.

    Raises:
        parity.ParityError: rollout and update disagree before the epoch's first step; this update has moved no weight.
        FloatingPointError: a loss or gradient is not finite; this update has moved no weight.
    """
    if run.on_policy:
        _check_parity(run)
    parameters, offloads = run.parameters, run.config.fsdp.offload == "optimizer"
    fsdp_utils.average_gradients(parameters)
    if run.loss_scale != 1:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1 / run.loss_scale.item())
    grad_norm = fsdp_utils.clip_grad_norm(parameters, run.config.train.max_grad_norm)
    if offloads:
        offload.reload_optimizer_state(run.optimizer)
    if _may_step(run, grad_norm):
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(run)
        run.optimizer.step()
    if offloads:
        offload.offload_optimizer_state(run.optimizer)
    run.optimizer.zero_grad()
    run.step += 1
    run.on_policy = False
    run.ema.update(run.step)
    if run.reference:
        run.reference.follow(run.step)
    run.trained_rows.clear()
    figures = {"grad_norm": grad_norm.item(), "learning_rate": run.optimizer.param_groups[0]["lr"]}
    run.board.log("update", run.meter.pop(distributed.over_ranks) | figures, epoch=run.epoch, step=run.step)


def learning_rate(run: Run) -> float:
    """Of the next update: the configured one, what its schedule leaves, and what health.action leaves."""
    config, train = run.config, run.config.train
    num_updates = config.num_epochs * train.inner_epochs * train.updates_per_epoch
    share = losses.learning_rate_share(run.step, num_updates, train.learning_rate_schedule, train.warmup_updates)
    return train.learning_rate * share * run.learning_rate_factor


def _check_parity(run: Run) -> None:
    """Log how far the first ratios of the epoch are from 1; beyond the limits of config.train, all ranks end the run,
    with the epochs before this one saved.

    Raises:
        parity.ParityError: nothing after it would be training.
    """
    train = run.config.train
    metrics, found = run.gaps.pop(distributed.over_ranks, train.clip_range)
    run.epoch_figures |= metrics
    limits = ratio_statistics.Limits(train.parity_largest, train.parity_mean, train.parity_clipped)
    problems = ratio_statistics.exceeded(found, limits) if found else []
    if not problems:
        return
    worst = [(part.log_ratios.abs().max().item(), part) for part in run.trained_rows]
    size, part = max(worst, key=lambda pair: pair[0])
    image, _ = part.where_of(part.log_ratios.abs().argmax())
    _, image = max(distributed.gather_objects([(size, image)]))
    if run.epoch > run.saved_epoch:
        save.save(run)
    raise ratio_statistics.ParityError(
        f"epoch {run.epoch + 1}: the update disagrees with the rollout before the first optimizer step. Log-ratios are "
        f"{', '.join(problems)}; the largest is at denoising step {found.step} of {_image_name(run, image)}. "
        f"tools/check_parity.py names the cause; docs/design/parity.md has the ways out. This was found in update "
        f"{run.step + 1}{_state(run)}"
    )


def _may_step(run: Run, grad_norm: Tensor) -> bool:
    """Stop the run before a step that would spoil the weights. The norm is over all ranks, so they decide alike."""
    finite = bool(grad_norm.isfinite())
    if not finite:
        _name_the_row(run)
        if run.loss_scale <= 1:
            raise FloatingPointError(f"the gradient norm is {grad_norm.item()} in update {run.step + 1}{_state(run)}")
    if run.config.precision == "fp16":  # an overflow of the scaled loss is no fault of the loss: skip, scale less
        run.loss_scale.mul_(2 ** (1 / 1000) if finite else 0.5).clamp_(max=2.0**16)
    return finite


def _name_the_row(run: Run) -> None:
    """Raises FloatingPointError with prompt and step of the first row whose loss is not finite, if there is one."""
    for part in run.trained_rows:
        bad = (~part.loss.isfinite()).nonzero().flatten()
        if len(bad):
            image, step = part.where_of(bad[0])
            raise FloatingPointError(
                f"the loss is {part.loss[bad[0]].item()} for {_image_name(run, image)}, trained step {step}, in update "
                f"{run.step + 1}{_state(run)}"
            )


def _image_name(run: Run, image: int) -> str:
    """An image of the epoch, by its global number and its prompt."""
    plan, dataset = run.plan, run.train_prompts
    picks = prompts.epoch_prompts(len(dataset), plan.num_groups, run.config.seed, run.epoch)
    return f"image {image} ({quoted(dataset[picks[image // plan.group_size]].text)})"


def _state(run: Run) -> str:
    """What an update that was not made leaves behind, as the end of a sentence."""
    problem = finite.problem(fsdp_utils.trainable_parameters(run.pipeline.transformer))
    weights = f"the weights were spoilt before it: {problem}" if problem else "it has moved no weight"
    return f", which was not made; {weights}; {checkpoints.named(checkpoints.find(run.folder / 'checkpoints'))}"
