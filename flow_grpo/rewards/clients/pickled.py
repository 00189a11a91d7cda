"""Older reward servers that speak pickle: what they send may hold numbers, strings, lists, dicts and numpy arrays."""

import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.rewards.clients.client import Server, ServerError
from flow_grpo.rewards.clients.wire import pack_image

ARRAYS = ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
PLAIN = {"numpy.ndarray", "numpy.dtype", *(f"numpy.{core}.{name}" for core in ("core", "_core") for name in ARRAYS)}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in PLAIN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def unpickle_scores(data: bytes, names: dict[str, str]) -> dict[str, list[float]]:
    """Numbers out of a pickled dict, NaN for None. Raises ServerError for everything else; none of it is run. `names`:
    what a score is called -> its key in the dict."""
    try:
        answer = _Plain(io.BytesIO(data)).load()
        return {name: list(map(_number, answer[key])) for name, key in names.items()}
    except Exception as error:  # a malformed pickle can raise anything
        raise ServerError(
            f"no plain pickle of a dict with numbers in {', '.join(names.values())}: {type(error).__name__}: {error}"
        ) from error


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def make_scorer(name: str, url: str | list[str], allow_pickle: bool, names: dict[str, str], **server) -> Callable:
    """(images, **more) -> scores by name, unchecked, of a server that takes and gives pickled dicts. Raises UserError:
    `allow_pickle` is not True, so nobody has said that pickle is fine.

    Args:
        names: as of `unpickle_scores`.
        server: token_file, timeout_s of Server.
    """
    if allow_pickle is not True:
        raise UserError(
            f"reward {name!r} asks a server that speaks pickle; if you trust {url}, set "
            f"config.reward.args to {{{name!r}: {{'allow_pickle': True}}}}"
        )
    asked = Server(url, **server)

    def score(images: Tensor, **more) -> dict[str, list[float]]:
        request = pickle.dumps({"images": [pack_image(image, "jpeg") for image in images]} | more)
        return asked.post("", partial(unpickle_scores, names=names), content=request).result()

    return score
