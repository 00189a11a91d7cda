"""Saving of a run: checkpoints to resume from, and averaged weights to use, the last and the best."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from flow_grpo.base import distributed, signals
from flow_grpo.base.errors import UserError
from flow_grpo.checkpoints import best, checkpoints, exports
from flow_grpo.diffusers_patch.sampling_params import of_validation
from flow_grpo.monitoring.dashboard import explained
from flow_grpo.run.run import EpochStart, Run
from flow_grpo.settings import table
from flow_grpo.settings.sections import Config
from flow_grpo.weights import finite, fsdp_utils, offload, policies
from flow_grpo.weights.safetensors_reader import StoredWeights


def state(run: Run) -> dict[str, Tensor]:
    """Return all tensors that training needs to go on; they are not copies."""
    tensors = checkpoints.training_state(run.pipeline.transformer, run.optimizer, run.ema)
    if run.reference:
        tensors |= {f"reference/{name}": weight for name, weight in run.reference.state_dict().items()}
    for policy, ema in run.extra_policies.items():
        tensors |= {f"{policy}/{name}": weight for name, weight in ema.state_dict().items()}
    return tensors


def save(run: Run) -> None:
    """Write a checkpoint, with the averaged adapter as a LoRA file for diffusers, and with the best evaluation. Raises
    FloatingPointError, and writes nothing, where weights, averages or optimizer state are not finite."""

    def extra_files(folder: Path) -> None:
        if run.config.lora.rank:
            export(run, folder)
        distributed.on_main(best.link_best, run.folder, folder)

    with run.board.timed("save"), explained(run.folder):
        _save_state(run, run.folder / "checkpoints", run.epoch, run.config.keep_checkpoints, extra_files)
    run.saved_epoch = run.epoch


def _save_state(
    run: Run, folder: Path, epoch: int, keep: int = 1, extra_files: Callable[[Path], None] | None = None
) -> None:
    """Write a checkpoint of an epoch into a folder of checkpoints, of which the newest `keep` stay.

    Args:
        extra_files: writes other files into the checkpoint.
    """
    offload.reload_optimizer_state(run.optimizer)
    tensors = state(run)
    _check_finite(run, tensors)
    evaluation = None
    if run.config.evaluates:
        evaluation = best.settings_of(best_candidate(run, epoch, {}))
    progress = checkpoints.Progress(
        epoch=epoch,
        step=run.step,
        learning_rate_factor=run.learning_rate_factor,
        num_roll_backs=run.num_roll_backs,
        reference_moves=run.reference.num_moves if run.reference else 0,
        evaluations_since=run.evaluations_since,
        evaluation=evaluation,
        prompt_signals=run.prompt_signal.signals if run.prompt_signal else None,
    )
    checkpoints.save(folder, tensors, progress, config=run.config.to_dict(), keep=keep, extra_files=extra_files)


def export(run: Run, folder: Path) -> None:
    """Write the averaged weights for diffusers: a LoRA file, or the whole transformer in full-weight training. Raises
    FloatingPointError, and writes nothing, where they are not finite."""
    _check_finite(run, run.ema.state_dict())
    with run.ema.applied():
        if run.config.lora.rank:
            exports.save_lora(run.pipeline, folder, run.config.lora.export_dtype)
        else:
            exports.save_transformer(run.pipeline.transformer, folder / "transformer")


def _check_finite(run: Run, tensors: dict[str, Tensor]) -> None:
    """Raise FloatingPointError unless all tensors are finite."""
    last = checkpoints.find_newest(run.folder / "checkpoints") if distributed.is_main() else None
    finite.check_tensors(tensors, f"after update {run.step} nothing is saved ({checkpoints.newest_in_words(last)})")


def state_after_failure(run: Run) -> str:
    """Say what an update that was not made leaves behind, as the end of a sentence."""
    problem = finite.problem_of_tensors(fsdp_utils.trainable_parameters(run.pipeline.transformer))
    weights = f"the weights were spoilt before it: {problem}" if problem else "it has moved no weight"
    last = checkpoints.newest_in_words(checkpoints.find_newest(run.folder / "checkpoints"))
    return f", which was not made; {weights}; {last}"


def keep_epoch_start(run: Run) -> None:
    """Before an epoch's first optimizer step, copy the state into the main rank's memory, so that a signal in mid-epoch
    loses this epoch alone, and none before it.

    Done only for adapters, whose state is small, and only where no checkpoint holds the same state. The other ranks
    have the same weights.
    """
    run.epoch_start = None
    is_in_checkpoint = run.epoch == run.saved_epoch
    if is_in_checkpoint or not signals.received.can_listen or not distributed.is_main():
        return
    if run.config.lora.rank and not fsdp_utils.is_sharded(run.model.network):
        offload.reload_optimizer_state(run.optimizer)
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in state(run).items()}
        run.epoch_start = EpochStart(copies, run.reference.num_moves if run.reference else 0)


def go_back_to_epoch_start(run: Run) -> bool:
    """Undo this epoch's optimizer steps, if a copy was kept; return whether it was."""
    if run.epoch_start is None:
        return False
    offload.reload_optimizer_state(run.optimizer)
    for name, tensor in state(run).items():
        tensor.copy_(run.epoch_start.tensors[name])
    if run.reference:
        run.reference.num_moves = run.epoch_start.reference_moves
    run.step = run.first_step
    return True


def load_export(run: Run, folder: Path) -> None:
    """Fill the transformer with the weights that `export` wrote; those that it carried are lost.

    It then computes, bit for bit, what the exported policy computed if the export was in float32 and lora.alpha /
    lora.rank is a power of two.
    """
    offload.wait_for_offloaded(run.parameters)
    transformer = run.pipeline.transformer
    if run.config.lora.rank:
        fsdp_utils.fill_weights(transformer, None, policies.stored_adapter(folder, run.config.lora))
    else:
        fsdp_utils.fill_weights(transformer, StoredWeights(folder / "transformer"), None)


def best_candidate(run: Run, epoch: int, figures: dict[str, float]) -> best.Evaluation:
    """Make the record of an evaluation of the averaged weights.

    Args:
        figures: name -> mean over all prompts; {} for an evaluation that was not made, whose settings are compared.

    Raises:
        UserError: eval.best_by is none of the figures.
    """
    settings = run.config.eval
    if figures and settings.best_by not in figures:
        raise UserError(f"config.eval.best_by is {settings.best_by!r}; it may be {', '.join(sorted(figures))}")
    drawn = of_validation(run.config)
    return best.Evaluation(
        epoch=epoch,
        step=run.step,
        split=run.prompts.choosing.name,
        num_prompts=min(settings.num_prompts, len(run.prompts.choosing.prompts)),
        noises_per_prompt=settings.noises_per_prompt,
        num_steps=settings.num_steps,
        guidance_scale=settings.guidance_scale,
        best_by=settings.best_by,
        value=figures.get(settings.best_by, float("nan")),
        figures=figures,
        height=run.size.height,
        width=run.size.width,
        frames=run.size.frames,
        vae_precision=run.config.vae_precision,
        weights=drawn.weights,
        solver=drawn.solver,
        since=run.evaluations_since,
        inputs=run.inputs.of_figures() | settings_of_figures(run.config),
    )


def settings_of_figures(config: Config) -> dict[str, str]:
    """Return the settings that an evaluation's figures depend on, as JSON by key. A resumed run keeps them; one that
    branches off another run may change them."""
    args = table.flat(config.reward.args, "reward.args.")
    values = {
        "reward_fn": dict(config.reward_fn),
        "options of rewards": {key: value for key, value in args.items() if table.decides_scores(key)},
        # For comparisons with older evaluations: with settings of requests, such as batch_size.
        "reward.args": {key: value for key, value in args.items() if table.is_fixed(key)},
        "reward.frames": config.reward.frames,
        "text_tokens": config.text_tokens,
        "precision": config.precision,
        "base_precision": config.base_precision,
    }
    return {key: json.dumps(value, sort_keys=True) for key, value in values.items()}


def keep_best(run: Run, epoch: int, figures: dict[str, float]) -> None:
    """If this evaluation is better than every earlier one, write the averaged weights and the figures to best/."""
    candidate = best_candidate(run, epoch, figures)
    if best.improves(candidate, run.best_evaluation, run.config.eval.min_variety):
        with run.board.timed("save"), explained(run.folder):
            best.write_best(run.folder, candidate, partial(_fill_best, run, epoch))
        run.best_evaluation = candidate


def load_best_state(run: Run) -> str:
    """Go back to the best evaluation's training state, but for the counters. Returns why it was not done, or ""."""
    best_folder = best.find_best(run.folder)
    if best_folder is None:
        return f"the folder {run.folder / best.NAME} was removed"
    folder = best_folder / best.STATE
    try:
        checkpoint, _ = distributed.on_main(checkpoints.choose, folder)
    except UserError as error:
        return str(error)
    if checkpoint is None:
        return f"{folder} is not there, as health.action was another one at that evaluation"
    reference = run.reference
    if reference and reference.num_moves and not checkpoints.stored_names(checkpoint, "reference/"):
        # Where none is stored, the reference was the first one, which the present one has to become again.
        was_reset = reference.reset()
        if not was_reset:
            return f"{checkpoint} holds no reference, and the first one was no fresh adapter"
    offload.reload_optimizer_state(run.optimizer)

    # In a run that branched off another one, the best state may be that run's, which may have had another algorithm.
    load_state(run, checkpoint, exact=False)
    return ""


def load_state(run: Run, checkpoint: Path, exact: bool = True) -> checkpoints.Progress:
    """Fill all tensors that training needs from a checkpoint; the caller sets the counters of the run.

    Args:
        exact: whether it is a checkpoint of this run. Another run's may lack the reference and extra policies, or have
            some that this run does not need. Extra policies that it lacks become copies of the loaded policy.
    """
    tensors = state(run)
    stored = tensors if exact else checkpoints.without_missing(tensors, checkpoint)
    progress = checkpoints.load(checkpoint, stored, exact)
    for policy, ema in run.extra_policies.items():
        if not any(name.startswith(f"{policy}/") for name in stored):
            ema.move(1.0)
    if run.reference and any(name.startswith("reference/") for name in stored):
        run.reference.num_moves = progress.reference_moves
    return progress


def _fill_best(run: Run, epoch: int, folder: Path) -> None:
    """Write the averaged weights, and the training state if health.action may go back to it."""
    export(run, folder)
    if run.config.health.action == "roll_back":
        _save_state(run, folder / best.STATE, epoch)
