"""What a run does about its health: it watches every epoch, and acts on alarms as config.health.action says."""

from collections.abc import Callable

from flow_grpo.base import distributed
from flow_grpo.monitoring import health
from flow_grpo.run import optimization, save
from flow_grpo.run.run import Run

MAX_ROLL_BACKS = 3  # each halves the learning rate


def watch(run: Run, epoch: int) -> None:
    """Judge the epoch; where a sign of health exceeds its limit, do what health.action says."""
    verdict = distributed.broadcast_object(_judge(run, epoch) if distributed.is_main() else None)
    action = run.config.health.action
    done = ACTIONS[action](run) if verdict.act else "nothing, so soon after the last time"
    if verdict.act or {alarm.name for alarm in verdict.alarms} - {alarm.name for alarm in run.alarms}:
        sentences = "; ".join(alarm.sentence for alarm in verdict.alarms)
        run.board.say(f"epoch {epoch + 1}: {sentences}. What config.health.action {action!r} does: {done}")
    run.alarms = verdict.alarms
    run.epoch_metrics |= {f"health/{name}": value for name, value in verdict.figures.items()}
    run.epoch_metrics |= {"health/limits_exceeded": len(verdict.alarms), "health/action_taken": verdict.act}
    run.epoch_metrics["health/learning_rate_factor"] = run.learning_rate_factor


def resume(run: Run) -> None:
    """Take up the history of metrics.jsonl, without figures that later ones cannot be compared with."""
    lines = [line for line in run.board.history() if line["epoch"] < run.epoch]  # [] on other ranks than the main one
    lines = [line for line in lines if line["kind"] != "eval" or line["epoch"] >= run.evaluations_since]
    history = health.by_epoch(lines, run.config)
    run.history = [e._replace(reward=None) if e.number < run.inputs.rewards_since else e for e in history]


def _judge(run: Run, epoch: int) -> health.Verdict:
    """On the main rank: enter the epoch into the history, and judge it."""
    line = {"kind": "epoch", "epoch": epoch, **run.epoch_metrics}
    run.history.append(health.summarize([*run.board.since_epoch, line], run.config))
    verdict = health.judge(run.history, run.config.health)
    run.history[-1] = run.history[-1]._replace(acted=verdict.act)
    return verdict


def _only_say(run: Run) -> str:
    return "nothing, training goes on"


def _lower_learning_rate(run: Run) -> str:
    run.learning_rate_factor /= 2
    return f"it halves the learning rate, to {optimization.learning_rate(run):.3g}"


def _stop(run: Run) -> str:
    run.stopped = True
    return "it saves a checkpoint and ends the run"


def _roll_back(run: Run) -> str:
    """Weights, averages and optimizer become those of the best evaluation; epochs and updates go on counting, so that
    what follows draws other prompts and other noise than what went wrong."""
    if run.best_evaluation is None or run.num_roll_backs >= MAX_ROLL_BACKS:
        reason = (
            f"it has gone back {MAX_ROLL_BACKS} times" if run.best_evaluation else "no evaluation was a finite number"
        )
        return f"{reason}, so {_stop(run)}"
    if problem := save.load_best_state(run):
        return f"{problem}, so {_stop(run)}"
    run.num_roll_backs += 1
    run.epoch_metrics["health/rolled_back_to"] = run.best_evaluation.epoch
    return f"it goes back to the best policy, of epoch {run.best_evaluation.epoch}; {_lower_learning_rate(run)}"


ACTIONS: dict[str, Callable[[Run], str]] = {  # by config.health.action; each says what it does
    "log": _only_say,
    "lower_learning_rate": _lower_learning_rate,
    "stop": _stop,
    "roll_back": _roll_back,
}
