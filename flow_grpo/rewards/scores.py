"""Calling a reward, and what its scores must be. It is no reward itself (`flow_grpo.rewards.HELPERS`)."""

import asyncio
import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import quoted
from flow_grpo.rewards.clients.threads import event_loop


def check_device(name: str, key: str) -> None:
    """Raises UserError, which names the setting by `key`, for a device that is not there; "" is the rank's own."""
    try:
        device = torch.device(name or "cpu")
    except RuntimeError as error:
        raise UserError(f"{key} is {quoted(name)}, which names no device; write cpu or cuda:0") from error
    count = torch.cuda.device_count()
    if (device.index or 0) >= {"cpu": 1, "cuda": count}.get(device.type, 0):
        raise UserError(f"{key} is {quoted(name)}, which is not there: there are the CPU and {count} CUDA devices")


def _awaited(output: Any) -> Any:
    """What a `score` returned, or what its coroutine returns; all coroutines run on one event loop."""
    if not inspect.iscoroutine(output):
        return output
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # the loop's thread has another stream
    loop = event_loop("async rewards", lambda: (torch.set_grad_enabled(False), torch.set_num_threads(1)))
    return asyncio.run_coroutine_threadsafe(output, loop).result()


def as_scores(output: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """What a `score` returned, as a dict."""
    return output if isinstance(output, dict) else {"score": output}


def takes_sources(score: Callable) -> bool:
    """Whether a `score` looks at the images that were to be edited, too."""
    return "sources" in inspect.signature(score).parameters


@torch.no_grad()
def scores_of(
    name: str,
    score: Callable,
    images: Tensor,
    prompts: list[str],
    metadata: list[dict],
    sources: list[list[Tensor]] | None = None,
) -> dict[str, Tensor]:
    """What a reward's `score` says, checked. Raises UserError: as of `checked`, or it left the process.

    Args:
        images: [B, 3, H, W] in [0, 1]; the reward gets copies of everything, so that nobody sees what it does to them.
        sources: of each prompt, [3, h, w] in [0, 1] each; for a `score` that takes them.
    """
    more = dict(sources=sources or [[]] * len(prompts)) if takes_sources(score) else {}
    try:
        output = _awaited(score(images.clone(), list(prompts), copy.deepcopy(metadata), **more))
    except SystemExit as error:  # would end the process without a word
        raise UserError(f"reward {name!r} left by {rewards.in_words(error)}") from error
    return checked(name, output, prompts)


def checked(name: str, output: Any, prompts: list[str]) -> dict[str, Tensor]:
    """What a reward or its server says of B images: by name, each [B] float32 on the CPU. Raises UserError: no "score"
    among it, not one finite number per image, or a score beyond the reward's RANGE."""
    scores = as_scores(output)
    if "score" not in scores:
        raise UserError(f"reward {name!r} returned a dict without 'score', but with {', '.join(map(repr, scores))}")
    scores = {key: _numbers(name, values, prompts) for key, values in scores.items()}
    low, high = rewards.bounds(name)
    if outside := [score for score in scores["score"].tolist() if not low <= score <= high]:
        raise UserError(f"reward {name!r} scores {outside[0]:g}, but its RANGE is {low:g} to {high:g}")
    return scores


def _numbers(name: str, values: Any, prompts: list[str]) -> Tensor:
    values = torch.as_tensor(values).detach().float().cpu()
    if values.shape != (len(prompts),):
        raise UserError(f"reward {name!r} returned {tuple(values.shape)} for {len(prompts)} images")
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise UserError(
            f"reward {name!r} is {values[bad[0]].item()} for {quoted(prompts[bad[0]])} ({len(bad)} such images)"
        )
    return values
