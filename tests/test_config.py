"""A config says what it means: no name is unknown, none is ignored, a wrong one is answered with the nearest, and any
value of any setting is accepted or refused by its name before a weight is loaded."""

import ast
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from refused import refusal
from small import CHECKS, ROOT, plan

from config import dpo, grpo, nft, refl
from flow_grpo import rewards
from flow_grpo.command_line import checks, command_line
from flow_grpo.diffusers_patch.sampling_params import SDE_TYPES, SamplingParams
from flow_grpo.monitoring import health
from flow_grpo.run import loop
from flow_grpo.scoring.settings import RewardSettings, check_rewards
from flow_grpo.settings import stored_config, table
from flow_grpo.settings.setting import Setting
from flow_grpo.weights import policies

FILES = {"grpo": grpo, "nft": nft, "dpo": dpo, "refl": refl}


def test_every_entry_is_one_key_of_a_known_section_whose_default_it_allows():
    keys = [setting.key for setting in table.SETTINGS]
    assert len(set(keys)) == len(keys) > 100
    assert {key.rpartition(".")[0] for key in keys} == set(table.SECTIONS)
    assert all(setting.meaning for setting in table.SETTINGS)
    table.check_values(table.default_config())


def other_value(setting):
    """A value that is not the default, and that the entry allows."""
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    by_type = {bool: lambda old: not old, int: lambda old: old + 1, float: lambda old: old / 2 + 0.26}
    by_type |= {str: lambda old: f"other{old}", tuple: lambda old: (1, 4) if old else (setting.entry(1),)}
    return by_type[type(setting.default)](setting.default)


def test_a_tuple_of_any_length_has_entries_of_the_type_that_its_annotation_names():
    assert table.BY_KEY["eval.rewards"].entry is str
    assert table.BY_KEY["sample.sde_window_range"].entry is None
    levels = Setting("sample.levels", (), "", min=0.1, entry=table._entry_type(tuple[float, ...]))
    for value in ((), (0.5,), (1, 0.7, 0.5)):
        levels.check(value, levels.key)
    for value, words in ((("a",), "a tuple of finite numbers, such as"), ((0.5, 0.01), "from 0.1"), (0.5, "a tuple")):
        with pytest.raises(ValueError, match=rf"config\.sample\.levels is .*; it must be {words}"):
            levels.check(value, levels.key)
    with pytest.raises(ValueError, match=r"it must be 2 finite numbers, such as \(0.9, 0.999\)"):
        table.BY_KEY["train.adam_betas"].check((0.9,), "train.adam_betas")
    with pytest.raises(ValueError, match=r"it must be a tuple of names, such as \('ocr',\)"):
        table.BY_KEY["eval.rewards"].check((1,), "eval.rewards")


A_RUN_OF = {  # each script
    table.GRPO: "shapes_qwenimage,smoke",
    table.PR: "shapes_qwenimage_pr,smoke",
    table.NFT: "shapes_qwenimage_nft,smoke",
    table.DPO: "shapes_qwenimage_dpo,online,smoke",
    table.DISTILL: "shapes_qwenimage,distill,smoke",
    table.REFL: "shapes_proxy_qwenimage_refl,smoke",
}


def config_of(name):
    kind = name.partition(",")[0].rpartition("_")[2]
    return FILES.get(kind, grpo).get_config(name)


def test_a_config_for_another_script_is_refused_with_that_scripts_name():
    for (kind, name), (other, script) in itertools.product(A_RUN_OF.items(), CHECKS.items()):
        if kind != other:
            with pytest.raises(ValueError, match=f"is a config for {re.escape(table.SCRIPTS[kind])}"):
                checks.check(config_of(name), script)


def test_a_script_refuses_exactly_the_settings_that_its_entries_do_not_give_it():
    for algorithm, script in CHECKS.items():
        ignored = [setting for setting in table.SETTINGS if algorithm not in setting.used_by]
        assert len(ignored) > 5
        for setting in ignored:
            config = table.default_config()
            config.update_from_flattened_dict({"algorithm": algorithm, setting.key: other_value(setting)})
            with pytest.raises(ValueError, match=rf"config\.{setting.key} is set to .*, but this script would ignore"):
                checks.check(config, script)


def runs_of(file):
    return [run.__name__ for run in FILES[file].RUNS]


BASES = (",eight_bit_base", ",large_gpu,eight_bit_base", ",large_gpu,four_bit_base", ",four_bit_base")
SUCCESSORS = ",ram,smoke", ",long,ram", ",crd,smoke", ",large_gpu,crd"
FORWARD = ",dgpo", ",dgpo,smoke", ",large_gpu,dgpo", ",long,elbo", ",elbo,smoke", *SUCCESSORS
GPUS = ",large_gpu", ",large_gpu,smoke"
NOISY = ",guard", ",dppo", ",rsm"
SIZES = ",px1024", ",px1328", ",large_gpu,px1024", ",large_gpu,px1328", ",px1024,smoke"
VARIANTS = {
    "grpo": (
        "",
        ",smoke",
        ",signal",
        ",signal,smoke",
        *NOISY,
        ",mixgrpo,flash",
        ",fast,smoke",
        ",large_gpu,distill",
        *GPUS,
        *BASES,
        *SIZES,
    ),
    "nft": ("", ",smoke", ",signal", ",flash", ",awm", ",awm,smoke", *FORWARD, *GPUS, *BASES, *SIZES),
    "dpo": ("", ",smoke", ",online", ",online,smoke", ",online,signal"),
    "refl": ("", ",draft", ",leap", ",sparse", ",smoke", ",draft,smoke"),
}
WITHOUT_ADAPTER = (
    "shapes_qwenimage_nft",
    "shapes_proxy_qwenimage_nft",
    "edits_qwenimage_edit_nft",
    "motions_wan_nft",
)


def combinations():
    for file, variants in VARIANTS.items():
        for run, variant in itertools.product(runs_of(file), variants):
            if run not in WITHOUT_ADAPTER or variant not in BASES:
                yield run, variant


def test_every_run_passes_its_own_scripts_checks():
    """On every base, rollouts that DiffusionNFT learns from have exact products."""
    for run, variant in combinations():
        config = config_of(run + variant)
        kind = "distill" if "distill" in variant else run.rpartition("_")[2]
        assert config.algorithm == (kind if kind in CHECKS else "grpo")
        assert config.name == (run + variant).replace(",", "_")
        if config.algorithm == "pr" and ("mixgrpo" in variant or "fast" in variant):
            with pytest.raises(ValueError, match="this script would ignore it"):
                checks.check(config, checks.PR)
            continue
        if variant in NOISY:
            config.sample.sde_type = config.sample.sde_type.replace("cps", "cps_gaussian")
        checks.check(config, CHECKS[config.algorithm])
        policies.check_lora(config.lora)
        if variant:
            rewards.check_rewards(config.reward_fn)
        assert config.algorithm != "nft" or variant not in BASES or config.sample.rollout_weights == "exact"
        if config.algorithm == "dpo":
            plan(config)
            assert bool(config.preferences.path) == ("online" not in variant)
            assert variant != ",smoke" or config.preferences.path == config_of(run).preferences.path + "_smoke"


@pytest.mark.parametrize("card", [",large_gpu", ",gpu_80gb", ",eight_bit_base", ",four_bit_base", ",large_gpu,px1024"])
@pytest.mark.parametrize("objective", [",fdfo", ",endpoint"])
def test_losses_of_whole_groups_pass_their_checks_with_the_rows_of_each_card(objective, card):
    config = config_of(f"pickscore_qwenimage{objective}{card}")
    checks.check(config, checks.GRPO)
    assert config.sample.batch_size % config.sample.num_images_per_prompt == 0


@pytest.mark.parametrize("run", ["pickscore_qwenimage", "pickscore_qwenimage_pr", "pickscore_qwenimage_nft"])
def test_the_variant_for_80_gb_has_8_bits_where_updates_are_guided(run):
    config = config_of(run + ",gpu_80gb")
    checks.check(config, CHECKS[config.algorithm])
    is_guided = not run.endswith("_nft")
    assert (config.base_precision == "fp8_weights") == is_guided
    assert config.fsdp.activation_checkpointing == (0.8 if is_guided else 0.5)
    assert config.precompute_modulation


def test_every_run_with_branches_weighs_steps_by_sqrt_3_times_their_noise_and_tempflow_grpos_recipes_by_constants():
    runs = [run() for run in grpo.RUNS if run.__name__.endswith("_pr")]
    assert {run.train.step_weight for run in runs} == {"sqrt3"}
    assert len(runs) > 10
    for recipe in (ROOT / "scripts" / "reproduce").glob("*.sh"):
        assert ("--config.train.step_weight=mean_one" in recipe.read_text()) == ("tempflow" in recipe.stem)


def test_variants_give_the_same_config_in_any_order():
    for file, module in FILES.items():
        run = runs_of(file)[0]
        names = [variant.__name__ for variant in module.VARIANTS]
        for first, second in itertools.combinations(names, 2):
            one = module.get_config(f"{run},{first},{second}")
            other = module.get_config(f"{run},{second},{first}")
            assert one == other, (run, first, second)


def reads():
    """ "section.key", or "config.key", of every attribute that flow_grpo or a script takes from something so called."""
    for path in [*(ROOT / "flow_grpo").rglob("*.py"), *(ROOT / "scripts").glob("[tp]r*_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield f"{getattr(node.value, 'attr', getattr(node.value, 'id', ''))}.{node.attr}"


def test_every_setting_is_read_somewhere():
    known = set(reads())
    # health.judge, split_settings and SamplingParams.of take settings by name.
    known.update(f"health.{sign}" for sign in health.SIGNS)
    known.update(f"reward.{field.name}" for field in dataclasses.fields(RewardSettings))
    known.update(f"sample.{field.name}" for field in dataclasses.fields(SamplingParams))
    for setting in table.SETTINGS:
        # A function that takes one section calls it `settings`; which ones a script reads is in test_reads.py.
        names = {setting.key, f"config.{setting.key}", f"settings.{setting.key.rpartition('.')[2]}"}
        assert names & known, setting.key


def test_every_type_of_step_and_every_action_and_all_of_what_one_reward_may_set_can_be_set():
    assert table.BY_KEY["sample.sde_type"].choices == SDE_TYPES
    assert table.BY_KEY["health.action"].choices == tuple(loop.ACTIONS)
    assert {*table.default_config().reward, "url"} == {field.name for field in dataclasses.fields(RewardSettings)}


FILE = Path("config.json")


def stored(section, key, value):
    """A stored config with an older key or value."""
    config = json.loads(table.default_config().to_json())
    (config[section] if section else config)[key] = value
    return config


def test_no_setting_is_an_older_one_and_each_of_these_is_refused_with_todays():
    assert not stored_config.MOVED.keys() & table.BY_KEY.keys()
    for key, today in stored_config.MOVED.items():
        with pytest.raises(ValueError, match=re.escape(f"config.{key} is now {today}")):
            command_line.config_of([f"--config.{key}=1"], "config/grpo.py:shapes_qwenimage")


@pytest.mark.parametrize(
    ("before", "key", "today"),
    [
        (("", "base_precision", "8bit"), "base_precision", "fp8_weights"),
        (("", "base_precision", "4bit"), "base_precision", "nf4"),
        (("", "base_precision", "fp8"), "base_precision", "fp8"),  # which no setting allows
        (("", "resolution", 512), "height", 512),
        (("train", "step_weight", "none"), "train.step_weight", "equal"),
        (("", "base_precision", [8]), "base_precision", [8]),
    ],
)
def test_a_stored_value_is_what_means_the_same_today_and_never_another_one(before, key, today):
    config = stored_config.with_defaults(stored(*before), FILE)
    assert table.value_of(config, key) == today
    assert table.flat(table.default_config()).keys() <= table.flat(config).keys()


@pytest.mark.parametrize(
    ("before", "differ"),
    [
        (("lora", "dropout", 0.0), []),
        (("lora", "dropout", 0.1), ["lora.dropout"]),
        (("reward", "backend", "process"), []),
        (("sample", "branch_schedule", "fixed"), []),
        (("sample", "branch_schedule", "spread"), ["sample.branch_schedule"]),
        (("reward", "on_failure", "mask"), ["reward.on_failure"]),
        (("sample", "merge_adapter", []), ["sample.merge_adapter"]),
        (("", "precision", "fp16"), ["precision"]),
        (("", "base_precision", "fp8"), ["base_precision"]),
    ],
)
def test_a_run_of_an_older_version_is_resumed_only_where_it_goes_on_with_the_same_numbers(before, differ):
    assert [*stored_config.changes(stored(*before), table.default_config().to_dict(), FILE)] == differ


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
    kind = type(setting.default)
    values = []
    for limit, step in itertools.product((setting.min, setting.max), steps):
        values += [kind(limit + step), kind(limit - step)]
    return values


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
    checked = checks.check(config, CHECKS[algorithm])
    check_rewards(checked.reward_fn, checked.eval.rewards, checked.reward)
    policies.check_lora(checked.lora)
    plan(config)


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
    config = config_of(A_RUN_OF[algorithm])
    put(config, key, value)
    if message := refusal(check_all, config, algorithm):
        assert key.rpartition(".")[2] in message or "config.reward" in message, (key, value, message)
        assert "\n" not in message
        assert len(message) < 1000


def test_distillation_takes_one_image_per_prompt_since_it_compares_none():
    sample = grpo.distill(grpo.shapes_qwenimage()).sample
    sample.num_images_per_prompt = 1
    checks.DISTILL.check(sample)
    assert "num_images_per_prompt is 1" in refusal(checks.GRPO.check, sample)


def test_losses_that_are_stable_with_a_pull_alone_have_one():
    runs = [(grpo, "shapes_qwenimage,fdfo"), (grpo, "shapes_qwenimage,endpoint"), (nft, "shapes_qwenimage_nft,awm")]
    for module, name in runs:
        assert module.get_config(name).train.beta > 0, name
