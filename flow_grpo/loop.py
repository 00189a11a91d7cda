"""What all training scripts do around their own lines of an epoch, and at the end."""

from collections.abc import Callable, Iterator

from flow_grpo import distributed, measuring, sampling, watching
from flow_grpo.evaluation import evaluates
from flow_grpo.run import Run
from flow_grpo.saving import export, save


def epochs(run: Run, *measures: Callable) -> Iterator[int]:
    """The epochs that are left; evaluates, logs and saves around them.

    measures: (run, epoch), more to be evaluated than images.
    """
    config = run.config
    for epoch in range(run.epoch, config.num_epochs):
        if config.eval_freq:
            measuring.measure(run, epoch, measures)
        run.on_policy, run.num_forwards = True, 0
        yield epoch
        run.epoch = epoch + 1
        _log_epoch(run, epoch)
        last = run.stopped or run.epoch == config.num_epochs or _out_of_time(run)
        if last or (config.save_freq and run.epoch % config.save_freq == 0):
            save(run)
        if last:
            break
    if config.eval_freq:
        measuring.measure(run, run.epoch, measures, last=True)


def _out_of_time(run: Run) -> bool:
    """Whether config.max_hours have passed, by the main rank's clock: every rank ends after the same epoch."""
    limit = run.config.max_hours
    return bool(limit) and distributed.broadcast_object(run.hours >= limit)


def _log_epoch(run: Run, epoch: int) -> None:
    if run.slots:
        run.epoch_figures["slot_use"] = run.slots.use
        run.slots = sampling.slots(run.config.sample)
    run.epoch_figures |= run.gaps.pop(distributed.over_ranks)
    run.epoch_figures["forwards"] = sum(distributed.gather_objects([run.num_forwards]))
    run.epoch_figures["memory/peak_gib"] = distributed.peak_memory_gib(run.device)
    watching.watch(run, epoch)
    run.board.log("epoch", run.epoch_figures, epoch=epoch, step=run.step)
    run.epoch_figures = {}


def finish(run: Run) -> None:
    """Export the last averaged weights, measure the best ones, draw the plots, and leave the process group."""
    export(run, run.folder)
    if evaluates(run.config):
        measuring.conclude(run)
    if run.pool:
        run.pool.close()
    run.board.finish()
    distributed.close()
