"""Where a reward server listens, and until when."""

import socket
import sys
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from flow_grpo.rewards.clients.client import RETRY_S

KEEP_ALIVE_S = 10  # of a connection without a request; longer than clients keep one
GRACE_S = 3  # for what is being scored when the server is stopped


def announce(name: str, url: str) -> None:
    """Who started this server reads its address from the first line."""
    reachable = url.replace("0.0.0.0", socket.gethostname()).replace("[::]", socket.gethostname())
    setting = f"--config.reward_fn.{name}=1 --config.reward.args.{name}.url={reachable}"
    sys.stdout.write(
        f"{url}\n{name} is served; a run is scored by it with {setting}\n"
        f"Ctrl-C or SIGTERM stops the server; a run waits {RETRY_S:g} s for another one\n"
    )
    sys.stdout.flush()


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
