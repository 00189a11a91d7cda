"""Averages of the numbers that a run logs, between two lines of the log."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Meter:
    """Means and maxima of named per-row values between two `pop`s, without a device sync until then."""

    def __init__(self, device: str | torch.device = "cpu"):
        self.device = device
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, float | Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.spreads: set[str] = set()

    def add(self, **values: float | Tensor) -> None:
        """Add numbers or tensors of any shape. The mean weights every element alike, however minibatches were cut."""
        for name, value in values.items():
            elements = self._float64(value)
            self.sums[name] = self.sums.get(name, 0) + elements.sum()
            self.counts[name] = self.counts.get(name, 0) + elements.numel()

    def add_weighted(self, weights: Tensor, **values: Tensor) -> None:
        """Like `add`, but popped as sum(weight * value) / sum(weight); NaN where all weights are 0."""
        weights = self._float64(weights)
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + (weights * self._float64(value)).sum()
            self.counts[name] = self.counts.get(name, 0) + weights.sum()

    def add_spread(self, **values: float | Tensor) -> None:
        """Like `add`, but popped as <name>_mean and <name>_std, the population's standard deviation."""
        for name, value in values.items():
            # `pop` turns the mean of the squares into the standard deviation.
            self.add(**{f"{name}_mean": value, f"{name}_std": self._float64(value).square()})
            self.spreads.add(name)

    def add_max(self, **values: float | Tensor) -> None:
        """Like `add`, but popped as the maximum."""
        for name, value in values.items():
            largest = self._float64(value).max()
            self.maxima[name] = torch.maximum(self.maxima.get(name, largest), largest)

    def pop(self, reduce: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Return everything since the last pop, in one copy to the host; every rank must have added the same names.

        Args:
            reduce: (sums [2, M], maxima [K]) -> the same over all ranks, float64: distributed.over_ranks.
        """
        names = sorted(self.sums)
        max_names = sorted(self.maxima)
        if not names and not max_names:
            return {}
        sums = torch.stack([self._stack(self.sums, names), self._stack(self.counts, names)])
        (sums, counts), maxima = reduce(sums, self._stack(self.maxima, max_names))
        values = dict(zip(names + max_names, torch.cat([sums / counts, maxima]).tolist()))
        for name in self.spreads:
            variance = values[f"{name}_std"] - values[f"{name}_mean"] ** 2
            # Rounding can make it negative. A NaN stays one, since max returns its first argument.
            values[f"{name}_std"] = math.sqrt(max(variance, 0.0))
        self._clear()
        return values

    def _stack(self, values: Mapping[str, float | Tensor], names: list[str]) -> Tensor:
        """Return the values of these names, [M] float64, also if M is 0."""
        if not names:
            return self._float64([])
        return torch.stack([self._float64(values[name]) for name in names])

    def _float64(self, value: float | list | Tensor) -> Tensor:
        # The spread of a ratio is 1e-5 around 1, and float32 has no room for its square.
        return torch.as_tensor(value, device=self.device).detach().double()
