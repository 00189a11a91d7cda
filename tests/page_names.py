"""Look up what pages name in backticks: settings and values, configs, variants, files, flags and Python's names."""

import ast
import contextlib
import functools
import keyword
import re

import commands
import make_docs
import prepare_preferences
from small import ROOT

from flow_grpo.base.errors import UserError
from flow_grpo.base.metric_table import explain
from flow_grpo.settings import stored_config, table

SOURCES = ("flow_grpo", "config", "scripts", "tools", "benchmarks")
FILES = (*SOURCES, "tests", "docs", "dataset")
PLACEHOLDER = re.compile(r"[A-Z]{2,}|\.\.\.|<|\*")  # of a name that the reader chooses, or of several
ENDINGS = ("json", "jsonl", "txt", "png", "html", "safetensors", "parquet", "csv", "svg", "pdf")
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
TEXTS = r'"[^"]*"(?:(?:,| or|, or| and) "[^"]*")*'
OUTSIDE = {  # names that are none of this repository's: of shells, of other programs, of examples that pages make up
    *("datasets", "nohup", "tmux", "pip", "rejected"),
    *("load_lora_weights", "enable_parallelism", "set_adapters", "pipeline.fuse_lora()"),
    *("config/base.py", "config/dgx.py", "scripts/finetune/finetune_flux_grpo.sh", "pickscore_sfw"),
    *("scripts/finetune/finetune_flux_grpo_MixGRPO.sh", "scripts/train_reward_weighted.py", "plain_guidance.py"),
    *("table.md", "best_epoch_000021", "_share", "shapes_color_bits", "shapes_position_bits", "shapes_size_bits"),
}


def ours(text):
    """A page's lines without fenced blocks, and of tables of other programs without what is said of these."""
    is_theirs = False
    for line in re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
        is_theirs = line.startswith("| theirs") or (is_theirs and line.startswith("|"))
        cells = line.split(" | ")
        yield cells[1] if is_theirs and len(cells) > 1 else line


def spans(text):
    """All code in backticks."""
    found = []
    for line in ours(text):
        found += re.findall(r"`([^`]+)`", line)
    return found


def python_files(*folders):
    for folder in folders:
        yield from (ROOT / folder).rglob("*.py")


@functools.cache
def python_names():
    """Everything that the sources define, read or spell as a text of one word, and what tests define."""
    names = set()
    for path in python_files(*SOURCES, "tests"):
        names |= {path.stem, path.parent.name}
        fields = ("name",) if path.parent.name == "tests" else ("id", "name", "attr", "arg", "module", "value")
        for node in ast.walk(ast.parse(path.read_text())):
            for field in fields:
                text = getattr(node, field, None)
                if isinstance(text, str):
                    names.update(text.split("."))
    return names


@functools.cache
def configs():
    """Names of all runs, and of all variants."""
    runs = set()
    variants = set()
    for module in make_docs.CONFIGS.values():
        runs.update(run.__name__ for run in module.RUNS)
        variants.update(variant.__name__ for variant in module.VARIANTS)
    return runs, variants


@functools.cache
def file_names():
    """Names of all files of the repository's folders, and of its root."""
    names = {path.name for path in ROOT.iterdir()}
    for folder in FILES:
        names.update(path.name for path in (ROOT / folder).rglob("*"))
    return names


@functools.cache
def flags():
    """All flags that a command of this repository takes."""
    found = {"--config", "--nproc_per_node"}
    found.update(f"--{name}" for name in prepare_preferences.Options._fields)
    for path in python_files(*SOURCES):
        found.update(re.findall(r'"(--[\w-]+)[",]', path.read_text()))
    return found


def key_of(text):
    """The setting that a dotted name is, or is an entry of; None for another name."""
    key = text.removeprefix("config.")
    while key and key not in table.BY_KEY:
        key = key.rpartition(".")[0]
    if key == text.removeprefix("config.") or (key and isinstance(table.BY_KEY[key].default, dict)):
        return table.BY_KEY[key]
    return None


def check_value(setting, text):
    """Raise UserError for a value that the setting does not take."""
    value = text
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)
    if not isinstance(setting.default, dict):
        setting.check(value, setting.key)


def problem(span):
    """Say what is wrong with a span of code, as a sentence; "" where it names what is there, or nothing of ours."""
    words = span.split()
    if span in OUTSIDE:
        return ""
    if span in older_names():
        return "an older name"
    if len(words) > 1 and words[0] in commands.PROGRAMS:
        return command_problem(span)
    if len(words) > 1 and all("=" in word for word in words):
        return next(filter(None, map(problem, words)), "")
    for pattern, check in KINDS:
        if match := re.fullmatch(pattern, span):
            return check(*match.groups())
    return ""


def flag_problem(flag):
    return "" if flag in flags() else "no such flag"


def setting_problem(key, value=None):
    """Say what is wrong with a dotted name whose first word is a section's, and with its value."""
    if PLACEHOLDER.search(key) or key in SECTIONS:
        return ""
    setting = key_of(key)
    if setting and value and not PLACEHOLDER.search(value):
        return value_problem(setting, value)
    is_there = setting or key.rpartition(".")[2] in ENDINGS
    return "" if is_there else "no such setting"


def argument_problem(name, value):
    """Say what is wrong with a setting without a section and its value, or with an argument's name of Python's."""
    return setting_problem(name, value) if key_of(name) else name_problem(name)


def config_problem(name, variants=""):
    """Say what is wrong with a run and its variants, or with a script and them."""
    runs, known = configs()
    is_file = name in file_names() or f"{name}.py" in file_names()
    measured = {name.replace("train_", kind) for kind in ("pickscore_", "editreward_")}  # of a line of will_it_fit.md
    is_there = not name or is_file or PLACEHOLDER.search(name) or name in runs or measured & runs
    has_variants = {*variants.split(",")} <= known | {""}
    return "" if is_there and has_variants else "no such run or variant"


def file_problem(path):
    is_there = (ROOT / path).exists() if "/" in path else path in file_names()
    return "" if is_there or PLACEHOLDER.search(path) else "no such file"


def name_problem(name):
    """Say what is wrong with a name of Python's, of a setting, a metric or a config."""
    is_free = keyword.iskeyword(name) or PLACEHOLDER.search(name) or name in OUTSIDE
    if is_free or explain(name) or key_of(name) or not config_problem(name):
        return ""
    last = name.rpartition(".")[2]
    return "" if last in python_names() or last in ENDINGS else "no such name"


def command_problem(line):
    """Say what is wrong with a command that stands in a sentence."""
    if PLACEHOLDER.search(line.partition(" --")[0]):
        return ""
    try:
        for words in commands.commands(line):
            commands.check(words, {})
    except (AssertionError, ValueError) as error:
        return f"no such command: {error}"
    return ""


def value_problem(setting, text):
    try:
        check_value(setting, text)
    except UserError as error:
        return str(error)
    return ""


def values(text):
    """(setting, value) of every value that stands behind a setting in backticks, quoted or as a number."""
    text = "\n".join(ours(text))
    for key, said in re.findall(rf"`(?:config\.)?([\w.]+)` (?:\| |is |to )?({TEXTS}|{NUMBER}(?![\w%]))", text):
        if key in table.BY_KEY:
            for value in re.findall(rf'"[^"]*"|{NUMBER}', said):
                yield table.BY_KEY[key], value


@functools.cache
def older_names():
    """Names and values of older configs that are none today."""
    older = set()
    for key in stored_config.MOVED:
        older |= {key, f"config.{key}", f"--config.{key}"}

    values = set()
    for names in stored_config.RENAMED.values():
        values.update(names)
    for _, value in stored_config.WITHOUT_EFFECT:
        if isinstance(value, str) and value:
            values.add(value)
    for setting in table.SETTINGS:
        values.difference_update(setting.choices)
    # A value that is no word may stand for other things.
    older.update(value for value in values if value.isidentifier() or value[0].isdigit())
    return older


SECTIONS = {setting.section for setting in table.SETTINGS} - {""}
KINDS = (  # what a span looks like, in the order of trying -> what looks its groups up
    (r"--config\.([\w.]+)(?: ?= ?(\S.*))?", setting_problem),
    (r"(--[\w-]+)(?:[= ].*)?", flag_problem),
    (rf"(?:config\.)?((?:{'|'.join(SECTIONS)})\.[\w.]+)(?: ?= ?(\S.*))?", setting_problem),
    (r"config\.([\w.]+)(?: ?= ?(\S.*))?", setting_problem),
    (r"(?:config/\w+\.py:)?(\w*)((?:,\w+)+)", config_problem),
    (r"config/\w+\.py:(\w+)", config_problem),
    (rf"((?:{'|'.join(FILES)})/[\w./-]*)", file_problem),
    (r"(\w+\.(?:py|sh|md))", file_problem),
    (r"([a-zA-Z_][\w.]*)(?:\(.*\))?", name_problem),
    (r"([a-z_]\w*) ?= ?(.*)", argument_problem),
)
