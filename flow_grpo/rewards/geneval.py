"""GenEval (arXiv:2310.11513): whether a detector finds the objects, numbers, colours and places that a prompt names.

The detector runs in the reward server that came with Flow-GRPO, which speaks pickle. A score is the share of the
prompt's demands that are met, in [0, 1]; `_strict` is 1 where all are. Metadata are GenEval's own. The server is not
asked to apply GenEval's lenient rule as well, whose outcome nothing here uses.
"""

import torch

from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import quoted
from flow_grpo.rewards.clients import pickled

RANGE = (0.0, 1.0)


def check_prompts(prompts: list[str], metadata: list[dict]) -> None:
    """Raises UserError for the first prompt whose metadata are not GenEval's."""
    for prompt, data in zip(prompts, metadata, strict=True):
        clauses = data.get("include")
        known = clauses and isinstance(clauses, list)
        if not known or not all(isinstance(c, dict) and {"class", "count"} <= c.keys() for c in clauses):
            raise UserError(
                f'reward geneval needs metadata with "include", a list of objects with "class" and "count", '
                f"which {quoted(prompt)} has not"
            )


def load(device: torch.device, url: str | list = "http://127.0.0.1:18085", allow_pickle: bool = False, **server):
    """The scorer; nothing is loaded here. Only plain data are unpickled, see clients/pickled.py."""
    names = {"score": "scores", "strict": "strict_rewards"}
    detected = pickled.scorer("geneval", url, allow_pickle, names, **server)
    return lambda images, prompts, metadata: detected(images, meta_datas=metadata, only_strict=True)
