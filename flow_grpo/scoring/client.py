"""Requests to reward servers: many in flight, repeated while a server is away, never longer than they may take.

One event loop, in a thread of its own, carries the requests of all servers.
"""

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any

import httpx

from flow_grpo.scoring.tokens import read_token

MAX_ANSWER_BYTES = 2**24
LONGEST_PAUSE_S = 5.0
SIGN_OF_LIFE_S = 30.0  # between two notices of one server, or of one wait
logging.getLogger("httpx").setLevel(logging.WARNING)  # it announces every request


class ServerError(RuntimeError):
    """A server refused a request, or was away for too long."""


def notice(text: str) -> None:
    """Say on the terminal, whatever the rank, what the run waits for."""
    rank = os.environ.get("RANK", "0")
    logging.getLogger(__name__).warning(text if rank == "0" else f"rank {rank}: {text}")


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Runs for as long as the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="reward requests").start()
    return loop


def authorization(token_file: str) -> dict[str, str]:
    """The header that holds the token; {} where there is none."""
    token = read_token(token_file)
    return {"Authorization": f"Bearer {token}"} if token else {}


class Server:
    """One server.

    Args:
        url: such as http://127.0.0.1:18087.
        token_file: holds what is sent as `Authorization: Bearer`; "" = the environment's REWARD_TOKEN, if any.
        in_flight: requests at once.
        timeout_s: of one request, from its first byte out to its last byte in.
        retry_s: for how long a request is repeated while the server is away, overloaded (429) or broken (5xx).
    """

    def __init__(
        self, url: str, token_file: str = "", in_flight: int = 64, timeout_s: float = 120.0, retry_s: float = 300.0
    ):
        self.url, self.timeout_s, self.retry_s = url.rstrip("/"), timeout_s, retry_s
        self.noticed_s = -math.inf  # when it was last said that the server is away
        headers = authorization(token_file)
        limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
        self.client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None, trust_env=False)
        self.slots = asyncio.Semaphore(in_flight)

    def post(self, path: str, parse: Callable[[bytes], Any], **request) -> Future:
        """POST; `parse` of the answer's body. request: content, json, data, files, headers of httpx.

        Raises, from result():
            ServerError: refused (4xx), too long an answer, or away for over retry_s.
            BadAnswer: from `parse`; such a request is not repeated.
        """
        return asyncio.run_coroutine_threadsafe(self._post(path, parse, request), event_loop())

    async def _post(self, path: str, parse: Callable, request: dict) -> Any:
        async with self.slots:
            started, pause = asyncio.get_running_loop().time(), 0.05
            while True:
                status, answer = await self._try(path, request)
                if status == 200:
                    return parse(answer)
                if 400 <= status < 500 and status != 429:
                    raise ServerError(
                        f"{self.url}{path} refused: HTTP {status} {answer[:200].decode(errors='replace')}"
                    )
                why = f"HTTP {status} {answer[:200].decode(errors='replace')}" if status else answer.decode()
                if asyncio.get_running_loop().time() + pause - started > self.retry_s:
                    raise ServerError(f"{self.url}{path} was away for over {self.retry_s:g} s; last: {why}")
                self._notice(status, why)
                await asyncio.sleep(pause * (1 - os.getpid() % 97 / 194))  # ranks do not come back all at once
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _notice(self, status: int, why: str) -> None:
        """Say that the server is away, at once and then now and again. A busy one (429) is not."""
        now = time.monotonic()
        if status != 429 and now - self.noticed_s >= SIGN_OF_LIFE_S:
            self.noticed_s = now
            notice(f"reward server {self.url}: {why}; each request is repeated for {self.retry_s:g} s")

    def was_noticed(self) -> bool:
        """Whether it has just been said that the server is away."""
        return time.monotonic() - self.noticed_s < SIGN_OF_LIFE_S + LONGEST_PAUSE_S

    async def _try(self, path: str, request: dict) -> tuple[int, bytes]:
        """Status and body; status 0 for a server that could not be reached or did not answer to the end."""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self.client.stream("POST", self.url + path, **request) as answer,
            ):
                body = bytearray()
                async for part in answer.aiter_raw():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise ServerError(f"{self.url}{path} answered with over {MAX_ANSWER_BYTES} bytes")
                return answer.status_code, bytes(body)
        except TimeoutError:
            return 0, f"no answer within {self.timeout_s:g} s".encode()
        except httpx.TransportError as error:
            return 0, f"{type(error).__name__} {error}".encode()
