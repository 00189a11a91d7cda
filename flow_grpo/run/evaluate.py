"""Evaluations of a run: when they are due, the best policy that they choose, and how good it is on test prompts."""

import math
from collections.abc import Mapping

import torch

from flow_grpo import rewards
from flow_grpo.base import distributed
from flow_grpo.base.formatting import counted, with_error
from flow_grpo.base.metric_table import is_of_frame
from flow_grpo.base.pixels import beside_sources
from flow_grpo.base.prompt import Prompt, captions_of
from flow_grpo.checkpoints import best
from flow_grpo.diffusers_patch.sampling_params import EXACT, Shortcuts, of_validation
from flow_grpo.evaluation import evaluation
from flow_grpo.run import save
from flow_grpo.run.run import Run
from flow_grpo.settings.sections import Config


def evaluate(run: Run, epoch: int, last: bool = False) -> None:
    """Evaluate what is due before an epoch, or after the last one, and keep the best policy.

    The images of the choosing prompts are due by config.eval_freq, those of the test prompts by config.eval.test_freq.
    """
    kinds = due_kinds(run.config, epoch, last)
    means = None
    if "eval" in kinds:
        means = score_choosing(run, epoch)
        save.keep_best(run, epoch, means)
    if "test" in kinds:
        _evaluate_test(run, epoch, means)


def due_kinds(config: Config, epoch: int, last: bool = False) -> set[str]:
    """Return which kinds of lines of metrics.jsonl are due before an epoch, or after the last one: "eval", "test"."""
    kinds = set()
    if not config.evaluates:
        return kinds
    if last or epoch % config.eval_freq == 0:
        kinds.add("eval")
    test_freq = config.eval.test_freq
    if last or epoch == 0 or (test_freq and epoch % test_freq == 0):
        kinds.add("test")
    return kinds


def remaining_kinds(run: Run) -> set[str]:
    """Return which kinds of evaluations a resumed run keeps in metrics.jsonl of the epoch that it goes on from: those
    that it will not make again, and that can be compared with its later ones.

    Such lines are there where the run had ended after that epoch: a run evaluates its last weights.
    """
    config = run.config
    last = run.epoch >= config.num_epochs
    kinds = set()

    # DPO's held-out pairs have always the same noises, so all of their lines can be compared.
    validates_again = config.eval_freq and (last or run.epoch % config.eval_freq == 0)
    if not validates_again:
        kinds.add("validation")
    cannot_compare = config.evaluates and run.best_evaluation is None
    if not cannot_compare:
        kinds |= {"eval", "test"} - due_kinds(config, run.epoch, last)
    return kinds


def sampler_of(run: Run, shortcuts: Shortcuts = EXACT) -> evaluation.Sampler:
    """Make the sampler of the policy that a run's transformer carries."""
    return evaluation.Sampler(
        model=run.model,
        embed=run.embed,
        velocity=run.velocity,
        pool=run.pool,
        bar=run.board.bar,
        size=run.size,
        settings=run.config.eval,
        vae_batch_size=run.config.vae_batch_size,
        shortcuts=shortcuts,
    )


def score_choosing(run: Run, epoch: int) -> dict[str, float]:
    """Score the averaged weights on the prompts that choose the best; log means and images. Returns the means by
    name, and of several noises the variety as a share of that before training."""
    settings = run.config.eval
    split = evaluation.part_of(run.prompts.choosing, settings.num_prompts)
    folder = run.folder / "images" / f"eval_{epoch:06d}"
    saved = evaluation.images_to_save(folder, split, settings)
    with run.ema.applied(), run.board.timed("eval"):
        seeds = range(settings.noises_per_prompt)
        sampler = sampler_of(run, of_validation(run.config))
        scores = evaluation.score(sampler, split, seeds, evaluation.num_shown(run.size), saved)
    if saved:
        run.board.say(saved.problem)
    means = evaluation.means(scores, settings.best_by, run.config.watched_rewards)
    metrics = _metrics_of(run, "eval", means)
    for name, share in scores.masked_shares.items():
        metrics[f"eval/{name}_masked_share"] = share
    run.board.log("eval", metrics, epoch=epoch, step=run.step)
    _log_shown_images(run, epoch, split.prompts, scores)
    if "distance" in means:
        # The main rank alone knows the distance before training.
        means[best.VARIETY] = distributed.on_main(metrics.get, f"eval/{best.VARIETY}")
    return means


def _log_shown_images(run: Run, epoch: int, prompts: list[Prompt], scores: evaluation.Scores) -> None:
    """Log some images of an evaluation, beside their sources, with their prompts and scores."""
    indices = list(scores.images)
    shown_prompts = [prompts[i] for i in indices]
    images = beside_sources(torch.stack(list(scores.images.values())), shown_prompts)
    shown_scores = scores.values["avg"][0, indices].tolist()
    run.board.log_images(images, captions_of(shown_prompts), shown_scores, epoch=epoch, step=run.step)


def score_test(run: Run) -> dict[str, float]:
    """Score the policy that the transformer carries on the test prompts. Returns means by name, and by category."""
    settings = run.config.eval
    with run.board.timed("eval"):
        split = evaluation.part_of(run.prompts.test, settings.num_prompts)
        scores = evaluation.score(sampler_of(run), split, range(settings.noises_per_prompt))
    means = evaluation.means(scores, settings.best_by, run.config.watched_rewards)
    return means | evaluation.means_by_category(scores, split)


def _evaluate_test(run: Run, epoch: int, choosing_means: dict[str, float] | None) -> None:
    """Log the means of the averaged weights on the test prompts: `choosing_means`, if the same images choose, too."""
    means = choosing_means
    if means is None or not _chooses_by_test(run):
        with run.ema.applied():
            means = score_test(run)
    run.test_figures = means
    run.board.log("test", _metrics_of(run, "test", means), epoch=epoch, step=run.step)


def _chooses_by_test(run: Run) -> bool:
    """Return whether the images that choose the best policy are those of the test: the same prompts, drawn alike."""
    same_prompts = run.prompts.choosing.name == run.prompts.test.name
    return same_prompts and of_validation(run.config) == EXACT


def _metrics_of(run: Run, kind: str, means: dict[str, float]) -> dict[str, float]:
    """Name means as a line of metrics.jsonl does, and add `variety`: the distance between a prompt's images, over that
    of the first line of this kind that can be compared."""
    metrics = {f"{kind}/{name}": mean for name, mean in means.items()}
    if "distance" in means:
        key = f"{kind.removesuffix('_best')}/distance"
        first = means["distance"]
        for line in run.board.history:
            if key in line and line["epoch"] >= run.evaluations_since:
                first = line[key]
                break
        metrics[f"{kind}/{best.VARIETY}"] = means["distance"] / first if first else math.nan
    return metrics


def why_no_best(run: Run) -> str:
    """Say why a run has no best policy, as the beginning of a sentence."""
    if run.best_evaluation:
        return f"the folder {best.NAME}/ was removed"
    evaluated = any(line["kind"] == "eval" and line["epoch"] >= run.evaluations_since for line in run.board.history)
    if run.evaluations_since and not evaluated:
        changed = f"after {counted(run.evaluations_since, 'epochs')}"
        return f"nothing was evaluated since the way of evaluating changed, {changed}"
    if run.config.eval.min_variety:
        least = f"the variety of config.eval.min_variety, {run.config.eval.min_variety}"
        return f"no evaluation with {least}, was a finite number"
    return "no evaluation was a finite number"


def conclude(run: Run) -> None:
    """Log the means of the best weights on the test prompts, after training, and say what the run has come to.

    The transformer carries the best weights from here on.
    """
    chosen = run.best_evaluation
    folder = best.find_best(run.folder)
    if chosen is None or folder is None:
        run.board.say(f"{run.folder}: {why_no_best(run)}, so there is no best policy")
        return
    if _chooses_by_test(run):
        best_means = chosen.figures
    elif chosen.epoch == run.epoch:
        best_means = run.test_figures
    else:
        save.load_export(run, folder)
        best_means = score_test(run)
    first_means = _first_test_means(run)
    metrics = _metrics_of(run, "test_best", best_means) | {"best_epoch": chosen.epoch}
    run.board.log("test", metrics, epoch=run.epoch, step=run.step)
    variety = metrics.get(f"test_best/{best.VARIETY}")
    if variety is not None:
        best_means = best_means | {best.VARIETY: variety}

    name = chosen.best_by
    moments = {"before": first_means, "last": run.test_figures, "best": best_means}
    scores = []
    for moment, means in moments.items():
        if name in means:
            scores.append(f"{with_error(means[name], means.get('std_error'))} {moment}")
    run.board.say(
        f"{folder} holds the best policy, of epoch {chosen.epoch} of {run.epoch}; "
        f"{rewards.display_name(name, run.config.reward_fn)} on the test prompts: {', '.join(scores)}"
        f"{_other_scores(first_means, best_means, name, run.config.reward_fn)}"
    )


def _first_test_means(run: Run) -> dict[str, float]:
    """Means on the test prompts before training; {} if there are none that can be compared with later ones."""
    if run.evaluations_since:
        return {}
    for line in run.board.history:
        if line["kind"] == "test" and line["epoch"] == 0:
            return {key.removeprefix("test/"): value for key, value in line.items()}
    return {}


def _other_scores(
    first_means: dict[str, float], best_means: dict[str, float], chosen: str, weights: Mapping[str, float]
) -> str:
    """Say how the scores that did not choose have moved from before training to the best policy."""
    parts = []
    for name, mean in best_means.items():
        is_score = not name.endswith("std_error") and "/" not in name and not is_of_frame(name)
        is_other = rewards.display_name(name, weights) != rewards.display_name(chosen, weights)
        if is_score and is_other and name in first_means:
            parts.append(f"; {name} {first_means[name]:.4g} before, {mean:.4g} best")
    return "".join(parts)
