"""Older reward servers that speak pickle: what they send may hold numbers, strings, lists, dicts and numpy arrays."""

import io
import pickle
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import to_uint8
from flow_grpo.rewards.clients.client import Server
from flow_grpo.rewards.clients.wire import BadAnswer

MAX_VALUES = 10**6
PLAIN = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *(
        (f"{module}.multiarray", name)
        for module in ("numpy.core", "numpy._core")
        for name in ("_reconstruct", "scalar")
    ),
    *((f"{module}.numeric", "_frombuffer") for module in ("numpy.core", "numpy._core")),
}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PLAIN:
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
    """A server that takes and gives pickled dicts.

    Raises:
        UserError: nobody has said that pickle is fine.
    """

    def __init__(self, name: str, url: str | list[str], allow_pickle: bool, **server):
        if allow_pickle is not True:
            raise UserError(
                f"reward {name!r} asks a server that speaks pickle; if you trust {url}, set "
                f"config.reward.args to {{{name!r}: {{'allow_pickle': True}}}}"
            )
        self.server = Server(url, **server)

    def ask(self, images: Tensor, **more) -> dict:
        """The answer to {"images": JPEG files, ...}, plain data. Raises BadAnswer unless it is a dict."""
        request = pickle.dumps({"images": [_jpeg(image) for image in images]} | more)
        answer = self.server.post("", loads, content=request).result()
        if not isinstance(answer, dict):
            raise BadAnswer(f"no dict but {str(answer)[:80]!r}")
        return answer


def _jpeg(image: Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(buffer, "jpeg")
    return buffer.getvalue()
