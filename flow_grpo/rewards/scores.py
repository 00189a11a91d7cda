"""Calling a reward, and what its scores must be. It is no reward itself (`flow_grpo.rewards.HELPERS`)."""

import asyncio
import copy
import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.rewards import foreign_code
from flow_grpo.rewards.clients.threads import event_loop

CLIPPED = "clipped_share"  # figure of a score that was clipped to its scale: 1, else 0


class SomeFailed(UserError):
    """Some images have no score. `scores`: those of all images by name, [B] each; NaN where there is none."""

    def __init__(self, text: str, scores: dict[str, Tensor]):
        super().__init__(text)
        self.scores = scores


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


def _as_scores(name: str, output: Any) -> dict[str, Any]:
    """What a `score` returned, as a dict. Raises UserError: a tuple that is Flow-GRPO's, or a dict without "score"."""
    if isinstance(output, tuple) and any(isinstance(part, dict) for part in output):
        raise UserError(
            f"reward {name!r} returned a tuple of scores and a dict, as Flow-GRPO's rewards do: return the scores "
            "alone, or a dict whose 'score' they are"
        )
    scores = output if isinstance(output, dict) else {"score": output}
    if "score" not in scores:
        raise UserError(f"reward {name!r} returned a dict without 'score', but with {', '.join(map(repr, scores))}")
    return scores


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
    """Scores of a reward's `score`, checked. Raises UserError: as of `checked`, it left the process, or a score of its
    own code is beyond its RANGE; one that it has from a server is left as it is, see `clipped`.

    Args:
        images: [B, 3, H, W] in [0, 1]; the reward gets copies of everything, so that nobody sees what it does to them.
        sources: of each prompt, [3, h, w] in [0, 1] each; for a `score` that takes them.
    """
    more = dict(sources=sources or [[]] * len(prompts)) if takes_sources(score) else {}
    try:
        with foreign_code.restored_after_call(name):
            output = _awaited(score(images.clone(), list(prompts), copy.deepcopy(metadata), **more))
    except SystemExit as error:  # would end the process without a word
        raise UserError(f"reward {name!r} left by {rewards.describe_error(error)}") from error
    scores = checked_scores(name, output, prompts)
    if not rewards.is_service(name):
        _check_range(name, scores["score"])
    return scores


def checked_scores(name: str, output: Any, prompts: list[str]) -> dict[str, Tensor]:
    """What a reward or its server says of B images: by name, each [B] float32 on the CPU. Raises UserError: no "score"
    among it, or not one real number per image; SomeFailed: there is one of some images only."""
    returned = _as_scores(name, output)
    scores = {key: _numbers(name, values, len(prompts)) for key, values in returned.items()}
    failed = torch.stack([~values.isfinite() for values in scores.values()]).any(0)
    if failed.any():
        raise SomeFailed(
            _why_failed(name, returned, scores, prompts),
            {key: values.masked_fill(failed, math.nan) for key, values in scores.items()},
        )
    return scores


def clip_to_range(name: str, scores: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Scores of somebody else's server, clipped to the reward's RANGE. Where that changed any, CLIPPED is among them,
    and the text says what was clipped; else the text is empty."""
    low, high = rewards.bounds(name)
    values = scores["score"]
    outside = (values < low) | (values > high)
    if not outside.any():
        return scores, ""
    text = f"it scores {values[outside][0].item():g}, beyond its scale {low:g} to {high:g}"
    return scores | {"score": values.clamp(low, high), CLIPPED: outside.float()}, text


def _check_range(name: str, values: Tensor) -> None:
    low, high = rewards.bounds(name)
    outside = values[(values < low) | (values > high)]
    if len(outside):
        raise UserError(f"reward {name!r} scores {outside[0].item():g}, but its RANGE is {low:g} to {high:g}")


def _numbers(name: str, values: Any, count: int) -> Tensor:
    """[B] float32 of what is said of B images; NaN for an entry of a list that is no number, such as None."""
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        raise UserError(f"reward {name!r} returned {quoted(values)} for {count} images; it must be one number for each")
    if isinstance(values, list | tuple):
        values = [_number(value) for value in values]
    values = torch.as_tensor(values).detach()
    if values.is_complex():
        raise UserError(f"reward {name!r} returned complex numbers ({values.dtype}); a score is a real one")
    if values.shape != (count,):
        raise UserError(f"reward {name!r} returned {tuple(values.shape)} for {count} images")
    return values.float().cpu()


def _number(value: Any) -> float:
    """A number of a list; NaN for what is none. A text is none, whatever it says."""
    if isinstance(value, str | bytes):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _why_failed(name: str, returned: dict, scores: dict[str, Tensor], prompts: list[str]) -> str:
    """What the first image without a finite number has in its place, for which prompt, and how many such there are."""
    key = next(key for key, values in scores.items() if not values.isfinite().all())
    bad = (~scores[key].isfinite()).nonzero().flatten().tolist()
    entry, number = returned[key][bad[0]], scores[key][bad[0]].item()
    said = number if isinstance(entry, Real | Tensor) else f"{quoted(entry)}, which is no number,"
    return f"reward {name!r} is {said} for {quoted(prompts[bad[0]])} ({len(bad)} such images)"
