"""Ends of an epoch and of a run, which every script's loop calls: log, judge the run's health, conclude. A signal may
ask for the end."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flow_grpo.base import distributed, folders, signals
from flow_grpo.base.formatting import counted
from flow_grpo.checkpoints import checkpoints
from flow_grpo.command_line import alerts
from flow_grpo.monitoring import health, model_card, provenance
from flow_grpo.monitoring.dashboard import attempt, explained
from flow_grpo.run import evaluate, update
from flow_grpo.run.run import Run
from flow_grpo.run.save import export, go_back_to_epoch_start, load_best_state, save
from flow_grpo.weights import fsdp_utils

# Each roll-back halves the learning rate.
MAX_ROLL_BACKS = 3


def is_due(interval: int, epoch: int) -> bool:
    """Return whether something that happens every `interval` epochs happens after `epoch` epochs; 0 = never."""
    return bool(interval) and epoch % interval == 0


def log_epoch(run: Run, epoch: int) -> None:
    """Count the epoch as completed, write its line of metrics.jsonl, and decide by config.health.action and
    config.max_hours whether the run goes on: `run.stopped`. Raises Interrupted, after it has saved the run, if a signal
    has asked for its end."""
    update.log_by_step(run)
    # Not before, so that a signal in mid-epoch saves what completed epochs have seen.
    if run.prompt_signal:
        run.prompt_signal.complete_epoch()
    run.epoch = epoch + 1
    run.first_step = run.step
    run.epoch_metrics["forwards"] = sum(distributed.gather_objects([run.num_forwards]))
    run.epoch_metrics["weight_norm"] = fsdp_utils.weight_norm(run.parameters).item()
    run.epoch_metrics["memory/peak_gib"] = distributed.peak_memory_gib(run.device)
    judge_health(run, epoch)

    # The main rank's clock decides, so that all ranks end after the same epoch; a signal may have come to any rank.
    seconds_left = distributed.broadcast_object(run.seconds_left)
    signal_name = max(distributed.gather_objects([signals.received.name]))
    sentences = [alarm.sentence for alarm in run.alarms]
    # Before the line, so that wandb has them in the line's row.
    for name, values in run.distributions.items():
        run.board.log_histogram(name, values, epoch=epoch, step=run.step)
    run.board.log("epoch", run.epoch_metrics, epoch=epoch, step=run.step, seconds_left=seconds_left, alarms=sentences)
    run.epoch_metrics = {}
    run.distributions = {}
    run.num_forwards = 0
    run.on_policy = True
    run.stopped = run.stopped or seconds_left <= 0
    now = time.monotonic()
    run.last_epoch_s = now - run.epoch_began_s
    run.epoch_began_s = now
    if signal_name:
        save(run)
        raise signals.Interrupted


def judge_health(run: Run, epoch: int) -> None:
    """Judge the epoch; if a sign of health exceeds its limit, do what health.action says."""
    action = run.config.health.action
    verdict = distributed.on_main(_verdict, run, epoch)
    done = "nothing, so soon after the last time"
    if verdict.act:
        done = ACTIONS[action](run)

    # An alarm is said once, when it is raised, or as often as something is done about it.
    new_alarms = {alarm.name for alarm in verdict.alarms} - {alarm.name for alarm in run.alarms}
    if verdict.act or new_alarms:
        sentences = "; ".join(alarm.sentence for alarm in verdict.alarms)
        text = f"ALARM, epoch {epoch + 1}: {sentences}. config.health.action {action!r}: {done}"
        run.board.say(text)
        run.board.say(alerts.send(run.config.alert, f"{run.folder.name}: {text}"))
    run.alarms = verdict.alarms
    run.epoch_metrics |= {f"health/{name}": value for name, value in verdict.figures.items()}
    run.epoch_metrics |= {"health/limits_exceeded": len(verdict.alarms), "health/action_taken": verdict.act}
    run.epoch_metrics["health/learning_rate_factor"] = run.learning_rate_factor


def _verdict(run: Run, epoch: int) -> health.Verdict:
    """Judge the epochs so far; the main rank alone has their history."""
    return health.judge(comparable_epochs(run, epoch), run.config.health)


def comparable_epochs(run: Run, epoch: int) -> list[health.Epoch]:
    """Return the epochs up to this one, without evaluations and rewards that cannot be compared with it."""
    lines = []
    for line in run.board.history:
        if line["kind"] != "eval" or line["epoch"] >= run.evaluations_since:
            lines.append(line)

    # This epoch's own line is not written yet.
    lines.append({"kind": "epoch", "epoch": epoch, **run.epoch_metrics})
    epochs = []
    for judged in health.by_epoch(lines, run.config):
        # Prompts that are drawn by their signal are harder ones later on.
        same_prompts = run.config.sample.prompt_weights == "uniform"
        comparable = judged.number >= run.inputs.rewards_since and same_prompts
        epochs.append(judged if comparable else judged._replace(reward=None))
    return epochs


def _go_on(run: Run) -> str:
    """Do nothing about an alarm."""
    return "nothing, training goes on"


def _lower_learning_rate(run: Run) -> str:
    """Halve the learning rate of the updates to come."""
    run.learning_rate_factor /= 2
    return f"it halves the learning rate, to {update.learning_rate(run):.3g}"


def _stop(run: Run) -> str:
    """End the run after this epoch."""
    run.stopped = True
    return "it saves a checkpoint and ends the run"


def _roll_back(run: Run) -> str:
    """Go back to weights, averages and optimizer of the best evaluation. Epochs and updates go on counting, so that the
    run draws other prompts and other noise than those that went wrong."""
    if run.best_evaluation is None:
        return f"{evaluate.why_no_best(run)}, so {_stop(run)}"
    if run.num_roll_backs >= MAX_ROLL_BACKS:
        return f"it has gone back {MAX_ROLL_BACKS} times, so {_stop(run)}"
    problem = load_best_state(run)
    if problem:
        return f"{problem}, so {_stop(run)}"
    run.num_roll_backs += 1
    run.epoch_metrics["health/rolled_back_to"] = run.best_evaluation.epoch
    return f"it goes back to the best policy, of epoch {run.best_evaluation.epoch}; {_lower_learning_rate(run)}"


# By config.health.action; each returns what it does, as the end of a sentence.
ACTIONS: dict[str, Callable[[Run], str]] = {
    "log": _go_on,
    "lower_learning_rate": _lower_learning_rate,
    "stop": _stop,
    "roll_back": _roll_back,
}


def _note_end(folder: Path) -> list[str]:
    """Note the end of a run in its folder, and write the model cards. Returns notices for the user.

    All that training made is saved by now, so a failure here is only one more notice.
    """
    notices = []

    def write_cards() -> None:
        notices.extend(model_card.write_cards(folder))

    notices.append(attempt(f"{folder / provenance.FILE} lacks the end", partial(provenance.note_end, folder)))
    notices.append(attempt(f"{folder} has no model card", write_cards))
    return notices


def finish(run: Run) -> None:
    """Save what no checkpoint holds, evaluate the last policy, export its averaged weights, measure the best ones on
    the test prompts, draw the plots, write the model cards, and leave the process group."""
    if run.epoch > run.saved_epoch:
        save(run)
    else:
        # A kill may have left too many checkpoints.
        distributed.on_main(checkpoints.prune, run.folder / "checkpoints", run.epoch, run.config.keep_checkpoints)
    evaluate.evaluate(run, run.epoch, last=True)
    with explained(run.folder):
        export(run, run.folder)
    if run.config.evaluates:
        evaluate.conclude(run)
    if run.loaded_pool:
        run.loaded_pool.close()
    _say_end(run)
    distributed.close()
    folders.release(run.folder)


def _say_end(run: Run) -> None:
    """Tell the user and config.alert that the run has ended, after its plots, notes and model cards are written."""
    run.board.say(alerts.send(run.config.alert, f"{run.folder.name} has ended after {counted(run.epoch, 'epochs')}"))
    run.board.finish(run.evaluations_since)
    for notice in distributed.on_main(_note_end, run.folder):
        run.board.say(notice)
    names = sorted(path.name for path in run.folder.glob("[!.]*"))
    run.board.say(f"{run.folder} holds {', '.join(names)}")
    if run.config.logger != "none":
        run.board.say(f"python -m flow_grpo.monitoring.report {run.folder} writes a page of it")


def lacks_time(run: Run) -> bool:
    """Return whether the epoch will probably not end within config.signal_grace_s of the signal: by the length of the
    last epoch and, where this one has taken longer, as soon as that time is over."""
    now = time.monotonic()
    ends_s = max(run.epoch_began_s + run.last_epoch_s, now)
    return ends_s > signals.received.at_s + run.config.signal_grace_s


def conclude_after_signal(run: Run) -> str:
    """Save the epochs that are completed, if the weights are still theirs or can be made theirs again. Returns what to
    tell the user.

    Ranks may have stopped in different places, so that nothing is exchanged here: the main rank saves alone. Sharded
    weights are not all on it, and stay as the last checkpoint has them.
    """
    name = signals.received.name or "another rank's signal"
    has_moved = run.step != run.first_step
    number = run.epoch + 1
    dropped = f"; epoch {number} is dropped, for there was no time to end it" if has_moved else ""
    is_sharded = fsdp_utils.is_sharded(run.model.network)
    if distributed.is_main():
        distributed.withdraw()
        has_completed_weights = not has_moved or go_back_to_epoch_start(run)
        if run.epoch > run.saved_epoch and has_completed_weights and not is_sharded:
            save(run)
        if 0 < run.saved_epoch < run.epoch:
            dropped += f"; no checkpoint holds what followed epoch {run.saved_epoch}"
    return f"stopped by {name} after {counted(run.epoch, 'epochs')}{dropped}; {folders.resume_hint(run.folder)}"
