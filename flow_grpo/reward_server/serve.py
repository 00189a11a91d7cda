"""The command line of a reward server, where it listens, and until when."""

import argparse
import asyncio
import ipaddress
import json
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import torch
import uvicorn
from starlette.applications import Starlette

from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.reward_server.requests import Limits
from flow_grpo.reward_server.server import make_app
from flow_grpo.rewards.clients.tokens import read_token
from flow_grpo.rewards.scores import check_device

KEEP_ALIVE_S = 10  # of a connection without a request; longer than clients keep one
GRACE_S = 3  # for what is being scored when the server is stopped


def parse(args: list[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description="Serve a reward file; see docs/howto/reward_servers.md.")
    parser.add_argument("name", help="a file of flow_grpo/rewards, or of a folder in FLOW_GRPO_REWARDS")
    parser.add_argument("--port", type=int, default=18087, help="0 = any that is free")
    parser.add_argument("--host", default="127.0.0.1", help="who may connect; 0.0.0.0 or :: = everyone")
    parser.add_argument("--token-file", default="", help="holds the token; without it the environment's REWARD_TOKEN")
    parser.add_argument("--without-token", action="store_true", help="other machines may connect without one")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--options", type=json.loads, default={}, help="of the reward's load(), as JSON")
    parser.add_argument("--batch-size", type=int, default=Limits.batch_size, help="images scored together")
    return parser.parse_args(args)


def announce(url: str) -> None:
    """Who started this server reads its address from the first line."""
    sys.stdout.write(url + "\n")
    sys.stdout.flush()


def main(args: list[str] | None = None) -> None:
    """Load the reward, print the server's address, serve until stopped. Raises UserError for what a user can mend,
    before the reward is loaded."""
    with suppress(KeyboardInterrupt):
        parsed = parse(args)
        token = read_token(parsed.token_file)
        check(parsed, token)
        score = rewards.load(parsed.name, torch.device(parsed.device), parsed.options)
        app = make_app(parsed.name, score, Limits(batch_size=parsed.batch_size), token)
        asyncio.run(listen(app, parsed.host, parsed.port, announce))


async def listen(app: Starlette, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Listen until stopped.

    Args:
        port: 0 = any that is free.
        announce: gets the server's address once it listens.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    listener, server = config.bind_socket(), uvicorn.Server(config)
    listener.listen(socket.SOMAXCONN)
    announce(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
    await server.serve(sockets=[listener])


def check(parsed: argparse.Namespace, token: str) -> None:
    """Raises UserError for what a user can mend."""
    rewards.check_rewards({parsed.name: 1.0})
    rewards.check_options(parsed.name, parsed.options)
    if not 0 <= parsed.port < 2**16:
        raise UserError(f"--port is {parsed.port}; it may be 0 to 65535")
    if not token and not parsed.without_token and not is_loopback(parsed.host):
        raise UserError(
            f"--host {parsed.host} lets other machines connect, and there is no token: set REWARD_TOKEN in the "
            "environment or name a file by --token-file, for the server and its clients; or say --without-token"
        )
    check_device(parsed.device, "--device")


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address. Raises UserError for what is none."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise UserError(f"--host is {host!r}, which is no address: {error}") from error
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)
