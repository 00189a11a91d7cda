"""A reward file as a server: POST /score, GET /health, GET /version. See wire.py for what is sent.

Requests wait in line and are scored together, up to a batch size; a full line is answered with 429. A request that is
repeated (same Idempotency-Key) gets the first one's answer.
"""

import asyncio
import base64
import hmac
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.scoring.wire import unpack_image

PROTOCOL = 1
REMEMBERED = 4096  # answers


@dataclass(frozen=True)
class Limits:
    """What a server takes."""

    batch_size: int = 32  # images scored together
    max_delay_s: float = 0.01  # how long an image waits for others
    max_waiting: int = 4096  # images in line
    max_body_bytes: int = 2**28
    max_side: int = 4096  # pixels of an image


@dataclass
class Job:
    images: list[Tensor]
    prompts: list[str]
    metadata: list[dict]
    done: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Line:
    """Jobs in line, and the thread that scores them."""

    def __init__(self, score: Callable, limits: Limits):
        self.score, self.limits = score, limits
        self.queue, self.waiting, self.thread = asyncio.Queue(), 0, ThreadPoolExecutor(1)

    async def put(self, job: Job) -> dict[str, list[float]]:
        """Its scores. Raises HTTPException 429 where the line is full."""
        if self.waiting + len(job.images) > self.limits.max_waiting:
            raise HTTPException(429, "too many images are waiting")
        self.waiting += len(job.images)
        try:
            self.queue.put_nowait(job)
            return await job.done
        finally:
            self.waiting -= len(job.images)

    async def work(self) -> None:
        """Score what comes, for ever."""
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
        images, prompts, metadata = (
            [x for job in jobs for x in getattr(job, name)] for name in ("images", "prompts", "metadata")
        )
        loop = asyncio.get_running_loop()
        try:
            scores = await loop.run_in_executor(
                self.thread, run_score, self.score, torch.stack(images), prompts, metadata
            )
        except Exception as error:
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(
                        error if len(jobs) == 1 else RuntimeError(f"{type(error).__name__}: {error}")
                    )
            return
        start = 0
        for job in jobs:
            rows = slice(start, start + len(job.images))
            start = rows.stop
            if not job.done.done():
                job.done.set_result({name: values[rows] for name, values in scores.items()})


def run_score(score: Callable, images: Tensor, prompts: list[str], metadata: list[dict]) -> dict[str, list[float]]:
    """A reward's scores as lists of numbers. Raises ValueError unless they are one finite number per image."""
    scores = rewards.as_scores(score(images, prompts, metadata))
    return {name: rewards.checked(name, values, prompts).tolist() for name, values in scores.items()}


async def read_job(request: Request, limits: Limits) -> Job:
    """From JSON or multipart. Raises HTTPException 400, 413 or 422."""
    if int(request.headers.get("content-length", limits.max_body_bytes + 1)) > limits.max_body_bytes:
        raise HTTPException(413, f"a body needs a length, of at most {limits.max_body_bytes} bytes")
    try:
        if request.headers.get("content-type", "").startswith("multipart/"):
            async with request.form(max_files=limits.max_waiting, max_part_size=limits.max_body_bytes) as form:
                body = json.loads(form["request"])
                files = [await part.read() for part in form.getlist("images")]
        else:
            body = json.loads(await request.body())
            files = [base64.b64decode(image, validate=True) for image in body["images"]]
        prompts, metadata = body["prompts"], body.get("metadata") or [{}] * len(files)
        if not files or not len(files) == len(prompts) == len(metadata):
            raise ValueError(f"{len(files)} images, {len(prompts)} prompts, {len(metadata)} metadata")
        if not all(isinstance(p, str) for p in prompts) or not all(isinstance(m, dict) for m in metadata):
            raise ValueError("prompts are strings, metadata objects")
        images = [unpack_image(file, limits.max_side) for file in files]
        if len({image.shape for image in images}) > 1:
            raise ValueError("the images of a request have one size")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HTTPException(422, f"{type(error).__name__}: {error}") from error
    return Job(images, prompts, metadata)


class Rewarder:
    """The server of one reward; its methods are the endpoints."""

    def __init__(self, name: str, score: Callable, limits: Limits, token: str):
        self.name, self.limits, self.token = name, limits, token
        self.line, self.answers = (
            Line(score, limits),
            OrderedDict(),
        )  # Idempotency-Key -> its scores, or a task for them

    async def post_score(self, request: Request) -> JSONResponse:
        """Score, or say what is wrong."""
        if not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {self.token}") and self.token:
            raise HTTPException(401, "wrong or no token")
        key = request.headers.get("idempotency-key")
        if key is None or key not in self.answers:
            job = await read_job(request, self.limits)
            self.answers[key] = asyncio.ensure_future(self.line.put(job))
        answer = self.answers.pop(key) if key is None else self.answers[key]
        try:
            return JSONResponse({"scores": await asyncio.shield(answer)})
        except HTTPException:
            self.answers.pop(key, None)
            raise
        except ValueError as error:  # the reward refuses the input: trying again would not help
            raise HTTPException(422, str(error)) from error
        except Exception as error:
            self.answers.pop(key, None)
            raise HTTPException(500, f"{type(error).__name__}: {error}") from error
        finally:
            while len(self.answers) > REMEMBERED:
                self.answers.popitem(last=False)

    async def get_health(self, request: Request) -> JSONResponse:
        """That it lives."""
        return JSONResponse({"status": "ok", "waiting": self.line.waiting})

    async def get_version(self, request: Request) -> JSONResponse:
        """What it is."""
        return JSONResponse({"reward": self.name, "protocol": PROTOCOL, "torch": torch.__version__})


def make_app(name: str, score: Callable, limits: Limits = Limits(), token: str = "") -> Starlette:
    """The server of one reward, whose `score` is loaded.

    Args:
        token: what `Authorization: Bearer` must say; "" = nothing.
    """
    served = Rewarder(name, score, limits, token)

    @asynccontextmanager
    async def working(app):
        worker = asyncio.create_task(served.line.work())
        yield
        worker.cancel()

    routes = [
        Route("/score", served.post_score, methods=["POST"]),
        Route("/health", served.get_health),
        Route("/version", served.get_version),
    ]
    return Starlette(routes=routes, lifespan=working)


async def serve(app: Starlette, host: str, port: int, announce: Callable[[str], None], parent: int = 0) -> None:
    """Listen until stopped.

    Args:
        port: 0 = any that is free.
        announce: gets the server's address once it listens.
        parent: process id; when it is no longer this process's parent, the server ends. 0 = never.
    """
    config = uvicorn.Config(app, host=host, port=port, log_level="warning")
    socket, server = config.bind_socket(), uvicorn.Server(config)
    announce(f"http://{host}:{socket.getsockname()[1]}")

    async def watch() -> None:
        while parent and not server.should_exit:
            server.should_exit = os.getppid() != parent
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    await server.serve(sockets=[socket])
    watching.cancel()
