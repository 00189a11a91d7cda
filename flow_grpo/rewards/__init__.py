"""Rewards. One file per reward, whose name is the reward's name in `config.reward_fn`; here, or in a folder that
the environment's FLOW_GRPO_REWARDS names. A function may be a reward too, see `register`.

A file has `load(device, **options) -> score(images [B, 3, H, W] in [0, 1], prompts, metadata)`. `score` returns [B], or
a dict whose "score" [B] is the reward and whose other entries [B] are logged beside it. It may be a coroutine function
(async def). If it has a parameter `sources`, it gets the images that each prompt edits, a list of [3, h, w] in [0, 1].

A file may also have
- RANGE: the lowest and the highest score there can be. A score of the file beyond it is an error, and one of a server
  is clipped to it.
- TYPICAL_RANGE: the scores of a failure and of a success, where RANGE is wider or has no end. A run that draws prompts
  by their signal measures spreads by it (sample.prompt_weights).
- check_prompts(prompts, metadata), which refuses prompts that it cannot score.
- labels(images, metadata): a dict of [B] int64, -1 = none, of what a prompt's images may differ in. Evaluations log
  its entropy.
- load_differentiable(device, **options) -> score_pixels(images, prompts, metadata), with the options of `load`: the
  same score as [B] float32 with a graph back to the images [B, 3, H, W] in [0, 1], in torch from the first step. Such a
  reward has a gradient. Images may be of any float dtype and require a gradient; weights must not.
"""

import difflib
import importlib
import inspect
import math
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, quoted
from flow_grpo.base.metric_table import METRICS
from flow_grpo.base.prompt import Prompt, texts_of
from flow_grpo.rewards import foreign_code

CONNECTION = ("token_file", "timeout_s")  # settings of a server, see clients/client.py
LARGEST_WEIGHT = 1e9
HELPERS = ("clip_model", "detection", "foreign_code", "scores")  # files here that are no rewards
REGISTERED: dict[str, SimpleNamespace] = {}  # rewards of `register`, each with the `load` that a file would have

# A reward of one of the names in RUNS_OWN would be logged as reward/NAME or eval/NAME, which a run logs itself.
GROUP_FIGURES = [name.removeprefix("reward/<name>_") for name in METRICS if name.startswith("reward/<name>_")]
_LOGGED = [name.partition("/")[2] for name in METRICS if name.startswith(("reward/", "eval/")) and "<" not in name]
RUNS_OWN = {"diversity", *GROUP_FIGURES, *_LOGGED}


def _file_names() -> set[str]:
    """Return the names of the files here and in the folders that FLOW_GRPO_REWARDS names now.

    Such a folder becomes part of this package, and of sys.path, so that its files may import their neighbours.
    """
    for name in os.environ.get("FLOW_GRPO_REWARDS", "").split(os.pathsep):
        if not name:
            continue
        # Tracebacks name files by resolved paths, see `describe_error`.
        folder = str(Path(name).resolve())
        for places in (__path__, sys.path):
            if folder not in places:
                places.append(folder)
    return {module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg}


def register(
    name: str,
    score: Callable,
    score_pixels: Callable | None = None,
    limits: tuple[float, float] | None = None,
) -> None:
    """Make a function a reward of this process, for a notebook or other code that calls a script's `main(config)`.

    The function takes and returns what a file's `score` does, and `score_pixels` what that of its
    `load_differentiable` does; without it the reward has no gradient. `limits` is a file's RANGE. Raise UserError if a
    file has that name.
    """
    if name in _file_names() or not name.isidentifier():
        raise UserError(f"a reward cannot be registered as {name!r}: it is a file's name, or no name for a setting")
    module = SimpleNamespace(load=lambda device: score, RANGE=limits)
    if score_pixels is not None:
        module = SimpleNamespace(load=module.load, RANGE=limits, load_differentiable=lambda device: score_pixels)
    REGISTERED[name] = module


def reward_names() -> list[str]:
    """Return the names of all reward files and of registered functions."""
    files = _file_names() - set(HELPERS)
    return sorted(files | set(REGISTERED))


def display_name(score: str, weights: Mapping[str, float]) -> str:
    """Return the name that people read for a score: the reward's own if it is the only one, of weight 1."""
    is_only_reward = score == "avg" and list(weights.values()) == [1.0]
    return next(iter(weights)) if is_only_reward else score


def check_rewards(weights: Mapping[str, float], watched: Iterable[str] = (), served: Iterable[str] = ()) -> None:
    """Raise UserError for an unknown reward, a weight that is no finite number, or no reward at all.

    Args:
        watched: names of rewards that are measured only.
        served: names that need no file here, since a server scores them.
    """
    if not weights:
        raise UserError(f"config.reward_fn is empty; there are: {', '.join(reward_names())}")
    keys = dict.fromkeys(weights, "config.reward_fn")
    for name in watched:
        keys.setdefault(name, "config.eval.rewards")
    for name, key in keys.items():
        if name in RUNS_OWN:
            raise UserError(f"reward {name!r} is called as a metric of every run; rename its file")
        check_reward_name(name, key, served)
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        # NaN is not below any limit.
        if not is_number or not abs(weight) <= LARGEST_WEIGHT:
            raise UserError(
                f"config.reward_fn.{name} is {quoted(weight)}; its weight must be a number from {-LARGEST_WEIGHT:g} to "
                f"{LARGEST_WEIGHT:g}"
            )


def check_reward_name(name: str, key: str, served: Iterable[str] = ()) -> None:
    """Raise UserError for a name that is no reward's; `key` names the setting, `served` is that of `check_rewards`."""
    if name not in reward_names() and name not in served:
        near = difflib.get_close_matches(name, reward_names(), cutoff=0)
        folders = "flow_grpo/rewards or the folders of FLOW_GRPO_REWARDS"
        raise UserError(f"{key}: no reward {quoted(name)} in {folders}; nearest: {', '.join(near)}")


def addressed(args: Mapping[str, Any]) -> list[str]:
    """Return the rewards to which config.reward.args gives the address of a server. Raise UserError for options that
    are no dict. Imports no reward's file."""
    names = []
    for name, options in args.items():
        if not isinstance(options, Mapping):
            raise UserError(f"config.reward.args.{name} is {quoted(options)}; it must be a dict")
        if options.get("url"):
            names.append(name)
    return names


def served(args: Mapping[str, Any]) -> list[str]:
    """Return the rewards that a server of ours scores in the place of their files. A service is asked by its own file,
    which runs here. Argument and error as of `addressed`."""
    return [name for name in addressed(args) if not is_service(name)]


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for an option that the reward's `load` does not take, or one that it needs and does not get."""
    takes = []
    missing = []
    for parameter in inspect.signature(_module(name).load).parameters.values():
        if parameter.name == "device" or parameter.kind is parameter.VAR_KEYWORD:
            continue
        takes.append(parameter.name)
        if parameter.default is parameter.empty and parameter.name not in options:
            missing.append(parameter.name)
    accepted = set(takes)
    if is_service(name):
        accepted.update(CONNECTION)
    unknown = sorted(set(options) - accepted)
    if unknown:
        raise UserError(
            f"config.reward.args.{name}: {', '.join(unknown)} unknown; it takes {', '.join(takes) or 'none'}"
        )
    if missing:
        raise UserError(f"reward {name!r} needs config.reward.args.{name}: {', '.join(missing)}")


def check_prompts(weights: Mapping[str, float], prompts: list[Prompt], watched: Iterable[str] = ()) -> None:
    """Raise UserError for the first prompt that a reward cannot score. Arguments as in `check_rewards`."""
    for name in sorted({*weights, *watched} & set(reward_names())):
        check = getattr(_module(name), "check_prompts", None)
        if not check:
            continue
        try:
            with _errors_named(name, "did not check the prompts"):
                check(texts_of(prompts), [prompt.metadata for prompt in prompts])
        except UserError as error:
            way_out = "leave it out"
            if name in weights:
                way_out += f" by config.reward_fn.{name}=0"
            raise UserError(f"reward {name!r}: {error}; give it other prompts, or {way_out}") from error


def image_labels(names: Iterable[str], images: Any, prompts: list[Prompt]) -> dict[str, Any]:
    """Return what the rewards' files tell the images of B prompts apart by: NAME_KEY -> [B] int64, -1 = none.

    Args:
        images: [B or more, 3, H, W]; those beyond the prompts are left out.
    """
    labels = {}
    for name in set(names) & set(reward_names()):
        label = getattr(_module(name), "labels", None)
        if label is None or not prompts:
            continue
        metadata = [prompt.metadata for prompt in prompts]
        with _errors_named(name, "did not label the images"):
            by_key = label(images[: len(prompts)], metadata)
        for key, values in by_key.items():
            labels[f"{name}_{key}"] = values
    return labels


def is_service(name: str) -> bool:
    """Return whether a reward file asks a server of another kind than ours: its `load` takes a url and **CONNECTION."""
    return name in reward_names() and "url" in inspect.signature(_module(name).load).parameters


def reward_file(name: str) -> Path | None:
    """Return a reward's file, or None for a registered function and a reward that has no file here."""
    if name not in reward_names():
        return None
    file = getattr(_module(name), "__file__", None)
    return Path(file) if file else None


def load(name: str, device: Any, options: Mapping[str, Any] | None = None) -> Callable:
    """Return the `score` of a reward's file. Raise UserError if `load` returns no function, or RANGE is no range."""
    foreign_code.remember_state(name)
    bounds(name)
    with _errors_named(name, "was not loaded"):
        score = _module(name).load(device, **options or {})
    if not callable(score):
        raise UserError(f"load() of reward {name!r} returned {quoted(score)} instead of a function")
    return score


def has_gradient(name: str) -> bool:
    """Return whether a reward's file has `load_differentiable`; False for a reward that has no file here."""
    return name in reward_names() and callable(getattr(_module(name), "load_differentiable", None))


def check_gradients(weights: Mapping[str, float], served: Iterable[str] = ()) -> None:
    """Raise UserError for the first reward without a gradient. Arguments as in `check_rewards`."""
    served = set(served)
    for name in weights:
        if name in served or is_service(name):
            raise UserError(
                f"reward {name!r} is scored by a server, which returns scores and no gradient; score it in this "
                f"process, without config.reward.args.{name}.url, or take a reward that has a gradient: "
                f"{_names_with_gradient()}"
            )
        if not has_gradient(name):
            raise UserError(
                f"reward {name!r} has no gradient: its file has no function load_differentiable(device, **options); "
                f"those that have one: {_names_with_gradient()}"
            )


def _names_with_gradient() -> str:
    """Return the names of the rewards that have a gradient. A file that cannot be imported has none."""
    names = []
    for name in reward_names():
        with suppress(UserError):
            if has_gradient(name):
                names.append(name)
    return ", ".join(names)


def load_differentiable(name: str, device: Any, options: Mapping[str, Any] | None = None) -> Callable:
    """Return (images [B, 3, H, W] in [0, 1], prompts, metadata) -> scores [B] float32 with a graph.

    Raise UserError if the reward has no gradient, or `load_differentiable` of its file returns no function. The
    returned function raises it for scores that are no [B], or have no graph back to images that require a gradient.
    """
    check_gradients({name: 1.0})
    foreign_code.remember_state(name)
    with _errors_named(name, "was not loaded"):
        score_pixels = _module(name).load_differentiable(device, **options or {})
    if not callable(score_pixels):
        raise UserError(
            f"load_differentiable() of reward {name!r} returned {quoted(score_pixels)} instead of a function"
        )

    def checked(images: Any, prompts: list[str], metadata: list[dict]) -> Any:
        scores: Any = score_pixels(images, prompts, metadata)
        shape = tuple(getattr(scores, "shape", ()))
        if shape != (len(prompts),):
            raise UserError(f"score_pixels of reward {name!r} returned {shape} for {counted(len(prompts), 'images')}")
        if images.requires_grad and not scores.requires_grad:
            raise UserError(f"score_pixels of reward {name!r} returned scores without a graph back to the images")
        return scores.float()

    return checked


def bounds(name: str) -> tuple[float, float]:
    """Return the lowest and the highest score there can be.

    They are infinite for a reward that has no file here, or whose RANGE is None. Raise UserError for a RANGE that is no
    pair of numbers in order.
    """
    return _range_of(name, "RANGE")


def span(name: str) -> float:
    """Return how far a success scores above a failure: the width of the file's TYPICAL_RANGE, or else of its RANGE.

    It is infinite where neither says it. Raise UserError for one that is no pair of numbers in order.
    """
    lowest, highest = _range_of(name, "TYPICAL_RANGE")
    if math.isinf(highest - lowest):
        lowest, highest = _range_of(name, "RANGE")
    return highest - lowest


def _range_of(name: str, attribute: str) -> tuple[float, float]:
    """Return a range of scores that a reward's file states, infinite where it states none. Raise UserError for one that
    is no pair of numbers in order."""
    limits = getattr(_module(name), attribute, None) if name in reward_names() else None
    if limits is None:
        return -math.inf, math.inf
    if not _is_range(limits):
        raise UserError(
            f"{attribute} of reward {name!r} is {quoted(limits)}; it must be the lowest and the highest score, such as "
            "(0.0, 1.0), or None"
        )
    lowest, highest = limits
    return lowest, highest


def _is_range(limits: Any) -> bool:
    """Return whether a file's RANGE is a pair of numbers in order."""
    if not isinstance(limits, tuple | list) or len(limits) != 2:
        return False
    return all(isinstance(limit, int | float) for limit in limits) and limits[0] <= limits[1]


def _module(name: str) -> ModuleType | SimpleNamespace:
    """Return a reward's file as a module, imported at the first call."""
    if name in REGISTERED:
        return REGISTERED[name]
    # The folders of FLOW_GRPO_REWARDS may be new.
    _file_names()
    module = sys.modules.get(f"{__name__}.{name}")
    if module is None:
        with _errors_named(name, "was not imported"):
            module = importlib.import_module(f"{__name__}.{name}")
    if not callable(getattr(module, "load", None)):
        raise UserError(f"the file of reward {name!r} has no function load(device, **options)")
    return module


@contextmanager
def _errors_named(name: str, failed: str) -> Iterator[None]:
    """Turn an error in a reward's file into a UserError that names the reward, and put back what the file changes."""
    try:
        with foreign_code.restored_after_loading():
            yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"reward {name!r} {failed}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return an error in a reward's file in words: its type, its text, and the file and line where it was raised."""
    place = ""
    # The last frame in a reward's file, not in what the file calls.
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if str(file.parent) in __path__ and file.stem not in (*HELPERS, "__init__"):
            place = f" ({file}, line {frame.lineno})"
    return f"{type(error).__name__}: {error}{place}"
