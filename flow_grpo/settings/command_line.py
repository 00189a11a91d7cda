"""The command line of every script: --config FILE:NAME,VARIANT and --config.KEY=VALUE, and errors as sentences."""

import argparse
import ast
import difflib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from flow_grpo import rewards
from flow_grpo.base import alerts, folders, shipped
from flow_grpo.base.errors import RunFailed, UserError
from flow_grpo.base.quoting import in_one_line, quoted
from flow_grpo.settings import answers, checks, config_files, older, table

LONGEST = 2000  # characters of a sentence
ALIKE = 0.8  # least similarity of the name of a setting that is offered for one that there is not
FORMS = "write --config FILE:NAME,VARIANT or --config.KEY=VALUE"
TURN_S = 5.0  # for which a machine's first rank has the word; when it ends, torchrun ends the others
AFTER_TORCHRUN = """for _ in $(seq 300); do kill -0 "$1" 2> /dev/null || break; sleep 0.1; done; printf %s "$2" >&2"""
ANOTHER_RANK = "another rank has ended; what it said is above or below"


def parse(default: str, script: checks.Script | None = None, arguments: Sequence[str] | None = None) -> ConfigDict:
    """The config of a command line, for a script's first lines: what this module imports takes a tenth of a second, so
    --help, --list and mistakes are answered before the script imports torch. Ends the process where it answers.

    Args:
        default: FILE:NAME, where the command line has no --config.
        script: what the script asks of a config; None = nothing is asked yet.
        arguments: those of the command line, by default.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    with sentences():
        _check_checkout()
        file, others = _split(words, default)
        if answer := answers.to(others, file, default):
            sys.stdout.write(f"{answer}\n")
            raise SystemExit(0)
        config = config_of(words, default)
        if os.environ.get("RANK", "0") == "0":
            lines = answers.replaced(file, config) + (
                [answers.changed_settings(file, config)] if config.dry_run else []
            )
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
        if script:
            _check(config, script, file)
        return config


def parser(description: str | None) -> argparse.ArgumentParser:
    """Of a script without a config, whose docstring is what --help begins with."""
    how = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=how, allow_abbrev=False)


def arguments(parser: argparse.ArgumentParser, check: Callable[[argparse.Namespace], None] | None = None) -> Any:
    """The arguments of such a script, for its first lines, as of `parse`.

    Args:
        check: raises UserError for what can be known without importing torch.
    """
    with sentences():
        _check_checkout()
        args = parser.parse_args()
        if check:
            check(args)
        return args


def _check_checkout() -> None:
    """Raises UserError for a script of one checkout that imports flow_grpo from another one."""
    checkout, imported = Path(sys.argv[0]).resolve().parent.parent, shipped.PACKAGE.parent.resolve()
    if (checkout / shipped.PACKAGE.name / "settings").is_dir() and checkout != imported:
        ways_out = f"set PYTHONPATH={checkout}, or run pip install -e {checkout}"
        raise UserError(f"{sys.argv[0]} imports flow_grpo from {imported}: {ways_out}")


def _check(config: ConfigDict, script: checks.Script, file: str) -> None:
    """Raises UserError, which names the variant that is to blame."""
    try:
        checks.check(config, script)
        served = [name for name, args in config.reward.args.items() if "url" in args]
        rewards.check_rewards(config.reward_fn, config.eval.rewards, served)
        script.plan(config, config.dry_run or _world_size())
        _check_places(config, script.reads_dataset(config))
    except UserError as error:
        raise UserError(f"{error}{answers.culprit(error, file, config)}") from error


def _check_places(config: ConfigDict, reads_dataset: bool) -> None:
    """Raises UserError for a data set, a checkpoint or a model that is not there."""
    try:
        if reads_dataset and not (data := Path(shipped.find(config.dataset))).is_dir():
            what = "is a file; tools/split_prompts.py makes a folder of it" if data.is_file() else "is no folder here"
            raise UserError(f"config.dataset {quoted(config.dataset)} {what}; see docs/howto/own_data.md")
        if config.resume_from not in ("", "latest") and not Path(config.resume_from).exists():
            raise UserError(f"config.resume_from {quoted(config.resume_from)} is no checkpoint and no folder of them")
        shipped.check_connection(config.model)
    except OSError as error:  # a name that is too long, or a folder that nobody may look into
        raise UserError(f"config.dataset, resume_from or model: {in_one_line(error)}") from error


def run(main: Callable[[ConfigDict], None], config: ConfigDict, after_stop: str = "") -> None:
    """Call a script's main; errors that are no bug are sentences.

    Args:
        after_stop: how to go on after Ctrl-C; "" = what the run's folder says.
    """
    try:
        with sentences(after_stop):
            main(config)
    except KeyboardInterrupt:  # it came while `sentences` dealt with another error, such as another rank's end
        raise _stopped(after_stop) from None
    except BaseException as error:
        if problem := _tell(config, error):
            _say(problem)
        raise


def _tell(config: ConfigDict, error: BaseException) -> str:
    """Send an alert where a run did not come to its end, unless its user has stopped it."""
    if isinstance(error, SystemExit):
        if error.code in (0, None, 128 + signal.SIGINT):
            return ""
        error = error.__cause__ or error
    return alerts.send(config.alert, f"{config.name} has failed: {type(error).__name__}: {error}")


@contextmanager
def sentences(after_stop: str = "") -> Iterator[None]:
    """Ends the process with one sentence where the user can mend it (status 2), where numbers went astray, a disk
    is full or another rank has ended (1), and after Ctrl-C (130); a bug keeps its traceback.

    Args:
        after_stop: how to go on after Ctrl-C.
    """
    interrupted = []

    def interrupt(signum, frame):
        interrupted.append(signum)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where it is ignored, as in a shell's background
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException as error:
        if interrupted or isinstance(error, KeyboardInterrupt):  # some libraries make another error of it
            raise _stopped(after_stop) from None
        if (status := _status(error)) is None:
            raise
        _say(ANOTHER_RANK if _is_of_another_rank(error) else _with_way_on(error))
        raise SystemExit(status) from error
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def _with_way_on(error: BaseException) -> str:
    """What an error says, and of one that ends a run with a checkpoint how it goes on."""
    ways_on = map(folders.how_to_go_on, folders.held()[-1:]) if isinstance(error, RunFailed) else []
    return "; ".join([str(error), *(way for way in ways_on if "resume_from" in way and way not in str(error))])


def _stopped(after_stop: str) -> SystemExit:
    """Says so once for all ranks. A second Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("RANK", "0") == "0":
        ways_on = [after_stop] if after_stop else map(folders.how_to_go_on, folders.held()[-1:])
        _say("; ".join(["stopped by Ctrl-C", *ways_on]))
    return SystemExit(128 + signal.SIGINT)


def _say(text: str) -> None:
    """Say it, under torchrun once for all ranks of a machine that end for one reason, and on a terminal once more below
    torchrun's own report, which is 20 lines long."""
    rank, by_torchrun = os.environ.get("RANK", "0"), "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(TURN_S)
    who = Path(sys.argv[0]).name + (f", rank {rank}" if rank != "0" else "")
    line = f"{who}: {in_one_line(text, LONGEST)}\n"
    sys.stderr.write(line)
    if by_torchrun and sys.stderr.isatty():
        subprocess.Popen(["sh", "-c", AFTER_TORCHRUN, "sh", str(os.getppid()), line], start_new_session=True)


def _status(error: BaseException) -> int | None:
    """Of a process that ends with an error and a sentence; None for a bug, which keeps its traceback."""
    if isinstance(error, UserError):
        return 2
    return 1 if isinstance(error, RunFailed | FloatingPointError) or _is_of_another_rank(error) else None


def _is_of_another_rank(error: BaseException) -> bool:
    """Whether a rank that this one waited for has ended, as gloo says it."""
    ended = re.search("[Cc]onnection (closed|reset) by peer", str(error))
    return "RANK" in os.environ and isinstance(error, RuntimeError) and bool(ended)


def config_of(arguments: Sequence[str], default: str) -> ConfigDict:
    """The config of a command line. Raises UserError: a word that means nothing, a setting that there is not (with the
    nearest), a value of another type."""
    file, others = _split(arguments, default)
    keys = [match[1] for word in others if (match := re.match(r"--?(?:no)?config\.([^=]*)", word))]
    for key in keys:
        if key in older.ANSWERS:
            raise UserError(f"config.{key} {older.ANSWERS[key]}")
    config = config_files.load(file)
    _add_rewards(config, others)
    _refuse_unknown(config, keys)
    _override(config, others)
    return config


def _split(arguments: Sequence[str], default: str) -> tuple[str, list[str]]:
    """The config file that a command line names, and its other words, of which --dry_run is spelt out."""
    file, others = default, []
    words = iter(arguments)
    for word in words:
        if re.fullmatch("--?config", word):
            file = next(words, "")
        elif re.match("--?config=", word):
            file = word.partition("=")[2]
        elif match := re.fullmatch(r"--?dry_run(?:=(.*))?", word):
            others.append(f"--config.dry_run={match[1] or _world_size()}")
        else:
            others.append(word)
    return file, others


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _add_rewards(config: ConfigDict, words: Sequence[str]) -> None:
    """Make room for rewards that the config file does not know: those of one's own, of a server, and their options."""
    for word, following in zip(words, [*words[1:], ""]):
        match = re.match(r"--?config\.(?:reward_fn\.(\w+)|reward\.args\.(\w+)\.(\w+))(?:=(.*))?$", word, re.DOTALL)
        if match:
            name, of, option, value = match.groups()
            with config.unlocked():
                if name:
                    _add(config.reward_fn, name, 0.0)
                else:
                    _add(config.reward.args, of, ConfigDict())
                    _add(config.reward.args[of], option, _literal(following if value is None else value))


def _add(config: ConfigDict, key: str, value: Any) -> None:
    if key not in config:
        config[key] = value


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
    """The settings, of its own section if possible, whose last part is most like that of `key`; none where that is only
    loosely alike, since another setting would make another experiment of it."""
    section, _, word = key.rpartition(".")
    shares = {name: difflib.SequenceMatcher(None, word, name.rpartition(".")[2]).ratio() for name in names}
    best = [name for name, share in shares.items() if share == max(shares.values()) >= ALIKE]
    return [name for name in best if name.rpartition(".")[0] == section] or best


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
