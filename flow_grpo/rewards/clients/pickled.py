"""Client of older reward servers, which speak pickle. Only numbers, strings, lists, dicts and numpy arrays are read."""

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

# Globals that a pickled array names, by numpy 1 in numpy.core and by numpy 2 in numpy._core.
ARRAY_GLOBALS = ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
ALLOWED_GLOBALS = {"numpy.ndarray", "numpy.dtype"}
ALLOWED_GLOBALS |= {f"numpy.core.{name}" for name in ARRAY_GLOBALS}
ALLOWED_GLOBALS |= {f"numpy._core.{name}" for name in ARRAY_GLOBALS}


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that refuses every global but those of arrays, so that no code of the sender runs."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def unpickle_scores(data: bytes, names: dict[str, str]) -> dict[str, list[float]]:
    """Return the scores in a pickled dict, NaN for None. Raise ServerError for anything else, none of which is run.

    Args:
        names: name of a score -> its key in the dict.
    """
    try:
        answer = _PlainUnpickler(io.BytesIO(data)).load()
        return {name: list(map(_number, answer[key])) for name, key in names.items()}
    # A malformed pickle can raise anything.
    except Exception as error:
        raise ServerError(
            f"no plain pickle of a dict with numbers in {', '.join(names.values())}: {type(error).__name__}: {error}"
        ) from error


def _number(value: Any) -> float:
    """Return a score as a number, NaN for None."""
    return math.nan if value is None else float(value)


def make_scorer(name: str, url: str | list[str], allow_pickle: bool, names: dict[str, str], **server) -> Callable:
    """Return a function (images, **entries) -> scores by name, unchecked, that asks a server by pickled dicts.

    `entries` join the images in the request.

    Args:
        allow_pickle: must be True, which says that the user trusts the server, else UserError.
        names: as in `unpickle_scores`.
        server: token_file and timeout_s of Server.
    """
    if allow_pickle is not True:
        raise UserError(
            f"reward {name!r} asks a server that speaks pickle; if you trust {url}, set "
            f"config.reward.args to {{{name!r}: {{'allow_pickle': True}}}}"
        )
    client = Server(url, **server)
    parse = partial(unpickle_scores, names=names)

    def score(images: Tensor, **entries: Any) -> dict[str, list[float]]:
        files = [pack_image(image, "jpeg") for image in images]
        request = pickle.dumps({"images": files} | entries)
        return client.post("", parse, content=request).result()

    return score
