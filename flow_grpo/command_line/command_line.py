"""The command line of every script, answered before torch is imported, and errors as sentences."""

import argparse
import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from flow_grpo import rewards
from flow_grpo.base import folders, locations, signals
from flow_grpo.base.errors import RunFailed, UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.command_line import alerts, checks, help_text, launcher, terminal
from flow_grpo.command_line.overrides import config_of, split
from flow_grpo.diffusers_patch import registry
from flow_grpo.settings.sections import Config

LONGEST = 2000  # characters of a sentence
# Other ranks wait this long before they print. When a machine's first one ends, torchrun ends them.
TURN_S = 5.0
ANOTHER_RANK = "another rank has ended; what it said is above or below"


def parse(default: str, script: checks.Script | None = None, arguments: Sequence[str] | None = None) -> ConfigDict:
    """Return the config of a command line, or answer --help, --list and mistakes and end the process.

    For a script's first lines: what this module imports takes a tenth of a second, so the answer comes before the
    script imports torch. The garbage collector rests from here until `run`.

    Args:
        default: FILE:NAME, where the command line has no --config.
        script: what the script asks of a config; None = nothing is asked yet.
        arguments: those of the command line, by default.
    """
    argv = sys.argv[1:] if arguments is None else list(arguments)
    with sentences():
        prepare_process()
        file, remaining = split(argv, default)
        answer = help_text.answer(remaining, file, default)
        if answer:
            sys.stdout.write(f"{answer}\n")
            raise SystemExit(0)
        config = config_of(argv, default)
        if launcher.is_main():
            lines = help_text.replaced(file, config, remaining)
            if config.dry_run and config.dry_run_format == "text":
                lines.append(help_text.changed_settings(file, config))
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
        if script:
            _check(config, script, file)

        # The script imports torch next. To look for garbage meanwhile would take a third of the time, and find none.
        gc.disable()
        return config


def parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a script without a config; --help begins with the script's docstring."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def arguments(parser: argparse.ArgumentParser, check: Callable[[argparse.Namespace], None] | None = None) -> Any:
    """Return the arguments of a script without a config, for its first lines, as `parse` does of one with a config.

    Args:
        check: raises UserError for what can be known without importing torch.
    """
    with sentences():
        prepare_process()
        args = parser.parse_args()
        if check:
            check(args)
        return args


def check_no_repeats(flag: str, values: Sequence[object] | None) -> None:
    """Raise UserError where a flag names a value twice, which would be ignored or made again; None = not given."""
    if values and len(set(values)) < len(values):
        raise UserError(f"{flag} names a value twice: {', '.join(map(str, values))}")


def check_set(texts: Sequence[str]) -> None:
    """Raise UserError for words of --set without a value, and where a setting is named twice."""
    keys = []
    for text in texts:
        key, has_value, _ = text.partition("=")
        if not has_value:
            raise UserError(f"--set {quoted(text)} has no value: write KEY=VALUE")
        keys.append(key)
    check_no_repeats("--set", keys)


def prepare_process() -> None:
    """Keep the terminal and the environment from ending this process later. Raise UserError for what only the user can
    mend."""
    terminal.protect()
    # It draws into files alone; the environment's may need a display, or be none.
    os.environ["MPLBACKEND"] = "agg"
    if sys.flags.optimize > 1:
        raise UserError("diffusers and transformers need docstrings: run without -OO and PYTHONOPTIMIZE=2")
    _check_checkout()
    launcher.check()


def _check_checkout() -> None:
    """Raise UserError for a script of one checkout that imports flow_grpo from another one."""
    checkout = Path(sys.argv[0]).resolve().parent.parent
    imported = locations.PACKAGE.parent.resolve()
    if (checkout / locations.PACKAGE.name / "settings").is_dir() and checkout != imported:
        ways_out = f"set PYTHONPATH={checkout}, or run pip install -e {checkout}"
        raise UserError(f"{sys.argv[0]} imports flow_grpo from {imported}: {ways_out}")


def _check(config: ConfigDict, script: checks.Script, file: str) -> None:
    """Raise UserError, which names the variant that is to blame, for what can be known without importing torch."""
    try:
        checked = checks.check(config, script)
        rewards.check_rewards(checked.reward_fn, checked.eval.rewards, rewards.addressed(checked.reward.args))
        script.plan(checked, checked.dry_run or launcher.world_size())
        _check_places(checked, script.reads_dataset(checked))
    except UserError as error:
        raise UserError(f"{error}{help_text.culprit(error, file, config)}") from error


def _check_places(config: Config, reads_dataset: bool) -> None:
    """Raise UserError for a data set, a checkpoint or a model that is not there."""
    try:
        data = Path(locations.resolve(config.dataset))
        if reads_dataset and not data.is_dir():
            what = "is no folder here"
            if data.is_file():
                what = "is a file; tools/split_prompts.py makes a folder of a file of prompts"
            raise UserError(f"config.dataset {quoted(config.dataset)} {what}; see docs/howto/own_data.md")
        if config.resume_from not in ("", "latest") and not Path(config.resume_from).exists():
            raise UserError(f"config.resume_from {quoted(config.resume_from)} is no checkpoint and no folder of them")
        # A plan needs no more of a published model than its sizes, which are known.
        if not (config.dry_run and registry.published(config.model)):
            locations.check_hub_connection(config.model)
    except OSError as error:
        # A name that is too long, or a folder that nobody may look into.
        raise UserError(f"config.dataset, resume_from or model: {in_one_line(error)}") from error


def run(main: Callable[[ConfigDict], None], config: ConfigDict, after_stop: str = "") -> None:
    """Call a script's main; errors that are no bug are told as `sentences` does. `after_stop` as there."""
    collect_rarely()
    try:
        with sentences(after_stop):
            _run_until_signal(main, config)
    except KeyboardInterrupt:
        # It came while `sentences` dealt with another error, such as another rank's end.
        raise _stopped(after_stop) from None
    except BaseException as error:
        problem = _tell(config, error)
        if problem:
            _say(problem)
        raise


def collect_rarely() -> None:
    """Have Python's garbage collector leave alone what is imported, and look through all the rest a hundredth as often.

    To look through a model of 60 blocks and its compiled graphs takes half a second, once or twice an epoch, and on
    each rank at another time, while the others wait.
    """
    gc.freeze()
    young, older, _ = gc.get_threshold()
    # The third is 10 by default.
    gc.set_threshold(young, older, 1000)
    gc.enable()


def _run_until_signal(main: Callable[[ConfigDict], None], config: ConfigDict) -> None:
    """Call a script's main. If a signal ends it, save what there is, and raise SystemExit."""
    with signals.of_a_command():
        try:
            main(config)
        except signals.Interrupted:
            raise _ended_by_signal(config) from None
        except RuntimeError as error:
            # After a signal another rank may have stopped first, while this one waited for it.
            if signals.received.number is None or not _is_of_another_rank(error):
                raise
            raise _ended_by_signal(config) from None


def _ended_by_signal(config: ConfigDict) -> SystemExit:
    """Conclude the run and say how it goes on; an alert says so, too, unless the user has pressed Ctrl-C."""
    text = signals.received.conclude()
    if launcher.is_main():
        _say(text)
    if signals.received.status == signals.STATUS:
        alerts.send(config.alert, f"{config.name} was {text}")
    return SystemExit(signals.received.status)


def _tell(config: ConfigDict, error: BaseException) -> str:
    """Send an alert where a run did not come to its end, unless its user has stopped it."""
    if isinstance(error, SystemExit):
        if error.code in (0, None, 128 + signal.SIGINT, signals.STATUS):
            return ""
        error = error.__cause__ or error
    return alerts.send(config.alert, f"{config.name} has failed: {type(error).__name__}: {error}")


@contextmanager
def sentences(after_stop: str = "") -> Iterator[None]:
    """End the process with one sentence, in the place of a traceback, for an error of this block that is no bug.

    The exit status is 2 for a mistake that the user can mend, 130 for Ctrl-C, and 1 where numbers are not finite, a
    disk is full or another rank has ended. A bug keeps its traceback.

    Args:
        after_stop: how to go on after Ctrl-C; "" = as the run's folder says.
    """
    try:
        yield
    except BaseException as error:
        # Some libraries make another error of it.
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
            raise _stopped(after_stop) from None
        status = _status(error)
        if status is None:
            raise
        if _is_of_another_rank(error):
            _say(ANOTHER_RANK)
        else:
            _say(_with_way_on(error))
        raise SystemExit(status) from error


def _with_way_on(error: BaseException) -> str:
    """Return an error's words; if a checkpoint is left behind, also how the run goes on."""
    goes_on = isinstance(error, RunFailed) or _is_of_the_disk(error)
    sentence = str(error)
    hint = _resume_hint() if goes_on else ""
    if "resume_from" in hint and hint not in sentence:
        sentence += f"; {hint}"
    return sentence


def _resume_hint() -> str:
    """Return how to go on with the run whose folder this process holds; "" where it holds none."""
    held = folders.held_folders()
    if not held:
        return ""
    return folders.resume_hint(held[-1])


def _stopped(after_stop: str) -> SystemExit:
    """Print once for all ranks that Ctrl-C stopped the process; a second Ctrl-C ends it at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if launcher.is_main():
        hint = after_stop or _resume_hint()
        _say(f"stopped by Ctrl-C; {hint}" if hint else "stopped by Ctrl-C")
    return SystemExit(128 + signal.SIGINT)


def _say(text: str) -> None:
    """Print a sentence; of a machine's ranks that end for one reason, only the first gets to print."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(TURN_S)
    speaker = Path(sys.argv[0]).name
    if not launcher.is_main():
        speaker += f", rank {launcher.rank_name()}"
    sys.stderr.write(f"{speaker}: {in_one_line(text, LONGEST)}\n")


def _status(error: BaseException) -> int | None:
    """Return the exit status after an error that is told in a sentence; None for a bug, which keeps its traceback."""
    if isinstance(error, UserError):
        return 2
    if isinstance(error, RunFailed | FloatingPointError) or _is_of_another_rank(error) or _is_of_the_disk(error):
        return 1
    return None


def _is_of_the_disk(error: BaseException) -> bool:
    """Return whether an error says that a disk is full, broken or not to be written by this user."""
    return folders.is_of_the_system(error) and folders.is_disk_error(error)


def _is_of_another_rank(error: BaseException) -> bool:
    """Return whether an error says, in gloo's words, that a rank that this one waited for has ended."""
    ended = re.search("[Cc]onnection (closed|reset) by peer", str(error))
    return "RANK" in os.environ and isinstance(error, RuntimeError) and bool(ended)
