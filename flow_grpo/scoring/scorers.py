"""One reward, computed in this process or by a server."""

import inspect
import json
import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.base.errors import RunFailed, UserError
from flow_grpo.base.formatting import counted, in_one_line, quoted
from flow_grpo.base.pixels import from_picture
from flow_grpo.base.prompt import Prompt, texts_of
from flow_grpo.rewards.clients import client, wire
from flow_grpo.rewards.clients.client import Server, ServerError, urls_of
from flow_grpo.rewards.clients.threads import Threads
from flow_grpo.rewards.scores import (
    CLIPPED,
    SomeFailed,
    checked_scores,
    clip_to_range,
    join_scores,
    scores_of,
    takes_sources,
    takes_videos,
)
from flow_grpo.scoring import videos
from flow_grpo.scoring.settings import RewardSettings, split_settings
from flow_grpo.settings.sections import Reward

MOST_SCORES = 32  # of one reward; each is a metric, a line of a plot and a panel of the report


class RewardFailed(RunFailed, RuntimeError):
    """A reward that must not fail did; says which, where and for which prompt."""


class Scorer:
    """One reward: its settings, the requests under way, and what becomes of a failure.

    Both kinds of scorers have `send(images, prompts) -> Future` of the scores by name, each [B].

    Args:
        address: of the server, or "thread", for messages.
        foreign: somebody else's server scores: what lies beyond the reward's scale is clipped to it.
    """

    def __init__(self, name: str, settings: RewardSettings, address: str, foreign: bool):
        self.name = name
        self.settings = settings
        self.address = address
        self.foreign = foreign
        self.last_error = ""
        self.said_clipped = False
        self.pending: dict[Future, list[Prompt]] = {}  # what was sent and has not come back
        self.answered_s = 0.0  # when something came back, or was sent while nothing was pending

    def rows_per_request(self, images: Tensor) -> int:
        """Return how many images or videos make a request of at most reward.batch_size images; at least one."""
        if not videos.is_video(images):
            return self.settings.batch_size
        num_frames = images.shape[1]
        num_scored = num_frames if self.takes_videos() else min(num_frames, self.settings.frames)
        return max(self.settings.batch_size // num_scored, 1)

    def takes_videos(self) -> bool:
        """Tell whether the reward takes videos, instead of some of their frames as images."""
        return False

    def track(self, future: Future, prompts: list[Prompt]) -> None:
        """Remember what was sent until it comes back."""
        if not self.pending:
            self.answered_s = time.monotonic()
        self.pending[future] = prompts
        future.add_done_callback(self._came_back)

    def _came_back(self, future: Future) -> None:
        self.answered_s = time.monotonic()
        del self.pending[future]

    def receive(self, future: Future, prompts: list[Prompt]) -> dict[str, Tensor]:
        """Return the scores of one request, NaN if it failed and may. Raises RewardFailed: it failed and must not."""
        try:
            scores = self._result(future)
            _check_names(scores)
            return self._clip(scores) if self.foreign else scores
        except Exception as error:
            # Our own sentences need no type and no line of a file.
            has_words = isinstance(error, UserError | ServerError)
            self.last_error = in_one_line(error if has_words else rewards.describe_error(error))
            if self.settings.max_masked_share:
                return {"score": torch.full((len(prompts),), torch.nan)}
            message = f"reward {self.name!r} ({self.address}): {self.last_error}"
            message += f"; first prompt: {quoted(prompts[0].text)}"
            raise RewardFailed(message) from error

    def _result(self, future: Future) -> dict[str, Tensor]:
        """Return the scores of one request; where a reward may fail, NaN for the images without one."""
        try:
            return future.result()
        except SomeFailed as error:
            if not self.settings.max_masked_share:
                raise
            self.last_error = in_one_line(error)
            return error.scores

    def _clip(self, scores: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return scores within the reward's scale; the first that were not are announced."""
        scores, text = clip_to_range(self.name, scores)
        if text and not self.said_clipped:
            self.said_clipped = True
            counted = f"such scores are clipped to it and counted in reward/{self.name}_{CLIPPED}"
            client.print_notice(f"reward {self.name!r} ({self.address}): {text}; {counted}")
        return scores

    def describe_wait(self) -> str:
        """Say what is waited for; "" for nothing."""
        pending = list(self.pending.values())
        if not pending:
            return ""
        silent_s = time.monotonic() - self.answered_s
        waits = f"{counted(len(pending), 'requests')} under way, none was answered for {silent_s:.0f} s"
        return f"reward {self.name!r} ({self.address}): {waits}; first prompt: {quoted(pending[0][0].text)}"

    def check_in_time(self) -> None:
        """Raise RewardFailed where a request takes longer than it may."""

    def close(self) -> None:
        """Stop what `send` has started."""


def _check_names(scores: dict[str, Tensor]) -> None:
    """Raise UserError for figures beside a score that cannot become metrics."""
    taken = sorted(scores.keys() & rewards.GROUP_FIGURES)
    if taken:
        raise UserError(f"it answers with {', '.join(taken)}, which a run logs of each reward itself")
    if len(scores) > MOST_SCORES:
        raise UserError(f"it answers with {len(scores)} scores; at most {MOST_SCORES} become metrics")
    for name in scores:
        if not re.fullmatch(r"[\w.-]{1,64}", name):
            raise UserError(f"it answers with {quoted(name)}; a metric has at most 64 letters, digits and _ . -")


def sources_of(prompts: list[Prompt]) -> list[list[Tensor]]:
    """Return the images that each of B prompts edits, [3, h, w] in [0, 1] each; prompts with the same ones share
    them."""
    loaded: dict[str, list[Tensor]] = {}
    for prompt in prompts:
        if prompt.digest not in loaded:
            loaded[prompt.digest] = [from_picture(picture) for picture in prompt.pictures()]
    return [loaded[prompt.digest] for prompt in prompts]


def make_scorer(name: str, device: torch.device, settings: Reward) -> "LocalScorer | RemoteScorer":
    """Make the scorer of a reward, by config.reward; a local one is loaded."""
    reward, options = split_settings(name, settings)
    if reward.url:
        return RemoteScorer(name, reward, reward.url)
    score = rewards.load(name, torch.device(reward.device or device), options)
    return LocalScorer(name, reward, score, device)


class LocalScorer(Scorer):
    """A reward of this process, in threads of its own; `device` is the rank's, on which images are drawn."""

    def __init__(self, name: str, settings: RewardSettings, score: Callable, device: torch.device):
        super().__init__(name, settings, "thread", foreign=rewards.is_service(name))
        self.score = score
        waits = rewards.is_service(name) or inspect.iscoroutinefunction(score)
        # A second thread's team of OpenMP threads would halve the speed of the first one's on a CPU.
        self.threads = Threads(client.IN_FLIGHT if waits else 1, partial(torch.set_num_threads, 1))
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def takes_videos(self) -> bool:
        return takes_videos(self.score)

    def send(self, images: Tensor, prompts: list[Prompt]) -> Future:
        drawn = None
        if images.is_cuda:
            drawn = torch.cuda.Event()
            drawn.record()
        return self.threads.submit(self._score, images, prompts, drawn)

    def check_in_time(self) -> None:
        """Raise RewardFailed where calls take longer than a server's may. A thread cannot be ended."""
        limit_s = self.settings.timeout_s + client.RETRY_S
        waits = self.describe_wait()
        if waits and time.monotonic() - self.answered_s > limit_s:
            raise RewardFailed(f"{waits}; config.reward.timeout_s + {client.RETRY_S:g} allows {limit_s:g} s")

    def _score(self, images: Tensor, prompts: list[Prompt], drawn: torch.cuda.Event | None) -> dict[str, Tensor]:
        """Score images once they are drawn, in a thread of the reward's. Where reward.max_masked_share lets scores
        fail, an image that fails alone has the score NaN."""
        # A stream of None is the present one.
        with torch.cuda.stream(self.stream):
            # Images are drawn on another stream, which must be done with them, and must not reuse their memory.
            if drawn:
                drawn.wait()
                images.record_stream(torch.cuda.current_stream())
            try:
                return self._scores_of(images, prompts)
            except Exception as error:
                if not self.settings.max_masked_share:
                    raise
                self.last_error = in_one_line(rewards.describe_error(error))
        # Which image failed? Each is scored alone, so that the others have a score.
        if len(prompts) == 1:
            return {"score": torch.full((1,), torch.nan)}
        return join_scores([self._score(images[i : i + 1], prompts[i : i + 1], drawn) for i in range(len(prompts))])

    def _scores_of(self, images: Tensor, prompts: list[Prompt]) -> dict[str, Tensor]:
        """Score images, or videos: as such where the reward takes them, else some frames of each."""
        if self.takes_videos() != videos.is_video(images):
            if not videos.is_video(images):
                return self._scores_of(images[:, None], prompts)
            frames = videos.frames_of(images, self.settings.frames)
            return frames.score(partial(self._scores_of, frames.images, frames.repeat(prompts)))
        metadata = [prompt.metadata for prompt in prompts]
        sources = sources_of(prompts) if takes_sources(self.score) else None
        return scores_of(self.name, self.score, images, texts_of(prompts), metadata, sources)

    def close(self) -> None:
        self.threads.stop()


class RemoteScorer(Scorer):
    """A reward behind one server of ours or several."""

    def __init__(self, name: str, settings: RewardSettings, url: str | list[str]):
        super().__init__(name, settings, ", ".join(urls_of(url)), foreign=True)
        self.server = Server(url, settings.token_file, settings.timeout_s)
        self.says_videos: bool | None = None  # what the server answers; None = not asked yet

    def takes_videos(self) -> bool:
        """Tell what the first server says at /health, which is asked once; one that does not answer takes images."""
        if self.says_videos is None:
            try:
                self.says_videos = _says_videos(self.server.health(self.server.urls[0]))
            except ServerError:
                self.says_videos = False
        return self.says_videos

    def send(self, images: Tensor, prompts: list[Prompt]) -> Future:
        """Send images, and videos to a server that takes them, else some frames of each."""
        if not videos.is_video(images) or self.takes_videos():
            return self._send(images, prompts, lambda scores: scores())
        frames = videos.frames_of(images, self.settings.frames)
        return self._send(frames.images, frames.repeat(prompts), frames.score)

    def _send(self, images: Tensor, prompts: list[Prompt], of_videos: Callable[..., dict[str, Tensor]]) -> Future:
        """Send images; `of_videos` makes a request's scores of a function that returns those of its images."""
        content: dict[str, Any] = {"prompts": texts_of(prompts), "metadata": [prompt.metadata for prompt in prompts]}
        uploads = [_upload("images", number, image) for number, image in enumerate(images.cpu())]
        sources = sources_of(prompts)
        if any(sources):
            # Images of a group share their sources, which are sent once: each prompt has their numbers.
            unique = _unique(sources)
            number_of = {id(source): number for number, source in enumerate(unique)}
            content["sources"] = []
            for of_prompt in sources:
                content["sources"].append([number_of[id(source)] for source in of_prompt])
            uploads += [_upload("sources", number, source) for number, source in enumerate(unique)]

        def parse(body: bytes) -> dict[str, Tensor]:
            return of_videos(lambda: self._checked(wire.parse_answer(body), texts_of(prompts)))

        data = {"request": json.dumps(content)}
        # The server scores a request that is sent again once.
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        return self.server.post("/score", parse, data=data, files=uploads, headers=headers)

    def _checked(self, answer: wire.Answer, prompts: list[str]) -> dict[str, Tensor]:
        """Return the scores of an answer, as `checked_scores` does; an error says what the server says of it."""
        try:
            return checked_scores(self.name, answer.scores, prompts)
        except SomeFailed as error:
            if not answer.error:
                raise
            raise SomeFailed(f"{error}; the server says: {answer.error}", error.scores) from error


def _says_videos(answer: bytes) -> bool:
    """Tell whether a server's answer to GET /health says that it takes videos."""
    try:
        fields = json.loads(answer)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("takes") == "videos"


def _unique(sources: list[list[Tensor]]) -> list[Tensor]:
    """Return the different tensors among these, in their order."""
    unique: dict[int, Tensor] = {}
    for of_prompt in sources:
        for source in of_prompt:
            unique.setdefault(id(source), source)
    return list(unique.values())


def _upload(part: str, number: int, image: Tensor) -> tuple[str, tuple[str, bytes]]:
    """Return an image as a file of a multipart request."""
    return part, (f"{number}.npy", wire.pack_image(image, "npy"))
