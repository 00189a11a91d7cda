"""A config says what it means: no name is unknown, none is ignored, and a wrong one is answered with the nearest."""

import ast
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import train_qwenimage
import train_qwenimage_dpo
import train_qwenimage_nft
import train_qwenimage_pr

from flow_grpo import batching, health, policies, rewards, settings
from flow_grpo.scoring.settings import RewardSettings

ROOT = Path(__file__).parents[1]
GRPO = runpy.run_path(str(ROOT / "config" / "grpo.py"))
NFT = runpy.run_path(str(ROOT / "config" / "nft.py"))
DPO = runpy.run_path(str(ROOT / "config" / "dpo.py"))
BASE = runpy.run_path(str(ROOT / "config" / "base.py"))["get_config"]()
KEYS = [
    f"{section}.{key}" if section else key
    for section in ("", "lora", "fsdp", "sample", "train", "preferences", "eval", "health")
    for key, value in (BASE[section] if section else BASE).items()
    if section or not hasattr(value, "keys") or key == "reward_fn"
]


@pytest.fixture
def run_with(tmp_path):
    """A user's own run in grpo.py, of the given line."""
    shutil.copytree(ROOT / "config", tmp_path / "config")

    def get_config(line):
        path, start = tmp_path / "config" / "grpo.py", "RUNS = ("
        assert start in path.read_text()
        run = f"def mine():\n    config = base()\n    {line}\n    return config\n\n\n"
        path.write_text(path.read_text().replace(start, f"{run}{start}mine, "))
        return runpy.run_path(str(path))["get_config"]("mine")

    return get_config


def test_a_users_own_run_is_found_by_its_name(run_with):
    assert run_with("config.num_epochs = 7").num_epochs == 7


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("config.num_epoch = 32", "num_epochs"),
        ("config.sample.num_stepz = 8", "num_steps"),
        ('config.train.step_weights = "sqrt3"', "step_weight"),
        ("config.trian.beta = 0.1", "train"),
    ],
)
def test_an_unknown_key_in_a_run_is_answered_with_the_nearest(line, near, run_with):
    with pytest.raises(ValueError, match=rf'mine in config/grpo\.py.*Did you mean "{near}" instead'):
        run_with(line)


@pytest.mark.parametrize("line", ['config.trouble.action = "stop"', "config.trouble = base().health"])
def test_a_renamed_key_in_a_run_is_answered_with_its_new_name(line, run_with):
    with pytest.raises(ValueError, match=r"config\.trouble is now config\.health"):
        run_with(line)


@pytest.mark.parametrize("flag", ["--config.trouble.action=stop", "-config.trouble.action"])
def test_a_renamed_key_on_the_command_line_is_answered_with_its_new_name(flag, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_qwenimage.py", "--config", "config/grpo.py:shapes_qwenimage", flag])
    with pytest.raises(ValueError, match=r"config\.trouble is now config\.health"):
        GRPO["get_config"]("shapes_qwenimage")


def test_a_value_of_another_type_is_refused(run_with):
    with pytest.raises(ValueError, match=r"mine in config/grpo\.py.*num_epochs"):
        run_with('config.num_epochs = "32"')


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
    with pytest.raises(ValueError, match=rf"no run '{name}' in config/grpo\.py; nearest: .*\b{near}\b.*NAME,smoke"):
        GRPO["get_config"](name)


@pytest.mark.parametrize(
    "variant", ["", ",smoke", ",guard", ",mixgrpo,flash", ",fast,smoke", ",large_gpu", ",large_gpu,smoke"]
)
@pytest.mark.parametrize("run", [run.__name__ for run in GRPO["RUNS"]])
def test_every_run_passes_its_own_scripts_checks(run, variant):
    branches = run.endswith("_pr")
    if branches and ("mixgrpo" in variant or "fast" in variant):
        with pytest.raises(ValueError, match="this script would ignore it"):
            settings.check(GRPO["get_config"](run + variant), train_qwenimage_pr.IGNORED)
        return
    config = GRPO["get_config"](run + variant)
    config.sample.sde_type = config.sample.sde_type.replace("cps", "cps_gaussian" if variant == ",guard" else "cps")
    settings.check(config, (train_qwenimage_pr if branches else train_qwenimage).IGNORED)
    (settings.check_branches if branches else settings.check_window)(config.sample)
    policies.check_lora(config.lora)
    if variant:
        rewards.check_rewards(config.reward_fn)
    assert config.name == (run + variant).replace(",", "_")


@pytest.mark.parametrize("variant", ["", ",smoke", ",flash", ",large_gpu"])
@pytest.mark.parametrize("run", [run.__name__ for run in NFT["RUNS"]])
def test_every_run_without_noise_passes_its_own_scripts_checks(run, variant):
    config = NFT["get_config"](run + variant)
    settings.check(config, train_qwenimage_nft.IGNORED)
    settings.check_forward(config.sample)
    assert config.name == (run + variant).replace(",", "_")


@pytest.mark.parametrize("variant", ["", ",smoke", ",online", ",online,smoke"])
@pytest.mark.parametrize("run", [run.__name__ for run in DPO["RUNS"]])
def test_every_run_of_pairs_passes_its_own_scripts_checks(run, variant):
    config = DPO["get_config"](run + variant)
    settings.check(config, train_qwenimage_dpo.IGNORED)
    settings.check_pairs(config.sample)
    batching.plan_pairs(config, 1)
    assert bool(config.preferences.path) == ("online" not in variant)


def reads():
    """ "section.key", or ".key" of a config itself, of every attribute that flow_grpo or a script takes from one."""
    found = set()
    for path in [*(ROOT / "flow_grpo").rglob("*.py"), *(ROOT / "scripts").glob("[tp]r*_*.py")]:
        tree = ast.parse(path.read_text())
        aliases = {
            node.targets[0].id: node.value.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Attribute)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
                found.add(f"{aliases.get(owner, owner)}.{node.attr}")
    return found


READS = reads() | {f"health.{sign}" for sign in health.SIGNS}  # health.judge takes them by name


def test_settings_of_rewards_are_those_that_one_reward_may_set():
    assert set(BASE.reward) == {*RewardSettings._fields, "args", "max_pending"}


def test_every_key_is_read_somewhere():
    assert len(KEYS) > 50
    assert [key for key in KEYS if (key if "." in key else f"config.{key}") not in READS] == []


def test_choices_and_limits_are_of_keys_that_exist():
    keys = {*KEYS, *(f"reward.{key}" for key in BASE.reward)}
    assert settings.CHOICES.keys() | settings.AT_LEAST.keys() <= keys
