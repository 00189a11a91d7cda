"""The config of a command line: --config FILE:NAME,VARIANT, and --config.KEY=VALUE, each of its setting's type."""

import ast
import difflib
import os
import re
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from flow_grpo.base.errors import UserError
from flow_grpo.settings import answers, config_files, older, table

ALIKE = 0.8  # least similarity of the name of a setting that is offered for one that there is not
FORMS = "write --config FILE:NAME,VARIANT or --config.KEY=VALUE"


def config_of(arguments: Sequence[str], default: str) -> ConfigDict:
    """The config of a command line. Raises UserError: a word that means nothing, a setting that there is not (with the
    nearest), a value of another type."""
    file, others = split(arguments, default)
    keys = [match[1] for word in others if (match := re.match(r"--?(?:no)?config\.([^=]*)", word))]
    for key in keys:
        if key in older.MOVED:
            raise UserError(f"config.{key} is now {older.MOVED[key]}")
    config = config_files.load(file)
    _add_rewards(config, others)
    _refuse_unknown(config, keys)
    _override(config, others)
    return config


def split(arguments: Sequence[str], default: str) -> tuple[str, list[str]]:
    """The config file that a command line names, and its other words, of which --dry_run is spelt out."""
    file, others = default, []
    words = iter(arguments)
    for word in words:
        if re.fullmatch("--?config", word):
            file = next(words, "")
        elif re.match("--?config=", word):
            file = word.partition("=")[2]
        elif match := re.fullmatch(r"--?dry_run(?:=(.*))?", word):
            others.append(f"--config.dry_run={match[1] or world_size()}")
        else:
            others.append(word)
    return file, others


def world_size() -> int:
    """How many ranks torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _add_rewards(config: ConfigDict, words: Sequence[str]) -> None:
    """Make room for rewards that the config file does not know: those of one's own, of a server, and their options."""
    for word, following in zip(words, [*words[1:], ""]):
        match = re.match(r"--?config\.(?:reward_fn\.(\w+)|reward\.args\.(\w+)\.(\w+))(?:=(.*))?$", word, re.DOTALL)
        if match:
            name, of, option, value = match.groups()
            with config.unlocked():
                if name:
                    config.reward_fn[name] = config.reward_fn.get(name, 0.0)
                else:
                    options = config.reward.args[of] = config.reward.args.get(of, ConfigDict())
                    options[option] = options.get(option, _literal(following if value is None else value))


def _literal(text: str) -> bool | int | float | str:
    """A value of the type that an option's value on the command line has: 0.5 is a number, /models/clip is none."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float) else text


def _refuse_unknown(config: ConfigDict, keys: Sequence[str]) -> None:
    for key in keys:
        try:
            table.value_of(config, key)
        except (KeyError, TypeError) as error:
            near = " or ".join(f"config.{name}" for name in _nearest(key, [*table.flat(config)]))
            section = key.partition(".")[0] if key.partition(".")[0] in answers.SECTIONS else "config"
            advice = f"nearest: {near}" if near else f"--help {section} lists all of its section"
            advice = "a config file of your own has to set it first" if key.startswith("custom.") else advice
            raise UserError(f"there is no setting config.{key}; {advice}") from error


def _nearest(key: str, names: Sequence[str]) -> list[str]:
    """The settings whose last part is most like that of `key`; none where that is only loosely alike, since another
    setting would make another experiment of it."""
    words = {name.rpartition(".")[2] for name in names}
    best = difflib.get_close_matches(key.rpartition(".")[2], words, n=1, cutoff=ALIKE)
    return [name for name in names if name.rpartition(".")[2] in best]


def _override(config: ConfigDict, arguments: Sequence[str]) -> None:
    """Put values of --config.KEY=VALUE into a config, each of its setting's type."""
    values, line = flags.FlagValues(), [sys.argv[0], *arguments]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=line)
        _, *words = values(line)
    except flags.UnrecognizedFlagError as error:
        raise UserError(f"--{error.flagname} means nothing: {FORMS}") from error
    except (flags.Error, TypeError) as error:
        key, value = [*re.findall(r"^flag --config\.([\w.]+)=(.*?): ", str(error)), ("", "")][0]
        if key in table.BY_KEY:
            table.BY_KEY[key].check(value, key)
        raise UserError(str(error)) from error
    if words:
        raise UserError(f"{words[0]!r} on the command line means nothing: {FORMS}")
