"""From the loss of a minibatch to an optimizer step, and the checks before it moves any weight."""

from collections.abc import Iterator

from torch import Tensor

from flow_grpo.algorithms import losses
from flow_grpo.algorithms.rollout import Minibatch, Rollout, TrainedRows, shuffled_updates
from flow_grpo.base import distributed
from flow_grpo.data.preferences import Pairs
from flow_grpo.run.log_probs import check_parity, image_name
from flow_grpo.run.run import Run
from flow_grpo.run.save import state_after_failure
from flow_grpo.weights import fsdp_utils, offload


def updates(run: Run, rollout: Rollout) -> Iterator[list[Minibatch]]:
    """The minibatches of each optimizer step of the epoch, all inner epochs, under a progress bar; logs advantages."""
    train = run.config.train
    for inner_epoch in range(train.inner_epochs):
        shuffled = shuffled_updates(rollout, run.plan, run.config.seed, run.epoch, inner_epoch)
        for minibatches in run.board.bar(shuffled, f"epoch {run.epoch + 1}, update", train.updates_per_epoch):
            for advantages in (rows.advantages for rows in minibatches):
                run.meter.add(advantage_abs_mean=advantages.abs(), advantage_positive_share=advantages > 0)
            yield minibatches


def backward(run: Run, loss: Tensor, rows: Minibatch | Pairs, log_ratios: Tensor | None = None) -> None:
    """Add the gradient of a minibatch's part of the update's mean. loss [R * J]: what is masked or filtered counts as
    rows.loss_weight says. log_ratios [R * J]: to name the row if one is wrong."""
    loss = loss * rows.loss_weight
    log_ratios = None if log_ratios is None else log_ratios.detach()
    run.trained_rows.append(TrainedRows(loss.detach(), rows.row_ids, log_ratios))
    (loss.sum() / (rows.num_rows * run.plan.num_branches)).backward()
    run.meter.add(loss=loss)


def optimizer_step(run: Run) -> None:
    """Average over ranks, clip by the norm over all of them, step, average the weights, log. A ParityError or, where a
    loss or gradient is not finite, a FloatingPointError comes before any weight is moved."""
    if run.on_policy:
        check_parity(run)
    parameters = run.parameters
    fsdp_utils.average_gradients(parameters)
    grad_norm = fsdp_utils.clip_grad_norm(parameters, run.config.train.max_grad_norm)
    if not grad_norm.isfinite():  # of all ranks: they decide alike
        _raise_not_finite(run, grad_norm)
    move_weights(run)
    run.optimizer.zero_grad()
    run.step += 1
    run.on_policy = False
    run.ema.update(run.step)
    if run.reference:
        run.reference.follow(run.step)
    run.trained_rows.clear()
    metrics = {"grad_norm": grad_norm.item(), "learning_rate": run.optimizer.param_groups[0]["lr"]}
    run.board.log("update", run.meter.pop(distributed.over_ranks) | metrics, epoch=run.epoch, step=run.step)


def move_weights(run: Run) -> None:
    """The optimizer's step, at the present rate."""
    offloads = run.config.fsdp.offload == "optimizer"
    if offloads:
        offload.reload_optimizer_state(run.optimizer)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run)
    run.optimizer.step()
    if offloads:
        offload.offload_optimizer_state(run.optimizer)


def learning_rate(run: Run) -> float:
    """Of the next update: the configured one, what its schedule leaves, and what health.action leaves."""
    config, train = run.config, run.config.train
    num_updates = config.num_epochs * train.inner_epochs * train.updates_per_epoch
    share = losses.learning_rate_share(run.step, num_updates, train.learning_rate_schedule, train.warmup_updates)
    return train.learning_rate * share * run.learning_rate_factor


def _raise_not_finite(run: Run, grad_norm: Tensor) -> None:
    """Raises FloatingPointError with image and step of the first row whose loss is not finite, or for the gradient."""
    for part in run.trained_rows:
        bad = (~part.loss.isfinite()).nonzero().flatten()
        if len(bad):
            image, step = part.row_id(bad[0])
            raise FloatingPointError(
                f"the loss is {part.loss[bad[0]].item()} for {image_name(run, image)}, trained step {step}, in update "
                f"{run.step + 1}{state_after_failure(run)}"
            )
    raise FloatingPointError(
        f"the gradient norm is {grad_norm.item()} in update {run.step + 1}{state_after_failure(run)}"
    )
