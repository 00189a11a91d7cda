"""Server of a reward file: POST /score and GET /health. The wire format is in flow_grpo/rewards/clients/wire.py.

A request that is repeated (same Idempotency-Key) gets the first one's answer.
"""

import asyncio
import hmac
import math
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from http.client import HTTPException as HTTPClientError
from typing import Any, NamedTuple

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor

from flow_grpo.reward_server.requests import Job, Limits, Memory, read_job
from flow_grpo.rewards import describe_error
from flow_grpo.rewards.clients.client import RETRY_S, is_of_the_network
from flow_grpo.rewards.clients.threads import Threads
from flow_grpo.rewards.scores import SomeFailed, join_scores, scores_of, takes_videos

REMEMBERED = 4096  # answers
DECODERS = 2  # threads that decode images
KEEP_ALIVE_S = 10  # time that a connection without a request stays; longer than clients keep one
GRACE_S = 3  # time that a request which is being scored has when the server is stopped
# Errors of the machine, its disk or its network, which may pass, or which a server on another machine may not have.
MACHINE_ERRORS = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, OSError, HTTPClientError)


class JobScores(NamedTuple):
    """Scores of a job's images."""

    scores: dict[str, Tensor]  # by name, [B] each; NaN for an image that has none
    error: str  # why an image has no score; "" where all have one

    def answer(self) -> dict[str, Any]:
        """Return the answer to the request, see flow_grpo/rewards/clients/wire.py."""
        answer: dict[str, Any] = {"scores": {name: as_json(values) for name, values in self.scores.items()}}
        if self.error:
            answer["error"] = self.error
        return answer


class JobFailed(NamedTuple):
    """Failure of a reward for all images of a job, in words: an error keeps the frames of its calls, and so images."""

    status: int  # of the answer
    error: str


def is_of_the_machine(error: BaseException | None) -> bool:
    """Return whether an error of a reward, or one that it was raised from, is of the machine or its network, not of the
    reward or its input. Libraries of services raise errors of their own from those of the network."""
    # `raise error from error` makes an error its own cause.
    seen = []
    while error is not None and error not in seen:
        if isinstance(error, MACHINE_ERRORS) or is_of_the_network(error):
            return True
        # The input is refused, whatever made that known, such as a file that is missing.
        if isinstance(error, ValueError):
            return False
        seen.append(error)
        error = error.__cause__
    return False


def failure_of(error: Exception) -> JobFailed:
    """Return what is answered after a reward's error."""
    if is_of_the_machine(error):
        return JobFailed(500, describe_error(error))
    # The reward refuses the input, or fails for it, and would do so again.
    if isinstance(error, ValueError):
        return JobFailed(422, str(error))
    return JobFailed(422, describe_error(error))


class Rewarder:
    """Endpoints of one reward's server, and the thread that scores requests in the order in which they come."""

    def __init__(self, name: str, score: Callable, limits: Limits, token: str):
        self.name = name
        self.score = score
        self.limits = limits
        self.token = token.encode()
        self.takes_videos = takes_videos(score)
        self.memory = Memory(limits.max_memory_bytes)
        self.thread = Threads(1)
        self.decoders = Threads(DECODERS)
        self.answers = OrderedDict()  # Idempotency-Key -> future JobScores or JobFailed

    def _score(self, job: Job) -> JobScores | JobFailed:
        """Score a job, in the scoring thread. Where the reward fails for all of its images together, each is scored
        alone, so that the others have a score."""
        try:
            return self._score_together(job)
        except Exception as error:
            failed = failure_of(error)
        # Only here what the failed call held is free again, such as the memory of a device that was full.
        if len(job.images) == 1:
            return failed
        scored = self._score_each(job)
        return failed if scored is None else scored

    def _score_together(self, job: Job) -> JobScores:
        """Score the images of a job by one call of the reward."""
        images = torch.stack(job.images)
        if self.takes_videos and images.ndim == 4:
            images = images[:, None]
        try:
            scores = scores_of(self.name, self.score, images, job.prompts, job.metadata, job.sources)
        # The other images keep their scores. What becomes of one without, the run decides.
        except SomeFailed as error:
            return JobScores(error.scores, str(error))
        return JobScores(scores, "")

    def _score_each(self, job: Job) -> JobScores | None:
        """Score each image of a job by a call of its own; return None if the reward fails for every one."""
        parts = []
        last_error = ""
        num_failed = 0
        for number in range(len(job.images)):
            try:
                scored = self._score_together(job.only(number))
            except Exception as error:
                num_failed += 1
                scored = JobScores({"score": torch.full((1,), torch.nan)}, describe_error(error))
            parts.append(scored.scores)
            last_error = scored.error or last_error
        if num_failed == len(job.images):
            return None
        return JobScores(join_scores(parts), last_error)

    def is_allowed(self, request: Request) -> bool:
        """Return whether a request bears the token, if there is one."""
        header = request.headers.get("authorization", "").encode("latin-1")
        # A comparison that takes as long for every wrong token.
        return not self.token or hmac.compare_digest(header, b"Bearer " + self.token)

    async def post_score(self, request: Request) -> JSONResponse:
        """Answer POST /score."""
        if not self.is_allowed(request):
            raise HTTPException(401, "wrong or no token")
        # An empty key is none.
        key = request.headers.get("idempotency-key") or None
        answer = self.answers.get(key) or await self._enter(request)
        if key is not None:
            self.answers[key] = answer
        try:
            # A client that leaves does not end the scoring, for whose result it may ask again.
            scored = await asyncio.shield(answer)
        except asyncio.CancelledError as error:
            raise HTTPException(503, "the server is stopping") from error
        finally:
            while len(self.answers) > REMEMBERED:
                self.answers.popitem(last=False)
        if isinstance(scored, JobScores):
            return JSONResponse(scored.answer())
        # What the machine failed at may do when it is asked for again.
        if scored.status >= 500:
            self.answers.pop(key, None)
        raise HTTPException(scored.status, scored.error)

    async def _enter(self, request: Request) -> asyncio.Future:
        """Put a request in the line and return its future outcome. It holds memory until it has them."""
        try:
            job = await read_job(request, self.limits, self.memory, self.decoders, self.takes_videos)
        except BaseException:
            self.memory.release(request)
            raise
        scores = asyncio.wrap_future(self.thread.submit(self._score, job))
        scores.add_done_callback(lambda _: self.memory.release(request))
        return scores

    async def get_health(self, request: Request) -> JSONResponse:
        """Answer GET /health, which needs no token."""
        takes = "videos" if self.takes_videos else "images"
        answer = {"status": "ok", "waiting": len(self.memory.taken), "allowed": self.is_allowed(request)}
        return JSONResponse(answer | {"takes": takes})


def as_json(values: Tensor) -> list[float | None]:
    """Return scores [B] as JSON has them, which has no NaN: None in its place."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def make_app(name: str, score: Callable, limits: Limits, token: str) -> Starlette:
    """Return the server of one reward, whose `score` is loaded; requests must bear the token, "" = none."""
    rewarder = Rewarder(name, score, limits, token)
    score_route = Route("/score", rewarder.post_score, methods=["POST"])
    health_route = Route("/health", rewarder.get_health)
    return Starlette(routes=[score_route, health_route])


def announce(name: str, url: str) -> None:
    """Print a server's address in the first line, for who started it, and how a run uses it."""
    # An address that listens everywhere is none that another machine can ask for.
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
    listener = config.bind_socket()
    listener.listen(socket.SOMAXCONN)
    # IPv6 addresses stand in brackets.
    name = f"[{host}]" if ":" in host else host
    announce(f"http://{name}:{listener.getsockname()[1]}")
    await uvicorn.Server(config).serve(sockets=[listener])
