"""Settings of older configs: refused with their successor where they are typed, brought up to date where stored."""

import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from flow_grpo.settings import command_line, older, table

FILE = Path("config.json")


def stored(**changes):
    """A stored config with older keys, "__" for the dot."""
    config = table.default_config().to_dict()
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        (config[section] if section else config)[key] = value
    return config


def value(config, name):
    section, _, key = name.rpartition("__")
    return (config[section] if section else config)[key]


def test_no_setting_is_gone_and_every_gone_one_is_refused_with_an_answer():
    assert not older.ANSWERS.keys() & table.BY_KEY.keys()
    for key in older.ANSWERS:
        with pytest.raises(ValueError, match=rf"{re.escape(key)}"):
            command_line.config_of([f"--config.{key}=1"], "config/grpo.py:shapes_qwenimage")


@pytest.mark.parametrize(
    ("before", "key", "today"),
    [
        (dict(sample__merge_adapter=False, sample__fast_precision=""), "sample__rollout_weights", "exact"),
        (dict(sample__merge_adapter=True, sample__fast_precision=""), "sample__rollout_weights", "merged"),
        (dict(sample__merge_adapter=True, sample__fast_precision="fp8"), "sample__rollout_weights", "merged_fp8"),
        (dict(sample__merge_adapter=False, sample__fast_precision="fp8"), "sample__rollout_weights", "fp8"),
        (dict(fsdp__activation_checkpointing=True), "fsdp__activation_checkpointing", 1.0),
        (
            dict(fsdp__activation_checkpointing=False, fsdp__activation_memory=0.25),
            "fsdp__activation_checkpointing",
            0.75,
        ),
        (dict(fsdp__offload_weights=True, fsdp__offload_optimizer=False), "fsdp__offload", "weights"),
        (dict(fsdp__offload_weights=False, fsdp__offload_optimizer=True), "fsdp__offload", "optimizer"),
        (dict(train__adam_beta1=0.5, train__adam_beta2=0.75), "train__adam_betas", [0.5, 0.75]),
        (dict(train__step_weight="none"), "train__step_weight", "equal"),
        (dict(base_precision="8bit"), "base_precision", "fp8_weights"),
        (dict(base_precision="4bit"), "base_precision", "nf4"),
        (dict(resolution=512), "height", 512),
        (dict(sample__sde_window_schedule="random"), "sample__sde_window_interval", 0),
        (dict(sample__sde_window_schedule="progressive"), "sample__sde_window_interval", 25),
        (dict(reward__on_failure="fail", reward__max_masked_share=0.05), "reward__max_masked_share", 0.0),
        (dict(reward__on_failure="mask", reward__max_masked_share=0.05), "reward__max_masked_share", 0.05),
        (
            dict(reward__on_failure="mask", reward__args={"a": {"on_failure": "fail"}, "b": {"url": "x"}}),
            "reward__args",
            {"a": {"max_masked_share": 0.0}, "b": {"url": "x"}},
        ),
        (dict(project="mine", eval__num_pairs=9, train__importance_cap=0.0), "logger", "wandb"),
    ],
)
def test_a_stored_value_is_what_means_the_same_today(before, key, today):
    before = dict(sample__sde_window_interval=25) | before
    config = older.with_defaults(stored(**before), FILE)
    assert value(config, key) == today
    keys = table.flat(ConfigDict(config)).keys()
    assert table.flat(table.default_config()).keys() <= keys
    assert not older.ANSWERS.keys() & keys


@pytest.mark.parametrize(
    "before",
    [
        dict(precision="fp16"),
        dict(base_precision="fp8"),
        dict(train__importance_cap=2.0),
        dict(train__target_update_size=1.0),
        dict(train__adam_eps=1e-6),
        dict(sample__sde_window_schedule="decay"),
        dict(reward__image_format="png"),
    ],
)
def test_a_stored_value_that_nothing_means_today_is_refused(before):
    with pytest.raises(ValueError, match=next(iter(before)).rpartition("__")[2]):
        older.with_defaults(stored(**before), FILE)


def test_a_stored_value_of_another_type_is_no_crash():
    older.with_defaults(stored(sample__merge_adapter=[], fsdp__activation_memory="all", base_precision=[8]), FILE)
