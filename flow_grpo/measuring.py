"""When a run evaluates its policy, and what follows: the best is kept, and test prompts say how good it is."""

import math
from typing import TYPE_CHECKING

from flow_grpo import best, evaluation, saving

if TYPE_CHECKING:
    from flow_grpo.run import Run


def evaluate(run: "Run", epoch: int, last: bool = False) -> None:
    """Evaluate what is due before an epoch, or after the last one, and keep the best policy.

    config.eval_freq says when the images of the choosing prompts are due, config.eval.test_freq when those of the test
    prompts are; both are due before the first epoch and after the last. Nothing happens where config.eval_freq is 0.
    """
    if not evaluation.evaluates(run.config):
        return
    settings, figures = run.config.eval, None
    if last or epoch % run.config.eval_freq == 0:
        figures = evaluation.evaluate(run, epoch)
        saving.keep_best(run, epoch, figures)
    if last or epoch == 0 or (settings.test_freq and epoch % settings.test_freq == 0):
        _test(run, epoch, figures)


def _test(run: "Run", epoch: int, figures: dict[str, float] | None) -> None:
    """Log the figures of the averaged weights on the test prompts; those at hand, if these prompts choose too."""
    if figures is None or run.choosing_prompts.name != run.test_prompts.name:
        with run.ema.applied():
            figures = evaluation.score_test(run)
    run.test_figures = figures
    run.board.log("test", {f"test/{name}": value for name, value in figures.items()}, epoch=epoch, step=run.step)


def conclude(run: "Run") -> None:
    """After training: log the best weights' figures on the test prompts, and say what the run has come to.

    The transformer carries these weights from here on.
    """
    chosen = run.best_evaluation
    if chosen is None:
        run.board.say(f"{run.folder}: no evaluation was a finite number, so there is no best policy")
        return
    name, folder = chosen.best_by, best.find(run.folder)
    if chosen.split == run.test_prompts.name:
        figures = chosen.figures
    elif chosen.epoch == run.epoch:
        figures = run.test_figures
    else:
        saving.load_export(run, folder)
        figures = evaluation.score_test(run)
    logged = {f"test_best/{key}": value for key, value in figures.items()} | {"best_epoch": chosen.epoch}
    lines = [line for line in run.board.history() if line["kind"] == "test" and line["epoch"] == 0]
    before = lines[0].get(f"test/{name}", math.nan) if lines else math.nan
    run.board.log("test", logged, epoch=run.epoch, step=run.step)
    run.board.say(
        f"{folder} holds the best policy, of epoch {chosen.epoch} of {run.epoch}; {name} on the test prompts: "
        f"{before:.4g} before, {run.test_figures[name]:.4g} last, {figures[name]:.4g} best"
    )
