"""The secret that a reward server and its clients share. No config and no command line holds it: both are stored."""

import os
from pathlib import Path

from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import quoted


def read_token(file: str = "") -> str:
    """The first line of a file, or else the environment's REWARD_TOKEN; "" = none. Raises UserError: the file cannot be
    read, or it is no token. The message does not show the token."""
    if not file:
        return _checked(os.environ.get("REWARD_TOKEN", ""), "the environment's REWARD_TOKEN")
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"no token in token_file {quoted(file)}: {error}") from error
    if not lines or not lines[0].strip():
        raise UserError(f"no token in token_file {quoted(file)}: its first line is empty")
    return _checked(lines[0].strip(), f"token_file {quoted(file)}")


def _checked(token: str, source: str) -> str:
    if not all("!" <= letter <= "~" for letter in token):
        raise UserError(f"the token of {source} may have printable ASCII characters without spaces only")
    return token
