"""What settings may say together, and what each script asks of them. Checked before any weight is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from ml_collections import ConfigDict

from flow_grpo import settings
from flow_grpo.quoting import quoted

MAX_WIDTHS = 32  # of text; with the update's and evaluation's graphs well below compiled.py's limit of 64


@dataclass(frozen=True)
class Script:
    """What a script asks of a config."""

    algorithm: str  # config.algorithm of the configs that are for it
    check: Callable[[ConfigDict], None]  # of config.sample
    ignored: tuple[str, ...]  # settings that it does not read


def check(config: ConfigDict, script: Script) -> None:
    """Refuse what cannot be meant.

    Raises:
        ValueError: with the setting, its value, and what it may be.
    """
    if config.algorithm in tuple(settings.SCRIPTS) and config.algorithm != script.algorithm:
        raise ValueError(
            f"{config.name} is a config for {settings.SCRIPTS[config.algorithm]}, but this script is "
            f"{settings.SCRIPTS[script.algorithm]}: config.algorithm is {config.algorithm!r}, not {script.algorithm!r}"
        )
    settings.check_values(config)
    defaults = settings.default_config()
    for key in script.ignored:
        value = settings.value_of(config, key)
        if value != settings.value_of(defaults, key):
            raise ValueError(f"config.{key} is set to {quoted(value)}, but this script would ignore it")
    _check_run_name(config.run_name)
    _check_meaning(config)
    _check_health(config)
    if "train.beta" not in script.ignored:
        _check_reference(config.train)
    _check_speed(config)
    _check_base(config)
    _check_memory(config)
    script.check(config.sample)


def drop_unused_rewards(config: ConfigDict) -> None:
    """Leave rewards of weight 0 out of config.reward_fn. Raises ValueError if that is no dict."""
    settings.BY_KEY["reward_fn"].check(config.reward_fn, "reward_fn")
    config.reward_fn = {name: weight for name, weight in config.reward_fn.items() if weight != 0}


def _check_run_name(name: str) -> None:
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or (name and not path.parts):
        raise ValueError(f"config.run_name is {quoted(name)}; it must be the name of a folder in config.output_dir")


def _check_meaning(config) -> None:
    for key in ("height", "width", "eval.height", "eval.width"):
        pixels = settings.value_of(config, key)
        if pixels % 16:
            raise ValueError(f"config.{key} is {pixels}; it must be a multiple of 16 pixels")
    if config.train.objective == "guard" and config.sample.sde_type == "cps":
        raise ValueError(
            "config.train.objective 'guard' corrects a Gaussian log-prob, which sample.sde_type 'cps' does not have; "
            "'cps_gaussian' is the same step with one"
        )
    if config.train.importance_cap and config.train.old_log_prob == "rollout":
        raise ValueError(
            f"config.train.importance_cap is {config.train.importance_cap} with config.train.old_log_prob 'rollout': "
            "a weight compares recomputed log-probs with the rollout's; set 'recompute'"
        )
    _check_best_by(config)
    _check_ignored_in_pairs(config.train)
    if config.sample.noise_level == 0:
        raise ValueError("config.sample.noise_level is 0: without noise no step has a log-probability to train")


def _check_ignored_in_pairs(train) -> None:
    """Refuse a setting that another one makes the run ignore."""
    if train.target_update_size and (train.objective == "guard" or not train.clip_range):
        raise ValueError(
            f"config.train.target_update_size is {train.target_update_size} with config.train.objective "
            f"{train.objective!r} and clip_range {train.clip_range}: an update's size is measured in clip ranges of "
            "the plain ratio; set objective 'clip' and a clip_range above 0"
        )
    if train.target_update_size and train.updates_per_epoch * train.inner_epochs == 1:
        raise ValueError(
            f"config.train.target_update_size is {train.target_update_size} with one update an epoch: its ratios "
            "are all 1, so its size is never seen; set config.train.updates_per_epoch to 2 or more"
        )
    if train.flow_matching_warmup and not train.flow_matching_weight:
        raise ValueError(
            f"config.train.flow_matching_warmup is {train.flow_matching_warmup}, but config.train.flow_matching_weight "
            "is 0: there is no weight to rise to"
        )


def _check_best_by(config) -> None:
    """Of a reward's own figures only their beginning is known before it has scored."""
    names, chosen = [*config.reward_fn, *config.eval.rewards], config.eval.best_by
    if chosen != "avg" and not any(chosen == name or chosen.startswith(f"{name}_") for name in names):
        raise ValueError(
            f"config.eval.best_by is {quoted(chosen)}; it may be 'avg', a reward that is measured "
            f"({', '.join(names)}), or a figure of one, such as 'shapes_accuracy'"
        )


def _check_health(config) -> None:
    if config.health.action == "roll_back" and not (config.eval_freq and config.eval.num_prompts):
        raise ValueError(
            f"config.health.action is 'roll_back', but with config.eval_freq {config.eval_freq} and "
            f"config.eval.num_prompts {config.eval.num_prompts} no evaluation says to what; set both"
        )


def _check_reference(train) -> None:
    for key in ("reference_interval", "reference_guidance_scale"):
        if train[key] and not train.beta:
            raise ValueError(
                f"config.train.{key} is {train[key]}, but config.train.beta 0 holds nothing to a reference: set both"
            )


def _check_speed(config) -> None:
    if config.sample.flash_solver != "dpm" and not config.sample.flash_ratio:
        raise ValueError(
            f"config.sample.flash_solver is {config.sample.flash_solver!r}, but config.sample.flash_ratio 0 leaves no "
            "forward out"
        )
    if config.attention and (config.precision == "fp32" or not config.lora.rank):
        raise ValueError(
            f"config.attention is {config.attention!r}, which needs config.precision 'bf16' or 'fp16' and an adapter "
            f"to train: config.precision is {config.precision!r}, config.lora.rank {config.lora.rank}"
        )
    merged = config.sample.merge_adapter and config.lora.rank
    if config.sample.fast_precision and not merged and config.base_precision != "8bit":
        raise ValueError(
            f"config.sample.fast_precision is {config.sample.fast_precision!r}, but no layer has other products: set "
            "config.sample.merge_adapter, with config.lora.rank above 0, or config.base_precision '8bit'"
        )
    if config.sample.text_multiple and config.sample.engine != "stepwise":
        raise ValueError(
            f"config.sample.text_multiple is {config.sample.text_multiple}: a batch's rows walk with one width of "
            "text; config.sample.engine 'stepwise' gives each its own"
        )
    if config.sample.completion_batch_size and config.sample.engine != "stepwise" and config.sample.num_branches == 1:
        raise ValueError(
            f"config.sample.completion_batch_size is {config.sample.completion_batch_size}: a batch's rows walk "
            "together; set config.sample.engine 'stepwise'"
        )
    widths = -(-config.text_tokens // config.sample.text_multiple) if config.sample.text_multiple else 1
    if config.compile and widths > MAX_WIDTHS:
        raise ValueError(
            f"config.sample.text_multiple is {config.sample.text_multiple}: {config.text_tokens} text tokens make "
            f"{widths} widths, and config.compile makes a graph for each; at most {MAX_WIDTHS}"
        )
    if config.sample.merge_adapter and config.fsdp.mode != "replicate":
        raise ValueError(
            f"config.sample.merge_adapter with config.fsdp.mode {config.fsdp.mode!r}: only replicated weights are "
            "merged"
        )


def _check_base(config) -> None:
    if config.weights_cache and not config.base_precision:
        raise ValueError(
            f"config.weights_cache is {quoted(config.weights_cache)}, but config.base_precision '' stores no other "
            "weights than the model's own"
        )
    if not config.base_precision:
        return
    if not config.lora.rank:
        raise ValueError(
            f"config.base_precision is {config.base_precision!r}, but with config.lora.rank 0 all weights are trained; "
            "a quantised base takes an adapter"
        )
    if config.fsdp.mode != "replicate":
        raise ValueError(
            f"config.base_precision is {config.base_precision!r} with config.fsdp.mode {config.fsdp.mode!r}: quantised "
            "weights are not sharded; set 'replicate'"
        )
    if config.sample.merge_adapter and config.base_precision == "4bit":
        raise ValueError(
            "config.base_precision is '4bit' with config.sample.merge_adapter: a base of 4 bits has no merged copy; "
            "set config.sample.merge_adapter to False"
        )
    if config.sample.merge_adapter and config.sample.fast_precision != "fp8":
        raise ValueError(
            f"config.base_precision is {config.base_precision!r} with config.sample.merge_adapter and "
            f"sample.fast_precision {config.sample.fast_precision!r}: the copy of a base of 8 bits has 8 bits, too; "
            "set 'fp8', or merge_adapter to False"
        )


def _check_memory(config) -> None:
    if config.fsdp.shard_size and config.fsdp.mode != "hybrid":
        raise ValueError(
            f"config.fsdp.shard_size is {config.fsdp.shard_size} with config.fsdp.mode {config.fsdp.mode!r}: only "
            "'hybrid' has groups of that size"
        )
    if config.fsdp.activation_memory < 1 and (not config.compile or config.fsdp.activation_checkpointing):
        raise ValueError(
            f"config.fsdp.activation_memory is {config.fsdp.activation_memory}: what to recompute is the compiler's "
            "choice, so it takes config.compile, and fsdp.activation_checkpointing, which recomputes all, off"
        )
    if config.fsdp.offload_weights and (config.fsdp.mode == "replicate" or config.fsdp.offload_optimizer):
        raise ValueError(
            f"config.fsdp.offload_weights with fsdp.mode {config.fsdp.mode!r} and fsdp.offload_optimizer "
            f"{config.fsdp.offload_optimizer}: it is for sharded weights ('shard', on one GPU too), and takes the "
            "optimizer's state along"
        )


def check_window(sample) -> None:
    """Raises ValueError unless the SDE window lies within the steps; train_*.py."""
    if sample.num_branches != 1:
        raise ValueError(f"config.sample.num_branches is {sample.num_branches}; branches are for train_*_pr.py")
    first, last = sample.sde_window_range
    inside = 0 <= first < last <= sample.num_steps - 1
    if sample.sde_window_size and not (inside and sample.sde_window_size <= last - first):
        raise ValueError(
            f"an SDE window of sde_window_size = {sample.sde_window_size} in sde_window_range = ({first}, {last}) does "
            f"not fit into config.sample.num_steps, {sample.num_steps} steps; the range may be up to "
            f"(0, {sample.num_steps - 1}), since the last step is never noisy"
        )
    if sample.sde_window_size == 0 and sample.sde_window_schedule != "random":
        raise ValueError(
            f"config.sample.sde_window_size is 0, all steps but the last: nothing is left to move by "
            f"sde_window_schedule {sample.sde_window_schedule!r}"
        )
    if sample.num_images_per_prompt < 2:
        raise ValueError("config.sample.num_images_per_prompt is 1: an image is compared with others of its prompt")


def check_branches(sample) -> None:
    """Raises ValueError unless branches can be compared; train_*_pr.py."""
    if sample.num_branches < 2:
        raise ValueError(
            f"config.sample.num_branches is {sample.num_branches}; a branch is compared with the others of its "
            "step, so it takes at least 2 (published: 6). Without branches use train_*.py"
        )


def check_pairs(sample) -> None:
    """Raises ValueError unless an image can lose against another; train_*_dpo.py and prepare_preferences.py."""
    if sample.num_images_per_prompt < 2:
        raise ValueError("config.sample.num_images_per_prompt is 1: a pair is the best and the worst of a prompt's")


def check_forward(sample) -> None:
    """Raises ValueError unless finished images are compared and any timestep may be trained; train_*_nft.py."""
    if sample.sde_window_size or sample.num_branches != 1:
        raise ValueError(
            f"config.sample.sde_window_size is {sample.sde_window_size} and num_branches {sample.num_branches}: "
            "without noise in the rollout there is neither window nor branch; set 0 and 1"
        )
    if sample.num_images_per_prompt < 2:
        raise ValueError("config.sample.num_images_per_prompt is 1: an image is compared with others of its prompt")


GRPO = Script(settings.GRPO, check_window, settings.ignored_by(settings.GRPO))
PR = Script(settings.PR, check_branches, settings.ignored_by(settings.PR))
NFT = Script(settings.NFT, check_forward, settings.ignored_by(settings.NFT))
DPO = Script(settings.DPO, check_pairs, settings.ignored_by(settings.DPO))
