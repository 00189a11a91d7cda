"""The frozen settings that a run reads, and the config that files and flags edit, of which they are made."""

import json
from dataclasses import fields, replace

import pytest
from refused import assert_refused
from small import CHECKS, config_of

from flow_grpo.base.errors import UserError
from flow_grpo.command_line import checks
from flow_grpo.settings import stored_config, table
from flow_grpo.settings.sections import Config, Sample, Train

NAME = "shapes_qwenimage"


def test_what_a_run_reads_and_stores_is_what_files_and_flags_made():
    custom = {"phases": [1, {"a": 2}], "more": {"b": 3.5}}
    editable = config_of(NAME, custom=custom, reward__args={"shapes": {"x": [1]}})
    config = table.typed(editable)
    assert config.to_dict() == editable.to_dict()
    assert json.dumps(config.to_dict()) == json.dumps(editable.to_dict())
    assert table.editable(config) == editable
    assert table.flat(config) == table.flat(editable)
    assert (config.custom.more.b, config.custom["phases"], dict(config.reward_fn)) == (
        3.5,
        [1, {"a": 2}],
        {"shapes": 1},
    )


def test_nothing_of_a_runs_settings_can_be_changed():
    config = table.typed(config_of(NAME, custom={"rate": 0.5}))
    for section, name in ((config, "seed"), (config.train, "clip_range"), (config.custom, "rate")):
        with pytest.raises(AttributeError):
            setattr(section, name, 7)
    for names in (config.reward_fn, config.reward.args, config.custom):
        with pytest.raises(TypeError, match="item assignment"):
            names["new"] = 1.0


def test_a_setting_of_ones_own_that_is_not_there_is_named_with_the_flag_that_sets_it():
    config = table.typed(config_of(NAME, custom={"rate": 0.5, "more": {"b": 1}}))
    for read, key in ((lambda custom: custom.rte, "custom.rte"), (lambda custom: custom.more.c, "custom.more.c")):
        with pytest.raises(UserError, match=rf"there is no config\.{key} beside .*: set --config\.{key}="):
            read(config.custom)
    assert not hasattr(config.custom, "rte")
    assert (config.custom.get("rte", 1), config.custom.get("rate", 1)) == (1, 0.5)


def test_a_stored_config_has_the_types_of_its_fields_again(tmp_path):
    """JSON has lists for tuples, and a whole number may stand for a float."""
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"train": {"learning_rate": 1, "teachers": ["a"]}, "sample": {"sde_window_range": [1, 4]}})
    )
    config = table.of_stored(stored_config.read(file))
    assert type(config.train.learning_rate) is float
    assert config == Config(train=Train(learning_rate=1.0, teachers=("a",)), sample=Sample(sde_window_range=(1, 4)))


def test_dotted_keys_change_a_copy():
    config = table.with_values(Config(), {"train.beta": 0.5, "seed": 7})
    assert config == replace(Config(), seed=7, train=Train(beta=0.5))
    assert (Config().seed, Config().train.beta) == (42, 0.0)


def test_scores_follow_from_rewards_their_weights_and_options_and_the_frames_that_they_see():
    deciding = ("reward_fn.shapes", "reward.frames", "reward.args.ocr.frames", "reward.args.vlm_judge.question")
    asking = ("reward.batch_size", "reward.timeout_s", "reward.args.ocr.batch_size", "reward.args.ocr.url", "frames")
    assert all(map(table.decides_scores, deciding))
    assert not any(map(table.decides_scores, asking))


def test_every_setting_is_a_field_with_its_meaning_below_it():
    for setting in table.SETTINGS:
        assert setting.meaning.endswith("."), setting.key
        section = getattr(Config(), setting.section) if setting.section else Config()
        assert setting.key.rpartition(".")[2] in {field.name for field in fields(section)}


def test_a_name_that_a_config_file_adds_beside_the_settings_is_refused():
    def with_name(key):
        config = config_of(NAME)
        with config.unlocked():
            config.update_from_flattened_dict({"custom.rate": 1})
            section, _, name = key.rpartition(".")
            (config[section] if section else config)[name] = 3
        return config

    rows = []
    for key in ("temperature", "train.temperature"):
        config = with_name(key)
        words = [f"config.{key} is no setting", "config.custom"]
        rows.append((key, lambda config=config: checks.check(config, CHECKS["grpo"]), words))
    assert_refused(rows)
