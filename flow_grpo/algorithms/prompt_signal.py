"""Signal of prompts: how much the rewards of a prompt's images differ within the groups that compete.

For rewards of 0 and 1 the unbiased variance of a group is p (1 - p) on average, where a share p of the prompt's images
succeeds: it is largest at p = 1/2, and 0 where all images succeed or all fail, which teaches nothing. To draw prompts
by it is called sampling for learnability (arXiv:2502.12272). Rewards between 0 and 1 need the variance itself, since
p (1 - p) of their mean p is only its upper bound: if every image scores 1/2, the bound is 1/4, but there is no signal.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.algorithms.advantages import stats_of_sum

# Signal of a prompt that was never drawn, so that it is tried: that of p = 1/2.
UNKNOWN = 1.0


class Visit(NamedTuple):
    """One drawing of a prompt, and what its images showed."""

    prompt: str  # Prompt.digest
    signal: float  # 1 = p of 1/2


@dataclass
class PromptSignal:
    """Decaying mean of each prompt's signal, by which epochs draw prompts. An epoch's visits count when it is over."""

    decay: float  # what a visit leaves of the mean before it
    floor: float  # weight that a prompt keeps
    span: float  # distance of the highest weighted sum of rewards from the lowest
    signals: dict[str, float] = field(default_factory=dict)  # by Prompt.digest, of prompts that were drawn
    visits: list[Visit] = field(default_factory=list)  # of the epoch under way

    def weights(self, prompts: Iterable[str]) -> Tensor:
        """Return the weights by which prompts are drawn, from the floor to 1, [P] float64."""
        signals = [self.signals.get(prompt, UNKNOWN) for prompt in prompts]
        return torch.tensor(signals, dtype=torch.float64).clamp(self.floor, 1.0)

    def complete_epoch(self) -> None:
        """Let the epoch's visits count."""
        for prompt, signal in self.visits:
            before = self.signals.get(prompt, UNKNOWN)
            self.signals[prompt] = self.decay * before + (1 - self.decay) * signal
        self.visits = []


def effective_number(weights: Tensor) -> float:
    """Return the effective number of prompts, (sum w)^2 / sum w^2: the number of all prompts where their weights are
    equal, and less the more they differ."""
    return (weights.sum().square() / weights.square().sum()).item()


def signals_of_prompts(
    scores: dict[str, Tensor], weights: dict[str, float], groups: Tensor, prompts: Tensor, span: float
) -> dict[int, float]:
    """Return the mean signal of each prompt's groups: 4 times the unbiased variance of the weighted sums of rewards,
    relative to the square of their span. A prompt without a group of two scored images is left out.

    Args:
        scores: name -> [B], NaN = not known.
        groups: [B] int64, which images compete.
        prompts: [B] int64, number of each image's prompt; the images of a group have one.
    """
    scored = torch.stack([scores[name].isfinite() for name in weights]).all(0)
    if not scored.any():
        return {}
    stats = stats_of_sum({name: scores[name][scored] for name in weights}, weights, groups[scored])
    counts = torch.bincount(stats.group)
    prompt_of_group = torch.zeros_like(counts).index_copy(0, stats.group, prompts[scored])

    # One image has no spread.
    compares = counts > 1
    unbiased = stats.std.square() * counts / (counts - 1).clamp(min=1)
    signals = 4 * unbiased / span**2
    means = {}
    for prompt in prompt_of_group[compares].unique().tolist():
        means[prompt] = signals[compares & (prompt_of_group == prompt)].mean().item()
    return means


def in_order(values: Tensor, image_numbers: Tensor) -> Tensor:
    """Return the values of all ranks' images in the order of their numbers, so that sums have the same bits on any
    number of ranks.

    Args:
        values: [B * J], J neighbours of each image.
        image_numbers: [B] int64.
    """
    return values.view(len(image_numbers), -1)[image_numbers.argsort()].flatten()


def weighted_draw(weights: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Draw `count` different prompts one after the other, each by its weight among those that are left.

    Prompts race: each arrives after an exponentially distributed time whose rate is its weight, and the first ones are
    drawn (Efraimidis and Spirakis, 2006).

    Args:
        weights: [P] float64, above 0.
    """
    uniform = torch.rand(len(weights), dtype=torch.float64, generator=generator)
    arrival = -torch.log1p(-uniform) / weights
    return arrival.argsort(stable=True)[:count].tolist()
