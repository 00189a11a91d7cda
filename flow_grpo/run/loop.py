"""What every script's loop calls around its own lines: after an epoch, and at the end of a run."""

from pathlib import Path

from flow_grpo.base import distributed, folders
from flow_grpo.checkpoints import checkpoints
from flow_grpo.evaluation.evaluation import evaluates
from flow_grpo.monitoring import model_card
from flow_grpo.run import evaluate, health_actions
from flow_grpo.run.run import Run
from flow_grpo.run.save import export, save
from flow_grpo.weights import fsdp_utils, lora_files


def is_due(interval: int, epoch: int) -> bool:
    """Whether something that happens every `interval` epochs happens after `epoch` epochs; never where it is 0."""
    return bool(interval) and epoch % interval == 0


def log_epoch(run: Run, epoch: int) -> None:
    """Count the epoch as completed, write its line of metrics.jsonl, and decide whether the run goes on.

    `run.stopped` says so: config.health.action may end a run, and so may config.max_hours.
    """
    run.epoch = epoch + 1
    run.epoch_metrics["forwards"] = sum(distributed.gather_objects([run.num_forwards]))
    run.epoch_metrics["weight_norm"] = fsdp_utils.weight_norm(run.parameters).item()
    run.epoch_metrics["memory/peak_gib"] = distributed.peak_memory_gib(run.device)
    health_actions.watch(run, epoch)
    seconds_left = distributed.broadcast_object(run.seconds_left)  # of the main rank: all end after the same epoch
    run.board.log("epoch", run.epoch_metrics, epoch=epoch, step=run.step, seconds_left=seconds_left)
    run.epoch_metrics, run.num_forwards, run.on_policy = {}, 0, True
    run.stopped = run.stopped or seconds_left <= 0


def _complete(run: Run) -> None:
    try:
        notices = model_card.complete(run.folder)
    except OSError as error:  # all that training made is saved by now
        notices = [f"not everything that others need was added to {run.folder}: {error}"]
    for notice in notices:
        run.board.say(notice)


def finish(run: Run) -> None:
    """Save what no checkpoint holds, evaluate the last policy, export its averaged weights, measure the best ones on
    the test prompts, draw the plots, write the model cards, and leave the process group."""
    if run.epoch > run.saved_epoch:
        save(run)
    else:  # a kill may have left checkpoints that are too many
        distributed.on_main(checkpoints.prune, run.folder / "checkpoints", run.epoch, run.config.keep_checkpoints)
    evaluate.evaluate(run, run.epoch, last=True)
    export(run, run.folder)
    if evaluates(run.config):
        evaluate.conclude(run)
    if run.pool:
        run.pool.close()
    run.board.finish()
    distributed.on_main(_complete, run)
    run.board.say(f"{run.folder} holds {', '.join(_contents(run.folder))}")
    distributed.close()
    folders.release(run.folder)


def _contents(run_folder: Path) -> list[str]:
    """What a run left for its user."""
    checkpoint = checkpoints.find(run_folder / "checkpoints")
    names = ["best", lora_files.FILE, "transformer", "README.md"]
    names += ["report.html", "reward.png", "samples.png", "metrics.jsonl"]
    left = [name for name in names if (run_folder / name).exists()]
    return left + ([f"checkpoints/{checkpoint.name}"] if checkpoint else [])
