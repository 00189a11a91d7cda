"""A reward file as a server: POST /score, GET /health. See wire.py for what is sent.

A request that is repeated (same Idempotency-Key) gets the first one's answer.
"""

import asyncio
import hmac
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor

from flow_grpo.reward_server.requests import Limits, Memory, read_job
from flow_grpo.rewards.clients.client import RETRY_S
from flow_grpo.rewards.clients.threads import Threads
from flow_grpo.rewards.scores import scores_of

REMEMBERED = 4096  # answers
DECODERS = 2  # threads that decode images
KEEP_ALIVE_S = 10  # of a connection without a request; longer than clients keep one
GRACE_S = 3  # for what is being scored when the server is stopped


class Rewarder:
    """The server of one reward: the thread that scores requests in their order, and the endpoints."""

    def __init__(self, name: str, score: Callable, limits: Limits, token: str):
        self.name, self.score, self.limits, self.token = name, score, limits, token.encode()
        self.memory, self.thread, self.decoders = Memory(limits.max_memory_bytes), Threads(1), Threads(DECODERS)
        self.answers = OrderedDict()  # Idempotency-Key -> its scores

    def _scores(self, images: list[Tensor], *rows: list) -> dict[str, list[float]]:
        scores = scores_of(self.name, self.score, torch.stack(images), *rows)
        return {name: values.tolist() for name, values in scores.items()}

    def is_allowed(self, request: Request) -> bool:
        header = request.headers.get("authorization", "").encode("latin-1")
        return not self.token or hmac.compare_digest(header, b"Bearer " + self.token)

    async def post_score(self, request: Request) -> JSONResponse:
        if not self.is_allowed(request):
            raise HTTPException(401, "wrong or no token")
        key = request.headers.get("idempotency-key") or None  # an empty one is none
        answer = self.answers.get(key) or await self._enter(request)
        if key is not None:
            self.answers[key] = answer
        try:
            return JSONResponse({"scores": await asyncio.shield(answer)})
        except ValueError as error:  # the reward refuses the input: trying again would not help
            raise HTTPException(422, str(error)) from error
        except asyncio.CancelledError as error:
            raise HTTPException(503, "the server is stopping") from error
        except Exception as error:
            self.answers.pop(key, None)
            raise HTTPException(500, f"{type(error).__name__}: {error}") from error
        finally:
            while len(self.answers) > REMEMBERED:
                self.answers.popitem(last=False)

    async def _enter(self, request: Request) -> asyncio.Future:
        """Put a request into the line; it holds memory until it has its scores."""
        try:
            job = await read_job(request, self.limits, self.memory, self.decoders)
        except BaseException:
            self.memory.release(request)
            raise
        scores = asyncio.wrap_future(self.thread.submit(self._scores, *job))
        scores.add_done_callback(lambda _: self.memory.release(request))
        return scores

    async def get_health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "waiting": len(self.memory.taken), "allowed": self.is_allowed(request)})


def make_app(name: str, score: Callable, limits: Limits, token: str = "") -> Starlette:
    """The server of one reward, whose `score` is loaded; `token` is what a request must bear, "" = nothing."""
    served = Rewarder(name, score, limits, token)
    routes = [Route("/score", served.post_score, methods=["POST"]), Route("/health", served.get_health)]
    return Starlette(routes=routes)


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
    """Listen until stopped, on any free port for port 0; `announce` gets the server's address once it listens."""
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
