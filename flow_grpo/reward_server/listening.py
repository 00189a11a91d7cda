"""A reward server's connections: where it listens, until when, and how long a client may take."""

import asyncio
import os
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

GRACE_S = 3  # for what is being scored when the server is stopped


class Protocol(H11Protocol):
    """uvicorn's, which closes a silent connection after a response, but waits for ever for the end of a header."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._limit_wait()

    def data_received(self, data: bytes) -> None:
        """Part of a header, or of a body."""
        super().data_received(data)
        self._limit_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        if self.deadline:
            self.deadline.cancel()

    def _limit_wait(self) -> None:
        """Close the connection if no request begins in time; what comes of an answered one's body does not count."""
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self.deadline is None:
            self.deadline = self.loop.call_later(self.timeout_keep_alive, self.transport.close)
        elif not waiting and self.deadline:
            self.deadline.cancel()
            self.deadline = None


async def serve(
    app: Starlette, host: str, port: int, announce: Callable[[str], None], idle_s: float, parent: int = 0
) -> None:
    """Listen until stopped.

    Args:
        port: 0 = any that is free.
        announce: gets the server's address once it listens.
        idle_s: how long a connection may take for a request's header, or send nothing.
        parent: process id; when it is no longer this process's parent, the server ends. 0 = never.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        http=Protocol,
        ws="none",
        timeout_keep_alive=idle_s,
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
