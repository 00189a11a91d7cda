"""The secret that a reward server and its clients share. No config and no command line holds it: both are stored."""

import os
from pathlib import Path

from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import quoted


def read_token(file: str = "") -> str:
    """The first line of a file, or else the environment's REWARD_TOKEN; "" = none. Raises UserError: the file cannot be
    read, or it is no token. The message does not show the token."""
    token, place = os.environ.get("REWARD_TOKEN", ""), "the environment's REWARD_TOKEN"
    if file:
        place = f"token_file {quoted(file)}"
        try:
            token = Path(file).read_text().partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"no token in {place}: {error}") from error
        if not token:
            raise UserError(f"no token in {place}: its first line is empty")
    if not all("!" <= letter <= "~" for letter in token):
        raise UserError(f"the token of {place} may have printable ASCII characters without spaces only")
    return token
