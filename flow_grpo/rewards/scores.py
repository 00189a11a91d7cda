"""Calls of a reward, and checks of the scores that it returns.

It is no reward itself (`flow_grpo.rewards.HELPERS`).
"""

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, quoted
from flow_grpo.rewards import foreign_code
from flow_grpo.rewards.clients.threads import event_loop

CLIPPED = "clipped_share"  # figure of a score that was clipped to its scale: 1, else 0


class SomeFailed(UserError):
    """Failure of some images' scores. `scores` holds those of all images by name, [B] each; NaN = none."""

    def __init__(self, text: str, scores: dict[str, Tensor]):
        super().__init__(text)
        self.scores = scores


def check_device(name: str, key: str) -> None:
    """Raise UserError, which names the setting by `key`, for a device that is not there; "" is the rank's own."""
    try:
        device = torch.device(name or "cpu")
    except RuntimeError as error:
        raise UserError(f"{key} is {quoted(name)}, which names no device; write cpu or cuda:0") from error
    num_gpus = torch.cuda.device_count()
    num_devices = {"cpu": 1, "cuda": num_gpus}.get(device.type, 0)
    if (device.index or 0) >= num_devices:
        raise UserError(f"{key} is {quoted(name)}, which is not there: there are the CPU and {num_gpus} CUDA devices")


def _awaited(output: Any) -> Any:
    """Return what a `score` returned, or what its coroutine returns. All coroutines run on one event loop."""
    if not inspect.iscoroutine(output):
        return output
    # The loop's thread has another stream.
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    loop = event_loop("async rewards", _prepare_thread)
    return asyncio.run_coroutine_threadsafe(output, loop).result()


def _prepare_thread() -> None:
    """Set torch's modes of the event loop's thread."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)


def _as_scores(name: str, output: Any) -> dict[str, Any]:
    """Return a `score`'s output as a dict.

    Raise UserError for a tuple as Flow-GRPO's rewards return it, and for a dict without "score".
    """
    if isinstance(output, tuple) and any(isinstance(part, dict) for part in output):
        raise UserError(
            f"reward {name!r} returned a tuple of scores and a dict, as Flow-GRPO's rewards do: return the scores "
            "alone, or a dict whose 'score' they are"
        )
    if not isinstance(output, dict):
        return {"score": output}
    if "score" not in output:
        raise UserError(f"reward {name!r} returned a dict without 'score', but with {', '.join(map(repr, output))}")
    return output


def takes_sources(score: Callable) -> bool:
    """Return whether a `score` also looks at the images that were to be edited."""
    return "sources" in inspect.signature(score).parameters


def takes_videos(score: Callable) -> bool:
    """Return whether a `score` takes videos [B, f, 3, H, W], after which its first argument is called; an image is a
    video of one frame."""
    return next(iter(inspect.signature(score).parameters), "") == "videos"


@torch.no_grad()
def scores_of(
    name: str,
    score: Callable,
    images: Tensor,
    prompts: list[str],
    metadata: list[dict],
    sources: list[list[Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Call a reward's `score` and return its scores, checked.

    A score that the reward has from a server may be beyond its RANGE, see `clip_to_range`.

    Args:
        images: [B, 3, H, W] in [0, 1], or videos [B, f, 3, H, W] for a `score` that takes them. The reward gets copies
            of all arguments, so that it cannot change them.
        sources: for each prompt a list of [3, h, w] in [0, 1]; for a `score` that takes them.

    Raises:
        UserError: as by `checked_scores`; the reward left the process; its own code's score is beyond its RANGE.
    """
    arguments = {"sources": sources or [[]] * len(prompts)} if takes_sources(score) else {}
    # The reward gets copies: it may change its arguments in place.
    try:
        with foreign_code.restored_after_call(name):
            output = _awaited(score(images.clone(), list(prompts), copy.deepcopy(metadata), **arguments))
    # SystemExit would end the process without a message.
    except SystemExit as error:
        raise UserError(f"reward {name!r} left by {rewards.describe_error(error)}") from error
    scores = checked_scores(name, output, prompts)
    if not rewards.is_service(name):
        _check_range(name, scores["score"])
    return scores


def checked_scores(name: str, output: Any, prompts: list[str]) -> dict[str, Tensor]:
    """Return what a reward or its server says of B images: by name, each [B] float32 on the CPU.

    Raises:
        UserError: there is no "score", or not one real number per image.
        SomeFailed: some images have no finite number.
    """
    returned = _as_scores(name, output)
    scores = {key: _numbers(name, values, len(prompts)) for key, values in returned.items()}
    finite = torch.stack([values.isfinite() for values in scores.values()]).all(0)
    if finite.all():
        return scores
    reason = _failure(name, returned, scores, prompts)
    raise SomeFailed(reason, {key: values.masked_fill(~finite, math.nan) for key, values in scores.items()})


def join_scores(parts: list[dict[str, Tensor]], names: Iterable[str] = ()) -> dict[str, Tensor]:
    """Concatenate the parts' scores by name, each [b, ...]. A part whose reward failed lacks side figures: NaN. One in
    which nothing was clipped lacks that figure: 0.

    Args:
        names: of scores that come first, whether a part has them or not.
    """
    all_names = list(names)
    for part in parts:
        all_names.extend(part)
    scores = {}
    for name in dict.fromkeys(all_names):
        missing = 0.0 if name.endswith(CLIPPED) else torch.nan
        columns = []
        for part in parts:
            # Any column of a part has its shape.
            shape_of_part = next(iter(part.values()))
            columns.append(part.get(name, torch.full_like(shape_of_part, missing)))
        scores[name] = torch.cat(columns)
    return scores


def clip_to_range(name: str, scores: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Return scores from a server, clipped to the reward's RANGE, and what was clipped in words, "" for nothing.

    If any score was clipped, the scores have an entry CLIPPED.
    """
    low, high = rewards.bounds(name)
    values = scores["score"]
    outside = (values < low) | (values > high)
    if not outside.any():
        return scores, ""
    first = values[outside][0].item()
    clipped = {"score": values.clamp(low, high), CLIPPED: outside.float()}
    return scores | clipped, f"it scores {first:g}, beyond its scale {low:g} to {high:g}"


def _check_range(name: str, values: Tensor) -> None:
    """Raise UserError for a score of a reward's own code beyond its RANGE."""
    low, high = rewards.bounds(name)
    outside = values[(values < low) | (values > high)]
    if len(outside):
        raise UserError(f"reward {name!r} scores {outside[0].item():g}, but its RANGE is {low:g} to {high:g}")


def _numbers(name: str, values: Any, count: int) -> Tensor:
    """Return one entry of a reward's output as [B] float32; NaN for an entry of a list that is no number, such as None.

    Raise UserError if it is anything but one real number for each image.
    """
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        raise UserError(
            f"reward {name!r} returned {quoted(values)} for {counted(count, 'images')}; it must be one number for each"
        )
    if isinstance(values, list | tuple):
        values = [_number(value) for value in values]
    values = torch.as_tensor(values).detach()
    if values.is_complex():
        raise UserError(f"reward {name!r} returned complex numbers ({values.dtype}); a score is a real one")
    if values.shape != (count,):
        raise UserError(f"reward {name!r} returned {tuple(values.shape)} for {counted(count, 'images')}")
    return values.float().cpu()


def _number(value: Any) -> float:
    """Return an entry of a list as a number; NaN if it is none. A text is none, whatever it says."""
    if isinstance(value, str | bytes):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _failure(name: str, returned: dict[str, Any], scores: dict[str, Tensor], prompts: list[str]) -> str:
    """Return what stands in the place of the first number that is not finite, for which prompt, and for how many."""
    key = next(key for key, values in scores.items() if not values.isfinite().all())
    failed = (~scores[key].isfinite()).nonzero().flatten().tolist()
    first = failed[0]
    entry = returned[key][first]
    number = scores[key][first].item()
    value = f"{number}" if isinstance(entry, Real | Tensor) else f"{quoted(entry)}, which is no number,"
    return f"reward {name!r} is {value} for {quoted(prompts[first])} ({counted(len(failed), 'such images')})"
