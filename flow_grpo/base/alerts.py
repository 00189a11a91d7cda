"""Words to somebody who does not watch a run: of an alarm, of its end, and of a crash; as config.alert says."""

import os
import shlex
import subprocess
from collections.abc import Callable

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted

TIMEOUT_S = 30

senders: dict[str, Callable[[str], None]] = {}  # name -> of one sentence; a tracker that can tell enters itself


def check_alert(alert: str) -> None:
    """Raises UserError unless config.alert is "", "wandb" or a command that can be read."""
    try:
        words = shlex.split(alert)
    except ValueError as error:
        raise UserError(f"config.alert is {quoted(alert)}, which is no command: {error}") from error
    if alert and not words:
        raise UserError(f"config.alert is {quoted(alert)}; it must be a command, such as 'ntfy publish my_runs'")


def send(alert: str, text: str) -> str:
    """Tell it, on the main rank; why that failed, "" where it did not. No run ends because nobody could be told.
    `alert` is config.alert: "" = nobody, the name of a sender, or a command that gets the text as its last argument."""
    if not alert or os.environ.get("RANK", "0") != "0":
        return ""
    words = in_one_line(text)
    try:
        if alert in senders:
            senders[alert](words)
        elif alert != "wandb":
            subprocess.run([*shlex.split(alert), words], timeout=TIMEOUT_S, check=True, capture_output=True)
    except subprocess.SubprocessError as error:  # which has the command's words, and a token may be among them
        said = in_one_line((error.stderr or b"").decode(errors="replace"))
        why = f"ended with {error.returncode}" if hasattr(error, "returncode") else f"took over {TIMEOUT_S} s"
        return f"config.alert failed: {shlex.split(alert)[0]} {why}" + (f": {said}" if said else "")
    except Exception as error:
        return f"config.alert failed: {in_one_line(error)}"
    return ""
