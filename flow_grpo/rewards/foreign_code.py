"""State of the process that a reward's code may change: it is put back after each call.

It is no reward itself (`flow_grpo.rewards.HELPERS`). The random generators that torch, numpy and Python share are left
alone, since a run draws from none of them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from flow_grpo.base.errors import UserError


class Shared(NamedTuple):
    """What all threads of a process share, and calls in other threads may change."""

    folder: Path | None  # the working directory; None where it is gone
    dtype: Any  # torch's default one; None before torch is imported


_homes: dict[str, Shared] = {}  # by reward, as it was when the reward was loaded


@contextmanager
def restored_after_loading() -> Iterator[None]:
    """Put back what the block changes: what all threads share, and torch's modes. For the main thread, which imports
    and loads foreign code while nothing is computed."""
    before, modes = _shared(), _modes()
    try:
        yield
    finally:
        _put_back(before)
        _put_back_modes(modes)


def remember_state(name: str) -> None:
    """Note what is put back after each call of a reward. For the main thread, before the reward is loaded."""
    _homes[name] = _shared()


@contextmanager
def restored_after_call(name: str) -> Iterator[None]:
    """Put back what the block, a call of a reward in any thread, changes of what all threads share.

    Raises UserError, which names the reward: torch's default dtype was another one, with which others computed.
    """
    before = _homes.get(name) or _shared()
    try:
        yield
    finally:
        changed = _put_back(before)
    if changed:
        raise UserError(
            f"reward {name!r} set torch's default dtype to {changed}, which the whole run shares: give its own tensors "
            "a dtype, and leave torch.set_default_dtype alone"
        )


def _shared() -> Shared:
    folder = None
    with suppress(OSError):
        folder = Path.cwd()
    torch = sys.modules.get("torch")
    return Shared(folder, torch.get_default_dtype() if torch else None)


def _put_back(before: Shared) -> Any:
    """Put back what all threads share. Returns the default dtype that there was; None where it has not changed."""
    now = _shared()
    if before.folder and now.folder != before.folder:
        with suppress(OSError):  # it is gone
            os.chdir(before.folder)
    if before.dtype in (None, now.dtype):
        return None
    sys.modules["torch"].set_default_dtype(before.dtype)
    return now.dtype


def _modes() -> dict[str, Any]:
    """Modes of torch, of this thread or of all. Those that torch begins with, where it is not imported yet."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {"grad": True, "deterministic": False, "matmul": "highest", "device": "cpu"}
    return {
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "device": str(torch.get_default_device()),
    }


def _put_back_modes(before: dict[str, Any]) -> None:
    torch, now = sys.modules.get("torch"), _modes()
    if before["grad"] != now["grad"]:
        torch.set_grad_enabled(before["grad"])
    if before["deterministic"] != now["deterministic"]:
        torch.use_deterministic_algorithms(before["deterministic"])
    if before["matmul"] != now["matmul"]:
        torch.set_float32_matmul_precision(before["matmul"])
    if before["device"] != now["device"]:
        torch.set_default_device(None if before["device"] == "cpu" else before["device"])
