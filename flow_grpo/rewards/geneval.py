"""GenEval (arXiv:2310.11513): whether a detector finds the objects, numbers, colours and places that a prompt names.

The detector runs in the reward server that came with Flow-GRPO, which speaks pickle. A score is the mean over the
prompt's demands: 1 - |found - wanted| / wanted of a number of objects or of a colour's, and 0 or 1 of a place. Where
more than twice as many are found as are wanted, it is negative. `_strict` is 1 where all demands are met. Metadata are
GenEval's own. The server is not asked to apply GenEval's lenient rule as well, whose outcome nothing here uses.
"""

import math

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.rewards.clients import pickled

RANGE = (-math.inf, 1.0)


def check_prompts(prompts: list[str], metadata: list[dict]) -> None:
    """Raises UserError for the first prompt whose metadata are not those that the server reads."""
    for prompt, data in zip(prompts, metadata, strict=True):
        clauses = data.get("include")
        known = bool(clauses) and isinstance(clauses, list)
        if not known or not all(_is_clause(clause) for clause in clauses):
            raise UserError(
                f'prompt {quoted(prompt)} needs metadata with "include", a list of objects with "class" and "count", '
                "a number from 1"
            )
        if not isinstance(data.get("tag"), str):
            raise UserError(
                f'prompt {quoted(prompt)} needs metadata with "tag", the category of the prompt, such as "counting"'
            )


def _is_clause(clause: object) -> bool:
    if not isinstance(clause, dict) or not isinstance(clause.get("class"), str):
        return False
    return type(clause.get("count")) is int and clause["count"] > 0


def load(device: torch.device, url: str | list = "http://127.0.0.1:18085", allow_pickle: bool = False, **server):
    """The scorer; nothing is loaded here. Only plain data are unpickled, see clients/pickled.py."""
    names = {"score": "scores", "strict": "strict_rewards"}
    detected = pickled.make_scorer("geneval", url, allow_pickle, names, **server)

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> dict[str, list[float]]:
        asked = [data | {"prompt": prompt} for prompt, data in zip(prompts, metadata, strict=True)]
        return detected(images, meta_datas=asked, only_strict=True)

    return score
