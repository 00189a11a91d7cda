"""Messages for renamed settings, and what older names and values mean in a stored config.

A checkpoint whose config has a setting that is none any more is resumed only where that changes no number.
"""

import json
from pathlib import Path, PurePath
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.settings import table
from flow_grpo.settings.table import SETTINGS, value_of

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
    "sample.sde_window_schedule": "config.sample.sde_window_interval: 0 is 'random', 25 was 'progressive'",
    "train.adam_beta1": "the first of config.train.adam_betas",
    "train.adam_beta2": "the second of config.train.adam_betas",
    "eval.height": "--sizes of scripts/evaluate.py",
    "eval.width": "--sizes of scripts/evaluate.py",
    "eval.keep_state": "config.health.action 'roll_back', which stores it",
    "preferences.source": "--source of scripts/prepare_preferences.py",
    "preferences.part_size": "--part_size of scripts/prepare_preferences.py",
    "preferences.max_rows": "--max_rows of scripts/prepare_preferences.py",
    "preferences.validation_share": "--validation_share of scripts/prepare_preferences.py",
    "preferences.max_dropped_share": "--max_dropped_share of scripts/prepare_preferences.py",
}
RENAMED = {  # setting -> its values that have other names today
    "base_precision": {"8bit": "fp8_weights", "4bit": "nf4"},
    "train.step_weight": {"none": "equal"},
}
WITHOUT_EFFECT = (  # settings that are none any more, as stored: today's program computes the same
    ("preferences.source", ""),
    ("lora.dropout", 0.0),
    ("sample.branch_schedule", "fixed"),
    ("reward.backend", "inline"),
    ("reward.backend", "thread"),
    ("reward.backend", "process"),
)
# setting -> pairs (stored, wanted): the configs of this repository, or the setting's default, had the former when the
# run began and have the latter today. A resumed run keeps its own.
KEPT = {"train.step_weight": (("equal", ""), ("equal", "sqrt3"), ("mean_one", "sqrt3"))}


def check_values(config: ConfigDict) -> None:
    """Raise UserError for a value that has another name today."""
    for key, names in RENAMED.items():
        for before, today in names.items():
            if value_of(config, key) == before:
                raise UserError(f"config.{key} is {before!r}, which is now called {today!r}")


def read(file: Path) -> dict[str, Any]:
    """Return the config that a JSON file holds, brought up to date. Raises UserError for a value of another type than
    its setting has."""
    stored = with_defaults(folders.read_json(file), file)
    for setting in SETTINGS:
        value = value_of(stored, setting.key)
        # JSON has lists for tuples.
        as_set = tuple(value) if isinstance(value, list) else value
        if not setting.is_like(as_set):
            raise UserError(f"{file} is damaged: its {setting.key!r} is {quoted(value)}")
    return stored


def with_defaults(stored: dict[str, Any], file: PurePath) -> dict[str, Any]:
    """Bring a config read from a JSON file up to date, in place, and return it.

    Settings newer than the file get their defaults, renamed values their present names, and `resolution` becomes height
    and width. Raises UserError, which names the file, where a section is no object.
    """
    for section in {setting.section for setting in SETTINGS} - {""}:
        if not isinstance(stored.setdefault(section, {}), dict):
            raise UserError(f"{file} is damaged: its {section!r} is {quoted(stored[section])}, no section of settings")
    if "resolution" in stored:
        stored["height"] = stored["width"] = stored.pop("resolution")
    for setting in SETTINGS:
        target = stored[setting.section] if setting.section else stored
        name = setting.key.rpartition(".")[2]
        # Through JSON, as the other values came: a tuple becomes a list, and no default is shared.
        default = json.loads(json.dumps(setting.default))
        value = target.setdefault(name, default)
        names_of_today = RENAMED.get(setting.key, {})
        if isinstance(value, str) and value in names_of_today:
            target[name] = names_of_today[value]
    return stored


def changes(stored: dict[str, Any], wanted: dict[str, Any], file: PurePath) -> dict[str, tuple]:
    """Compare a config with one from a JSON file, in the settings that a resumed run keeps: key -> (stored, wanted)."""
    before = table.flat(with_defaults(stored, file))
    now = table.flat(json.loads(json.dumps(wanted)))
    pairs = {}
    for key in sorted(before.keys() | now.keys()):
        was = before.get(key)
        wants = now.get(key)
        has_changed = table.is_fixed(key) and was != wants
        if has_changed and (key, was) not in WITHOUT_EFFECT:
            pairs[key] = (was, wants)
    # Without branches no choice is the weight 1, too.
    if now.get("sample.num_branches") == 1 and pairs.get("train.step_weight") in (("equal", ""), ("", "equal")):
        del pairs["train.step_weight"]
    return pairs


def is_setting(key: str) -> bool:
    """Return whether a dotted key is a setting of today, or an entry of one that is a dict."""
    while key not in table.BY_KEY and "." in key:
        key = key.rpartition(".")[0]
    return key in table.BY_KEY


def kept_settings(changed: dict[str, tuple]) -> dict[str, Any]:
    """Return those of `changes` that a resumed run keeps as they are stored, because only a default has changed."""
    kept_values = {}
    for key, pair in changed.items():
        if pair in KEPT.get(key, ()):
            kept_values[key], _ = pair
    return kept_values
