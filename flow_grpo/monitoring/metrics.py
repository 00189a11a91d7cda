"""Averages of the numbers that a run logs: between two lines of the log, and by denoising step."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.base import distributed


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

    def mean(self, name: str) -> Tensor:
        """Return this rank's mean of a name of `add` so far, [] float64."""
        return self.sums[name] / self.counts[name]

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


# Values of rows of which trackers show the distribution.
HISTOGRAMS = ("advantage", "log_ratio")


class RowValues(NamedTuple):
    """Named values of rows that were trained, whose mean is wanted for each denoising step."""

    timesteps: Tensor  # [R] f32, scheduler units (1000 * sigma)
    values: dict[str, Tensor]  # name -> [R]


def gather_rows(parts: list[RowValues]) -> RowValues | None:
    """Join the rows of all minibatches and ranks, on the CPU in float64; None if there are none on any rank.

    Ranks may have different numbers of rows. Names that some minibatch lacks are left out.
    """
    # One copy to the host for each column of this rank.
    tables = []
    if parts:
        columns = {"timesteps": torch.cat([part.timesteps for part in parts]).double().cpu()}
        for name in _common_names([part.values for part in parts]):
            columns[name] = torch.cat([part.values[name] for part in parts]).double().cpu()
        tables.append(columns)
    tables = distributed.gather_objects(tables)
    if not tables:
        return None
    joined = {}
    for name in _common_names(tables):
        joined[name] = torch.cat([table[name] for table in tables])
    timesteps = joined.pop("timesteps")
    return RowValues(timesteps, joined)


def _common_names(tables: list[dict[str, Tensor]]) -> list[str]:
    """Return the names that all tables have, in the first one's order."""
    common = set(tables[0]).intersection(*tables[1:])
    return [name for name in tables[0] if name in common]


def by_step(rows: RowValues, levels: Tensor) -> dict[str, float]:
    """Return the mean of each value over the rows of each denoising step, as steps/NAME/STEP, the standard deviation
    for the name "ratio", as steps/ratio_std/STEP, and the noise level of each step that was trained. Names of
    HISTOGRAMS are left out.

    Args:
        levels: [S] timesteps of the S denoising steps. A row belongs to the step with the nearest one.
    """
    step_of_row = (rows.timesteps[:, None] - levels).abs().argmin(1)
    figures = {}
    for step in step_of_row.unique().tolist():
        chosen = step_of_row == step
        figures[f"steps/sigma/{step}"] = levels[step].item() / 1000
        for name, column in rows.values.items():
            if name in HISTOGRAMS:
                continue
            values = column[chosen]
            if name == "ratio":
                figures[f"steps/ratio_std/{step}"] = values.std(correction=0).item()
            else:
                figures[f"steps/{name}/{step}"] = values.mean().item()
    return figures
