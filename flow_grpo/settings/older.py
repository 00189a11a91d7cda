"""Keys and values of older configs: what is said to who types one, and what it means in a stored config.

A stored one is mapped where a setting of today means the same, dropped where it changed nothing, and refused otherwise.
"""

import json
from pathlib import PurePath
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import quoted
from flow_grpo.settings.table import BY_KEY, SETTINGS, TOKEN_WAYS, value_of


class Gone(NamedTuple):
    """A setting that is none any more."""

    answer: str  # to who types it, after its key
    allowed: tuple = ()  # stored values that today's program can go on with; () = all


LIMIT = "is gone: health.reward_drop, eval_drop and epochs_without_signal stay, and what it watched is logged"
PREPARING = "is a flag of scripts/prepare_preferences.py: --{}"
GONE = {
    "project": Gone("is gone: set WANDB_PROJECT in the environment"),
    "trouble": Gone("is now config.health"),
    "embeddings_cache": Gone("is now config.cache_dir"),
    "weights_cache": Gone("is now config.cache_dir"),
    "rollout_images_freq": Gone("is gone: a script of your own may call run.log_images"),
    "resolution": Gone("is now config.height and config.width"),
    "reward.token": Gone(f"would be stored with the config; {TOKEN_WAYS}"),
    "reward.image_format": Gone("is gone: servers get .npy, which has every bit", ("npy",)),
    "reward.in_flight": Gone("is gone: 64 requests of a rank wait for each server"),
    "reward.max_pending": Gone("is gone: 1024 images of a rank wait for a score"),
    "reward.retry_s": Gone("is gone: a server may be away for 300 s"),
    "reward.url": Gone("is an option of one reward: --config.reward.args.NAME.url"),
    "reward.on_failure": Gone("is gone: 'mask' is a config.reward.max_masked_share above 0"),
    "fsdp.shard_size": Gone("is gone: 'hybrid' shards over the GPUs of a machine"),
    "fsdp.activation_memory": Gone("is now config.fsdp.activation_checkpointing, 1 minus this"),
    "fsdp.offload_optimizer": Gone("is now config.fsdp.offload 'optimizer'"),
    "fsdp.offload_weights": Gone("is now config.fsdp.offload 'weights'"),
    "sample.merge_adapter": Gone("is now config.sample.rollout_weights 'merged'"),
    "sample.fast_precision": Gone("is now config.sample.rollout_weights: 'merged_fp8', or 'fp8' without a copy"),
    "sample.merged_precision": Gone("is now config.sample.rollout_weights 'merged_fp8'"),
    "sample.engine": Gone("is gone: every image is a request of its own, drawn by continuous batching"),
    "sample.sde_window_schedule": Gone(
        "is now config.sample.sde_window_interval: 0 is 'random', 25 was that of 'progressive'",
        ("random", "progressive"),
    ),
    "sample.sde_window_stride": Gone("is gone: a window moves by one step", (1,)),
    "train.parity_largest": Gone("is now config.train.parity_limit"),
    "train.parity_mean": Gone("is a tenth of config.train.parity_limit"),
    "train.parity_clipped": Gone("is a hundredth of config.train.parity_limit"),
    "train.target_update_size": Gone("is gone: set train.learning_rate, or train.beta", (0,)),
    "train.importance_cap": Gone("is gone: train.old_log_prob 'recompute' makes the first ratio 1", (0,)),
    "train.flow_matching_warmup": Gone("is gone: the weight is the same from the start", (0,)),
    "train.adam_beta1": Gone("is the first of config.train.adam_betas"),
    "train.adam_beta2": Gone("is the second of config.train.adam_betas"),
    "train.adam_eps": Gone("is gone: it is 1e-8", (1e-8,)),
    "train.old_interval": Gone("is gone: the sampling policy moves after every epoch", (1,)),
    "health.max_roll_backs": Gone("is gone: a run stops after three"),
    "eval.height": Gone("is gone: scripts/evaluate.py --sizes evaluates at other sizes"),
    "eval.width": Gone("is gone: scripts/evaluate.py --sizes evaluates at other sizes"),
    "eval.keep_state": Gone("is now config.health.action 'roll_back', which stores it"),
    "eval.noises_per_pair": Gone("is gone: a pair is judged at 4 noises and levels"),
    "eval.num_pairs": Gone("is gone: 256 held-out pairs are judged"),
    "eval.num_panel_images": Gone("is gone: 12 images are shown"),
    "preferences.dtype": Gone("is gone: pairs are stored in config.precision"),
    **{f"preferences.{name}": Gone(PREPARING.format(name)) for name in ("part_size", "max_rows", "validation_share")},
    "preferences.max_dropped_share": Gone(PREPARING.format("max_dropped_share")),
    **{
        f"health.{name}": Gone(LIMIT)
        for name in (
            *("reference_distance", "loss_rise", "update_size", "grad_norm_spike"),
            *("latent_rms_change", "high_frequency_change", "diversity_change"),
        )
    },
}
VALUES = {  # setting -> its values that are none any more, and what means the same today; None = nothing does
    "base_precision": {"8bit": "fp8_weights", "4bit": "nf4", "fp8": None},
    "train.step_weight": {"none": "equal"},
    "logger": {"both": "wandb"},
    "fsdp.activation_checkpointing": {True: 1.0, False: 0.0},
}


def answer(key: str) -> str | None:
    """What to say of a key that was a setting, or lay in a section; None for another name."""
    return next((f"config.{old} {gone.answer}" for old, gone in GONE.items() if f"{key}.".startswith(f"{old}.")), None)


def check_values(config: ConfigDict) -> None:
    """Raises UserError for a value of older configs, with what it is called today."""
    for key, today in VALUES.items():
        value = value_of(config, key)
        if isinstance(value, str | bool) and value in today:
            means = "is gone" if today[value] is None else f"is now {today[value]!r}"
            raise UserError(f"config.{key} is {value!r}, which {means}")


def with_defaults(stored: dict[str, Any], file: PurePath) -> dict[str, Any]:
    """Bring a config as a JSON file holds it up to date, in place: settings that are younger than the file have their
    defaults, older ones what they are today.

    Raises:
        UserError: something else stands in the place of a section, or a setting that decides something is gone.
    """
    for section in {setting.key.rpartition(".")[0] for setting in SETTINGS} - {""}:
        if not isinstance(stored.setdefault(section, {}), dict):
            raise UserError(f"{file} is damaged: its {section!r} is {quoted(stored[section])}, no section of settings")
    is_older = "baseline" not in stored["sample"]  # which came together with what `_published_fraction` translates
    _refuse_gone(stored, file)
    _move(stored)
    for key in GONE.keys() - {"reward.token"}:
        section, _, name = key.rpartition(".")
        (stored[section] if section else stored).pop(name, None)
        for options in _args_of(stored) if section == "reward" and name != "url" else ():
            options.pop(name, None)
    for setting in SETTINGS:
        section, _, name = setting.key.rpartition(".")
        target = stored[section] if section else stored
        target.setdefault(name, json.loads(json.dumps(setting.default)))
        value, old = target[name], VALUES.get(setting.key, {})
        if isinstance(value, str | bool) and value in old:
            target[name] = old[value]
    if is_older:
        _published_fraction(stored["sample"], stored["train"])
    return stored


def _refuse_gone(stored: dict[str, Any], file: PurePath) -> None:
    for key, value in [(key, _value_of(stored, key)) for key in (*GONE, *VALUES)]:
        gone = GONE.get(key)
        if gone and gone.allowed and value not in (None, *gone.allowed):
            raise UserError(f"{file} says {key} = {quoted(value)}, and that {gone.answer}")
        if key in VALUES and isinstance(value, str | bool) and VALUES[key].get(value, value) is None:
            raise UserError(f"{file} says {key} = {quoted(value)}, which is gone; the version that made it reads it")


def _args_of(stored: dict[str, Any]) -> list[dict]:
    """What reward.args says of each reward."""
    args = stored["reward"].get("args", {})
    return [options for options in args.values() if isinstance(options, dict)] if isinstance(args, dict) else []


def _value_of(stored: dict[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    return (stored.get(section, {}) if section else stored).get(name)


def _move(stored: dict[str, Any]) -> None:
    """Give today's settings the values that they had under other names."""
    if "resolution" in stored:
        stored["height"] = stored["width"] = stored["resolution"]
    if "embeddings_cache" in stored:
        stored["cache_dir"] = stored["embeddings_cache"]
    _move_reward(stored["reward"], _args_of(stored))
    _move_fsdp(stored["fsdp"])
    _move_sample(stored["sample"])
    _move_train(stored["train"])


def _move_reward(reward: dict[str, Any], args: list[dict]) -> None:
    """on_failure "fail" made nothing of max_masked_share."""
    if "on_failure" not in reward:
        return
    share = reward.get("max_masked_share", 0.05)
    for options in args:
        if options.keys() & {"on_failure", "max_masked_share"}:
            masks = options.get("on_failure", reward["on_failure"]) == "mask"
            options["max_masked_share"] = options.get("max_masked_share", share) if masks else 0.0
    reward["max_masked_share"] = share if reward["on_failure"] == "mask" else 0.0


def _move_fsdp(fsdp: dict[str, Any]) -> None:
    if "activation_memory" in fsdp and fsdp.get("activation_checkpointing") is not True:
        kept = fsdp["activation_memory"]
        fsdp["activation_checkpointing"] = 1 - kept if isinstance(kept, int | float) else kept
    if fsdp.get("offload_weights") or fsdp.get("offload_optimizer"):
        fsdp["offload"] = "weights" if fsdp.get("offload_weights") else "optimizer"


def _move_sample(sample: dict[str, Any]) -> None:
    if "merge_adapter" in sample:
        fp8 = sample.get("fast_precision", sample.get("merged_precision")) == "fp8"
        merged, exact = ("merged_fp8", "fp8") if fp8 else ("merged", "exact")
        sample["rollout_weights"] = merged if sample["merge_adapter"] is True else exact
    if sample.get("sde_window_schedule") == "random":
        sample["sde_window_interval"] = 0


def _move_train(train: dict[str, Any]) -> None:
    if "adam_beta1" in train or "adam_beta2" in train:
        first, second = BY_KEY["train.adam_betas"].default
        train["adam_betas"] = [train.get("adam_beta1", first), train.get("adam_beta2", second)]
    if "parity_largest" in train:
        train["parity_limit"] = train["parity_largest"]


def _published_fraction(sample: dict[str, Any], train: dict[str, Any]) -> None:
    """timestep_fraction was one of all steps but the last."""
    num_steps, fraction = sample["num_steps"], train["timestep_fraction"]
    windowed = sample["num_branches"] == 1 and sample["sde_window_size"]
    if isinstance(num_steps, int) and isinstance(fraction, int | float) and 0 < fraction < 1 and not windowed:
        train["timestep_fraction"] = int((num_steps - 1) * fraction + 1e-9) / num_steps
