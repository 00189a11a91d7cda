"""Serve a reward file over HTTP, to runs on this machine or others.

    python scripts/serve_reward.py pickscore --port 18087 --device cuda:0

It prints its address and the setting with which a run uses it; see docs/howto/reward_servers.md. Ctrl-C stops it.
"""

import argparse
import json
from typing import Any

from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.command_line import command_line
from flow_grpo.rewards.clients.client import read_token

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")  # values of --host with which no other machine can connect


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    flags = command_line.parser(__doc__)
    add = flags.add_argument
    add("name", help="a file of flow_grpo/rewards, or of a folder in FLOW_GRPO_REWARDS")
    add("--port", type=int, default=18087, help="0 = any that is free; default %(default)s")
    add("--host", default="127.0.0.1", help="who may connect; 0.0.0.0 or :: = everyone; default %(default)s")
    add("--token-file", default="", help="holds the token; without it the environment's REWARD_TOKEN")
    add("--without-token", action="store_true", help="other machines may connect without one")
    add("--device", default="", help="default: cuda:0 where there is one")
    add("--options", type=options, default={}, help="of the reward's load(), as an object of JSON")
    return flags


def options(text: str) -> dict[str, Any]:
    """Parse the options of a reward."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f'{quoted(text)} is no object; write {{"NAME": VALUE}}')
    return parsed


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for flags that cannot be, as far as that is known without torch."""
    rewards.check_reward_name(args.name, "serve_reward.py")
    if not 0 <= args.port < 2**16:
        raise UserError(f"--port is {args.port}; it may be 0 to 65535")
    if not read_token(args.token_file) and not args.without_token and args.host not in THIS_MACHINE:
        raise UserError(
            f"--host {args.host} lets other machines connect, and there is no token: set REWARD_TOKEN in the "
            "environment or name a file by --token-file, for the server and its clients; or say --without-token"
        )


# Before torch is imported, so that --help and mistakes are answered at once.
args = None
if __name__ == "__main__":
    args = command_line.arguments(parser(), check_flags)

import asyncio
from contextlib import suppress
from functools import partial

import torch

from flow_grpo.reward_server.requests import Limits
from flow_grpo.reward_server.server import announce, listen, make_app
from flow_grpo.rewards.scores import check_device


def main(args: argparse.Namespace) -> None:
    """Load the reward, print the server's address, serve until stopped.

    Raise UserError for a device that is not there or an option that the reward does not take, before it is loaded.
    """
    device = args.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    check_device(device, "--device")
    rewards.check_options(args.name, args.options)
    score = rewards.load(args.name, torch.device(device), args.options)
    app = make_app(args.name, score, Limits(), read_token(args.token_file))
    with suppress(KeyboardInterrupt):
        asyncio.run(listen(app, args.host, args.port, partial(announce, args.name)))


if args is not None:
    with command_line.sentences():
        main(args)
