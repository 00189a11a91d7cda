"""Scores of several rewards, made while other images are drawn. An update waits for all of its epoch's.

Each reward has a backend: "inline" (at once), "thread" (of this process), "process" (a server that the main rank starts
on a device of its own, for all ranks) or, where it has a `url`, a server that is there. Images are cut into requests of
a fixed size in the order in which they come, so that no score depends on how fast anything was.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.scoring import wire
from flow_grpo.scoring.client import Server
from flow_grpo.scoring.processes import start_server

OWN = (  # settings of config.reward that config.reward.args.NAME may set for one reward
    *("backend", "device", "batch_size", "in_flight", "timeout_s", "retry_s", "on_failure", "max_masked_share"),
    *("url", "token", "image_format"),
)


def check_rewards(weights: Mapping[str, float], watched: Iterable[str], settings) -> None:
    """Raises ValueError for what cannot be meant, or a server that does not answer. Loads no model.

    Args:
        settings: config.reward.
    """
    args = settings.args.to_dict()
    served = [name for name, own in args.items() if own.get("url") and not rewards.is_service(name)]
    rewards.check_rewards(weights, watched, served)
    for name in {**weights, **dict.fromkeys(watched)}:
        args.pop(name, None)
        own, options = split_settings(name, settings)
        _check_choices(name, own)
        if name in served:
            _check_server(name, own["url"], options)
        else:
            rewards.check_options(name, options)
    if args:
        raise ValueError(
            f"config.reward.args.{next(iter(args))}: that reward is not in config.reward_fn or eval.rewards"
        )


def split_settings(name: str, settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.reward says of a reward, and the options of its `load`."""
    given = settings.args.get(name, {})
    own = {key: settings.get(key) for key in OWN} | {key: value for key, value in given.items() if key in OWN}
    options = {key: value for key, value in given.items() if key not in OWN}
    if rewards.is_service(name):  # it has a server of its own kind, and a request per image
        options |= {key: own[key] for key in rewards.CONNECTION}
        options |= {"url": given["url"]} if "url" in given else {}
        own |= {"url": "", "batch_size": given.get("batch_size", 1)}
    return own, options


def _check_choices(name: str, own: dict[str, Any]) -> None:
    choices = dict(backend=("inline", "thread", "process"), on_failure=("fail", "mask"), image_format=("npy", "png"))
    for key, allowed in choices.items():
        if own.get(key, allowed[0]) not in allowed:
            raise ValueError(f"config.reward.args.{name}.{key} is {own[key]!r}; it may be {str(allowed)[1:-1]}")


def _check_server(name: str, url: str, options: dict) -> None:
    where = f"config.reward.args.{name}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{where}.url is {url!r}; it begins with http:// or https://")
    if options:
        raise ValueError(f"{where}: {', '.join(options)} unknown, or for the server to know")
    try:
        httpx.get(url.rstrip("/") + "/health", timeout=10, trust_env=False)
    except httpx.HTTPError as error:
        raise ValueError(f"{where}: no answer from {url}: {error}") from error


class RewardFailed(RuntimeError):
    """A reward that must not fail did; says which, where and for which prompt."""


class Clock:
    """Seconds in which at least one image was being scored."""

    def __init__(self):
        self.lock, self.outstanding, self.since, self.busy_s = threading.Lock(), 0, 0.0, 0.0

    def start(self) -> None:
        """A request has left."""
        with self.lock:
            self.outstanding += 1
            self.since = time.perf_counter() if self.outstanding == 1 else self.since

    def stop(self, _=None) -> None:
        """One has come back."""
        with self.lock:
            self.outstanding -= 1
            self.busy_s += time.perf_counter() - self.since if self.outstanding == 0 else 0.0

    def pop(self) -> float:
        """The seconds since the last pop."""
        with self.lock:
            busy, self.busy_s = self.busy_s, 0.0
        return busy


class Pending:
    """Scores of B images that are being made."""

    def __init__(self, finish: Callable[[], dict[str, Tensor]]):
        self.finish, self.scores = finish, None

    def result(self) -> dict[str, Tensor]:
        """name -> [B] float32 on the CPU, with "avg", the weighted sum. NaN where a reward failed that may.

        Raises:
            RewardFailed: a reward failed that must not.
        """
        if self.scores is None:
            self.scores, self.finish = self.finish(), None
        return self.scores


class Pool:
    """The rewards of a run.

    Args:
        device: the rank's own.
        weights: reward -> its weight in the average.
        watched: rewards that `submit(..., everything=True)` scores, too.
        settings: config.reward.
    """

    def __init__(self, device: torch.device, weights: Mapping[str, float], watched: Iterable[str], settings):
        self.weights, self.clock = dict(weights), Clock()
        self.room = threading.Semaphore(settings.max_pending)
        self.max_pending = settings.max_pending
        self.scorers = {name: Scorer(name, device, settings) for name in dict.fromkeys([*weights, *watched])}

    def submit(self, images: Tensor, prompts: list[str], metadata: list[dict], everything: bool = False) -> Pending:
        """Begin to score B images [B, 3, H, W] in [0, 1]; waits only while max_pending images are under way."""
        images, names = images.detach(), list(self.scorers) if everything else list(self.weights)
        requests = {name: [] for name in names}
        for name in names:
            scorer = self.scorers[name]
            for start in range(0, len(prompts), scorer.batch_size):
                rows = slice(start, start + scorer.batch_size)
                requests[name].append((self._send(scorer, images[rows], prompts[rows], metadata[rows]), prompts[rows]))
        return Pending(partial(self._collect, requests))

    def _send(self, scorer: "Scorer", images: Tensor, prompts: list[str], metadata: list[dict]) -> Future:
        taken = min(len(prompts), self.max_pending)
        for _ in range(taken):
            self.room.acquire()
        self.clock.start()
        future = scorer.send(images, prompts, metadata)
        future.add_done_callback(lambda _: (self.clock.stop(), self.room.release(taken)))
        return future

    def _collect(self, requests: dict[str, list[tuple[Future, list[str]]]]) -> dict[str, Tensor]:
        scores = {}
        for name, sent in requests.items():
            parts = [self.scorers[name].receive(future, prompts) for future, prompts in sent]
            keys = next((part for part in parts if len(part) > 1), parts[0])
            for key in keys:
                column = [part.get(key, torch.full_like(part["score"], torch.nan)) for part in parts]
                scores[name if key == "score" else f"{name}_{key}"] = torch.cat(column)
        scores["avg"] = sum(weight * scores[name] for name, weight in self.weights.items())
        return scores

    def masked_shares(self, scores: dict[str, Tensor]) -> dict[str, float]:
        """Of an epoch's images those without a score, for each reward that may fail.

        Raises:
            RewardFailed: more than there may be.
        """
        shares = {}
        for name, scorer in self.scorers.items():
            if scorer.on_failure == "mask" and name in scores:
                shares[name] = scores[name].isnan().double().mean().item()
                if shares[name] > scorer.max_masked_share:
                    raise RewardFailed(
                        f"reward {name!r} ({scorer.where}) failed for {shares[name]:.1%} of an epoch's images; "
                        f"reward.max_masked_share is {scorer.max_masked_share}; last: {scorer.last_error}"
                    )
        return shares

    def close(self) -> None:
        """Stop the threads and the servers that this pool started."""
        for scorer in self.scorers.values():
            scorer.close()


class Scorer:
    """One reward, wherever it is."""

    def __init__(self, name: str, device: torch.device, settings):
        own, options = split_settings(name, settings)
        self.name, self.batch_size, self.on_failure = name, own["batch_size"], own["on_failure"]
        self.max_masked_share, self.where = own["max_masked_share"], own["backend"]
        self.closers, self.threads, self.stream, self.last_error = [], None, None, ""
        if own["url"] or own["backend"] == "process":
            self._connect(own, options, device)
        else:
            self.score = rewards.load(name, torch.device(own["device"] or device), options)
            self.send = self._send_here
            if own["backend"] == "thread":
                # A second thread's team of OpenMP threads would halve the speed of the first one's on a CPU.
                workers = own["in_flight"] if rewards.is_service(name) else 1
                self.threads = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
                self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _connect(self, own: dict[str, Any], options: dict, device: torch.device) -> None:
        url = own["url"]
        if not url:
            url, close = start_server(self.name, own["device"] or str(device), options, own["batch_size"])
            self.closers.append(close)
        how = {key: own[key] for key in ("token", "in_flight", "timeout_s", "retry_s")}
        self.server, self.where, self.form = Server(url, **how), url, own["image_format"]
        self.bounds, self.send = rewards.bounds(self.name), self._send_away

    def _send_away(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Future:
        request = json.dumps({"prompts": prompts, "metadata": metadata})
        files = [wire.pack_image(image, self.form) for image in images.cpu()]
        key = hashlib.blake2b(b"".join([request.encode(), *files]), digest_size=16).hexdigest()
        parts = [("images", (f"{i}.{self.form}", file, wire.TYPES[self.form])) for i, file in enumerate(files)]
        parse = lambda body: wire.read_scores(_json(body), len(prompts), self.bounds)  # noqa: E731
        return self.server.post(
            "/score", parse, data={"request": request}, files=parts, headers={"Idempotency-Key": key}
        )

    def _send_here(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Future:
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
    def _score(self, images: Tensor, prompts: list[str], metadata: list[dict], drawn) -> dict[str, Tensor]:
        with torch.cuda.stream(self.stream):  # None = the present one
            if drawn:
                drawn.wait()
                images.record_stream(torch.cuda.current_stream())
            try:
                scores = rewards.as_scores(self.score(images, prompts, metadata))
                return {key: rewards.checked(self.name, values, prompts) for key, values in scores.items()}
            except Exception as error:
                if self.on_failure == "fail" or len(prompts) == 1:
                    raise
                self.last_error = f"{type(error).__name__}: {error}"
        rows = [slice(i, i + 1) for i in range(len(prompts))]  # which image is it?
        alone = [self._masked(images[row], prompts[row], metadata[row], drawn) for row in rows]
        return {"score": torch.cat(alone)}

    def _masked(self, *row) -> Tensor:
        try:
            return self._score(*row)["score"]
        except Exception:
            return torch.full((1,), torch.nan)

    def receive(self, future: Future, prompts: list[str]) -> dict[str, Tensor]:
        """Scores of one request, NaN if it failed and may."""
        try:
            return future.result()
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"
            if self.on_failure == "mask":
                return {"score": torch.full((len(prompts),), torch.nan)}
            raise RewardFailed(f"reward {self.name!r} ({self.where}): {error}; first prompt: {prompts[0]!r}") from error

    def close(self) -> None:
        """Stop what belongs to this reward."""
        for close in self.closers:
            close()
        if self.threads:
            self.threads.shutdown(wait=False, cancel_futures=True)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise wire.BadAnswer(f"no JSON but {body[:80]!r}") from error
