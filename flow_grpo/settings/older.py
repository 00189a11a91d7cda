"""Keys and values of older configs: what is said to who types one, and what it means in a stored config.

A stored one is mapped where a setting of today means the same, dropped where it changed nothing, and refused otherwise.
"""

import json
from pathlib import PurePath
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import quoted
from flow_grpo.settings import table
from flow_grpo.settings.table import BY_KEY, SETTINGS, value_of

MOVED = {  # setting that is none any more -> what says the same today
    "project": "WANDB_PROJECT in the environment",
    "resolution": "config.height and config.width",
    "embeddings_cache": "config.cache_dir",
    "reward.token": "REWARD_TOKEN in the environment, or a file that config.reward.token_file names",
    "reward.url": "an option of one reward: config.reward.args.NAME.url",
    "reward.backend": "a thread, or for 'process' scripts/serve_reward.py with config.reward.args.NAME.url",
    "reward.on_failure": "config.reward.max_masked_share, which is above 0 for 'mask'",
    "fsdp.activation_memory": "config.fsdp.activation_checkpointing, 1 minus this",
    "fsdp.offload_optimizer": "config.fsdp.offload 'optimizer'",
    "fsdp.offload_weights": "config.fsdp.offload 'weights'",
    "sample.merge_adapter": "config.sample.rollout_weights 'merged'",
    "sample.fast_precision": "config.sample.rollout_weights 'merged_fp8', or 'fp8' without a copy",
    "sample.sde_window_schedule": "config.sample.sde_window_interval: 0 is 'random', 25 was that of 'progressive'",
    "train.adam_beta1": "the first of config.train.adam_betas",
    "train.adam_beta2": "the second of config.train.adam_betas",
    "eval.height": "--sizes of scripts/evaluate.py",
    "eval.width": "--sizes of scripts/evaluate.py",
    "eval.keep_state": "config.health.action 'roll_back', which stores it",
    **{
        f"preferences.{name}": f"--{name} of scripts/prepare_preferences.py"
        for name in ("source", "part_size", "max_rows", "validation_share", "max_dropped_share")
    },
}
GONE = (  # settings that nothing says today
    *("rollout_images_freq", "preferences.dtype", "fsdp.shard_size", "sample.engine", "sample.sde_window_stride"),
    *("weights_cache", "lora.dropout"),
    *(f"reward.{name}" for name in ("image_format", "in_flight", "max_pending", "retry_s")),
    *(f"train.{name}" for name in ("target_update_size", "importance_cap", "flow_matching_warmup", "adam_eps")),
    *(f"eval.{name}" for name in ("noises_per_pair", "num_pairs", "num_panel_images")),
    *(f"health.{name}" for name in ("reference_distance", "loss_rise", "update_size", "grad_norm_spike")),
    *(f"health.{name}" for name in ("latent_rms_change", "high_frequency_change", "diversity_change")),
    "health.max_roll_backs",
)
ANSWERS = {key: f"is now {today}" for key, today in MOVED.items()} | dict.fromkeys(GONE, "is gone")
COMPUTED = {  # setting that is none any more -> its values that today's program computes
    "lora.dropout": (0,),
    "reward.image_format": ("npy",),
    "sample.sde_window_schedule": ("random", "progressive"),
    "sample.sde_window_stride": (1,),
    "train.target_update_size": (0,),
    "train.importance_cap": (0,),
    "train.flow_matching_warmup": (0,),
    "train.adam_eps": (1e-8,),
}
VALUES = {  # setting -> its values that are none any more, and what means the same today; None = nothing does
    "precision": {"fp16": None},
    "base_precision": {"8bit": "fp8_weights", "4bit": "nf4", "fp8": None},
    "train.step_weight": {"none": "equal"},
    "logger": {"both": "wandb"},
    "fsdp.activation_checkpointing": {True: 1.0, False: 0.0},
}


def check_values(config: ConfigDict) -> None:
    """Raises UserError for a value of older configs, with what it is called today."""
    for key, today in VALUES.items():
        value = value_of(config, key)
        if isinstance(value, str | bool) and value in today:
            means = "is gone" if today[value] is None else f"is now {today[value]!r}"
            raise UserError(f"config.{key} is {value!r}, which {means}")


def with_defaults(stored: dict[str, Any], file: PurePath) -> dict[str, Any]:
    """Bring a config as a JSON file holds it up to date, in place: settings that are younger than the file have their
    defaults, older ones what they are today. Raises UserError: something else stands in the place of a section, or a
    setting that decides something is gone."""
    for section in {setting.key.rpartition(".")[0] for setting in SETTINGS} - {""}:
        if not isinstance(stored.setdefault(section, {}), dict):
            raise UserError(f"{file} is damaged: its {section!r} is {quoted(stored[section])}, no section of settings")
    is_older = "baseline" not in stored["sample"]  # which came together with what `_published_fraction` translates
    _move(stored)
    _drop(stored, file)
    for setting in SETTINGS:
        section, _, name = setting.key.rpartition(".")
        target = stored[section] if section else stored
        value, old = target.setdefault(name, json.loads(json.dumps(setting.default))), VALUES.get(setting.key, {})
        if isinstance(value, str | bool) and value in old:
            target[name] = old[value]
            if old[value] is None:
                raise _refusal(file, setting.key, value)
    if is_older:
        _published_fraction(stored["sample"], stored["train"])
    return stored


def changes(stored: dict[str, Any], wanted: dict[str, Any], file: PurePath) -> dict[str, tuple]:
    """Where a config differs from one as a JSON file holds it, in what a resumed run keeps: key -> (stored, wanted)."""
    before = table.flat(ConfigDict(with_defaults(stored, file)))
    now = table.flat(ConfigDict(json.loads(json.dumps(wanted))))
    pairs = {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys()) if table.is_fixed(key)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _drop(stored: dict[str, Any], file: PurePath) -> None:
    for key in ANSWERS:
        section, _, name = key.rpartition(".")
        value = (stored[section] if section else stored).pop(name, None)
        if key in COMPUTED and value is not None and value not in COMPUTED[key]:
            raise _refusal(file, key, value)
        for options in _args_of(stored) if section == "reward" and name != "url" else ():
            options.pop(name, None)


def _refusal(file: PurePath, key: str, value: Any) -> UserError:
    return UserError(f"{file} says {key} = {quoted(value)}, which is gone; the version that made it reads it")


def _args_of(stored: dict[str, Any]) -> list[dict]:
    args = stored["reward"].get("args", {})
    return [options for options in args.values() if isinstance(options, dict)] if isinstance(args, dict) else []


def _move(stored: dict[str, Any]) -> None:
    """Give today's settings the values that they had under other names."""
    if "resolution" in stored:
        stored["height"] = stored["width"] = stored["resolution"]
    if "embeddings_cache" in stored:
        stored["cache_dir"] = stored["embeddings_cache"]
    _move_reward(stored["reward"], _args_of(stored))
    _move_fsdp(stored["fsdp"])
    _move_sample(stored["sample"])
    train = stored["train"]
    if "adam_beta1" in train or "adam_beta2" in train:
        first, second = BY_KEY["train.adam_betas"].default
        train["adam_betas"] = [train.get("adam_beta1", first), train.get("adam_beta2", second)]


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
        fp8 = sample.get("fast_precision") == "fp8"
        merged, exact = ("merged_fp8", "fp8") if fp8 else ("merged", "exact")
        sample["rollout_weights"] = merged if sample["merge_adapter"] is True else exact
    if sample.get("sde_window_schedule") == "random":
        sample["sde_window_interval"] = 0


def _published_fraction(sample: dict[str, Any], train: dict[str, Any]) -> None:
    """timestep_fraction was one of all steps but the last."""
    num_steps, fraction = sample["num_steps"], train["timestep_fraction"]
    windowed = sample["num_branches"] == 1 and sample["sde_window_size"]
    if isinstance(num_steps, int) and isinstance(fraction, int | float) and 0 < fraction < 1 and not windowed:
        train["timestep_fraction"] = int((num_steps - 1) * fraction + 1e-9) / num_steps
