"""Rewards. One file per reward, whose name is the reward's name in `config.reward_fn`; here, or in a folder that
the environment's FLOW_GRPO_REWARDS names. A function may be one too, see `register`.

A file has `load(device, **options) -> score(images [B, 3, H, W] in [0, 1], prompts, metadata)`. `score` returns [B], or
a dict whose "score" [B] is the reward and whose other entries [B] are logged beside it. RANGE, if the file has it, is
the lowest and the highest score there can be: an own score beyond it is an error, and one of a server is clipped to it.
check_prompts(prompts, metadata), if it has that, refuses prompts that it
cannot score. `score` may be a coroutine function (async def). One that has a parameter `sources` gets the images that
each prompt edits, a list of [3, h, w] in [0, 1]. labels(images, metadata), if it has that, says what a
prompt's images may differ in, as a dict of [B] int64, -1 = none: evaluations log its entropy.
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
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.base.metric_table import METRICS
from flow_grpo.base.prompt import Prompt, texts_of
from flow_grpo.rewards import foreign_code

CONNECTION = ("token_file", "timeout_s")  # settings of a server, see clients/client.py
MOST = 1e9  # size of a weight
GROUP_FIGURES = [name.removeprefix("reward/<name>_") for name in METRICS if name.startswith("reward/<name>_")]
_LOGGED = [name.partition("/")[2] for name in METRICS if name.startswith(("reward/", "eval/")) and "<" not in name]
RUNS_OWN = {"diversity", *GROUP_FIGURES, *_LOGGED}  # metrics, and a score, that reward/NAME or eval/NAME would be
HELPERS = ("clip_model", "detection", "foreign_code", "scores")  # files here that are no rewards
REGISTERED: dict[str, SimpleNamespace] = {}  # what `register` was called with, as a file has it


def _files() -> set[str]:
    """Names of the reward files here and in the folders that FLOW_GRPO_REWARDS names now, whose files may import their
    neighbours."""
    for named in filter(None, os.environ.get("FLOW_GRPO_REWARDS", "").split(os.pathsep)):
        folder = str(Path(named).resolve())  # as tracebacks name its files
        __path__.extend([folder] if folder not in __path__ else [])
        sys.path.extend([folder] if folder not in sys.path else [])
    return {module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg}


def register(name: str, score: Callable) -> None:
    """Make a function a reward of this process, where a script's `main(config)` is called in Python or a notebook. It
    takes and returns what a file's `score` does. Raises UserError: a file has that name."""
    if name in _files() or not name.isidentifier():
        raise UserError(f"a reward cannot be registered as {name!r}: it is a file's name, or no name for a setting")
    REGISTERED[name] = SimpleNamespace(load=lambda device: score)


def reward_names() -> list[str]:
    """Names of all reward files, and of the functions that were registered."""
    return sorted(_files() - set(HELPERS) | set(REGISTERED))


def display_name(score: str, weights: Mapping[str, float]) -> str:
    """What people read for a score: in place of the weighted sum the only reward, where that is all of it."""
    return next(iter(weights)) if score == "avg" and [*weights.values()] == [1.0] else score


def check_rewards(weights: Mapping[str, float], watched: Iterable[str] = (), served: Iterable[str] = ()) -> None:
    """Raises UserError for an unknown reward, a weight that is no finite number, or no reward at all.

    Args:
        watched: names of rewards that are measured only.
        served: names that need no file here, since a server scores them.
    """
    if not weights:
        raise UserError(f"config.reward_fn is empty; there are: {', '.join(reward_names())}")
    for name in {**weights, **dict.fromkeys(watched)}:
        if name in RUNS_OWN:
            raise UserError(f"reward {name!r} is called as a metric of every run; rename its file")
        check_reward_name(name, f"config.{'reward_fn' if name in weights else 'eval.rewards'}", served)
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= MOST:
            raise UserError(
                f"config.reward_fn.{name} is {quoted(weight)}; its weight must be a number from {-MOST:g} to {MOST:g}"
            )


def check_reward_name(name: str, key: str, served: Iterable[str] = ()) -> None:
    """Raises UserError for a name that is no reward's. Arguments as of `check_rewards`; `key` is where it stands."""
    if name not in reward_names() and name not in served:
        near = difflib.get_close_matches(name, reward_names(), cutoff=0)
        folders = "flow_grpo/rewards or the folders of FLOW_GRPO_REWARDS"
        raise UserError(f"{key}: no reward {quoted(name)} in {folders}; nearest: {', '.join(near)}")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises UserError for an option that the reward's `load` does not take, or one that it needs and has not."""
    parameters = inspect.signature(_file(name).load).parameters
    takes = {key: value for key, value in parameters.items() if key != "device" and value.kind != value.VAR_KEYWORD}
    unknown = sorted(set(options) - set(takes) - set(CONNECTION if is_service(name) else ()))
    if unknown:
        raise UserError(
            f"config.reward.args.{name}: {', '.join(unknown)} unknown; it takes {', '.join(takes) or 'none'}"
        )
    needed = [key for key, value in takes.items() if value.default is inspect.Parameter.empty and key not in options]
    if needed:
        raise UserError(f"reward {name!r} needs config.reward.args.{name}: {', '.join(needed)}")


def check_prompts(weights: Mapping[str, float], prompts: list[Prompt], watched: Iterable[str] = ()) -> None:
    """Raises UserError for the first prompt that one of the rewards cannot score. Arguments as of `check_rewards`."""
    for name in sorted({*weights, *watched} & set(reward_names())):
        check = getattr(_file(name), "check_prompts", None)
        if not check:
            continue
        try:
            with _named(name, "did not check the prompts"):
                check(texts_of(prompts), [prompt.metadata for prompt in prompts])
        except UserError as error:
            way_out = f"leave it out by config.reward_fn.{name}=0" if name in weights else "leave it out"
            raise UserError(f"reward {name!r}: {error}; give it other prompts, or {way_out}") from error


def image_labels(names: Iterable[str], images: Any, prompts: list[Prompt]) -> dict[str, Any]:
    """NAME_KEY -> what the files of some rewards tell the first images apart by, of B prompts: [B] int64, -1 = none."""
    found = {}
    for name in set(names) & set(reward_names()):
        if (of_file := getattr(_file(name), "labels", None)) and prompts:
            metadata = [prompt.metadata for prompt in prompts]
            with _named(name, "did not label the images"):
                labelled = of_file(images[: len(prompts)], metadata)
            found |= {f"{name}_{key}": values for key, values in labelled.items()}
    return found


def is_service(name: str) -> bool:
    """Whether the reward file asks a server of another kind than ours: its `load` takes a url and **CONNECTION."""
    return name in reward_names() and "url" in inspect.signature(_file(name).load).parameters


def reward_file(name: str) -> Path | None:
    """A reward's file; None for a function that was registered, and for what has no file here."""
    file = getattr(_file(name), "__file__", None) if name in reward_names() else None
    return Path(file) if file else None


def load(name: str, device: Any, options: Mapping[str, Any] | None = None) -> Callable:
    """A reward file's scorer. Raises UserError where `load` returns none, or the file's RANGE is none."""
    foreign_code.remember_state(name)
    bounds(name)
    with _named(name, "was not loaded"):
        score = _file(name).load(device, **options or {})
    if not callable(score):
        raise UserError(f"load() of reward {name!r} returned {quoted(score)} instead of a function")
    return score


def bounds(name: str) -> tuple[float, float]:
    """The lowest and the highest score there can be; without limits for a reward that has no file here, or whose RANGE
    is None. Raises UserError for a RANGE that is no pair of numbers in order."""
    limits = getattr(_file(name), "RANGE", None) if name in reward_names() else None
    if limits is None:
        return -math.inf, math.inf
    numbers = [end for end in limits if isinstance(end, int | float)] if isinstance(limits, tuple | list) else []
    if len(numbers) != 2 or len(limits) != 2 or not numbers[0] <= numbers[1]:
        raise UserError(
            f"RANGE of reward {name!r} is {quoted(limits)}; it must be the lowest and the highest score, such as "
            "(0.0, 1.0), or None"
        )
    return numbers[0], numbers[1]


def _file(name: str) -> ModuleType | SimpleNamespace:
    if name in REGISTERED:
        return REGISTERED[name]
    _files()
    module = sys.modules.get(f"{__name__}.{name}")
    if module is None:
        with _named(name, "was not imported"):
            module = importlib.import_module(f"{__name__}.{name}")
    if not callable(getattr(module, "load", None)):
        raise UserError(f"the file of reward {name!r} has no function load(device, **options)")
    return module


@contextmanager
def _named(name: str, failed: str) -> Iterator[None]:
    """An error in a reward's file is a UserError that says whose it is. What the file changes of the process is put
    back."""
    try:
        with foreign_code.restored_after_loading():
            yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"reward {name!r} {failed}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """An error in a reward's file: its type, what it says, and the file and line where it was raised."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [
        frame for frame in frames if str(frame[0].parent) in __path__ and frame[0].stem not in (*HELPERS, "__init__")
    ]
    place = f" ({own[-1][0]}, line {own[-1][1]})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
