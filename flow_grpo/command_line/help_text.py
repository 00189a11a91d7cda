"""Text for --help and --list, and for the origin of a config's values; none of it starts a run."""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.command_line import overrides
from flow_grpo.settings import config_files, table

WIDTH = 120  # characters of a line
# Settings of which a smoke run says that it replaces them.
REPLACED_BY_SMOKE = (
    "model",
    "dataset",
    "reward_fn",
    "eval.rewards",
    "eval.best_by",
    "height",
    "width",
    "frames",
    "precision",
)
HIDDEN = ("name", "dry_run")  # settings that say nothing of the experiment
# Name of a section on the command line -> its name in the table.
SECTIONS = {section or "config": section for section in table.SECTIONS}


def answer(arguments: Sequence[str], file: str, default: str) -> str:
    """Return the answer to a command line that asks for one; "" for one that starts a run. `file` is what it names, or
    `default`. Raises UserError: --help names a section that there is not, or --list a file that has no list."""
    if "--list" in arguments:
        return _list(file)
    for index, word in enumerate(arguments):
        if word in ("-h", "--help"):
            sections = arguments[index + 1 :]
            if not sections:
                return _help(default)
            return "\n".join(map(_section, sections))
    return ""


def _help(default: str) -> str:
    """Return the usage of the command line, below the docstring of the script that runs."""
    usage = {
        "--config FILE:NAME,VARIANT": f"the run, and changes to it; without it {default}",
        "--config.KEY=VALUE": "any setting",
        "--list": "the runs and variants of FILE",
        "--dry_run, --dry_run=8": "what the run would be on the GPUs that there are, or on 8; loads no weights",
        "--help SECTION": f"the settings of a section: {', '.join(SECTIONS)}",
    }
    lines = [f"{form:<28}{meaning}" for form, meaning in usage.items()]
    return "\n".join([sys.modules["__main__"].__doc__ or "", *lines])


def _section(name: str) -> str:
    """Return the settings of a section, or one setting."""
    name = name.removeprefix("config.")
    chosen = [setting for setting in table.SETTINGS if setting.key == name or setting.section == SECTIONS.get(name)]
    if not chosen:
        raise UserError(f"--help {quoted(name)}: there is no such section or setting; sections: {', '.join(SECTIONS)}")
    lines = []
    if name in SECTIONS:
        title = table.SECTIONS[SECTIONS[name]]
        lines.append(f"\n{name}: {title}")
    for setting in chosen:
        meaning = textwrap.fill(setting.description(), WIDTH, initial_indent="    ", subsequent_indent="    ")
        lines += ["", f"--config.{setting.key}={setting.default!r}", meaning]
    return "\n".join(lines)


def _list(file: str) -> str:
    """Return the runs and variants of a config file, with the first paragraph of what they say of themselves."""
    file, _ = config_files.parts(file)
    path = config_files.find(file)
    module = config_files.module_of(path)
    runs = getattr(module, "RUNS", ())
    variants = getattr(module, "VARIANTS", ())
    if not runs and not variants:
        raise UserError(f"--list: {path} has no RUNS and no VARIANTS; docs/howto/own_config.md shows a whole file")
    lines = ["", f"{path}, runs", *_entries(runs)]
    lines += ["", f"{path}, variants, of any of them: NAME,VARIANT,...", *_entries(variants)]
    return "\n".join(lines)


def _entries(functions: Sequence[Callable]) -> list[str]:
    """Return an entry for each run or variant, whose paragraphs begin in one column."""
    names = [function.__name__ for function in functions]
    column = 4 + max(map(len, names), default=0)
    return [_entry(function, column) for function in functions]


def _entry(function: Callable, column: int) -> str:
    """Return the name of a run or variant, and its first paragraph from a column on."""
    docstring = inspect.getdoc(function) or ""
    first_paragraph, *_ = docstring.split("\n\n")
    paragraph = " ".join(first_paragraph.split())
    name = f"  {function.__name__}".ljust(column)
    return textwrap.fill(paragraph, WIDTH, initial_indent=name, subsequent_indent=" " * column)


def origins(file: str, config: ConfigDict) -> dict[str, str]:
    """Map each setting whose value is not the default to what set it last: a word of NAME,VARIANT,..., the file itself
    if it has no names, or "the command line".

    Args:
        file: FILE:NAME,VARIANT,... of the command line.
        config: the final one, with the command line's changes.
    """
    set_by = {}
    default = table.flat(table.default_config())
    before = default
    for stage, stage_config in [*_stages(file), ("the command line", config)]:
        after = table.flat(stage_config)
        for key, value in after.items():
            if value != before.get(key):
                set_by[key] = stage
        before = after

    # A setting that ends at its default, or that a later stage removed, has no origin.
    final = before
    changed = {}
    for key, stage in set_by.items():
        if key in final and key not in HIDDEN and final[key] != default.get(key):
            changed[key] = stage
    return changed


def _stages(file: str) -> list[tuple[str, ConfigDict]]:
    """Return the words of FILE:NAME,VARIANT,..., or FILE where it names no run, each with the config up to it."""
    path, names = config_files.parts(file)
    if not names:
        return [(path, config_files.load(path))]
    stages = []
    words_so_far = []
    for word in names.split(","):
        words_so_far.append(word)
        stages.append((word, config_files.load(f"{path}:{','.join(words_so_far)}")))
    return stages


def changed_settings(file: str, config: ConfigDict) -> str:
    """List every setting whose value is not the default, and what has set it. Arguments as of `origins`."""
    default = table.flat(table.default_config())
    values = table.flat(config)
    lines = ["settings that are not the defaults:"]
    for key, stage in origins(file, config).items():
        value = f"{key} = {values[key]!r}"
        lines.append(f"  {value:<64}  {stage}; the default is {default.get(key)!r}")
    return "\n".join(lines)


def replaced(file: str, config: ConfigDict, arguments: Sequence[str] = ()) -> list[str]:
    """List what the variant smoke has replaced: whatever is not on this machine, by something that is, and rewards that
    it has left out beside those that the command line's arguments name."""
    unchanged = overrides.before_smoke(file)
    if unchanged is None:
        return []
    before = unchanged.to_dict()
    smoke = config_files.load(file).to_dict()
    now = config.to_dict()
    lines = []
    for key in REPLACED_BY_SMOKE:
        was = table.value_of(before, key)
        stand_in = table.value_of(smoke, key)
        value = table.value_of(now, key)
        # The command line has the last word.
        is_overridden = value != stand_in
        if stand_in != was and not is_overridden:
            lines.append(f"smoke replaces {key} {was} by {value}")
    if overrides.names_rewards(arguments):
        for name in before["reward_fn"]:
            if name not in now["reward_fn"]:
                lines.append(f"smoke leaves out the reward {name}, which needs weights of the hub or a server")
    return lines


def culprit(error: UserError, file: str, config: ConfigDict) -> str:
    """Name what has set a setting that an error names, unless it is the command line; "" if there is nothing to say."""
    set_by = origins(file, config)
    for key in re.findall(r"config\.([\w.]*\w)", str(error)):
        if key not in set_by:
            continue
        if set_by[key] == "the command line":
            return ""
        return f"; {set_by[key]} has set {key}"
    return ""
