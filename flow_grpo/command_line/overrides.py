"""The config of a command line: --config FILE:NAME,VARIANT, and --config.KEY=VALUE, each of its setting's type."""

import ast
import re
import sys
from collections.abc import Iterator, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from flow_grpo.base.errors import UserError
from flow_grpo.command_line import checks, launcher
from flow_grpo.settings import config_files, table, unknown_names

FORMS = "write --config FILE:NAME,VARIANT or --config.KEY=VALUE"


def config_of(arguments: Sequence[str], default: str) -> ConfigDict:
    """Return the config of a command line. Raises UserError: a word that means nothing, a setting that there is not
    (with the nearest), a value of another type."""
    file, remaining = split(arguments, default)
    keys = keys_of(remaining)
    config = config_files.load(file)
    _drop_stand_ins(config, file, remaining)
    _add_rewards(config, remaining)
    _add_custom(config, remaining)
    for key in keys:
        if not table.has(config, key):
            raise UserError(unknown_names.answer(key, table.flat(config)))
    _override(config, remaining)
    checks.check_typed(config, keys)
    return config


def keys_of(arguments: Sequence[str]) -> list[str]:
    """Return the settings to which words of a command line give a value, by their dotted keys."""
    keys = []
    for word in arguments:
        match = re.match(r"--?(?:no)?config\.([^=]*)", word)
        if match:
            keys.append(match[1])
    return keys


def split(arguments: Sequence[str], default: str) -> tuple[str, list[str]]:
    """Return the config file that a command line names, and its remaining arguments, with --dry_run spelt out."""
    file = default
    remaining = []
    unread = iter(arguments)
    for word in unread:
        if re.fullmatch("--?config", word):
            file = next(unread, "")
        elif re.match("--?config=", word):
            file = word.partition("=")[2]
        elif match := re.fullmatch(r"--?dry_run(?:=(.*))?", word):
            remaining.append(f"--config.dry_run={match[1] or launcher.world_size()}")
        else:
            remaining.append(word)
    return file, remaining


def before_smoke(file: str) -> ConfigDict | None:
    """Return the config of FILE:NAME,VARIANT,... without its variant smoke; None where it has none."""
    path, name = config_files.parts(file)
    run, *variants = name.split(",")
    if "smoke" not in variants:
        return None
    without_smoke = [variant for variant in variants if variant != "smoke"]
    return config_files.load(f"{path}:{','.join([run, *without_smoke])}")


def _drop_stand_ins(config: ConfigDict, file: str, arguments: Sequence[str]) -> None:
    """Drop what the variant smoke has put in the place of rewards or of a data set that the command line names."""
    before = before_smoke(file)
    if before is None:
        return
    assignments = list(_assignments(arguments))
    watched = ""
    for key, value in assignments:
        if key == "dataset":
            config.text_tokens = before.text_tokens
        if key == "eval.rewards":
            watched = value
    named = names_rewards(arguments)
    if named:
        wanted = {*before.reward_fn, *named}
        config.reward_fn = {name: weight for name, weight in config.reward_fn.items() if name in wanted}
    for name, options in before.reward.args.items():
        if name in named or name in re.findall(r"\w+", watched):
            with config.unlocked():
                config.reward.args[name] = options


def _assignments(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield key and value of each --config.KEY=VALUE, or --config.KEY VALUE, of a command line."""
    followers = [*arguments[1:], ""]
    for word, follower in zip(arguments, followers):
        match = re.fullmatch(r"--?config\.([\w.]*\w)(?:=(.*))?", word, re.DOTALL)
        if match:
            key, value = match.groups()
            yield key, follower if value is None else value


def names_rewards(arguments: Sequence[str]) -> list[str]:
    """Return the rewards to which a command line gives a weight, one by one."""
    names = []
    for key, value in _assignments(arguments):
        section, _, name = key.rpartition(".")
        if section == "reward_fn" and _literal(value) != 0:
            names.append(name)
    return names


def _add_rewards(config: ConfigDict, arguments: Sequence[str]) -> None:
    """Make room for rewards that the config file does not know: those of one's own, of a server, and their options."""
    for key, value in _assignments(arguments):
        section, _, name = key.rpartition(".")
        option_of = re.fullmatch(r"reward\.args\.(\w+)", section)
        with config.unlocked():
            if section == "reward_fn":
                config.reward_fn[name] = config.reward_fn.get(name, 0.0)
            elif option_of:
                reward = option_of[1]
                options = config.reward.args.get(reward, ConfigDict())
                config.reward.args[reward] = options
                options[name] = options.get(name, _literal(value))


def _add_custom(config: ConfigDict, arguments: Sequence[str]) -> None:
    """Make room for settings of one's own that the config file has not set, unless one is a slip of one that it has."""
    for key, value in _assignments(arguments):
        section, _, name = key.rpartition(".")
        if section != "custom" or name in config.custom:
            continue
        if any(unknown_names.is_slip(name, known) for known in config.custom):
            raise UserError(unknown_names.answer(f"custom.{name}", table.flat(config)))
        with config.unlocked():
            config.custom[name] = _literal(value, tuple)


def _literal(text: str, *types: type) -> bool | int | float | str | tuple:
    """Parse a value of the command line: True, 8 and 0.5 as Python reads them, and all else as text.

    Args:
        types: further types that are parsed, such as tuple.
    """
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    if isinstance(value, (bool, int, float, *types)):
        return value
    return text


def _override(config: ConfigDict, arguments: Sequence[str]) -> None:
    """Put values of --config.KEY=VALUE into a config, each of its setting's type."""
    values = flags.FlagValues()
    line = [sys.argv[0], *_names_as_tuples(arguments)]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=line)
        _, *not_flags = values(line)
    except flags.UnrecognizedFlagError as error:
        raise UserError(_meaningless(f"--{error.flagname}", error.flagname)) from error
    except (flags.Error, TypeError) as error:
        # The setting's own refusal says what it may be, which absl's does not.
        match = re.match(r"flag --config\.([\w.]+)=(.*?): ", str(error))
        if match and match[1] in table.BY_KEY:
            key, value = match.groups()
            table.BY_KEY[key].check(value, key)
        raise UserError(str(error)) from error
    if not_flags:
        word = not_flags[0]
        # Other programs take KEY=VALUE, or +KEY=VALUE.
        key, equals_sign, _ = word.partition("=")
        raise UserError(_meaningless(f"{word!r} on the command line", key.lstrip("+") if equals_sign else ""))


def _names_as_tuples(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which a tuple of names that is written as NAME,NAME is one of Python's."""
    written = []
    key = ""  # of the setting whose value is the next argument
    for word in arguments:
        match = re.match(r"(--?config\.([\w.]+)=)(.*)$", word, re.DOTALL)
        start = ""
        value = word
        if match:
            start, key, value = match.groups()
        takes_tuple = key in table.BY_KEY and isinstance(table.BY_KEY[key].default, tuple)
        if takes_tuple and _literal(value, tuple) == value:
            names = filter(None, value.split(","))
            value = repr(tuple(names))
        written.append(start + value)
        key = word.partition("config.")[2]
    return written


def _meaningless(what: str, key: str) -> str:
    """Return a sentence that refuses a word; if `key` is another program's setting, with the one that has its part
    here."""
    sentence = f"{what} means nothing: {FORMS}"
    advice = unknown_names.of_other_program(key) if key else ""
    if advice:
        sentence += f"; {advice}"
    return sentence
