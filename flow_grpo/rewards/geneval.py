"""GenEval (arXiv:2310.11513): accuracy of the objects, numbers, colours and places of a prompt, seen by a detector.

The detector runs in the reward server that came with Flow-GRPO, which speaks pickle. A score is the mean over the
prompt's demands: 1 - |found - wanted| / wanted for a number of objects, of one colour or of any, and 0 or 1 for a
place. It is negative if more than twice as many are found as are wanted. `_strict` is 1 if all demands are met.
Metadata are GenEval's own. The server is not asked to apply GenEval's lenient rule as well: nothing here uses it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.rewards.clients import pickled

RANGE = (-math.inf, 1.0)
TYPICAL_RANGE = (0.0, 1.0)


def check_prompts(prompts: list[str], metadata: list[dict]) -> None:
    """Raise UserError for the first prompt whose metadata are not those that the server reads."""
    for prompt, data in zip(prompts, metadata, strict=True):
        clauses = data.get("include")
        if not isinstance(clauses, list) or not clauses or not all(map(_is_clause, clauses)):
            raise UserError(
                f'prompt {quoted(prompt)} needs metadata with "include", a list of objects with "class" and "count", '
                "a number from 1"
            )
        if not isinstance(data.get("tag"), str):
            raise UserError(
                f'prompt {quoted(prompt)} needs metadata with "tag", the category of the prompt, such as "counting"'
            )


def _is_clause(clause: object) -> bool:
    """Return whether an entry of "include" names a class and a number of objects."""
    if not isinstance(clause, dict) or not isinstance(clause.get("class"), str):
        return False
    return type(clause.get("count")) is int and clause["count"] > 0


def load(
    device: torch.device, url: str | list[str] = "http://127.0.0.1:18085", allow_pickle: bool = False, **server
) -> Callable[..., dict[str, list[float]]]:
    """Return the scorer. Nothing is loaded here, and only plain data are unpickled, see clients/pickled.py."""
    names = {"score": "scores", "strict": "strict_rewards"}
    grade = pickled.make_scorer("geneval", url, allow_pickle, names, **server)

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> dict[str, list[float]]:
        demands = [data | {"prompt": prompt} for prompt, data in zip(prompts, metadata, strict=True)]
        return grade(images, meta_datas=demands, only_strict=True)

    return score
