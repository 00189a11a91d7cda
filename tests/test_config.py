"""A config says what it means: no name is unknown, none is ignored, and a wrong one is answered with the nearest."""

import ast
import itertools

import pytest
from small import ROOT

from config import dpo, grpo, nft
from flow_grpo import batching, checks, configs, health, policies, rewards, settings
from flow_grpo.diffusers_patch.sde_with_logprob import SDE_TYPES
from flow_grpo.scoring.settings import RewardSettings, check_rewards

FILES = {"grpo": grpo, "nft": nft, "dpo": dpo}
SCRIPTS = {"grpo": checks.GRPO, "pr": checks.PR, "nft": checks.NFT, "dpo": checks.DPO}


def test_every_entry_is_one_key_of_a_known_section_whose_default_it_allows():
    keys = [setting.key for setting in settings.SETTINGS]
    assert len(set(keys)) == len(keys) > 100
    assert {key.rpartition(".")[0] for key in keys} == set(settings.SECTIONS)
    assert all(setting.meaning for setting in settings.SETTINGS)
    settings.check_values(settings.default_config())


def test_the_page_of_settings_is_the_table():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == settings.page(), "run `python -m flow_grpo.settings > docs/settings.md`"


@pytest.mark.parametrize(
    ("key", "wrong", "says"),
    [
        ("fsdp.mode", "zero", r"config\.fsdp\.mode is 'zero'; it may be 'replicate', 'shard', 'hybrid'"),
        ("sample.num_steps", 1, r"config\.sample\.num_steps is 1; it must be from 2 to 1000"),
        ("sample.flash_ratio", 1.5, r"config\.sample\.flash_ratio is 1\.5; it must be from 0 to 1"),
        ("train.adam_beta1", float("nan"), r"config\.train\.adam_beta1 is nan; it must be from 0 to 0\.9999999"),
        ("sample.guidance_scale", float("inf"), r"config\.sample\.guidance_scale is inf; it must be from 0 to 1000"),
    ],
)
def test_a_value_that_its_entry_does_not_allow_is_refused(key, wrong, says):
    config = settings.default_config()
    config.update_from_flattened_dict({key: wrong})
    with pytest.raises(ValueError, match=says):
        settings.check_values(config)


def other_value(setting):
    """A value that is not the default, and that the entry allows."""
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    by_type = {bool: lambda old: not old, int: lambda old: old + 1, float: lambda old: old / 2 + 0.25}
    by_type |= {str: lambda old: f"other{old}", tuple: lambda old: (1, 4)}
    return by_type[type(setting.default)](setting.default)


def test_a_script_refuses_exactly_the_settings_that_its_entries_do_not_give_it():
    for algorithm, script in SCRIPTS.items():
        ignored = [setting for setting in settings.SETTINGS if algorithm not in setting.scripts]
        assert len(ignored) > 10
        for setting in ignored:
            config = settings.default_config()
            config.update_from_flattened_dict({"algorithm": algorithm, setting.key: other_value(setting)})
            with pytest.raises(ValueError, match=rf"config\.{setting.key} is set to .*, but this script would ignore"):
                checks.check(config, script)


def runs_of(file):
    return [run.__name__ for run in FILES[file].RUNS]


BASES = (
    ",eight_bit_base",
    ",large_gpu,eight_bit_base",
    ",large_gpu,fp8_base",
    ",large_gpu,four_bit_base",
    ",four_bit_base",
)
GRPO_VARIANTS = ("", ",smoke", ",guard", ",mixgrpo,flash", ",fast,smoke", ",large_gpu", ",large_gpu,smoke", *BASES)
COMBINATIONS = [
    *((run, variant) for run in runs_of("grpo") for variant in GRPO_VARIANTS),
    *((run, variant) for run in runs_of("nft") for variant in ("", ",smoke", ",flash", ",large_gpu")),
    *(
        (run, variant) for run in runs_of("nft") if "pickscore" in run for variant in BASES
    ),  # the tiny run has no adapter
    *((run, variant) for run in runs_of("dpo") for variant in ("", ",smoke", ",online", ",online,smoke")),
]


def config_of(name):
    kind = name.partition(",")[0].rpartition("_")[2]
    return FILES.get(kind, grpo).get_config(name)


def test_what_diffusion_nft_learns_from_has_exact_products_on_every_base():
    for run, variant in COMBINATIONS:
        if "_nft" in run and variant in BASES:
            assert not config_of(run + variant).sample.fast_precision
            assert not config_of(run + variant).sample.merge_adapter


def test_every_run_passes_its_own_scripts_checks():
    for run, variant in COMBINATIONS:
        config = config_of(run + variant)
        assert config.algorithm == (kind if (kind := run.rpartition("_")[2]) in ("pr", "nft", "dpo") else "grpo")
        assert config.name == (run + variant).replace(",", "_")
        if config.algorithm == "pr" and ("mixgrpo" in variant or "fast" in variant):
            with pytest.raises(ValueError, match="this script would ignore it"):
                checks.check(config, checks.PR)
            continue
        config.sample.sde_type = config.sample.sde_type.replace("cps", "cps_gaussian" if "guard" in variant else "cps")
        checks.check(config, SCRIPTS[config.algorithm])
        policies.check_lora(config.lora)
        if variant:
            rewards.check_rewards(config.reward_fn)
        if config.algorithm == "dpo":
            batching.plan_pairs(config, 1)
            assert bool(config.preferences.path) == ("online" not in variant)


def test_a_config_for_another_script_is_refused_with_that_scripts_name():
    names = dict(grpo="shapes_qwenimage", pr="shapes_qwenimage_pr", nft="shapes_qwenimage_nft")
    for (kind, name), (other, script) in itertools.product(
        (names | dict(dpo="shapes_qwenimage_dpo")).items(), SCRIPTS.items()
    ):
        if kind != other:
            file = settings.SCRIPTS[kind].replace("*", r"\*")
            with pytest.raises(ValueError, match=rf"{name} is a config for {file}, but this script is"):
                checks.check(config_of(name), script)


def test_variants_give_the_same_config_in_any_order():
    for file, module in FILES.items():
        for pair in itertools.permutations([variant.__name__ for variant in module.VARIANTS], 2):
            for run in runs_of(file):
                one, two = (module.get_config(",".join([run, *words])) for words in (pair, pair[::-1]))
                assert one == two, (run, pair)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("shapes_qwenimag", "shapes_qwenimage"),
        ("pickscore", "pickscore_sd3"),
        ("shapes_qwenimage,smok", "shapes_qwenimage"),
        ("", "shapes_qwenimage"),
    ],
)
def test_an_unknown_run_is_answered_with_the_nearest(name, near):
    with pytest.raises(ValueError, match=rf"no run '{name}' in config/grpo\.py; nearest: .*\b{near}\b.*smoke"):
        grpo.get_config(name)


def made(line):
    """What `select` makes of a user's run of the given line."""
    code = f"def mine():\n    config = default_config()\n    {line}\n    return config\n"
    names = dict(default_config=settings.default_config)
    exec(code, names)
    return configs.select("mine", (names["mine"],), grpo.VARIANTS, "mine.py")


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("config.num_epoch = 32", "num_epochs"),
        ("config.sample.num_stepz = 8", "num_steps"),
        ('config.train.step_weights = "sqrt3"', "step_weight"),
        ("config.trian.beta = 0.1", "train"),
    ],
)
def test_an_unknown_key_in_a_run_is_answered_with_the_nearest(line, near):
    with pytest.raises(ValueError, match=rf'mine in mine\.py.*Did you mean "{near}" instead'):
        made(line)


@pytest.mark.parametrize("line", ['config.trouble.action = "stop"', "config.trouble = default_config().health"])
def test_a_renamed_key_in_a_run_is_answered_with_its_new_name(line):
    with pytest.raises(ValueError, match=r"mine in mine\.py: config\.trouble is now config\.health"):
        made(line)


def test_a_value_of_another_type_is_refused():
    with pytest.raises(ValueError, match=r"mine in mine\.py.*num_epochs"):
        made('config.num_epochs = "32"')


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("None.sample", AttributeError),
        ("dict()['sample']", KeyError),
        ("config.num_epochs = 'a' + config.num_epochs", TypeError),
    ],
)
def test_a_bug_in_a_run_keeps_its_own_error(line, error):
    with pytest.raises(error):
        made(line)


def test_a_run_that_forgets_to_return_its_config_is_named():
    def mine():
        settings.default_config()

    with pytest.raises(ValueError, match=r"mine in mine\.py returns None instead of a config"):
        configs.select("mine", (mine,), (), "mine.py")


def test_variants_that_a_file_does_not_look_at_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from flow_grpo.settings import default_config\n\n\ndef get_config(name):\n    return default_config()\n"
    )
    assert configs.load(f"{tmp_path}/mine.py:mine").name == "base"
    with pytest.raises(ValueError, match=r"mine\.py makes of 'mine,guard' what it makes of 'mine'"):
        configs.load(f"{tmp_path}/mine.py:mine,guard")


def assignments(tree):
    """(name, value) of each `name = value` and of each pair of `a, b = x, y`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = zip(target.elts, value.elts) if {type(target), type(value)} == {ast.Tuple} else [(target, value)]
            yield from ((left.id, right) for left, right in pairs if isinstance(left, ast.Name))


def reads():
    """ "section.key", or ".key" of a config itself, of every attribute that flow_grpo or a script takes from one."""
    taken = set()
    for path in [*(ROOT / "flow_grpo").rglob("*.py"), *(ROOT / "scripts").glob("[tp]r*_*.py")]:
        tree = ast.parse(path.read_text())
        aliases = {name: value.attr for name, value in assignments(tree) if isinstance(value, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
                taken.add(f"{aliases.get(owner, owner)}.{node.attr}")
    return taken


def test_every_setting_is_read_somewhere():
    known = reads() | {f"health.{sign}" for sign in health.SIGNS}  # health.judge takes them by name
    known |= {f"reward.{key}" for key in RewardSettings._fields}  # split_settings takes them by name
    known |= {key.replace("settings.", "reward.") for key in known}  # as the pool calls config.reward
    keys = [setting.key if "." in setting.key else f"config.{setting.key}" for setting in settings.SETTINGS]
    assert [key for key in keys if key not in known] == ["config.custom"]  # the user's own


def test_every_type_of_step_can_be_set():
    choices = {setting.key: setting.choices for setting in settings.SETTINGS}
    assert choices["sample.sde_type"] == SDE_TYPES


def test_settings_of_rewards_are_those_that_one_reward_may_set():
    assert set(settings.default_config().reward) == {*RewardSettings._fields, "args", "max_pending"}


@pytest.mark.parametrize(
    ("key", "wrong", "says"),
    [
        ("backend", "threads", r"config\.reward\.args\.shapes\.backend is 'threads'; it may be 'inline', 'thread'"),
        ("batch_size", 0, r"config\.reward\.args\.shapes\.batch_size is 0; it must be from 1 to 100000"),
        ("timeout_s", "long", r"config\.reward\.args\.shapes\.timeout_s is 'long'; it must be a finite number"),
    ],
)
def test_what_args_say_of_one_reward_is_checked_as_what_is_said_of_all(key, wrong, says):
    config = settings.default_config()
    config.reward.args = {"shapes": {key: wrong}}
    with pytest.raises(ValueError, match=says):
        check_rewards({"shapes": 1.0}, (), config.reward)


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("shapes_qwenimage", dict(target_update_size=1.0, objective="guard"), "target_update_size"),
        ("shapes_qwenimage", dict(target_update_size=1.0, clip_range=0.0), "target_update_size"),
        ("shapes_qwenimage", dict(target_update_size=1.0, updates_per_epoch=1), "target_update_size"),
        ("shapes_qwenimage_nft", dict(flow_matching_warmup=5), "flow_matching_warmup"),
    ],
)
def test_a_setting_that_another_one_makes_the_run_ignore_is_refused(name, values, named):
    script = checks.NFT if name.endswith("nft") else checks.GRPO
    config = config_of(name)
    checks.check(config, script)
    config.train.update(values)
    with pytest.raises(ValueError, match=f"config.train.{named} is "):
        checks.check(config, script)
