"""GenEval (arXiv:2310.11513): whether a detector finds the objects, numbers, colours and places that a prompt names.

The detector runs in the reward server that came with Flow-GRPO, which speaks pickle. A score is the share of the
prompt's demands that are met, in [0, 1]; `_strict` is 1 where all are. Metadata are GenEval's own.
"""

import torch
from torch import Tensor

from flow_grpo.scoring.pickled import PickleServer
from flow_grpo.scoring.wire import check_numbers

RANGE = (0.0, 1.0)


def load(device: torch.device, url: str = "http://127.0.0.1:18085", allow_pickle: bool = False, **server):
    """The scorer; nothing is loaded here.

    Args:
        allow_pickle: must be True. Only plain data are unpickled, see scoring/pickled.py.
        server: token, in_flight, timeout_s, retry_s.

    Raises:
        ValueError: allow_pickle is not True.
    """
    detector = PickleServer("geneval", url, allow_pickle, **server)

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> dict[str, Tensor]:
        answer = detector.ask(images, meta_datas=metadata, only_strict=False)
        names = {"score": "scores", "strict": "strict_rewards"}
        return {name: check_numbers(key, list(answer.get(key, [])), len(images), RANGE) for name, key in names.items()}

    return score
