"""A reward file as a server: POST /score, GET /health. See wire.py for what is sent.

Requests wait in line and are scored together, up to a batch size. A request that is repeated (same Idempotency-Key)
gets the first one's answer.
"""

import asyncio
import hmac
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from flow_grpo.base.threads import Threads
from flow_grpo.reward_server.requests import Job, Limits, Memory, read_job
from flow_grpo.rewards.clients.client import RETRY_S
from flow_grpo.rewards.scores import scores_of

REMEMBERED = 4096  # answers
DECODERS = 2  # threads that decode images
KEEP_ALIVE_S = 10  # of a connection without a request; longer than clients keep one
GRACE_S = 3  # for what is being scored when the server is stopped


class Rewarder:
    """The server of one reward: jobs in line, the thread that scores them, and the endpoints."""

    def __init__(self, name: str, score: Callable, limits: Limits, token: str):
        self.name, self.score, self.limits, self.token = name, score, limits, token.encode()
        self.queue, self.thread = asyncio.Queue(), Threads(1)
        self.memory, self.decoders = Memory(limits.max_memory_bytes), Threads(DECODERS)
        self.answers = OrderedDict()  # Idempotency-Key -> its scores

    async def work(self) -> None:
        while True:
            jobs = [await self.queue.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.max_delay_s):
                    while sum(len(job.images) for job in jobs) < self.limits.batch_size:
                        jobs.append(await self.queue.get())
            sizes = {job.images[0].shape for job in jobs}
            for same_size in ([job for job in jobs if job.images[0].shape == size] for size in sizes):
                await self._score(same_size)

    async def _score(self, jobs: list[Job]) -> None:
        try:
            scores = await asyncio.wrap_future(self.thread.submit(self._call, jobs))
        except Exception as error:
            for job in jobs:
                job.done.set_exception(error if len(jobs) == 1 else RuntimeError(f"{type(error).__name__}: {error}"))
            return
        start = 0
        for job in jobs:
            rows = slice(start, start + len(job.images))
            start = rows.stop
            job.done.set_result({name: values[rows] for name, values in scores.items()})

    def _call(self, jobs: list[Job]) -> dict[str, list[float]]:
        images, prompts, metadata, sources = (
            [x for job in jobs for x in getattr(job, name)] for name in ("images", "prompts", "metadata", "sources")
        )
        scores = scores_of(self.name, self.score, torch.stack(images), prompts, metadata, sources)
        return {name: values.tolist() for name, values in scores.items()}

    def is_allowed(self, request: Request) -> bool:
        header = request.headers.get("authorization", "").encode("latin-1")
        return not self.token or hmac.compare_digest(header, b"Bearer " + self.token)

    async def post_score(self, request: Request) -> JSONResponse:
        if not self.is_allowed(request):
            raise HTTPException(401, "wrong or no token")
        key = request.headers.get("idempotency-key")
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
        job.done.add_done_callback(lambda _: self.memory.release(request))
        self.queue.put_nowait(job)
        return job.done

    async def get_health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "waiting": self.queue.qsize(), "allowed": self.is_allowed(request)})


def make_app(name: str, score: Callable, limits: Limits, token: str = "") -> Starlette:
    """The server of one reward, whose `score` is loaded.

    Args:
        token: what `Authorization: Bearer` must say; "" = nothing.
    """
    served = Rewarder(name, score, limits, token)

    @asynccontextmanager
    async def working(app):
        worker = asyncio.create_task(served.work())
        yield
        worker.cancel()

    routes = [Route("/score", served.post_score, methods=["POST"]), Route("/health", served.get_health)]
    return Starlette(routes=routes, lifespan=working)


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
