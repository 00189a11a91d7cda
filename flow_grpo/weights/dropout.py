"""Dropout of what an adapter reads, in the forwards that are trained: which numbers a row loses follows from its name.

peft's own would draw from the global generator: other masks on two GPUs than on one, and after a resume. What is saved
says nothing of it, since diffusers would go on dropping.
"""

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn


@torch.library.custom_op("flow_grpo::keep_mask", mutates_args=())
def keep_mask(seeds: Tensor, shape: list[int], rate: float, device: torch.device) -> Tensor:
    """[R, ...] bool, False with probability `rate`. Row r follows from seeds[r mod S] alone. An operation of its own,
    so that compiled blocks have the same masks.

    Args:
        seeds: [S] int64, on the CPU.
    """
    streams = [torch.Generator(device).manual_seed(seed) for seed in seeds.tolist()]
    masks = torch.stack([torch.rand(shape[1:], generator=stream, device=device) >= rate for stream in streams])
    return masks.repeat(shape[0] // len(seeds), *[1] * (len(shape) - 1))


@keep_mask.register_fake
def _(seeds: Tensor, shape: list[int], rate: float, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


class RowDropout(nn.Module):
    """Sets numbers of x [R, ...] to 0 and scales the others by 1 / (1 - rate), where gradients are wanted, once `seed`
    has said how."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate, self.seeds = rate, None

    def forward(self, x: Tensor) -> Tensor:
        """[R, ...] -> [R, ...]."""
        if self.seeds is None or not torch.is_grad_enabled():
            return x
        return x * keep_mask(self.seeds, x.shape, self.rate, x.device) / (1 - self.rate)


def attach(transformer: nn.Module, rate: float) -> None:
    """Give each adapter its dropout; with a rate of 0 there is none."""
    for layer in transformer.modules() if rate else ():
        if isinstance(layer, BaseTunerLayer):
            layer.lora_dropout["default"] = RowDropout(rate)


def seed(transformer: nn.Module, streams: list[torch.Generator]) -> None:
    """Draw what the forwards drop that follow, with gradients, and their backward, which may compute them again.

    Args:
        streams: one for each row, or for each row of every part of a forward whose parts are to lose the same.
    """
    layers = [module for module in transformer.modules() if isinstance(module, RowDropout)]
    for layer in layers:  # a tensor each: one graph serves all blocks
        layer.seeds = torch.stack([torch.randint(2**62, (), generator=stream) for stream in streams])
