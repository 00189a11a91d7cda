"""Scores of several rewards, made while other images are drawn. An update waits for all of its epoch's.

A reward is computed in a thread of each rank or, where it has a `url`, by a server. Images are cut into requests of a
fixed size in the order in which they come, so that no score depends on how fast anything was.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from flow_grpo.base import distributed, signals
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, quoted
from flow_grpo.base.prompt import Prompt
from flow_grpo.rewards.clients.client import SIGN_OF_LIFE_S, print_notice
from flow_grpo.rewards.scores import join_scores
from flow_grpo.scoring.scorers import LocalScorer, RemoteScorer, RewardFailed, make_scorer
from flow_grpo.settings.sections import Reward

MAX_PENDING = 1024  # images, or frames, of a rank that wait for a score; the rollout waits for room
LOOK_S = 0.2  # between two looks at rewards that are waited for


# Waits for the scores of B images: name -> [B] float32 on the CPU, with "avg", the weighted sum. NaN where a reward
# failed that may. Raises FloatingPointError: an image is not finite; RewardFailed: a reward failed that must not.
Pending = Callable[[], dict[str, Tensor]]


def open_pool(
    device: torch.device,
    weights: Mapping[str, float],
    watched: Iterable[str],
    settings: Reward,
    shape: tuple[int, ...],
    prompt: Prompt,
) -> "Pool":
    """Load rewards on all ranks, and try each on a grey image of this shape, as `Pool.try_rewards` does. It belongs
    before the loading of a model, which may take minutes. The other arguments are those of `Pool`."""
    pool = Pool(device, weights, watched, settings)
    distributed.on_all(pool.try_rewards, shape, prompt)
    return pool


class _Request(NamedTuple):
    """Images that were sent to a scorer together."""

    future: Future
    prompts: list[Prompt]


class Pool:
    """The rewards of a run.

    Args:
        device: the rank's own.
        weights: reward -> its weight in the average.
        watched: rewards that `submit(..., everything=True)` scores, too.
        settings: config.reward.
    """

    def __init__(self, device: torch.device, weights: Mapping[str, float], watched: Iterable[str], settings: Reward):
        self.device = device
        self.weights = dict(weights)
        self.scorers: dict[str, LocalScorer | RemoteScorer] = {}
        for name in dict.fromkeys([*weights, *watched]):
            self.scorers[name] = make_scorer(name, device, settings)

    def try_rewards(self, shape: tuple[int, ...], prompt: Prompt) -> None:
        """Score a grey image or video by every reward before any weight of the model is loaded; print what each gives.
        Raises UserError: a reward fails that must not.

        Args:
            shape: (3, H, W) of the model's images, or (f, 3, H, W) of its videos.
        """
        image = torch.full((1, *shape), 0.5, device=self.device)
        tried = "a grey image" if len(shape) == 3 else "a grey video"
        for name, scorer in self.scorers.items():
            start_s = time.perf_counter()
            try:
                scores = scorer.receive(self._send(scorer, image, [prompt]), [prompt])
            except RewardFailed as error:
                raise UserError(f"{error}; tried on {tried} before anything is loaded") from error
            seconds = time.perf_counter() - start_s
            shown = ", ".join(f"{key} {value.item():.4g}" for key, value in scores.items())
            if distributed.is_main():
                tqdm.write(f"reward {name} of {tried}, after {seconds:.2g} s: {shown}")

    def submit(self, images: Tensor, prompts: list[Prompt], everything: bool = False) -> Pending:
        """Begin to score B images [B, 3, H, W] or videos [B, f, 3, H, W] in [0, 1]; waits only while MAX_PENDING images
        or frames are under way."""
        assert len(images) == len(prompts), f"images: {len(images)}, prompts: {len(prompts)}"
        images = images.detach()
        requests: dict[str, list[_Request]] = {}
        for name in self.scorers if everything else self.weights:
            scorer = self.scorers[name]
            requests[name] = []
            rows_per_request = scorer.rows_per_request(images)
            for start in range(0, len(prompts), rows_per_request):
                rows = slice(start, start + rows_per_request)
                future = self._send(scorer, images[rows], prompts[rows])
                requests[name].append(_Request(future, prompts[rows]))
        # The answer stays on the device until somebody waits for the scores: nothing waits for the images here.
        are_finite = images.isfinite().flatten(1).all(1)
        return partial(self._collect, requests, are_finite, prompts)

    def _send(self, scorer: LocalScorer | RemoteScorer, images: Tensor, prompts: list[Prompt]) -> Future:
        num_frames = images.shape[1:-3].numel()
        self._wait_for_room(len(prompts), MAX_PENDING // num_frames)
        future = scorer.send(images, prompts)
        scorer.track(future, prompts)
        return future

    def _wait_for_room(self, num_images: int, most: int) -> None:
        """Wait until so many images more are no more than `most`, or no others are under way."""
        pending = self._pending()
        while pending and sum(map(len, pending.values())) + num_images > most:
            self._wait_for_one(pending)
            pending = self._pending()

    def _pending(self) -> dict[Future, list[Prompt]]:
        """Return the prompts of each request that is under way."""
        pending = {}
        for scorer in self.scorers.values():
            # A copy: threads take their requests out while this one looks.
            pending |= scorer.pending.copy()
        return pending

    def _wait_for_one(self, futures: Iterable[Future]) -> None:
        """Wait until one of these is done; say now and then which rewards are waited for. Raises RewardFailed: one will
        not answer any more."""
        said_s = time.monotonic()
        while not wait(futures, LOOK_S, FIRST_COMPLETED).done:
            signals.check()
            for scorer in self.scorers.values():
                scorer.check_in_time()
            if time.monotonic() - said_s >= SIGN_OF_LIFE_S:
                said_s = time.monotonic()
                waits = [scorer.describe_wait() for scorer in self.scorers.values() if scorer.pending]
                if waits:
                    print_notice(f"waiting: {'; '.join(waits)}")

    def _collect(
        self, requests: dict[str, list[_Request]], are_finite: Tensor, prompts: list[Prompt]
    ) -> dict[str, Tensor]:
        """Wait for all rewards of images; return scores by name, [B] each, with their weighted sum as "avg"."""
        # First: a reward would see NaN as black, or fail with another reason.
        check_images(are_finite, prompts)
        scores: dict[str, Tensor] = {}
        for name, sent in requests.items():
            for key, values in self._receive(name, sent).items():
                score_name = name if key == "score" else f"{name}_{key}"
                if score_name in scores:
                    raise RewardFailed(f"rewards {', '.join(requests)}: two of their figures are called {score_name}")
                scores[score_name] = values
        average = torch.zeros(len(prompts))
        for name, weight in self.weights.items():
            average = average + weight * scores[name]
        scores["avg"] = average
        return scores

    def _receive(self, name: str, sent: list[_Request]) -> dict[str, Tensor]:
        """Wait for the scores of one reward."""
        for request in sent:
            self._wait_for_one([request.future])
        return join_scores([self.scorers[name].receive(future, prompts) for future, prompts in sent])

    def masked_shares(self, scores: dict[str, Tensor]) -> dict[str, float]:
        """Return the share of images without a score, for each reward that may fail, of an epoch, an evaluation or a
        file of pairs. Raises RewardFailed: more than there may be."""
        shares = {}
        for name, scorer in self.scorers.items():
            allowed = scorer.settings.max_masked_share
            if not allowed or name not in scores:
                continue
            shares[name] = scores[name].isnan().double().mean().item()
            if shares[name] > allowed:
                last_error = f"; last: {scorer.last_error}" if scorer.last_error else ""
                images = counted(scores[name].numel(), "images")
                raise RewardFailed(
                    f"reward {name!r} ({scorer.address}) failed for {shares[name]:.1%} of {images}; "
                    f"config.reward.max_masked_share is {allowed}{last_error}"
                )
        return shares

    def close(self) -> None:
        for scorer in self.scorers.values():
            scorer.close()


def check_images(are_finite: Tensor, prompts: list[Prompt]) -> None:
    """Raise FloatingPointError, which names a prompt, unless all images are finite; `are_finite` [B] bool."""
    bad = (~are_finite).nonzero().flatten().tolist()
    if bad:
        first = prompts[bad[0]]
        raise FloatingPointError(
            f"{len(bad)} of {counted(len(are_finite), 'images')} with NaN or infinities, the first of "
            f"{quoted(first.text)}: the weights are too large (config.train.learning_rate), or a precision is too "
            "coarse (config.precision, config.vae_precision)"
        )
