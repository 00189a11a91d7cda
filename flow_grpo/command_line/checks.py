"""Check which settings may stand together, and what each script asks of them, before any weight is loaded."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath

from ml_collections import ConfigDict

from flow_grpo import rewards
from flow_grpo.algorithms.batch_plan import BatchPlan, plan_batches, plan_pairs, plan_whole_batches
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.base.metric_table import names_score
from flow_grpo.command_line import alerts
from flow_grpo.diffusers_patch.sampling_params import check_noise_level
from flow_grpo.settings import stored_config, table
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES, OBJECTIVES, Objective
from flow_grpo.settings.sections import Config, Eval, Sample, Train
from flow_grpo.settings.setting import FrozenDict, Setting

# Beginnings of keys whose ends are the user's own names.
OPEN_SECTIONS = ("custom.", "reward_fn.", "reward.args.")
# Of text. With the graphs of the update and of evaluations they stay well below the limit of compilation.py, 64.
MAX_WIDTHS = 32
# sample.rollout_weights -> the values of base_precision that it can be made of.
BASES = {
    "exact": ("", "fp8_weights", "nf4"),
    "merged": ("",),
    "merged_fp8": ("", "fp8_weights"),
    "fp8": ("fp8_weights",),
}


def _always(config: Config) -> bool:
    """Return True: most scripts need the data set, whatever their config."""
    return True


@dataclass(frozen=True)
class Script:
    """A script's demands on its config."""

    algorithm: str  # config.algorithm of the configs that are for it
    check: Callable[[Sample], None]  # of config.sample
    # How an epoch divides over a number of GPUs; None of a script that does not train. Raises UserError.
    plan: Callable[[Config, int], BatchPlan | None] = plan_batches
    reads_dataset: Callable[[Config], bool] = _always


def check(editable: ConfigDict, script: Script) -> Config:
    """Return the config that a run reads, without rewards of weight 0. Raises UserError for what cannot be meant, with
    the setting, its value, and what it may be."""
    check_algorithm(editable, script)
    stored_config.check_values(editable)
    _check_names(editable)
    config = without_unused_rewards(table.typed(editable))
    _check_used(config)
    alerts.check_alert(config.alert)
    if config.alert == "wandb" and config.logger != "wandb":
        raise UserError(f"config.alert is 'wandb', which takes config.logger 'wandb'; it is {config.logger!r}")
    _check_loss(config)
    _check_meaning(config)
    _check_speed(config)
    script.check(config.sample)
    # A checkpoint may have what the config lacks, see run/resume.py.
    if not config.resume_from:
        check_step_weight(config)
    return config


def check_algorithm(config: ConfigDict, script: Script) -> None:
    """Raise UserError for a config that is for another script."""
    if config.algorithm in tuple(table.SCRIPTS) and config.algorithm != script.algorithm:
        raise UserError(
            f"{config.name} is a config for {table.SCRIPTS[config.algorithm]}, but this script is "
            f"{table.SCRIPTS[script.algorithm]}: config.algorithm is {config.algorithm!r}, not {script.algorithm!r}"
        )


def _check_names(config: ConfigDict) -> None:
    """Raise UserError for a name that a config file has added beside the settings."""
    for key in table.flat(config):
        is_named_by_user = key.startswith(OPEN_SECTIONS)
        if key not in table.BY_KEY and not is_named_by_user:
            raise UserError(f"config.{key} is no setting; settings of your own belong into config.custom")


def _check_used(config: Config) -> None:
    """Raise UserError for a setting that is not its default and that the script, or another setting, makes useless."""
    defaults = Config()
    for setting in table.SETTINGS:
        value = table.value_of(config, setting.key)
        if value != table.value_of(defaults, setting.key):
            if config.algorithm not in setting.used_by:
                raise UserError(f"config.{setting.key} is set to {quoted(value)}, but this script would ignore it")
            _check_needs(config, setting, setting.when)


def _check_loss(config: Config) -> None:
    """Refuse a setting that only another loss than the chosen one reads, and what that one cannot be trained with."""
    read_by_some: set[str] = set()
    for record in (*OBJECTIVES.values(), *FORWARD_OBJECTIVES.values()):
        read_by_some.update(record.reads)
    for key, record in _chosen_losses(config.train, config.algorithm):
        for name in sorted(read_by_some.difference(record.reads)):
            value = table.value_of(config, f"train.{name}")
            if value != table.BY_KEY[f"train.{name}"].default:
                chosen = table.value_of(config, f"train.{key}")
                raise UserError(f"config.train.{name} is {value!r}, but config.train.{key} {chosen!r} would ignore it")
        if record.check:
            record.check(config)


def _chosen_losses(train: Train, algorithm: str) -> Iterator[tuple[str, Objective]]:
    """Yield the chosen losses among those that an algorithm's script reads, after the last part of their setting's
    key."""
    if algorithm in table.BY_KEY["train.objective"].used_by:
        yield "objective", OBJECTIVES[train.objective]
    if algorithm in table.BY_KEY["train.forward_objective"].used_by:
        yield "forward_objective", FORWARD_OBJECTIVES[train.forward_objective]


def caution(config: Config) -> str:
    """Return what a run says of its loss when it starts; "" for nothing."""
    sentences = []
    for key, record in _chosen_losses(config.train, config.algorithm):
        if record.caution:
            chosen = table.value_of(config, f"train.{key}")
            sentences.append(f"train.{key} {chosen!r} {record.caution}")
    return "; ".join(sentences)


def without_unused_rewards(config: Config) -> Config:
    """Return the config without rewards of weight 0. Raises UserError if one of them is no reward: a misspelt name
    would leave in what it was to take out."""
    used = {}
    for name, weight in config.reward_fn.items():
        if weight == 0:
            rewards.check_reward_name(name, "config.reward_fn", served=config.reward.args)
        else:
            used[name] = weight
    return replace(config, reward_fn=FrozenDict(used, "reward_fn"))


def check_typed(config: ConfigDict, keys: Collection[str]) -> None:
    """Refuse settings of the command line that the run would ignore, even at the value that a config file has."""
    for setting in table.SETTINGS:
        if setting.key in keys:
            _check_needs(config, setting, setting.typed_when)


def _check_needs(config: Config | ConfigDict, setting: Setting, needs: tuple[tuple, ...]) -> None:
    """Refuse a setting that others make the run ignore; `needs` as in Setting.when."""
    for key, *values in needs:
        other = table.value_of(config, key)
        is_met = other in values if values else bool(other)
        if config.algorithm in table.BY_KEY[key].used_by and not is_met:
            need = " or ".join(map(repr, values)) or "set"
            value = table.value_of(config, setting.key)
            raise UserError(
                f"config.{setting.key} is {quoted(value)}, which needs config.{key} {need}, but that is {other!r}"
            )


def _check_meaning(config: Config) -> None:
    """Raise UserError for a value that its entry allows and that makes no sense, alone or beside others."""
    _check_run_name(config.run_name)
    for key, pixels in (("height", config.height), ("width", config.width)):
        if pixels % 16:
            raise UserError(f"config.{key} is {pixels}; it must be a multiple of 16 pixels")
    _check_frames(config)
    _check_best_by(config.eval.best_by, [*config.reward_fn, *config.eval.rewards])
    if config.eval.min_variety and config.eval.noises_per_prompt == 1:
        raise UserError(
            f"config.eval.min_variety is {config.eval.min_variety}, but config.eval.noises_per_prompt is 1: one image "
            "of a prompt has no variety"
        )
    if config.health.action == "roll_back" and not config.evaluates:
        raise UserError(
            f"config.health.action is 'roll_back', but with config.eval_freq {config.eval_freq} and "
            f"config.eval.num_prompts {config.eval.num_prompts} there is no evaluation to go back to; set both above 0"
        )
    if config.train.beta_gate and not config.watched_rewards:
        raise UserError(
            f"config.train.beta_gate is {config.train.beta_gate}, but every reward is trained on, so none tells which "
            "images are overrated; set config.eval.rewards to others, such as ('shapes',) beside 'shapes_proxy'"
        )
    check_noise_level(config.sample.noise_level, config.sample.sde_type, "config.sample.noise_level")
    _check_schedule("old_decay_schedule", config.train.old_decay_schedule)
    if config.train.sampler_decay_schedule != -1:
        _check_schedule("sampler_decay_schedule", config.train.sampler_decay_schedule)


def _check_run_name(name: str) -> None:
    """Raise UserError unless a name is that of a folder in another one. "" is that of the config."""
    path = PurePath(name)
    is_nowhere = bool(name) and not path.parts
    if path.is_absolute() or ".." in path.parts or is_nowhere:
        raise UserError(f"config.run_name is {quoted(name)}; it must be the name of a folder in config.output_dir")


def _check_best_by(chosen: str, measured_rewards: list[str]) -> None:
    """Raise UserError unless evaluations measure the score that chooses the best policy."""
    if not names_score(chosen, measured_rewards):
        raise UserError(
            f"config.eval.best_by is {quoted(chosen)}; it may be 'avg', a reward that is measured "
            f"({', '.join(measured_rewards)}), or a figure of one, such as 'shapes_accuracy'"
        )


def _check_frames(config: Config) -> None:
    """Raise UserError for settings of videos that an image, or the format of its files, does not take."""
    check_saved_images(config.eval, config.frames)
    if config.frames == 1 and config.reward.frames != table.BY_KEY["reward.frames"].default:
        raise UserError(
            f"config.reward.frames is {config.reward.frames}, but config.frames is 1: an image has no other frames"
        )


def check_saved_images(settings: Eval, num_frames: int) -> None:
    """Raise UserError where evaluations would save videos in a format that has no animations."""
    if num_frames > 1 and settings.save_images and settings.image_format == "jpg":
        raise UserError(
            f"config.eval.image_format is 'jpg', of a single frame, but videos have {num_frames}; set 'png' or 'webp'"
        )


def _check_schedule(name: str, decay: float) -> None:
    """Raise UserError unless a decay is one of the numbered schedules, or a share of itself that a policy can keep."""
    if not (0 <= decay < 1 or decay in (1, 2, 3)):
        raise UserError(f"config.train.{name} is {decay}; it may be 1, 2, 3, or a fixed decay from 0 to below 1")


def check_rollout_weights(config: Config) -> None:
    """Raise UserError where sample.rollout_weights cannot be made of weights of config.base_precision."""
    weights = config.sample.rollout_weights
    if config.base_precision not in BASES[weights]:
        raise UserError(
            f"config.sample.rollout_weights is {weights!r} with config.base_precision {config.base_precision!r}; it "
            f"takes {' or '.join(map(repr, BASES[weights]))}"
        )


def _check_speed(config: Config) -> None:
    """Raise UserError for settings of speed and memory that do not go together."""
    sample = config.sample
    recomputed = config.fsdp.activation_checkpointing
    check_rollout_weights(config)
    widths = 1
    if sample.text_multiple:
        widths = math.ceil(config.text_tokens / sample.text_multiple)
    if config.compile and widths > MAX_WIDTHS:
        raise UserError(
            f"config.sample.text_multiple is {sample.text_multiple}: {config.text_tokens} text tokens make "
            f"{widths} widths, and config.compile makes a graph for each; at most {MAX_WIDTHS}"
        )
    if 0 < recomputed < 1 and not config.compile:
        raise UserError(
            f"config.fsdp.activation_checkpointing is {recomputed}: what to recompute is the compiler's choice, so it "
            "takes config.compile; without it set 0 or 1"
        )
    if config.fsdp.offload == "weights" and config.fsdp.mode == "replicate":
        raise UserError(
            "config.fsdp.offload is 'weights' with config.fsdp.mode 'replicate': it is for sharded weights; set "
            "'shard', on one GPU too"
        )


def check_windowed_groups(sample: Sample) -> None:
    """Raise UserError unless the SDE window lies within the steps and images can be compared; train_*.py."""
    check_window(sample)
    check_groups(sample)


def check_window(sample: Sample) -> None:
    """Raise UserError unless the SDE window lies within the steps; train_*_distill.py, which compares no images."""
    first, last = sample.sde_window_range
    unused_ranges = (table.BY_KEY["sample.sde_window_range"].default, (0, sample.num_steps - 1))
    if not sample.sde_window_size and (first, last) not in unused_ranges:
        raise UserError(
            f"config.sample.sde_window_range is ({first}, {last}), but with config.sample.sde_window_size 0 the noisy "
            f"steps are all but the last, (0, {sample.num_steps - 1}); set sde_window_size, or drop the range"
        )
    inside = 0 <= first < last <= sample.num_steps - 1
    if sample.sde_window_size and not (inside and sample.sde_window_size <= last - first):
        raise UserError(
            f"an SDE window of sde_window_size = {sample.sde_window_size} in sde_window_range = ({first}, {last}) does "
            f"not fit into config.sample.num_steps, {sample.num_steps} steps; the range may be up to "
            f"(0, {sample.num_steps - 1}), since the last step is never noisy"
        )


def check_branches(sample: Sample) -> None:
    """Raise UserError unless branches can be compared; train_*_pr.py."""
    if sample.num_branches < 2:
        raise UserError(
            f"config.sample.num_branches is {sample.num_branches}; a branch is compared with the others of its "
            "step, so it takes at least 2 (published: 6). Without branches use train_*.py"
        )


def check_groups(sample: Sample) -> None:
    """Raise UserError unless an image can be compared with another; train_*_dpo.py and prepare_preferences.py."""
    if sample.num_images_per_prompt < 2:
        raise UserError(
            "config.sample.num_images_per_prompt is 1, but images of one prompt are compared; set at least 2"
        )
    if sample.baseline == "prompt":
        raise UserError(
            "config.sample.baseline is 'prompt', which compares branches of several trunks; this script has no "
            "branches: 'group' compares the images of a prompt"
        )


def check_step_weight(config: Config) -> None:
    """Raise UserError for branches without a choice of their steps' weight."""
    if config.sample.num_branches > 1 and not config.train.step_weight:
        raise UserError(
            "config.train.step_weight is '', but steps that branch have a weight each: set 'sqrt3' (sqrt(3) times the "
            "step's noise, as our configs have it), 'mean_one' (TempFlow-GRPO's constants) or 'equal' (no weighting)"
        )


def check_forward(sample: Sample) -> None:
    """Raise UserError unless finished images are compared and any timestep may be trained; train_*_nft.py."""
    if sample.sde_window_size:
        raise UserError(f"config.sample.sde_window_size is {sample.sde_window_size}; without noise it must be 0")
    check_groups(sample)


def _draws_or_evaluates(config: Config) -> bool:
    """Return whether a script of DPO needs the data set: not to train on stored pairs alone."""
    return not config.preferences.path or config.evaluates


def _accept(sample: Sample) -> None:
    """Accept any settings of sampling."""


GRPO = Script(table.GRPO, check_windowed_groups)
PR = Script(table.PR, check_branches)
NFT = Script(table.NFT, check_forward)
DISTILL = Script(table.DISTILL, check_window)
DPO = Script(table.DPO, check_groups, plan_pairs, _draws_or_evaluates)
REFL = Script(table.REFL, _accept, plan_whole_batches)
