"""Requests to reward servers: many in flight, repeated while a server is away, never longer than they may take.

One event loop, in a thread of its own, carries the requests of all servers.
"""

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.rewards.clients.threads import event_loop

MAX_ANSWER_BYTES = 2**24
IN_FLIGHT = 64  # requests at once, to each server
RETRY_S = 300.0  # for which a request is repeated while its server is away, overloaded (429) or broken (5xx)
LONGEST_PAUSE_S = 5.0
SIGN_OF_LIFE_S = 30.0  # between two notices of one server, or of one wait
ANSWERS = 3  # that are asked for while none has a score in it
EXCERPT = 400  # characters of an answer in a message
logging.getLogger("httpx").setLevel(logging.WARNING)  # it announces every request


class ServerError(RuntimeError):
    """A server refused a request, was away for too long, or gave no answer that can be read."""


def excerpt(answer: bytes) -> str:
    """An answer in a message: its beginning, and its end, where a traceback has the error."""
    if answer.startswith(b"\x1f\x8b"):
        return f"{len(answer)} bytes of gzip, which was not asked for"
    text = in_one_line(answer.decode(errors="replace"), len(answer) + 1)
    if len(text) <= EXCERPT:
        return text
    return f"{text[: EXCERPT // 4]} ... {text[-(EXCERPT - EXCERPT // 4) :]}"


def print_notice(text: str) -> None:
    """Say on the terminal, whatever the rank, what the run waits for."""
    rank, text = os.environ.get("RANK", "0"), in_one_line(text)
    logging.getLogger(__name__).warning(text if rank == "0" else f"rank {rank}: {text}")


def urls_of(url: str | list[str]) -> list[str]:
    """The servers of one reward: an address, or a list of them."""
    return list(url) if isinstance(url, list | tuple) else [url]


def read_token(file: str = "") -> str:
    """The secret that servers and clients share, which no config or command line holds: both are stored. The first line
    of a file, or else the environment's REWARD_TOKEN; "" = none. Raises UserError, which does not show it: the file
    cannot be read, or holds no token."""
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


class Server:
    """One server, or several that score alike: requests go to them in turn, and on to the next one while one is away.

    Args:
        url: such as http://127.0.0.1:18087, or a list of such.
        token_file: holds what is sent as `Authorization: Bearer`; "" = the environment's REWARD_TOKEN, if any.
        timeout_s: of one request, from its first byte out to its last byte in.
    """

    def __init__(self, url: str | list[str], token_file: str = "", timeout_s: float = 120.0):
        self.urls, self.timeout_s, self.retry_s = [part.rstrip("/") for part in urls_of(url)], timeout_s, RETRY_S
        self.turns = itertools.count(int(os.environ.get("RANK", "0")))  # ranks that draw in step ask different ones
        in_flight = IN_FLIGHT * len(self.urls)
        self.noticed_s = dict.fromkeys(self.urls, -math.inf)  # when it was last said that a server is away
        self.away_s = dict.fromkeys(self.urls, -math.inf)  # when a server was last found to be away
        token = read_token(token_file)
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
        self.client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None, trust_env=False)
        self.slots = asyncio.Semaphore(in_flight)

    def post(self, path: str, parse: Callable[[bytes], Any], **request) -> Future:
        """POST; `parse` of the answer's body. request: content, json, data, files, headers of httpx.

        Raises, from result():
            ServerError: refused (3xx, 4xx), too long an answer, or all servers away for over retry_s. What `parse`
                raises comes, too, where it raises it for each of ANSWERS answers.
        """
        return asyncio.run_coroutine_threadsafe(self._post(path, parse, request), event_loop("reward requests"))

    def health(self, url: str) -> bytes:
        """What one of the servers answers to GET /health, whatever its status. Raises ServerError where none comes."""
        asking = self._try("GET", url + "/health", {})
        status, answer = asyncio.run_coroutine_threadsafe(asking, event_loop("reward requests")).result()
        if not status:
            raise ServerError(f"no answer from {url}: {answer.decode()}")
        return answer

    async def _post(self, path: str, parse: Callable, request: dict) -> Any:
        async with self.slots:
            for number in range(1, ANSWERS + 1):
                answer = await self._answer(path, request)
                try:
                    return parse(answer)
                except (ServerError, UserError):
                    if number == ANSWERS:
                        raise

    async def _answer(self, path: str, request: dict) -> bytes:
        """The body of an answer with status 200, whatever it holds. Raises ServerError: refused, or none is there."""
        started, pause = time.monotonic(), 0.05
        for turn in itertools.count(next(self.turns)):
            url = self._choose(turn)
            status, answer = await self._try("POST", url + path, request)
            if status == 200:
                self.away_s[url] = -math.inf
                return answer
            why = f"HTTP {status} {excerpt(answer)}" if status else answer.decode()
            if 300 <= status < 500 and status != 429:
                raise ServerError(f"{url}{path} refused: {why}")
            if time.monotonic() + pause - started > self.retry_s:
                raise ServerError(f"{url}{path} was away for over {self.retry_s:g} s; last: {why}")
            if status != 429:  # a busy one is not away
                self._set_aside(url, why)
                if self._is_there(self._choose(turn + 1)):
                    continue
            await asyncio.sleep(pause * (1 - os.getpid() % 97 / 194))  # ranks do not come back all at once
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _choose(self, turn: int) -> str:
        """The server whose turn it is, or the next one that is there; where none is, each is asked in its turn."""
        start = turn % len(self.urls)
        rotated = self.urls[start:] + self.urls[:start]
        return next(filter(self._is_there, rotated), rotated[0])

    def _is_there(self, url: str) -> bool:
        return time.monotonic() - self.away_s[url] >= SIGN_OF_LIFE_S

    def _set_aside(self, url: str, why: str) -> None:
        """Note that a server is away, and say so, at once and then now and again."""
        now = time.monotonic()
        self.away_s[url] = now
        if now - self.noticed_s[url] >= SIGN_OF_LIFE_S:
            self.noticed_s[url] = now
            print_notice(f"reward server {url}: {why}; each request is repeated for {self.retry_s:g} s")

    async def _try(self, method: str, url: str, request: dict) -> tuple[int, bytes]:
        """Status and body; status 0 for a server that could not be reached or did not answer to the end."""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self.client.stream(method, url, **request) as answer,
            ):
                body = bytearray()
                async for part in answer.aiter_raw():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise ServerError(f"{url} answered with over {MAX_ANSWER_BYTES} bytes")
                return answer.status_code, bytes(body)
        except TimeoutError:
            return 0, f"no answer within {self.timeout_s:g} s".encode()
        except httpx.TransportError as error:
            return 0, f"{type(error).__name__} {error}".encode()
