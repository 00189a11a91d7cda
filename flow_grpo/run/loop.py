"""What every script's loop calls around its own lines: after an epoch, when it judges the run, and at its end."""

from collections.abc import Callable
from pathlib import Path

from flow_grpo.base import alerts, distributed, folders
from flow_grpo.checkpoints import checkpoints
from flow_grpo.command_line.checks import evaluates
from flow_grpo.monitoring import health, model_card, provenance
from flow_grpo.monitoring.dashboard import explained, problem_of
from flow_grpo.run import evaluate, update
from flow_grpo.run.run import Run
from flow_grpo.run.save import export, load_best_state, save
from flow_grpo.weights import fsdp_utils

MAX_ROLL_BACKS = 3  # each halves the learning rate


def is_due(interval: int, epoch: int) -> bool:
    """Whether something that happens every `interval` epochs happens after `epoch` epochs; never where it is 0."""
    return bool(interval) and epoch % interval == 0


def log_epoch(run: Run, epoch: int) -> None:
    """Count the epoch as completed, write its line of metrics.jsonl, and decide by config.health.action and
    config.max_hours whether the run goes on: `run.stopped`."""
    run.epoch, run.first_step = epoch + 1, run.step
    run.epoch_metrics["forwards"] = sum(distributed.gather_objects([run.num_forwards]))
    run.epoch_metrics["weight_norm"] = fsdp_utils.weight_norm(run.parameters).item()
    run.epoch_metrics["memory/peak_gib"] = distributed.peak_memory_gib(run.device)
    watch(run, epoch)
    seconds_left = distributed.broadcast_object(run.seconds_left)  # of the main rank: all end after the same epoch
    sentences = [alarm.sentence for alarm in run.alarms]
    run.board.log("epoch", run.epoch_metrics, epoch=epoch, step=run.step, seconds_left=seconds_left, alarms=sentences)
    run.epoch_metrics, run.num_forwards, run.on_policy = {}, 0, True
    run.stopped = run.stopped or seconds_left <= 0


def watch(run: Run, epoch: int) -> None:
    """Judge the epoch; where a sign of health exceeds its limit, do what health.action says."""
    limits, action = run.config.health, run.config.health.action
    verdict = health.judge(history(run, epoch), limits) if distributed.is_main() else None
    verdict = distributed.broadcast_object(verdict)
    done = ACTIONS[action](run) if verdict.act else "nothing, so soon after the last time"
    if verdict.act or {alarm.name for alarm in verdict.alarms} - {alarm.name for alarm in run.alarms}:
        sentences = "; ".join(alarm.sentence for alarm in verdict.alarms)
        text = f"epoch {epoch + 1}: {sentences}. What config.health.action {action!r} does: {done}"
        run.board.say(text)
        run.board.say(alerts.send(run.config.alert, f"{run.folder.name}: {text}"))
    run.alarms = verdict.alarms
    run.epoch_metrics |= {f"health/{name}": value for name, value in verdict.figures.items()}
    run.epoch_metrics |= {"health/limits_exceeded": len(verdict.alarms), "health/action_taken": verdict.act}
    run.epoch_metrics["health/learning_rate_factor"] = run.learning_rate_factor


def history(run: Run, epoch: int) -> list[health.Epoch]:
    """The epochs up to this one, whose own line is not written yet, without figures that cannot be compared with it."""
    lines = [*run.board.history, {"kind": "epoch", "epoch": epoch, **run.epoch_metrics}]
    lines = [line for line in lines if line["kind"] != "eval" or line["epoch"] >= run.evaluations_since]
    epochs = health.by_epoch(lines, run.config)
    return [e._replace(reward=None) if e.number < run.inputs.rewards_since else e for e in epochs]


def _lower_learning_rate(run: Run) -> str:
    run.learning_rate_factor /= 2
    return f"it halves the learning rate, to {update.learning_rate(run):.3g}"


def _stop(run: Run) -> str:
    run.stopped = True
    return "it saves a checkpoint and ends the run"


def _roll_back(run: Run) -> str:
    """Weights, averages and optimizer become those of the best evaluation; epochs and updates go on counting, so that
    what follows draws other prompts and other noise than what went wrong."""
    if run.best_evaluation is None:
        return f"{evaluate.why_no_best(run)}, so {_stop(run)}"
    if run.num_roll_backs >= MAX_ROLL_BACKS:
        return f"it has gone back {MAX_ROLL_BACKS} times, so {_stop(run)}"
    if problem := load_best_state(run):
        return f"{problem}, so {_stop(run)}"
    run.num_roll_backs += 1
    run.epoch_metrics["health/rolled_back_to"] = run.best_evaluation.epoch
    return f"it goes back to the best policy, of epoch {run.best_evaluation.epoch}; {_lower_learning_rate(run)}"


ACTIONS: dict[str, Callable[[Run], str]] = {  # by config.health.action; each says what it does
    "log": lambda run: "nothing, training goes on",
    "lower_learning_rate": _lower_learning_rate,
    "stop": _stop,
    "roll_back": _roll_back,
}


def _describe(folder: Path) -> list[str]:
    """Note the end and write the model cards; what to tell the user. All that training made is saved by now."""
    problem = problem_of(f"{folder / provenance.FILE} lacks the end", lambda: provenance.note_end(folder))
    notices = [problem]
    problem = problem_of(f"{folder} has no model card", lambda: notices.extend(model_card.write_cards(folder)))
    return [*notices, problem]


def finish(run: Run) -> None:
    """Save what no checkpoint holds, evaluate the last policy, export its averaged weights, measure the best ones on
    the test prompts, draw the plots, write the model cards, and leave the process group."""
    if run.epoch > run.saved_epoch:
        save(run)
    else:  # a kill may have left checkpoints that are too many
        distributed.on_main(checkpoints.prune, run.folder / "checkpoints", run.epoch, run.config.keep_checkpoints)
    evaluate.evaluate(run, run.epoch, last=True)
    with explained(run.folder):
        export(run, run.folder)
    if evaluates(run.config):
        evaluate.conclude(run)
    if run.pool:
        run.pool.close()
    run.board.say(alerts.send(run.config.alert, f"{run.folder.name} has ended after {run.epoch} epochs"))
    run.board.finish(run.evaluations_since)
    for notice in distributed.on_main(_describe, run.folder):
        run.board.say(notice)
    run.board.say(f"{run.folder} holds {', '.join(sorted(path.name for path in run.folder.glob('[!.]*')))}")
    if run.config.logger != "none":
        run.board.say(f"python -m flow_grpo.monitoring.report {run.folder} writes a page of it")
    distributed.close()
    folders.release(run.folder)
