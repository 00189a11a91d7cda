"""DeQA-Score (arXiv:2501.11561): the technical quality of an image, from 1 (bad) to 5 (excellent), here over 5.

The model runs in the reward server that came with Flow-GRPO, which speaks pickle and answers with scores in [0, 1].
"""

import torch

from flow_grpo.rewards.clients import pickled

RANGE = (0.0, 1.0)


def load(device: torch.device, url: str | list = "http://127.0.0.1:18086", allow_pickle: bool = False, **server):
    """The scorer; nothing is loaded here. Only plain data are unpickled, see clients/pickled.py."""
    rated = pickled.make_scorer("deqa", url, allow_pickle, {"score": "outputs"}, **server)
    return lambda images, prompts, metadata: rated(images)
