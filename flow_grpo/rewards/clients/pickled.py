"""Client of older reward servers, which speak pickle. Only numbers, strings, lists, dicts and numpy arrays are read."""

import builtins
import io
import math
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.rewards.clients.client import Server, ServerError, excerpt, is_ok
from flow_grpo.rewards.clients.wire import pack_image

# Globals that a pickled array names, by numpy 1 in numpy.core and by numpy 2 in numpy._core.
ARRAY_GLOBALS = ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
ALLOWED_GLOBALS = {"numpy.ndarray", "numpy.dtype"}
ALLOWED_GLOBALS |= {f"numpy.core.{name}" for name in ARRAY_GLOBALS}
ALLOWED_GLOBALS |= {f"numpy._core.{name}" for name in ARRAY_GLOBALS}

TRACEBACK = "Traceback (most recent call last):"
# Words of PyTorch's errors of a GPU, most of which are RuntimeErrors.
OF_THE_GPU = re.compile("out of memory|CUDA|cuDNN|CUBLAS|HIP error", re.IGNORECASE)
# Words in the names of errors by which libraries, such as numpy, requests and httpx, say the same of the machine.
OF_A_LIBRARY = re.compile("MemoryError|Timeout|Connect|Protocol|Network|Disconnected|IncompleteRead|URLError|gaierror")


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
    error = _raised(data)
    if error:
        raise ServerError(f"its reward raises {excerpt(error.encode())}")
    try:
        answer = _PlainUnpickler(io.BytesIO(data)).load()
        return {name: list(map(_number, answer[key])) for name, key in names.items()}
    # A malformed pickle can raise anything.
    except Exception as error:
        raise ServerError(
            f"no plain pickle of a dict with numbers in {', '.join(names.values())}: {type(error).__name__}: {error}"
        ) from error


def is_answer(status: int, body: bytes) -> bool:
    """Return whether an answer is one to its request: scores, or an error of the reward, which would raise it again.

    These servers answer every error by 500 and its traceback. Only an error of the machine may pass, as any other 5xx.
    """
    if status != 500:
        return is_ok(status, body)
    error = _raised(body)
    return bool(error) and not _is_of_the_machine(error)


def _raised(body: bytes) -> str:
    """Return the error at the end of a traceback, "TYPE: TEXT"; "" for another answer."""
    text = body.decode(errors="replace")
    if not text.startswith(TRACEBACK):
        return ""
    # The last traceback of a chain. Its calls are indented, the error is not.
    lines = text.rpartition(TRACEBACK)[2].splitlines()
    for number, line in enumerate(lines):
        if line.strip() and not line.startswith(" "):
            return "\n".join(lines[number:])
    return ""


def _is_of_the_machine(error: str) -> bool:
    """Return whether an error, "TYPE: TEXT", is of the server's memory, GPU, disk or network."""
    name = error.partition(":")[0].strip().rpartition(".")[2]
    kind = getattr(builtins, name, None)
    is_of_the_system = isinstance(kind, type) and issubclass(kind, OSError | MemoryError)
    return is_of_the_system or bool(OF_A_LIBRARY.search(name) or OF_THE_GPU.search(error))


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
    client = Server(url, is_answer=is_answer, **server)
    parse = partial(unpickle_scores, names=names)

    def score(images: Tensor, **entries: Any) -> dict[str, list[float]]:
        files = [pack_image(image, "jpeg") for image in images]
        request = pickle.dumps({"images": files} | entries)
        return client.post("", parse, content=request).result()

    return score
