"""Alerts to somebody who does not watch a run: of an alarm, of its end and of a crash, sent as config.alert says."""

import shlex
import subprocess
from collections.abc import Callable

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.command_line import launcher

TIMEOUT_S = 30

senders: dict[str, Callable[[str], None]] = {}  # name -> send(sentence); a tracker that can send alerts adds itself


def check_alert(alert: str) -> None:
    """Raise UserError unless config.alert is "", "wandb" or a command that can be read."""
    try:
        command = shlex.split(alert)
    except ValueError as error:
        raise UserError(f"config.alert is {quoted(alert)}, which is no command: {error}") from error
    if alert and not command:
        raise UserError(f"config.alert is {quoted(alert)}; it must be a command, such as 'ntfy publish my_runs'")


def send(alert: str, text: str) -> str:
    """Send a text, on the main rank. Return why that failed, or "": no run ends because an alert was not sent.

    Args:
        alert: config.alert: "" = nobody, the name of a sender, or a command that gets the text as its last argument.
    """
    if not alert or not launcher.is_main():
        return ""
    line = in_one_line(text)
    try:
        if alert in senders:
            senders[alert](line)
        elif alert != "wandb":
            subprocess.run([*shlex.split(alert), line], timeout=TIMEOUT_S, check=True, capture_output=True)
    except subprocess.SubprocessError as error:
        program = shlex.split(alert)[0]
        return f"config.alert failed: {program} {_command_error(error)}"
    except Exception as error:
        return f"config.alert failed: {in_one_line(error)}"
    return ""


def _command_error(error: subprocess.SubprocessError) -> str:
    """Return how a command failed. The error's own text quotes the whole command, which may hold a token."""
    if isinstance(error, subprocess.CalledProcessError):
        reason = f"ended with {error.returncode}"
    else:
        reason = f"took over {TIMEOUT_S} s"
    stderr = getattr(error, "stderr", None) or b""
    said = in_one_line(stderr.decode(errors="replace"))
    return f"{reason}: {said}" if said else reason
