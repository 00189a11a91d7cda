"""Every setting with values at, within and beyond its limits, and with no value of it, through the command line."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from faults_commands import Command, judge
from faults_runs import RECIPES, Bench
from faults_tries import Dice, Try, Verdict

from flow_grpo.setting import ALL, Setting
from flow_grpo.settings import SETTINGS

LIMIT_S = 60.0
AT_WORK_S = 10.0
NO_NUMBERS = ("nan", "inf", "-inf", "1e400", "1e-320", "-0.0")
NO_VALUES = ("", "abc", "None", "True", "[1]", "0x10", "\N{ARABIC-INDIC DIGIT THREE}", "1_0", "1;2", "x" * 5000)
BAD_TEXTS = ("", " ", "é", "\N{PILE OF POO}", "a\nb", "%s{}$HOME", "--", "None", "x" * 5000, "\udcff", "nowhere/at/all")
PATHS = (
    "/proc/nowhere",
    "/dev/null",
    "/dev/null/x",
    "..",
    ".",
    "~",
    "a/b?c",
    "file",
    "loop",
    "x" * 300,
    "a/../b",
    "\udcff",
)
TUPLES = (
    "()",
    "(1,)",
    "(0,1,2)",
    "('a','b')",
    "(0.5,2.5)",
    "(1,0)",
    "(-1,3)",
    "((0,1),(1,2))",
    "(0,10**9)",
    "5",
    "(",
    "",
)
DICTS = (
    "{}",
    "{'shapes': 5}",
    "{'shapes': {'batch_size': 0}}",
    "{1: 2}",
    "[]",
    "{'nowhere': {'url': 'x'}}",
    "{",
    "None",
)
REWARD_ARGS = (
    *("{'jpeg_compressibility': 5}", "{'jpeg_compressibility': {'batch_size': 0}}", "{'shapes': {}}"),
    *("{'jpeg_compressibility': {'batch_size': 'x'}}", "{'jpeg_compressibility': {'timeout_s': 'x'}}"),
    *("{'jpeg_compressibility': {'max_masked_share': 'x'}}", "{'jpeg_compressibility': {'url': 'x'}}"),
    *("{'jpeg_compressibility': {'url': 'http://127.0.0.1:1'}}", "{'jpeg_compressibility': {'nowhere': 1}}"),
    *("{'jpeg_compressibility': {'backend': 'nowhere'}}", "{'jpeg_compressibility': {'in_flight': nan}}"),
    *("{'jpeg_compressibility': {'device': 'warp:9'}}", "{'jpeg_compressibility': None}", "{None: None}"),
)
DEVICES = ("warp:9", "meta", "cuda:7", "cpu:3", "cpu", "", "cuda:-1", "mps", ":", "cpu cpu")
WORK = (  # settings whose large values ask for more work than a try has time for
    *("num_epochs", "max_hours", "height", "width", "text_tokens", "sample.num_steps", "eval.num_steps", "lora.rank"),
    *("sample.num_prompts_per_epoch", "sample.num_images_per_prompt", "sample.num_branches", "train.inner_epochs"),
    *(
        "compile",
        "eval.noises_per_prompt",
        "eval.height",
        "eval.width",
        "eval.noises_per_pair",
        "train.updates_per_epoch",
    ),
)
EXTRA = (  # settings that the table has as one entry
    *(Setting(f"reward_fn.{name}", 1.0, "") for name in ("shapes", "jpeg_compressibility", "clip_model", "nowhere")),
    Setting("nowhere", 1.0, ""),
    Setting("sample.nowhere", 1.0, ""),
)
ENTRIES = (*SETTINGS, *EXTRA)


def make(bench: Bench, seed: int, number: int) -> Try:
    """A value of one setting, or of two at once; all settings come before the first comes again."""
    bench.reference("prepare")
    dice = Dice(seed, "settings", number)
    start = Dice(seed, "settings", -1).below(len(ENTRIES))
    entries = [ENTRIES[(start + number) % len(ENTRIES)]]
    entries += [dice.pick(ENTRIES)] if dice.share() < 0.15 else []
    algorithm = script_for(dice, entries[0])
    flags = {entry.key: value_for(dice, entry) for entry in entries}
    flags["num_epochs"] = flags.get("num_epochs", "2")
    act = partial(attempt, bench, algorithm, flags, [entry.key for entry in entries])
    return Try("settings", number, f"{algorithm} " + " ".join(f"{k}={v!r:.200}" for k, v in flags.items()), act)


def script_for(dice: Dice, entry: Setting) -> str:
    """A script that reads a setting; now and then one that does not."""
    scripts = entry.scripts if dice.share() < 0.9 else ALL
    algorithm = dice.pick(scripts)
    offline = algorithm == "dpo" and dice.share() < 0.5
    if algorithm == "dpo" and entry.key.startswith("preferences.") and dice.share() < 0.5:
        return "prepare"
    return "dpo_offline" if offline else algorithm


def value_for(dice: Dice, entry: Setting) -> str:
    """A text for the command line."""
    return str(dice.pick(values_of(dice, entry)))


def values_of(dice: Dice, entry: Setting) -> Sequence[object]:
    """What may be tried of a setting, each as likely as the others."""
    default = entry.default
    if entry.key == "reward.device":
        return DEVICES
    if entry.key == "reward.args":
        return REWARD_ARGS
    if isinstance(default, dict):
        return DICTS
    if isinstance(default, tuple):
        return TUPLES
    if entry.choices:
        return (*entry.choices, *entry.choices, *BAD_TEXTS, 3)
    if isinstance(default, bool):
        return ("true", "false", "1", "maybe", "", "None", "2")
    if isinstance(default, str):
        return (*PATHS, *BAD_TEXTS)
    return numbers_of(dice, entry)


def numbers_of(dice: Dice, entry: Setting) -> Sequence[object]:
    """At, just within, just beyond and far from the limits; those without a limit around 0 and 1."""
    whole = isinstance(entry.default, int)
    ends = [end for end in (entry.least, entry.most) if abs(end) != float("inf")] or [0, 1]
    step = 1 if whole else 1e-3
    near = [value for end in ends for value in (end, end - step, end + step)]
    near = [int(value) for value in near] if whole else near
    far = [2**31, 2**63, 10**30, -(2**31)] if whole else [1e30, -1e30, 1e308, 1e-30]
    usual = [1 + dice.below(8) if whole else round(2 * dice.share(), 3) for _ in range(6)]
    return NO_VALUES if dice.share() < 0.15 else (*near, *near, *far, *usual, *NO_NUMBERS, 0.5)


def attempt(bench: Bench, algorithm: str, flags: dict[str, str], keys: list[str], folder: Path) -> Verdict:
    """Run it in two epochs, with a file and a link onto itself that path settings may name."""
    (folder / "file").write_text("a file\n")
    (folder / "loop").symlink_to("loop")
    words = [*bench.words(algorithm, "runs/a/b"), *(f"--config.{key}={value}" for key, value in flags.items())]
    command = Command(words, folder, env={"WANDB_MODE": "offline"} if "project" in keys else {})
    large = any(key in WORK for key in keys)
    ended = command.wait(AT_WORK_S if large else LIMIT_S)
    if ended.status is None and large:
        return Verdict(True, f"at work when {AT_WORK_S:.0f} s were over, as asked")
    names = [name for key in keys for name in (key, key.rpartition(".")[2])]
    return judge(ended, names + (["output_dir"] if {"name", "run_name"} & set(keys) else []))


assert set(RECIPES) >= set(ALL)
