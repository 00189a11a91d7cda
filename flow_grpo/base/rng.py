"""Random draws of a run, from one seed and a name.

A stream is named by what it is for and where in the run it happens ("noise", epoch, image), never by how many draws
came before it. So two ranks draw what one rank would have drawn, a resumed run sees the noise of the unbroken one, and
there is no generator state to save.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def generator(seed: int, stream: str, *names: int | str) -> torch.Generator:
    """Return the CPU generator of a named stream: same arguments, same draws, on every machine."""
    key = repr((seed, stream, *names)).encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    # torch takes seeds below 2^63.
    stream_seed = int.from_bytes(digest, "big") >> 1
    return torch.Generator().manual_seed(stream_seed)


def normal(shape: Iterable[int], generators: list[torch.Generator], device: torch.device | str | None = None) -> Tensor:
    """Return standard normal [B, *shape] float32, row b drawn from generators[b]."""
    shape = tuple(shape)
    noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
    # A copy from pageable memory would wait for all work that the GPU has been given before.
    if device is not None and torch.device(device).type == "cuda":
        noise = noise.pin_memory()
    return noise.to(device, non_blocking=True)
