"""Rewards. One file per reward, whose name is the reward's name in `config.reward_fn`.

A file has `load(device) -> score(images [B, 3, H, W] in [0, 1], prompts, metadata)`, which returns [B], or a dict whose
"score" [B] is the reward and whose other entries [B] are logged beside it.
"""

import difflib
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def check_rewards(weights: Mapping[str, float]) -> None:
    """Raises ValueError for an unknown reward, a weight that is no finite number, or no reward at all."""
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if not weights:
        raise ValueError(f"config.reward_fn is empty; there are: {', '.join(known)}")
    for name, weight in weights.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, cutoff=0)
            raise ValueError(f"no reward {name!r} in flow_grpo/rewards; nearest: {', '.join(near)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"config.reward_fn.{name} is {weight!r}; its weight must be a finite number")


def multi_score(device: torch.device, weights: Mapping[str, float]) -> Callable[..., dict[str, Tensor]]:
    """Load several rewards as one.

    Returns:
        (images, prompts, metadata) -> {"avg": weighted sum [B], name: [B], name_extra: [B], ...}, float32 on the CPU.
        It raises ValueError when a reward is not one finite number per image, and names the prompt.
    """
    scorers = {name: importlib.import_module(f"flow_grpo.rewards.{name}").load(device) for name in weights}

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> dict[str, Tensor]:
        scores = {}
        for name, scorer in scorers.items():
            found = scorer(images, prompts, metadata)
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
