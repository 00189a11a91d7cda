"""Where a reward server listens, and until when."""

import asyncio
import os
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

KEEP_ALIVE_S = 10  # of a connection without a request; longer than clients keep one
GRACE_S = 3  # for what is being scored when the server is stopped


async def serve(app: Starlette, host: str, port: int, announce: Callable[[str], None], parent: int = 0) -> None:
    """Listen until stopped.

    Args:
        port: 0 = any that is free.
        announce: gets the server's address once it listens.
        parent: process id; when it is no longer this process's parent, the server ends. 0 = never.
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

    async def watch() -> None:
        while parent and not server.should_exit:
            server.should_exit = os.getppid() != parent
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    await server.serve(sockets=[listener])
    watching.cancel()
