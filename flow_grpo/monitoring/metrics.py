"""How the numbers that a run logs are averaged until they are logged."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


class Meter:
    """Means and maxima of named per-row values between two `pop`s, without a device sync until then."""

    def __init__(self, device: str | torch.device = "cpu"):
        self.device = device
        self._clear()

    def _clear(self):
        self.sums, self.counts, self.maxima, self.spreads = {}, {}, {}, set()

    def add(self, **values) -> None:
        """Numbers or tensors of any shape: the mean weights every element alike, however minibatches were cut."""
        for name, value in values.items():
            value = self._float64(value)
            self.sums[name] = self.sums.get(name, 0) + value.sum()
            self.counts[name] = self.counts.get(name, 0) + value.numel()

    def add_weighted(self, weights: Tensor, **values: Tensor) -> None:
        """Like `add`, but popped as sum(weight * value) / sum(weight); NaN where all weights are 0."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + (self._float64(weights) * self._float64(value)).sum()
            self.counts[name] = self.counts.get(name, 0) + self._float64(weights).sum()

    def add_spread(self, **values) -> None:
        """Like `add`, but popped as <name>_mean and <name>_std, the population's standard deviation."""
        for name, value in values.items():
            self.add(**{f"{name}_mean": value, f"{name}_std": self._float64(value).square()})
            self.spreads.add(name)

    def add_max(self, **values) -> None:
        """Like `add`, but popped as the maximum."""
        for name, value in values.items():
            value = self._float64(value).max()
            self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)

    def pop(self, reduce: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Everything since the last pop, in one copy to the host; every rank must have added the same names.

        Args:
            reduce: (sums [2, M], maxima [K]) -> the same over all ranks, float64: distributed.over_ranks.
        """
        names, tops = sorted(self.sums), sorted(self.maxima)
        if not names + tops:
            return {}
        columns = [self.sums[n] for n in names], [self.counts[n] for n in names], [self.maxima[n] for n in tops]
        sums, counts, maxima = (torch.stack([self._float64(x) for x in c]) if c else self._float64(c) for c in columns)
        (sums, counts), maxima = reduce(torch.stack([sums, counts]), maxima)
        values = dict(zip(names + tops, torch.cat([sums / counts, maxima]).tolist()))
        for name in self.spreads:
            variance = values[f"{name}_std"] - values[f"{name}_mean"] ** 2
            values[f"{name}_std"] = 0.0 if variance < 0 else math.sqrt(variance)  # a NaN stays a NaN
        self._clear()
        return values

    def _float64(self, value) -> Tensor:
        # The spread of a ratio is 1e-5 around 1, and float32 has no room for its square.
        return torch.as_tensor(value, device=self.device).detach().double()
