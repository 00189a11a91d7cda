"""One reward, computed in this process or by a server."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.quoting import quoted
from flow_grpo.scoring import wire
from flow_grpo.scoring.client import Server
from flow_grpo.scoring.processes import start_server
from flow_grpo.scoring.settings import RewardSettings, split_settings


class RewardFailed(RuntimeError):
    """A reward that must not fail did; says which, where and for which prompt."""


class Scorer:
    """What the two kinds of scorers share: the reward's settings, and what becomes of a failure.

    Both have `send(images, prompts, metadata) -> Future` of the scores by name, each [B], and `close()`.
    """

    def __init__(self, name: str, settings: RewardSettings, address: str):
        self.name, self.settings, self.address, self.last_error = name, settings, address, ""

    def receive(self, future: Future, prompts: list[str]) -> dict[str, Tensor]:
        """Scores of one request, NaN if it failed and may.

        Raises:
            RewardFailed: it failed and must not.
        """
        try:
            return future.result()
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"
            if self.settings.on_failure == "mask":
                return {"score": torch.full((len(prompts),), torch.nan)}
            message = f"reward {self.name!r} ({self.address}): {error}; first prompt: {quoted(prompts[0])}"
            raise RewardFailed(message) from error


def make_scorer(name: str, device: torch.device, settings) -> "LocalScorer | RemoteScorer":
    """The scorer of a reward; loads its model or starts its process.

    Args:
        settings: config.reward.
    """
    reward, options = split_settings(name, settings)
    if reward.url:
        return RemoteScorer(name, reward, reward.url, lambda: None)
    if reward.backend == "process":
        address, stop = start_server(name, reward.device or str(device), options, reward.batch_size)
        return RemoteScorer(name, reward, address, stop)
    score = rewards.load(name, torch.device(reward.device or device), options)
    return LocalScorer(name, reward, score, device)


class LocalScorer(Scorer):
    """A reward of this process: at once, or in threads of its own (backend "thread").

    Args:
        device: the rank's own, on which images are drawn.
    """

    def __init__(self, name: str, settings: RewardSettings, score: Callable, device: torch.device):
        super().__init__(name, settings, settings.backend)
        self.score, self.threads, self.stream = score, None, None
        if settings.backend == "thread":
            # A second thread's team of OpenMP threads would halve the speed of the first one's on a CPU.
            workers = settings.in_flight if rewards.is_service(name) else 1
            self.threads = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
            self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Future:
        """Begin to score."""
        drawn = torch.cuda.Event() if images.is_cuda else None
        if drawn:
            drawn.record()
        if self.threads:
            return self.threads.submit(self._score, images, prompts, metadata, drawn)
        future = Future()
        try:
            future.set_result(self._score(images, prompts, metadata, drawn))
        except Exception as error:
            future.set_exception(error)
        return future

    @torch.no_grad()
    def _score(
        self, images: Tensor, prompts: list[str], metadata: list[dict], drawn: torch.cuda.Event | None
    ) -> dict[str, Tensor]:
        with torch.cuda.stream(self.stream):  # None = the present one
            if drawn:
                drawn.wait()
                images.record_stream(torch.cuda.current_stream())
            try:
                scores = rewards.as_scores(self.score(images, prompts, metadata))
                return {key: rewards.checked(self.name, values, prompts) for key, values in scores.items()}
            except Exception as error:
                if self.settings.on_failure == "fail" or len(prompts) == 1:
                    raise
                self.last_error = f"{type(error).__name__}: {error}"
        rows = [slice(i, i + 1) for i in range(len(prompts))]  # which image is it?
        return {"score": torch.cat([self._masked(images[row], prompts[row], metadata[row], drawn) for row in rows])}

    def _masked(self, image: Tensor, prompt: list[str], metadata: list[dict], drawn: torch.cuda.Event | None) -> Tensor:
        try:
            return self._score(image, prompt, metadata, drawn)["score"]
        except Exception:
            return torch.full((1,), torch.nan)

    def close(self) -> None:
        """Stop the threads."""
        if self.threads:
            self.threads.shutdown(wait=False, cancel_futures=True)


class RemoteScorer(Scorer):
    """A reward behind a server of ours.

    Args:
        stop: ends the server, if this run started it.
    """

    def __init__(self, name: str, settings: RewardSettings, address: str, stop: Callable[[], None]):
        super().__init__(name, settings, address)
        limits = settings.in_flight, settings.timeout_s, settings.retry_s
        self.server, self.bounds, self.close = Server(address, settings.token, *limits), rewards.bounds(name), stop

    def send(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Future:
        """Post a request, whose key lets the server know a repeated one."""
        request, suffix = json.dumps({"prompts": prompts, "metadata": metadata}), self.settings.image_format
        files = [wire.pack_image(image, suffix) for image in images.cpu()]
        key = hashlib.blake2b(b"".join([request.encode(), *files]), digest_size=16).hexdigest()
        uploads = [("images", (f"{i}.{suffix}", file, wire.TYPES[suffix])) for i, file in enumerate(files)]

        def parse(body: bytes) -> dict[str, Tensor]:
            return wire.read_scores(_json(body), len(prompts), self.bounds)

        headers = {"Idempotency-Key": key}
        return self.server.post("/score", parse, data={"request": request}, files=uploads, headers=headers)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise wire.BadAnswer(f"no JSON but {body[:80]!r}") from error
