"""Rewards. One file per reward, whose name is the reward's name in `config.reward_fn`.

A file has `load(device) -> score(images [B, 3, H, W] in [0, 1], prompts, metadata)`, which returns [B], or a dict whose
"score" [B] is the reward and whose other entries [B] are logged beside it.
"""

import difflib
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


def check_rewards(weights: Mapping[str, float], watched: Iterable[str] = ()) -> None:
    """Raises ValueError for an unknown reward, a weight that is no finite number, or no reward at all.

    watched: names of rewards that are measured only.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if not weights:
        raise ValueError(f"config.reward_fn is empty; there are: {', '.join(known)}")
    for name in [*weights, *watched]:
        if name not in known:
            near = difflib.get_close_matches(name, known, cutoff=0)
            raise ValueError(f"no reward {name!r} in flow_grpo/rewards; nearest: {', '.join(near)}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"config.reward_fn.{name} is {weight!r}; its weight must be a finite number")


def multi_score(
    device: torch.device, weights: Mapping[str, float], watched: Iterable[str] = ()
) -> Callable[..., dict[str, Tensor]]:
    """Load several rewards as one.

    Args:
        watched: names of rewards that only `score(..., everything=True)` measures; they do not count in "avg".

    Returns:
        (images, prompts, metadata) -> {"avg": weighted sum [B], name: [B], name_extra: [B], ...}, float32 on the CPU.
        It raises ValueError when a reward is not one finite number per image, and names the prompt.
    """
    names = dict.fromkeys([*weights, *watched])
    scorers = {name: importlib.import_module(f"flow_grpo.rewards.{name}").load(device) for name in names}

    def score(images: Tensor, prompts: list[str], metadata: list[dict], everything: bool = False) -> dict[str, Tensor]:
        scores = {}
        for name in scorers if everything else weights:
            found = scorers[name](images, prompts, metadata)
            found = found if isinstance(found, dict) else {"score": found}
            scores |= {
                name if key == "score" else f"{name}_{key}": _checked(name, v, prompts) for key, v in found.items()
            }
        scores["avg"] = sum(weight * scores[name] for name, weight in weights.items())
        return scores

    return score


def _checked(name: str, values, prompts: list[str]) -> Tensor:
    values = torch.as_tensor(values).detach().float().cpu()
    if values.shape != (len(prompts),):
        raise ValueError(f"reward {name!r} returned {tuple(values.shape)} for {len(prompts)} images")
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"reward {name!r} is {values[bad[0]].item()} for {prompts[bad[0]]!r} ({len(bad)} such images)")
    return values
