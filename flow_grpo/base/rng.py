"""Every random draw of a run, from one seed and a name.

A stream is named by what it is for and where in the run it happens ("noise", epoch, image), never by how many draws
came before it. So two ranks draw what one rank would have drawn, a resumed run sees the noise of the unbroken one, and
there is no generator state to save.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def generator(seed: int, stream: str, *names: int | str) -> torch.Generator:
    """A CPU generator for one named stream: same arguments, same draws, on every machine."""
    digest = hashlib.blake2b(repr((seed, stream, *names)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def normal(shape: Iterable[int], generators: list[torch.Generator], device=None) -> Tensor:
    """Standard normal [B, *shape] float32, row b drawn from generators[b]."""
    rows = torch.stack([torch.randn(tuple(shape), generator=g) for g in generators])
    if device is not None and torch.device(device).type == "cuda":
        rows = rows.pin_memory()  # or else the copy waits for all that the device was asked before
    return rows.to(device, non_blocking=True)
