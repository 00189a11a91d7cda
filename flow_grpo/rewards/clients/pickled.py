"""Older reward servers that speak pickle: what they send may hold numbers, strings, lists, dicts and numpy arrays."""

import io
import pickle
from typing import Any

import numpy as np
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.rewards.clients.client import Server
from flow_grpo.rewards.clients.wire import BadAnswer, pack_image

MAX_VALUES = 10**6
ARRAYS = ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
PLAIN = {"numpy.ndarray", "numpy.dtype", *(f"numpy.{core}.{name}" for core in ("core", "_core") for name in ARRAYS)}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in PLAIN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def loads(data: bytes) -> Any:
    """Unpickle plain data, arrays as lists. Raises BadAnswer for everything else; none of it is run."""
    try:
        return _as_lists(_Plain(io.BytesIO(data)).load(), [MAX_VALUES])
    except Exception as error:  # a malformed pickle can raise anything
        raise BadAnswer(f"no plain pickle: {error}") from error


def _as_lists(value: Any, left: list[int]) -> Any:
    left[0] -= value.size if isinstance(value, np.ndarray) else 1
    if left[0] < 0:  # a list of one list of one list ... many times over is a short pickle
        raise ValueError(f"over {MAX_VALUES} values")
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _as_lists(item, left) for key, item in value.items()}
    return [_as_lists(item, left) for item in value] if isinstance(value, list | tuple) else value


class PickleServer:
    """A server that takes and gives pickled dicts. Raises UserError: nobody has said that pickle is fine."""

    def __init__(self, name: str, url: str | list[str], allow_pickle: bool, **server):
        if allow_pickle is not True:
            raise UserError(
                f"reward {name!r} asks a server that speaks pickle; if you trust {url}, set "
                f"config.reward.args to {{{name!r}: {{'allow_pickle': True}}}}"
            )
        self.server = Server(url, **server)

    def ask(self, images: Tensor, **more) -> dict:
        """The answer to {"images": JPEG files, ...}, plain data. Raises BadAnswer unless it is a dict."""
        request = pickle.dumps({"images": [pack_image(image, "jpeg") for image in images]} | more)
        answer = self.server.post("", loads, content=request).result()
        if not isinstance(answer, dict):
            raise BadAnswer(f"no dict but {str(answer)[:80]!r}")
        return answer
