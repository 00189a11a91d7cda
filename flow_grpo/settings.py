"""What a config may say, beyond the counts that must divide (batching.py). Checked before any weight is loaded."""

import math
import runpy
from pathlib import Path

CHOICES = {
    "precision": ("fp32", "bf16", "fp16"),
    "vae_precision": ("fp32", "bf16"),
    "fsdp.mode": ("replicate", "shard", "hybrid"),
    "sample.engine": ("full", "stepwise"),
    "sample.flash_solver": ("dpm", "extrapolate"),
    "sample.merged_precision": ("", "fp8"),
    "sample.sde_type": ("sde", "dance", "cps", "cps_gaussian"),
    "sample.sde_window_schedule": ("random", "progressive", "decay", "exp_decay"),
    "train.old_log_prob": ("rollout", "recompute"),
    "train.objective": ("clip", "guard"),
    "train.reward_aggregation": ("sum", "gdpo"),
    "train.old_decay_schedule": (0, 1, 2),
    "reward.backend": ("inline", "thread", "process"),
    "reward.on_failure": ("fail", "mask"),
    "reward.image_format": ("npy", "png"),
    "preferences.dtype": ("float32", "bfloat16"),
    "health.action": ("log", "lower_learning_rate", "stop", "roll_back"),
    "train.step_weight": ("none", "sqrt3", "mean_one"),
    "train.learning_rate_schedule": ("constant", "linear", "cosine"),
}
RATIO = tuple(  # of train_*.py and train_*_pr.py alone
    f"train.{key}"
    for key in ("objective", "old_log_prob", "importance_cap", "clip_range", "step_weight", "target_update_size")
)
NFT = tuple(  # of train_*_nft.py alone
    f"train.{key}"
    for key in ("nft_beta", "old_decay_schedule", "shared_noise", "flow_matching_weight", "flow_matching_warmup")
)
DPO = (  # of train_*_dpo.py and prepare_preferences.py alone
    *("train.dpo_beta", "eval.num_pairs", "eval.noises_per_pair"),
    *("preferences.path", "preferences.source", "preferences.min_margin", "preferences.validation_share"),
    *("preferences.max_dropped_share", "preferences.part_size", "preferences.dtype"),
)
MAX_WIDTHS = 32  # of text; with the update's and evaluation's graphs well below compiled.py's limit of 64
AT_LEAST = {  # smallest value of a number
    "num_epochs": 1, "max_hours": 0,
    "save_freq": 0, "keep_checkpoints": 1, "eval_freq": 0, "text_tokens": 1,
    "height": 16, "width": 16, "eval.height": 0, "eval.width": 0,
    "vae_batch_size": 1, "lora.rank": 0, "lora.alpha": 1, "fsdp.shard_size": 0, "fsdp.activation_memory": 0,
    "sample.num_steps": 2, "sample.text_multiple": 0,
    "sample.num_prompts_per_epoch": 1, "sample.num_images_per_prompt": 1, "sample.batch_size": 1,
    "sample.sde_window_size": 0, "sample.sde_window_interval": 1, "sample.sde_window_stride": 1,
    "sample.flash_ratio": 0, "sample.num_branches": 1, "sample.completion_batch_size": 1, "sample.noise_level": 0,
    "train.learning_rate": 0, "train.updates_per_epoch": 1, "train.inner_epochs": 1, "train.clip_range": 0,
    "train.adv_clip_max": 0, "train.beta": 0, "train.nft_beta": 1e-6, "train.dpo_beta": 0, "reward.batch_size": 1,
    "reward.max_pending": 1, "reward.max_masked_share": 0, "reward.in_flight": 1, "reward.timeout_s": 0,
    "reward.retry_s": 0, "train.reference_interval": 0, "preferences.min_margin": 0,
    "preferences.validation_share": 0, "preferences.max_dropped_share": 0, "preferences.part_size": 1,
    "train.importance_cap": 0, "eval.num_pairs": 1, "eval.noises_per_pair": 1, "train.max_grad_norm": 0,
    "train.weight_decay": 0, "train.warmup_updates": 0, "train.target_update_size": 0,
    "train.reference_guidance_scale": 0, "train.flow_matching_weight": 0, "train.flow_matching_warmup": 0,
    "train.timestep_fraction": 0, "train.ema_decay": 0, "train.ema_interval": 1, "eval.num_prompts": 0,
    "health.max_roll_backs": 0, "health.reward_drop": 0, "health.eval_drop": 0, "health.reference_distance": 0,
    "health.loss_rise": 0,
    "health.update_size": 0, "health.epochs_without_signal": 0, "health.latent_rms_change": 0,
    "health.high_frequency_change": 0, "health.diversity_change": 0, "health.grad_norm_spike": 0,
    "eval.noises_per_prompt": 1, "eval.test_freq": 0, "eval.num_steps": 1, "eval.batch_size": 1,
    "eval.num_panel_images": 1,
}  # fmt: skip


def check(config, ignored: tuple[str, ...]) -> None:
    """Refuse what cannot be meant.

    Args:
        ignored: dotted keys that the calling script does not read; setting one of them is an error.

    Raises:
        ValueError: with the setting, its value, and what it may be.
    """
    for key, choices in CHOICES.items():
        if _get(config, key) not in choices:
            raise ValueError(f"config.{key} is {_get(config, key)!r}; it may be {', '.join(map(repr, choices))}")
    for key, least in AT_LEAST.items():
        if not least <= _get(config, key) < math.inf:  # NaN compares false too
            raise ValueError(f"config.{key} is {_get(config, key)}; it must be finite and at least {least}")
    _check_meaning(config)
    _check_health(config)
    if "train.beta" not in ignored:
        _check_reference(config.train)
    _check_speed(config)
    _check_memory(config)
    defaults = runpy.run_path(str(Path(__file__).parents[1] / "config" / "base.py"))["get_config"]()
    for key in ignored:
        if _get(config, key) != _get(defaults, key):
            raise ValueError(f"config.{key} is set to {_get(config, key)}, but this script would ignore it")


def _check_meaning(config) -> None:
    _check_size(config)
    if not 0 < config.train.timestep_fraction <= 1:
        raise ValueError(f"config.train.timestep_fraction is {config.train.timestep_fraction}; it lies in (0, 1]")
    if config.reward.max_masked_share > 1:
        raise ValueError(f"config.reward.max_masked_share is {config.reward.max_masked_share}; a share is at most 1")
    if config.sample.flash_ratio > 1:
        raise ValueError(f"config.sample.flash_ratio is {config.sample.flash_ratio}; a share of the steps is at most 1")
    if config.train.objective == "guard" and config.sample.sde_type == "cps":
        raise ValueError(
            "config.train.objective 'guard' corrects a Gaussian log-prob, which sample.sde_type 'cps' has not; "
            "'cps_gaussian' is the same step with one"
        )
    if config.train.importance_cap and config.train.old_log_prob == "rollout":
        raise ValueError(
            f"config.train.importance_cap is {config.train.importance_cap} with config.train.old_log_prob 'rollout': "
            "a weight compares recomputed log-probs with the rollout's; set 'recompute'"
        )
    _check_best_by(config)
    if config.sample.noise_level == 0:
        raise ValueError("config.sample.noise_level is 0: without noise no step has a log-probability to train")


def _check_size(config) -> None:
    for key in ("height", "width", "eval.height", "eval.width"):
        if _get(config, key) % 16:
            raise ValueError(f"config.{key} is {_get(config, key)}; it must be a multiple of 16 pixels")


def _check_best_by(config) -> None:
    """Of a reward's own figures only their beginning is known before it has scored."""
    names, chosen = [*config.reward_fn, *config.eval.rewards], config.eval.best_by
    if chosen != "avg" and not any(chosen == name or chosen.startswith(f"{name}_") for name in names):
        raise ValueError(
            f"config.eval.best_by is {chosen!r}; it may be 'avg', a reward that is measured ({', '.join(names)}), or a "
            "figure of one, such as 'shapes_accuracy'"
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
    if config.sample.merged_precision and not (config.sample.merge_adapter and config.lora.rank):
        raise ValueError(
            f"config.sample.merged_precision is {config.sample.merged_precision!r}, but no adapter is merged: set "
            "config.sample.merge_adapter, with config.lora.rank above 0"
        )
    if config.sample.text_multiple and config.sample.engine != "stepwise":
        raise ValueError(
            f"config.sample.text_multiple is {config.sample.text_multiple}: a batch's rows walk with one width of "
            "text; config.sample.engine 'stepwise' gives each its own"
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


def _check_memory(config) -> None:
    if config.fsdp.activation_memory > 1:
        raise ValueError(f"config.fsdp.activation_memory is {config.fsdp.activation_memory}; a share is at most 1")
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
            f"not fit into {sample.num_steps} steps; the range may be up to (0, {sample.num_steps - 1}), "
            f"since the last step is never noisy"
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


def _get(config, key: str):
    for part in key.split("."):
        config = config[part]
    return config
