"""Requests to reward servers: many in flight, repeated while a server is away, each with a time limit.

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

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.rewards.clients.threads import event_loop

MAX_ANSWER_BYTES = 2**24
IN_FLIGHT = 64  # requests at once, to each server
RETRY_S = 300.0  # for which a request is repeated while its server is away, overloaded (429) or broken (5xx)
LONGEST_PAUSE_S = 5.0
SIGN_OF_LIFE_S = 30.0  # between two notices of one server, or of one wait
ANSWERS = 3  # that are asked for while none can be read
EXCERPT = 400  # characters of an answer in a message

# httpx logs every request.
logging.getLogger("httpx").setLevel(logging.WARNING)


class ServerError(RuntimeError):
    """Refusal of a request, an answer that cannot be read, or a server that was away for too long (ServerAway)."""


class ServerAway(ServerError):
    """Server that was away for too long, and may be there later."""


def is_of_the_network(error: BaseException) -> bool:
    """Return whether a service that was asked through httpx, or by a Server, was away, overloaded or broken."""
    if isinstance(error, httpx.HTTPStatusError):
        return may_pass(error.response.status_code)
    return isinstance(error, httpx.TransportError | ServerAway)


def may_pass(status: int) -> bool:
    """Return whether a server with this status is overloaded (429) or broken (5xx), not one that refuses."""
    return status == 429 or status >= 500


def excerpt(answer: bytes) -> str:
    """Return an answer for a message: its beginning, and its end, where a traceback has the error."""
    # The first bytes of a gzip file.
    if answer.startswith(b"\x1f\x8b"):
        return f"{len(answer)} bytes of gzip, which was not asked for"
    text = in_one_line(answer.decode(errors="replace"), len(answer) + 1)
    if len(text) <= EXCERPT:
        return text
    num_first = EXCERPT // 4
    num_last = EXCERPT - num_first
    return f"{text[:num_first]} ... {text[-num_last:]}"


def print_notice(text: str) -> None:
    """Print on the terminal, on any rank, what the run waits for."""
    rank = os.environ.get("RANK", "0")
    line = in_one_line(text)
    logging.getLogger(__name__).warning(line if rank == "0" else f"rank {rank}: {line}")


def urls_of(url: str | list[str]) -> list[str]:
    """Return the addresses of one reward's servers, given as one address or as a list."""
    return list(url) if isinstance(url, list | tuple) else [url]


def is_ok(status: int, body: bytes) -> bool:
    """Return whether an answer has the status of one that is to be parsed."""
    return status == 200


def read_token(file: str) -> str:
    """Return the secret that servers and clients share: first line of a file, or else REWARD_TOKEN; "" = none.

    No config or command line holds it, since both are stored. Raise UserError, which does not show it, if the file
    cannot be read or holds no token.
    """
    token = os.environ.get("REWARD_TOKEN", "")
    place = "the environment's REWARD_TOKEN"
    if file:
        place = f"token_file {quoted(file)}"
        problem = folders.file_problem(Path(file))
        if problem:
            raise UserError(f"no token in {place}: it {problem}")
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
    """Client of one server, or of several that score alike: they are asked in turn, without those that are away.

    Args:
        url: address such as http://127.0.0.1:18087, or a list of addresses.
        token_file: file whose first line is sent as `Authorization: Bearer`; "" = REWARD_TOKEN, if it is set.
        timeout_s: limit of one request, from its first byte out to its last byte in.
        is_answer: (status, body) -> whether it is to be parsed, for a protocol whose statuses say less.
    """

    def __init__(
        self,
        url: str | list[str],
        token_file: str = "",
        timeout_s: float = 120.0,
        is_answer: Callable[[int, bytes], bool] = is_ok,
    ):
        self.is_answer = is_answer
        self.urls = [address.rstrip("/") for address in urls_of(url)]
        self.timeout_s = timeout_s
        self.retry_s = RETRY_S
        self.noticed_s = dict.fromkeys(self.urls, -math.inf)  # time of the last notice that a server is away
        self.away_s = dict.fromkeys(self.urls, -math.inf)  # time at which a server was last found to be away

        # Ranks send their requests in step. Each begins with another server.
        self.turns = itertools.count(int(os.environ.get("RANK", "0")))

        # Compressed answers would need a limit of their own.
        headers = {"Accept-Encoding": "identity"}
        token = read_token(token_file)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        in_flight = IN_FLIGHT * len(self.urls)
        limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
        self.client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None, trust_env=False)
        self.slots = asyncio.Semaphore(in_flight)

    def post(self, path: str, parse: Callable[[bytes], Any], **request: Any) -> Future:
        """Send a POST request and return the future result of `parse` of the answer's body.

        Args:
            request: content, json, data, files or headers of httpx.

        Raises, from result():
            ServerError: refused (3xx, 4xx), or too long an answer.
            ServerAway: all servers away for over retry_s.
            Any error of `parse`, if it raises a ServerError or UserError for each of ANSWERS answers, or another one.
        """
        return asyncio.run_coroutine_threadsafe(self._post(path, parse, request), event_loop("reward requests"))

    def health(self, url: str) -> bytes:
        """Return a server's answer to GET /health, whatever its status. Raise ServerError if none comes."""
        asking = self._try("GET", url + "/health", {})
        status, answer = asyncio.run_coroutine_threadsafe(asking, event_loop("reward requests")).result()
        if not status:
            raise ServerError(f"no answer from {url}: {answer.decode()}")
        return answer

    async def _post(self, path: str, parse: Callable[[bytes], Any], request: dict[str, Any]) -> Any:
        """Return `parse` of the first answer that it can read."""
        async with self.slots:
            for number in range(1, ANSWERS + 1):
                answer = await self._answer(path, request)
                try:
                    return parse(answer)
                except (ServerError, UserError):
                    if number == ANSWERS:
                        raise

    async def _answer(self, path: str, request: dict[str, Any]) -> bytes:
        """Return the body of an answer to be parsed. Raise ServerError if a server refuses, or none is there."""
        started = time.monotonic()
        pause = 0.05
        turns = itertools.count(next(self.turns))
        while True:
            turn = next(turns)
            url = self._choose(turn)
            status, answer = await self._try("POST", url + path, request)
            if self.is_answer(status, answer):
                self.away_s[url] = -math.inf
                return answer
            problem = f"HTTP {status} {excerpt(answer)}" if status else answer.decode()
            if status >= 300 and not may_pass(status):
                raise ServerError(f"{url}{path} refused: {problem}")
            if time.monotonic() + pause - started > self.retry_s:
                raise ServerAway(f"{url}{path} was away for over {self.retry_s:g} s; last: {problem}")
            # A busy server (429) is not away.
            if status != 429:
                self._set_aside(url, problem)
                # Another server is asked at once.
                if self._is_there(self._choose(turn + 1)):
                    continue
            # Each process pauses for another time, so that ranks do not come back all at once.
            await asyncio.sleep(pause * (1 - os.getpid() % 97 / 194))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _choose(self, turn: int) -> str:
        """Return the server whose turn it is, or the next one that is there. If none is, each is asked in its turn."""
        start = turn % len(self.urls)
        for url in self.urls[start:] + self.urls[:start]:
            if self._is_there(url):
                return url
        return self.urls[start]

    def _is_there(self, url: str) -> bool:
        """Return whether a server was not found to be away of late."""
        return time.monotonic() - self.away_s[url] >= SIGN_OF_LIFE_S

    def _set_aside(self, url: str, problem: str) -> None:
        """Note that a server is away, and print a notice at once and then every SIGN_OF_LIFE_S."""
        now = time.monotonic()
        self.away_s[url] = now
        if now - self.noticed_s[url] >= SIGN_OF_LIFE_S:
            self.noticed_s[url] = now
            print_notice(f"reward server {url}: {problem}; each request is repeated for {self.retry_s:g} s")

    async def _try(self, method: str, url: str, request: dict[str, Any]) -> tuple[int, bytes]:
        """Return status and body; status 0 and the reason for a server that did not answer, or not to the end."""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self.client.stream(method, url, **request) as answer,
            ):
                body = bytearray()
                async for chunk in answer.aiter_raw():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise ServerError(
                            f"{url} answered with over {MAX_ANSWER_BYTES} bytes, too many for scores; check the address"
                        )
                return answer.status_code, bytes(body)
        except TimeoutError:
            return 0, f"no answer within {self.timeout_s:g} s".encode()
        except httpx.TransportError as error:
            return 0, f"{type(error).__name__} {error}".encode()
