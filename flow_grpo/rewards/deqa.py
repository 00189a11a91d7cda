"""DeQA-Score (arXiv:2501.11561): technical quality of an image, from 1 (bad) to 5 (excellent), divided by 5.

The model runs in the reward server that came with Flow-GRPO, which speaks pickle and answers with scores in [0, 1].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.rewards.clients import pickled

RANGE = (0.0, 1.0)


def load(
    device: torch.device, url: str | list[str] = "http://127.0.0.1:18086", allow_pickle: bool = False, **server
) -> Callable[..., dict[str, list[float]]]:
    """Return the scorer. Nothing is loaded here, and only plain data are unpickled, see clients/pickled.py."""
    rate = pickled.make_scorer("deqa", url, allow_pickle, {"score": "outputs"}, **server)

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> dict[str, list[float]]:
        return rate(images)

    return score
