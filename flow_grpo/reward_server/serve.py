"""Where a reward server listens, and until when."""

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette

from flow_grpo import rewards
from flow_grpo.reward_server.requests import Limits
from flow_grpo.reward_server.server import make_app
from flow_grpo.rewards.scores import check_device

KEEP_ALIVE_S = 10  # of a connection without a request; longer than clients keep one
GRACE_S = 3  # for what is being scored when the server is stopped


def announce(name: str, url: str) -> None:
    """Who started this server reads its address from the first line."""
    reachable = url.replace("0.0.0.0", socket.gethostname()).replace("[::]", socket.gethostname())
    setting = f"--config.reward_fn.{name}=1 --config.reward.args.{name}.url={reachable}"
    sys.stdout.write(
        f"{url}\n{name} is served; a run is scored by it with {setting}\n"
        "Ctrl-C or SIGTERM stops the server; a run waits for another one for config.reward.retry_s\n"
    )
    sys.stdout.flush()


def main(name: str, host: str, port: int, token: str, device: str, options: dict[str, Any], batch_size: int) -> None:
    """Load the reward, print the server's address, serve until stopped. Raises UserError for a device that is not
    there or an option that the reward does not take, before it is loaded.

    Args:
        port: 0 = any that is free.
        device: "" = cuda:0 where there is one.
    """
    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    check_device(device, "--device")
    rewards.check_options(name, options)
    score = rewards.load(name, torch.device(device), options)
    app = make_app(name, score, Limits(batch_size=batch_size), token)
    with suppress(KeyboardInterrupt):
        asyncio.run(listen(app, host, port, partial(announce, name)))


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
