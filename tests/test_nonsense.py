"""Whatever a setting is set to, the checks before any weight accept it or name the setting in one sentence."""

import math

from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from small import CHECKS, plan

from config import dpo, grpo, nft
from flow_grpo.scoring.settings import check_rewards
from flow_grpo.settings import checks, table
from flow_grpo.weights import policies

RUNS = {
    table.GRPO: (grpo.get_config, "shapes_qwenimage,smoke"),
    table.PR: (grpo.get_config, "shapes_qwenimage_pr,smoke"),
    table.NFT: (nft.get_config, "shapes_qwenimage_nft,smoke"),
    table.DPO: (dpo.get_config, "shapes_qwenimage_dpo,online,smoke"),
    table.DISTILL: (grpo.get_config, "shapes_qwenimage,distill,smoke"),
}
HUGE = 10**5000  # of more digits than Python writes out
NUMBERS = (0, 1, -1, 2, 3, 0.5, -0.5, 1e-300, 1e38, 1e300, -1e300, 10**9, 2**63, -(2**64), HUGE)
NUMBERS = (*NUMBERS, math.nan, math.inf, -math.inf)
TEXTS = "", " ", "a", "a\nb", "../a", "/a", "a/b?c", "warp:9", "meta", "cuda:7", "cpu:3"
TUPLES = (), (0,), (0, 1, 2), ("a", "b"), (0.5, 2.5), (math.nan, 1), (3, 0), (-1, 2), (0, HUGE), ((0, 1), 2)
TUPLES = *TUPLES, (True, 2)
OF_SHAPES = 5, None, {"batch_size": 1.5}, {"batch_size": HUGE}, {"threads": 1}, {"timeout_s": math.nan}, ()
OF_SHAPES = *OF_SHAPES, {"batch_size": True}, {"device": "warp:9"}, {"url": 5}, math.inf, {"a": {1}}, 1e300
DICTS = {}, {"": {}}, {"nothing": {}}, {"ocr": {"threads": "many"}}, {"ocr": 1}, *({"shapes": of} for of in OF_SHAPES)
VALUES = (*NUMBERS, *TEXTS, *TUPLES, *DICTS, True, False, None, [], [1, 2], b"a", object)
NAMES = st.characters(exclude_categories=("Cs",), exclude_characters="\0")  # what a file may be called
BY_DEFAULT = {bool: st.booleans(), int: st.integers(), float: st.floats(), str: st.text(NAMES, max_size=20)}


def near_limits(setting):
    """Numbers at a setting's limits and beyond them, and one between."""
    steps = (0, 1) if isinstance(setting.default, int) else (0.0, 1e-9, 0.5)
    sides = [(setting.min, 1), (setting.max, -1)]
    kind = type(setting.default)
    return [kind(limit + direction * sign * step) for limit, direction in sides for step in steps for sign in (1, -1)]


def values_of(setting):
    """Values of the setting's own type half of the time, else any."""
    kind = type(setting.default)
    parts = [st.sampled_from(VALUES), BY_DEFAULT.get(kind, st.sampled_from((*TUPLES, *DICTS)))]
    if kind in (int, float):
        parts.append(st.sampled_from(near_limits(setting)))
    if setting.choices:
        parts.append(st.sampled_from(tuple(setting.choices)))
    return st.one_of(parts)


SET = st.sampled_from(table.SETTINGS).flatmap(lambda setting: st.tuples(st.just(setting.key), values_of(setting)))


def put(config, key, value):
    """Set any value, as a user's Python could."""
    section, _, name = key.rpartition(".")
    if type(value) is int and type(table.BY_KEY[key].default) is float:
        value = float(value) if abs(value) < 1e300 else math.inf  # as ml_collections would, if it could
    with config.ignore_type(), config.unlocked():
        (config[section] if section else config)[name] = value


def check_all(config, algorithm):
    """All that is checked before a file is read or a weight is loaded."""
    checks.check(config, CHECKS[algorithm])
    check_rewards(config.reward_fn, config.eval.rewards, config.reward)
    policies.check_lora(config.lora)
    plan(config)


def refusal(check, *arguments):
    """What a check says, "" if it says nothing. Any other error than ValueError is the test's."""
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def test_each_entry_takes_its_own_default_and_refuses_what_is_not_of_its_type_or_beyond_its_limits():
    for setting in table.SETTINGS:
        for value in (*VALUES, *(near_limits(setting) if type(setting.default) in (int, float) else ())):
            if message := refusal(setting.check, value, setting.key):
                assert message.startswith(f"config.{setting.key} is ")
                assert len(message) < 400
            else:
                assert type(value) is type(setting.default) or (type(setting.default), type(value)) == (float, int)
                if type(value) in (int, float):
                    assert setting.min <= value <= setting.max
                    assert math.isfinite(value)


@hypothesis_settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(SET, st.integers(0, 3))
@example(("sample.sde_window_range", (0,)), 0)
@example(("run_name", "../a"), 0)
@example(("lora.path", "a\nb"), 0)
@example(("reward.device", "warp:9"), 0)
def test_any_value_of_any_setting_is_accepted_or_refused_by_its_name(key_and_value, number):
    key, value = key_and_value
    scripts = table.BY_KEY[key].used_by
    algorithm = scripts[number % len(scripts)]
    get_config, name = RUNS[algorithm]
    config = get_config(name)
    put(config, key, value)
    if message := refusal(check_all, config, algorithm):
        assert key.rpartition(".")[2] in message or "config.reward" in message, (key, value, message)
        assert "\n" not in message
        assert len(message) < 1000
