"""Each script reads what the entries of the settings say and nothing else; functions of one's own declare it."""

import functools
import inspect
import re
from collections import defaultdict

import pytest
import torch
import train_qwenimage
import train_qwenimage_distill
import train_qwenimage_dpo
import train_qwenimage_nft
import train_qwenimage_pr
import train_qwenimage_refl
from reading import ROLES, recorded_reads
from refused import assert_refused
from small import config_of, train
from test_defences import write_images

from flow_grpo.base import folders
from flow_grpo.monitoring import model_card
from flow_grpo.settings import declared, table
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES, OBJECTIVES
from flow_grpo.settings.sections import NOISY

WINDOW = "shapes_qwenimage"
BRANCHES = "shapes_qwenimage_pr"
NFT = "shapes_qwenimage_nft"
REFL = "shapes_proxy_qwenimage_refl"
ONE = dict(num_epochs=1, eval_freq=0)
# With evaluations, so that there are alarms to judge.
TWO = dict(eval__save_images=1, eval__rewards=("jpeg_compressibility",), num_epochs=2)
SIGNAL = dict(sample__prompt_weights="signal")
BRIGHTNESS = dict(reward_fn__shapes_proxy=0.0)  # alone
KL = dict(train__beta=0.1, train__old_log_prob="recompute")
RUNS = {  # script -> its runs, which have all that it can do switched on between them
    table.GRPO: [
        (WINDOW, TWO | KL | SIGNAL | dict(sample__scouts_per_image=2, sample__flash_ratio=0.5)),
        (f"{WINDOW},dppo", ONE | dict(sample__sde_window_size=0)),
        (f"{WINDOW},guard", ONE),
        (f"{WINDOW},rsm", ONE),
        (f"{WINDOW},fdfo", ONE),
        (f"{WINDOW},endpoint", ONE),
    ],
    table.PR: [
        (BRANCHES, TWO | KL | SIGNAL),
        *((f"{BRANCHES},{name}", ONE) for name in ("dppo", "guard", "rsm")),
    ],
    table.NFT: [
        (NFT, TWO | SIGNAL | dict(sample__scouts_per_image=2)),
        *((f"{NFT},{name}", ONE) for name in ("awm", "dgpo", "elbo", "ram", "crd")),
    ],
    table.DPO: [("shapes_qwenimage_dpo,online", TWO | SIGNAL)],
    table.DISTILL: [
        (f"{WINDOW},distill", TWO | dict(sample__flash_ratio=0.5)),
        (f"{WINDOW},distill", ONE | dict(sample__sde_window_size=2, sample__sde_window_range=(0, 3))),
    ],
    table.REFL: [
        (REFL, BRIGHTNESS | TWO | dict(train__beta=0.1)),
        *((f"{REFL},{name}", ONE | BRIGHTNESS) for name in ("draft", "leap", "sparse")),
    ],
}
SCRIPTS = {
    table.GRPO: train_qwenimage,
    table.PR: train_qwenimage_pr,
    table.NFT: train_qwenimage_nft,
    table.DPO: train_qwenimage_dpo,
    table.DISTILL: train_qwenimage_distill,
    table.REFL: train_qwenimage_refl,
}

# What code that scripts share reads of settings that a script refuses: they are their defaults there, which are off.
FINGERPRINT = {"preferences.path", "train.teachers"}  # digests of the files that they name
PLAN = {"sample.num_branches", "train.forward_objective"}
# Of noisy steps: parameters of all samplers, which those without noise do not look at.
OF_NOISE = {setting.key for setting in table.SETTINGS if setting.section == "sample" and setting.used_by == NOISY}
SAMPLER = {"sample.same_latent"} | OF_NOISE
AT_THEIR_DEFAULT = {
    table.GRPO: FINGERPRINT | PLAN,
    table.PR: FINGERPRINT | PLAN - {"sample.num_branches"} | {"sample.same_latent"},
    table.NFT: FINGERPRINT | SAMPLER | {"sample.num_branches", "train.objective"},
    table.DPO: SAMPLER
    | {"train.teachers", "train.data", "sample.baseline"}
    | {"train.beta", "train.reference_guidance_scale", "train.reference_kl", "train.reward_aggregation"},
    table.DISTILL: PLAN
    | {
        "train.objective",
        "preferences.path",
        "train.data",
        "sample.scouts_per_image",
        "train.beta",
        "train.guidance_scale",
        "sample.baseline",
        "sample.prompt_weights",
    }
    | {setting.key for setting in table.SETTINGS if setting.read_in == "advantages"},  # for the weights alone
    table.REFL: FINGERPRINT
    | {"frames", "sample.baseline", "sample.prompt_weights", "train.reward_aggregation", "train.inner_epochs"}
    # By evaluations, whose shortcuts are those of a rollout's completions.
    | {"eval.flash_ratio", "sample.flash_solver"},
}
# Read by name, from the config as it is stored, by nothing (the user's own), after more epochs than these, by a run
# that goes on, after a signal, by a dry run, or by a run that compiles.
NOT_SEEN = {"method", "custom", "health.reward_drop", "accept_changes", "signal_grace_s", "dry_run_format"} | {
    "compile_cache"
}
# Their defaults say that they are off.
UNCONDITIONALLY = {
    *("attention", "sample.flash_solver"),
    *("train.guidance_scale", "train.gradient_noisings", "train.grad_input_precision"),
}
# Where the loss itself reads none.
OF_STATISTICS = {name: {"train.clip_range"} for name in ("dppo", "elbo", "crd", "endpoint")}
# What functions that one's own rollout or update calls too read: run.sampling and run.update. The window's range is
# left out, since `smoke` has to set it.
OF_HELPERS = {
    "rollout": {
        *("sample.completion_batch_size", "sample.flash_ratio", "sample.flash_solver", "sample.rollout_weights"),
        *("sample.same_latent", "sample.sde_window_range", "preferences.min_margin", "train.step_weight"),
        "algorithm",  # by run.rewards, which online DPO waits for in its rollout
    },
    "add_gradients": {"train.guidance_scale"},
    "advantages": set(),
    "updates": set(),
}


def of_losses(algorithm, train_section):
    """The settings that only some losses read, which the chosen one reads, and which its statistics read."""
    key, records = ("forward_objective", FORWARD_OBJECTIVES) if algorithm == table.NFT else ("objective", OBJECTIVES)
    if algorithm not in table.BY_KEY[f"train.{key}"].used_by:
        return set(), set()
    some = set()
    for record in (*OBJECTIVES.values(), *FORWARD_OBJECTIVES.values()):
        some.update(f"train.{name}" for name in record.reads)
    chosen = train_section[key]
    return some, {f"train.{name}" for name in records[chosen].reads} | OF_STATISTICS.get(chosen, set())


def is_met(setting, config, algorithm):
    """Say whether all that an entry's `when` asks for is there."""
    for key, *values in setting.when:
        value = table.value_of(config, key)
        if algorithm in table.BY_KEY[key].used_by and (value not in values if values else not value):
            return False
    return True


def switched_off(config):
    """The settings that a run without evaluations, or without a window, does not read."""
    off = set()
    if not config.eval_freq:
        off |= {"health.eval_drop", "health.watched_drop"}
        off.update(key for key in table.BY_KEY if key.startswith("eval."))
    if not config.sample.sde_window_size:
        off.add("sample.sde_window_range")  # checks.check_window
    return off


OTHER_SCRIPTS = [pytest.param(algorithm, marks=pytest.mark.slow) for algorithm in RUNS if algorithm != table.GRPO]


@pytest.mark.parametrize("algorithm", [table.GRPO, *OTHER_SCRIPTS])
def test_a_script_reads_exactly_the_settings_whose_entries_say_so(algorithm, shallow, tmp_path, monkeypatch):
    found = defaultdict(set)
    declares = {setting.key for setting in table.SETTINGS if algorithm in setting.used_by}
    given = {}
    if "train.teachers" in declares:
        given |= dict(train__teachers=(str(train(WINDOW, tmp_path, **shallow | ONE | dict(run_name="teacher"))),))
    if "train.data" in declares:
        given |= dict(train__data=write_images(tmp_path / "data"))
    for name, how in RUNS[algorithm]:
        config = config_of(name, tmp_path, **shallow | how | given)
        with recorded_reads(monkeypatch) as reads:
            SCRIPTS[algorithm].main(config)
        some, expected = of_losses(algorithm, config.train)
        assert some & reads.keys() == expected, name
        unmet = {setting.key for setting in table.SETTINGS if not is_met(setting, config, algorithm)}
        assert declares - reads.keys() - unmet - some <= NOT_SEEN | switched_off(config), name
        assert unmet & reads.keys() <= UNCONDITIONALLY | AT_THEIR_DEFAULT[algorithm], name
        for key, roles in reads.items():
            found[key] |= roles
    assert found.keys() - declares == AT_THEIR_DEFAULT[algorithm]
    assert declares - found.keys() == NOT_SEEN
    for role in set(ROLES) & inspect.signature(SCRIPTS[algorithm].main).parameters.keys():
        only = {key for key in declares & found.keys() if found[key] == {role}}
        of_role = {key for key in declares if table.BY_KEY[key].read_in == role}
        assert only - of_role <= OF_HELPERS[role], role
        assert {key for key in of_role if role not in found[key]} <= {"train.step_weight"}, role


def zero_advantages(run, rewards):
    values = torch.zeros(rewards.shape)
    return values, torch.ones_like(values)


def no_gradients(run, rows, *more):
    """Never called: the setting is refused before."""


UNDECLARED = [  # a script, what is put in the place of one of its functions, a setting, its value
    (WINDOW, dict(advantages=zero_advantages), "sample.global_std", True),
    (WINDOW, dict(advantages=zero_advantages), "train.reward_aggregation", "gdpo"),
    (WINDOW, dict(advantages=zero_advantages), "train.filter_groups", True),
    (WINDOW, dict(advantages=zero_advantages), "train.diversity_weight", 0.1),
    (WINDOW, dict(add_gradients=no_gradients), "train.objective", "guard"),
    (WINDOW, dict(add_gradients=no_gradients), "train.beta", 0.1),
    (WINDOW, dict(add_gradients=no_gradients), "train.clip_range", 0.1),
    (WINDOW, dict(rollout=no_gradients), "sample.scouts_per_image", 2),
    (WINDOW, dict(updates=no_gradients), "train.inner_epochs", 2),
    (BRANCHES, dict(updates=no_gradients), "train.inner_epochs", 2),
    (BRANCHES, dict(add_gradients=no_gradients), "train.step_weight", "sqrt3"),
    (NFT, dict(add_gradients=no_gradients), "train.flow_matching_weight", 0.1),
    (NFT, dict(advantages=zero_advantages), "sample.global_std", True),
    (NFT, dict(updates=no_gradients), "train.inner_epochs", 2),
    ("shapes_qwenimage_dpo,online", dict(add_gradients=no_gradients), "train.dpo_beta", 7.0),
]


def test_a_setting_that_a_function_of_ones_own_does_not_declare_is_refused_before_anything_is_made(tmp_path):
    def start(name, functions, key, value):
        config = config_of(name, tmp_path / "runs", train__beta=0.0)
        config.update_from_flattened_dict({key: value})
        return lambda: SCRIPTS[config.algorithm].main(config, **functions)

    rows = []
    for name, functions, key, value in UNDECLARED:
        role = next(iter(functions))
        page = "own_advantage.md" if role == "advantages" else "own_loss.md"
        words = [f"config.{key} is {value!r}", f"@declared.reads({key!r})", role, page]
        rows.append((f"{name} {key}", start(name, functions, key, value), words))
    assert_refused(rows)
    assert not (tmp_path / "runs").exists()


def test_what_a_function_declares_is_accepted_and_a_wrapper_of_ours_declares_what_ours_does():
    config = config_of(WINDOW, train__beta=0.1, train__clip_range=1e-3, sample__global_std=True)
    own = declared.reads("train.beta", "train.clip_range")(lambda run, rows: None)
    wrapped = functools.wraps(train_qwenimage.rewards.advantages)(lambda run, rewards: None)
    declared.check(config, rollout=train_qwenimage.rollout, add_gradients=own, advantages=wrapped)


def test_the_card_does_not_take_a_wrapper_for_the_scripts_own_function():
    wrapped = functools.wraps(train_qwenimage.rollout)(lambda run, epoch: None)
    config = config_of(WINDOW, sample__sde_window_interval=2)
    declared.check(config, rollout=wrapped)
    assert config.method == "functions of its author's own (rollout)"
    config.method = ""
    declared.check(config, rollout=declared.reads(card="another rollout")(wrapped))
    assert config.method == "another rollout"


def test_a_declaration_of_no_setting_is_answered_like_one_on_the_command_line():
    with pytest.raises(ValueError, match=r"reads\('train\.betta'\): .*nearest: config\.train\.beta"):
        declared.reads("train.betta")


def test_a_card_says_what_functions_of_ones_own_are_called(shallow, tmp_path):
    named = declared.reads(card="rank advantages (arXiv:0000.00000)")(
        lambda run, rewards: zero_advantages(run, rewards)
    )
    said = []
    for functions in ({}, dict(advantages=zero_advantages), dict(advantages=named)):
        config = config_of(WINDOW, tmp_path / str(len(said)), **shallow | ONE)
        train_qwenimage.main(config, **functions)
        card = (tmp_path / str(len(said)) / config.name / "README.md").read_text()
        assert folders.read_json(tmp_path / str(len(said)) / config.name / "config.json")["method"] == config.method
        said.append(re.search(r"trained by (.*?) with flow_grpo", " ".join(card.split()))[1])
        assert model_card.algorithm(config) == said[-1]
    assert said[0] == "Flow-GRPO (arXiv:2505.05470)"
    assert said[1] == "functions of its author's own (zero_advantages)"
    assert said[2] == "rank advantages (arXiv:0000.00000)"
