"""When a run evaluates its policy, and what follows: the best is kept, and test prompts say how good it is."""

import math
from collections.abc import Mapping

import torch
from ml_collections import ConfigDict

from flow_grpo import rewards
from flow_grpo.base.formatting import with_error
from flow_grpo.base.pixels import beside_sources
from flow_grpo.base.prompt import captions_of
from flow_grpo.checkpoints import best
from flow_grpo.command_line.checks import evaluates
from flow_grpo.evaluation import evaluation
from flow_grpo.run import save
from flow_grpo.run.run import Run


def evaluate(run: Run, epoch: int, last: bool = False) -> None:
    """Evaluate what is due before an epoch, or after the last one, and keep the best policy.

    The images of the choosing prompts are due by config.eval_freq, those of the test prompts by config.eval.test_freq.
    """
    kinds, figures = due(run.config, epoch, last), None
    if "eval" in kinds:
        figures = score_choosing(run, epoch)
        save.keep_best(run, epoch, figures)
    if "test" in kinds:
        _test(run, epoch, figures)


def due(config: ConfigDict, epoch: int, last: bool = False) -> set[str]:
    """Which kinds of lines of metrics.jsonl are due before an epoch, or after the last one: "eval", "test"."""
    if not evaluates(config):
        return set()
    test_freq = config.eval.test_freq
    kinds = {"eval": epoch % config.eval_freq == 0, "test": epoch == 0 or (test_freq and epoch % test_freq == 0)}
    return {kind for kind, is_due in kinds.items() if last or is_due}


def remaining(run: Run) -> set[str]:
    """Which kinds of lines of its epoch a resumed run keeps: those of an end, whose weights are the checkpoint's,
    unless they are made again or cannot be compared with what comes."""
    config, last = run.config, run.epoch >= run.config.num_epochs
    held_out_again = bool(config.eval_freq) and (last or run.epoch % config.eval_freq == 0)  # of DPO's pairs
    kept = set() if held_out_again else {"validation"}
    if evaluates(config) and run.best_evaluation is None:
        return kept
    return kept | ({"eval", "test"} - due(config, run.epoch, last))


def sampler_of(run: Run) -> evaluation.Sampler:
    """A run's own, of the policy that its transformer carries."""
    return evaluation.Sampler(run.model, run.embed, run.velocity, run.pool, run.board.bar, run.config)


def score_choosing(run: Run, epoch: int) -> dict[str, float]:
    """Score the averaged weights on the prompts that choose the best; log means and images; the means by name."""
    settings = run.config.eval
    split = evaluation.part_of(run.choosing_prompts, run.config)
    with run.ema.applied(), run.board.timed("eval"):
        scores = evaluation.score(sampler_of(run), split, range(settings.noises_per_prompt), evaluation.NUM_SHOWN)
    figures, masked = evaluation.means(scores, settings.best_by), run.pool.masked_shares(scores.values)
    logged = _logged(run, "eval", figures)
    logged |= {f"eval/{name}_masked_share": share for name, share in masked.items()}
    run.board.log("eval", logged, epoch=epoch, step=run.step)
    prompts, rewards = [split.prompts[i] for i in scores.images], scores.values["avg"][0, list(scores.images)]
    images = beside_sources(torch.stack(list(scores.images.values())), prompts)
    run.board.log_images(images, captions_of(prompts), rewards, epoch=epoch, step=run.step)
    return figures


def score_test(run: Run) -> dict[str, float]:
    """Score what the transformer carries on the prompts that choose nothing; the means by name, and by category."""
    with run.board.timed("eval"):
        split = evaluation.part_of(run.test_prompts, run.config)
        scores = evaluation.score(sampler_of(run), split, range(run.config.eval.noises_per_prompt))
    run.pool.masked_shares(scores.values)
    return evaluation.means(scores, run.config.eval.best_by) | evaluation.means_by_category(scores, split)


def _test(run: Run, epoch: int, figures: dict[str, float] | None) -> None:
    """Log the figures of the averaged weights on the test prompts; those at hand, if these prompts choose too."""
    if figures is None or run.choosing_prompts.name != run.test_prompts.name:
        with run.ema.applied():
            figures = score_test(run)
    run.test_figures = figures
    run.board.log("test", _logged(run, "test", figures), epoch=epoch, step=run.step)


def _logged(run: Run, kind: str, figures: dict[str, float]) -> dict[str, float]:
    """Figures by the names of a line, and `variety`: the distance between a prompt's images over that before training,
    of the first such line that can be compared."""
    if "distance" in figures:
        key = f"{kind.removesuffix('_best')}/distance"
        lines = [line for line in run.board.history if key in line and line["epoch"] >= run.evaluations_since]
        first = lines[0][key] if lines else figures["distance"]
        figures = figures | {"variety": figures["distance"] / first if first else math.nan}
    return {f"{kind}/{name}": value for name, value in figures.items()}


def why_no_best(run: Run) -> str:
    """Why a run has no best policy, as the beginning of a sentence."""
    evaluated = any(line["kind"] == "eval" and line["epoch"] >= run.evaluations_since for line in run.board.history)
    if run.evaluations_since and not evaluated:
        return f"nothing was evaluated since the way of evaluating changed, after {run.evaluations_since} epochs"
    return "no evaluation was a finite number"


def conclude(run: Run) -> None:
    """After training: log the best weights' figures on the test prompts, and say what the run has come to.

    The transformer carries these weights from here on.
    """
    chosen = run.best_evaluation
    if chosen is None:
        run.board.say(f"{run.folder}: {why_no_best(run)}, so there is no best policy")
        return
    name, folder = chosen.best_by, best.find_best(run.folder)
    if chosen.split == run.test_prompts.name:
        figures = chosen.figures
    elif chosen.epoch == run.epoch:
        figures = run.test_figures
    else:
        save.load_export(run, folder)
        figures = score_test(run)
    logged = _logged(run, "test_best", figures) | {"best_epoch": chosen.epoch}
    lines = [line for line in run.board.history if line["kind"] == "test" and line["epoch"] == 0]
    comparable = lines and not run.evaluations_since
    first = {key.removeprefix("test/"): value for key, value in lines[0].items()} if comparable else {}
    moments = {"before": first, "last": run.test_figures, "best": figures}
    known = [f"{with_error(m[name], m.get('std_error'))} {when}" for when, m in moments.items() if name in m]
    run.board.log("test", logged, epoch=run.epoch, step=run.step)
    run.board.say(
        f"{folder} holds the best policy, of epoch {chosen.epoch} of {run.epoch}; "
        f"{rewards.display_name(name, run.config.reward_fn)} on the test prompts: {', '.join(known)}"
        f"{_others(first, figures, name, run.config.reward_fn)}"
    )


def _others(first: dict[str, float], figures: dict[str, float], chosen: str, weights: Mapping[str, float]) -> str:
    """What became of the other scores, from before training to the best policy."""
    names = [name for name in figures if name != "std_error" and "/" not in name and name in first]
    names = [name for name in names if rewards.display_name(name, weights) != rewards.display_name(chosen, weights)]
    return "".join(f"; {name} {first[name]:.4g} before, {figures[name]:.4g} best" for name in names)
