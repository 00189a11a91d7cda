"""A running average of the trained weights, for evaluation and export."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flow_grpo.weights import fsdp_utils, offload


class Ema:
    """Float32 averages of float32 parameters, in the parameters' own layout (sharded ones stay sharded)."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float = 0.9, interval: int = 8):
        self.parameters = parameters
        self.decay = decay
        self.interval = interval
        self.is_applied = False
        self.averages: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            assert parameter.dtype == torch.float32
            self.averages[name] = parameter.detach().clone()

    def update(self, step: int) -> None:
        """Call after every optimizer step with the number taken so far, n.

        The average moves at every `interval`-th step by a decay of min((1 + n) / (10 + n), decay), so that early
        averages follow the weights closely. Before the first of these steps the average is the weights themselves, so
        that a run of few steps exports what it learned.
        """
        if step < self.interval:
            self.move(1.0)
        elif step % self.interval == 0:
            self.move(1 - min((1 + step) / (10 + step), self.decay))

    @torch.no_grad()
    def move(self, share: float) -> None:
        """average = (1 - share) average + share weight."""
        assert not self.is_applied
        # All of them at once: one by one, a GPU would wait for the host, which launches a kernel for each.
        torch._foreach_lerp_(list(self.averages.values()), list(self.parameters.values()), share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averages inside this block, and the very same training weights after it."""
        assert not self.is_applied
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live averages, for a checkpoint to save or to fill in place."""
        assert not self.is_applied
        return self.averages

    @torch.no_grad()
    def _swap(self) -> None:
        self.is_applied = not self.is_applied
        offload.wait_for_offloaded(self.parameters.values())
        # Tensor by tensor, which needs no second copy of the model.
        for name, parameter in self.parameters.items():
            fsdp_utils.exchange(parameter, self.averages[name])
        # A graph that has saved the weights must not go backward through others.
        torch.autograd.graph.increment_version(list(self.parameters.values()))
