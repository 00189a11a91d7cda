"""What a run does about its health: it watches every epoch, and acts on alarms as config.health.action says."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from flow_grpo import distributed, health, optimization, saving

if TYPE_CHECKING:
    from flow_grpo.run import Run

STEERING_LIMIT = 1.5  # by which train.target_update_size changes the learning rate after an epoch, at most


def watch(run: "Run", epoch: int) -> None:
    """Add the signs of health to the epoch's figures; where one exceeds its limit, do what health.action says."""
    signs = distributed.gather(torch.cat(run.signs)).mean(0).tolist() if run.signs else []  # none without a rollout
    run.signs.clear()
    run.epoch_figures |= {f"health/{sign}": value for sign, value in zip(health.LATENT_SIGNS, signs)}
    verdict = distributed.broadcast_object(_judge(run, epoch) if distributed.is_main() else None)
    action = run.config.health.action
    done = ACTIONS[action](run) if verdict.act else "nothing, so soon after the last time"
    if verdict.act or {alarm.name for alarm in verdict.alarms} - {alarm.name for alarm in run.alarms}:
        sentences = "; ".join(alarm.sentence for alarm in verdict.alarms)
        run.board.say(f"epoch {epoch + 1}: {sentences}. What config.health.action {action!r} does: {done}")
    run.alarms = verdict.alarms
    if run.config.train.target_update_size:
        run.learning_rate_factor *= distributed.broadcast_object(_steering(run) if distributed.is_main() else None)
        run.learning_rate_factor = min(run.learning_rate_factor, run.learning_rate_ceiling)
    run.epoch_figures |= {f"health/{name}": value for name, value in verdict.figures.items()}
    run.epoch_figures |= {"health/limits_exceeded": len(verdict.alarms), "health/action_taken": verdict.act}
    run.epoch_figures["health/learning_rate_factor"] = run.learning_rate_factor


def resume(run: "Run") -> None:
    """Take up the history of metrics.jsonl."""
    lines = [line for line in run.board.history() if line["epoch"] < run.epoch]  # [] on other ranks than the main one
    run.history = health.by_epoch(lines, run.config)


def _judge(run: "Run", epoch: int) -> health.Verdict:
    """On the main rank: enter the epoch into the history, and judge it."""
    line = {"kind": "epoch", "epoch": epoch, **run.epoch_figures}
    run.history.append(health.summarize([*run.board.since_epoch, line], run.config))
    verdict = health.judge(run.history, run.config.health)
    run.history[-1] = run.history[-1]._replace(acted=verdict.act)
    return verdict


def _steering(run: "Run") -> float:
    """The factor that brings the size of the next epoch's updates nearer to train.target_update_size.

    The spread of the ratios grows with the learning rate, in proportion while updates are small; the square root and
    the bounds keep one epoch's luck from deciding.
    """
    size = run.history[-1].update_size
    factor = math.sqrt(run.config.train.target_update_size / size) if size else 1.0
    return min(max(factor, 1 / STEERING_LIMIT), STEERING_LIMIT)


def _only_say(run: "Run") -> str:
    return "nothing, training goes on"


def _lower_learning_rate(run: "Run") -> str:
    run.learning_rate_factor /= 2
    run.learning_rate_ceiling = run.learning_rate_factor
    return f"it halves the learning rate, to {optimization.learning_rate(run):.3g}"


def _stop(run: "Run") -> str:
    run.stopped = True
    return "it saves a checkpoint and ends the run"


def _roll_back(run: "Run") -> str:
    """Weights, averages and optimizer become those of the best evaluation; epochs and updates go on counting, so that
    what follows draws other prompts and other noise than what went wrong."""
    most = run.config.health.max_roll_backs
    if run.best_evaluation is None or run.num_roll_backs >= most:
        reason = f"it has gone back {most} times" if run.best_evaluation else "no evaluation was a finite number"
        return f"{reason}, so {_stop(run)}"
    saving.load_best_state(run)
    run.num_roll_backs += 1
    run.epoch_figures["health/rolled_back_to"] = run.best_evaluation.epoch
    return f"it goes back to the best policy, of epoch {run.best_evaluation.epoch}; {_lower_learning_rate(run)}"


ACTIONS: dict[str, Callable[["Run"], str]] = {  # by config.health.action; each says what it does
    "log": _only_say,
    "lower_learning_rate": _lower_learning_rate,
    "stop": _stop,
    "roll_back": _roll_back,
}
