"""Scores of several rewards, made while other images are drawn. An update waits for all of its epoch's.

A reward is computed in a thread of each rank or, where it has a `url`, by a server. Images are cut into requests of a
fixed size in the order in which they come, so that no score depends on how fast anything was.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from flow_grpo.base import distributed
from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.rewards.clients.client import SIGN_OF_LIFE_S, print_notice
from flow_grpo.scoring.scorers import LocalScorer, RemoteScorer, RewardFailed, joined, make_scorer
from flow_grpo.weights import finite

MAX_PENDING = 1024  # images of a rank that wait for a score; the rollout waits for room
LOOK_S = 0.2  # between two looks at rewards that are waited for


# Waits for the scores of B images: name -> [B] float32 on the CPU, with "avg", the weighted sum. NaN where a reward
# failed that may. Raises FloatingPointError: an image is not finite; RewardFailed: a reward failed that must not.
Pending = Callable[[], dict[str, Tensor]]


class Pool:
    """The rewards of a run.

    Args:
        device: the rank's own.
        weights: reward -> its weight in the average.
        watched: rewards that `submit(..., everything=True)` scores, too.
        settings: config.reward.
    """

    def __init__(self, device: torch.device, weights: Mapping[str, float], watched: Iterable[str], settings):
        self.device, self.weights = device, dict(weights)
        self.scorers = {name: make_scorer(name, device, settings) for name in dict.fromkeys([*weights, *watched])}

    def try_rewards(self, size: Size, prompt: Prompt) -> None:
        """Score a grey image by every reward, before any weight of the model is loaded, and say what each makes of it.
        Raises UserError: a reward fails that must not."""
        image = torch.full((1, 3, size.height, size.width), 0.5, device=self.device)
        for name, scorer in self.scorers.items():
            start = time.perf_counter()
            try:
                scores = scorer.receive(self._send(scorer, image, [prompt]), [prompt])
            except RewardFailed as error:
                raise UserError(f"{error}; tried on a grey image before anything is loaded") from error
            values = ", ".join(f"{key} {value.item():.4g}" for key, value in scores.items())
            if distributed.is_main():
                tqdm.write(f"reward {name} of a grey image, after {time.perf_counter() - start:.2g} s: {values}")

    def submit(self, images: Tensor, prompts: list[Prompt], everything: bool = False) -> Pending:
        """Begin to score B images [B, 3, H, W] in [0, 1]; waits only while MAX_PENDING images are under way."""
        assert len(images) == len(prompts), f"{len(images)} images of {len(prompts)} prompts"
        images, names = images.detach(), list(self.scorers) if everything else list(self.weights)
        requests = {name: [] for name in names}
        for name in names:
            scorer = self.scorers[name]
            for start in range(0, len(prompts), scorer.settings.batch_size):
                rows = slice(start, start + scorer.settings.batch_size)
                requests[name].append((self._send(scorer, images[rows], prompts[rows]), prompts[rows]))
        return partial(self._collect, requests, images.isfinite().flatten(1).all(1), prompts)

    def _send(self, scorer: LocalScorer | RemoteScorer, images: Tensor, prompts: list[Prompt]) -> Future:
        while pending := {f: rows for each in self.scorers.values() for f, rows in each.pending.copy().items()}:
            if sum(map(len, pending.values())) + len(prompts) <= MAX_PENDING:
                break
            self._wait(pending)
        future = scorer.send(images, prompts)
        scorer.track(future, prompts)
        return future

    def _wait(self, futures: Iterable[Future]) -> None:
        """Until one of them is done; says now and then which rewards are waited for. Raises RewardFailed: one will not
        answer any more."""
        said_s = time.monotonic()
        while not wait(futures, LOOK_S, FIRST_COMPLETED).done:
            for scorer in self.scorers.values():
                scorer.check()
            if time.monotonic() - said_s >= SIGN_OF_LIFE_S:
                said_s = time.monotonic()
                if states := [state for scorer in self.scorers.values() if (state := scorer.state())]:
                    print_notice(f"waiting: {'; '.join(states)}")

    def _collect(
        self, requests: dict[str, list[tuple[Future, list[Prompt]]]], are_finite: Tensor, prompts: list[Prompt]
    ) -> dict[str, Tensor]:
        finite.check_images(are_finite, prompts)  # first: a reward would see NaN as black, or fail with another reason
        scores = {}
        for name, sent in requests.items():
            for future, _ in sent:
                self._wait([future])
            answers = joined([self.scorers[name].receive(future, prompts) for future, prompts in sent])
            figures = {name if key == "score" else f"{name}_{key}": values for key, values in answers.items()}
            if both := sorted(figures.keys() & scores.keys()):
                raise RewardFailed(f"rewards {', '.join(requests)}: two of their figures are called {both[0]}")
            scores |= figures
        scores["avg"] = sum(weight * scores[name] for name, weight in self.weights.items())
        return scores

    def masked_shares(self, scores: dict[str, Tensor]) -> dict[str, float]:
        """The share of images without a score, for each reward that may fail, of an epoch, an evaluation or a file of
        pairs. Raises RewardFailed: more than there may be."""
        shares = {}
        for name, scorer in self.scorers.items():
            if scorer.settings.max_masked_share and name in scores:
                shares[name] = scores[name].isnan().double().mean().item()
                if shares[name] > scorer.settings.max_masked_share:
                    raise RewardFailed(
                        f"reward {name!r} ({scorer.address}) failed for {shares[name]:.1%} of "
                        f"{scores[name].numel()} images; config.reward.max_masked_share is "
                        f"{scorer.settings.max_masked_share}{f'; last: {scorer.last_error}' * bool(scorer.last_error)}"
                    )
        return shares

    def close(self) -> None:
        for scorer in self.scorers.values():
            scorer.close()
