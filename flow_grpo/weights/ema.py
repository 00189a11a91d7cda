"""A running average of the trained weights, for evaluation and export."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flow_grpo.weights import offload


class Ema:
    """Float32 averages of float32 parameters, in the parameters' own layout (sharded ones stay sharded)."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float = 0.9, interval: int = 8):
        self.parameters, self.decay, self.interval = parameters, decay, interval
        self.averages = {name: p.detach().clone() for name, p in parameters.items()}
        self.is_applied = False
        assert all(p.dtype == torch.float32 for p in parameters.values())

    def update(self, step: int) -> None:
        """Call after every optimizer step with the number taken so far, n; moves at every `interval`-th, by a decay of
        min((1 + n) / (10 + n), decay): early averages follow the weights closely. Before the first of these the average
        is the weights themselves, so that a run of few steps exports what it learned."""
        if step < self.interval:
            self.move(1.0)
        elif step % self.interval == 0:
            self.move(1 - min((1 + step) / (10 + step), self.decay))

    @torch.no_grad()
    def move(self, share: float) -> None:
        """average = (1 - share) average + share weight."""
        assert not self.is_applied
        for name, p in self.parameters.items():
            self.averages[name].lerp_(p, share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model carries the averages inside this block, and the very same training weights after it."""
        assert not self.is_applied
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Tensor]:
        """The live averages, for a checkpoint to save or to fill in place."""
        assert not self.is_applied
        return self.averages

    @torch.no_grad()
    def _swap(self) -> None:
        self.is_applied = not self.is_applied
        offload.wait_for_offloaded(self.parameters.values())
        for name, p in self.parameters.items():  # tensor by tensor: no second copy of the model
            present = p.clone()
            p.copy_(self.averages[name])
            self.averages[name].copy_(present)
