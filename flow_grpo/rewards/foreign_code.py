"""Protection of the process from a reward's code: state that it changes is put back after each call.

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
    """State that all threads of a process share, and calls in other threads may change."""

    folder: Path | None  # the working directory; None if it is gone
    dtype: Any  # torch's default one; None before torch is imported


_states: dict[str, Shared] = {}  # reward -> the state when it was loaded


@contextmanager
def restored_after_loading() -> Iterator[None]:
    """Put back the shared state and torch's modes after the block.

    For the main thread, which imports and loads foreign code while nothing is computed.
    """
    before = _shared()
    modes = _modes()
    try:
        yield
    finally:
        _put_back(before)
        _put_back_modes(modes)


def remember_state(name: str) -> None:
    """Keep the state that is put back after each call of a reward. For the main thread, before the reward is loaded."""
    _states[name] = _shared()


@contextmanager
def restored_after_call(name: str) -> Iterator[None]:
    """Put back the shared state after the block, a call of a reward in any thread.

    Raise UserError, which names the reward, if torch's default dtype was changed: other threads have computed with it.
    """
    before = _states.get(name) or _shared()
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
    """Return the shared state of now."""
    folder = None
    with suppress(OSError):  # it was deleted
        folder = Path.cwd()
    # torch is not imported here: a reward may be the first to need it.
    torch = sys.modules.get("torch")
    return Shared(folder, torch.get_default_dtype() if torch else None)


def _put_back(before: Shared) -> Any:
    """Put back the shared state. Return the default dtype that was found, or None if it had not changed."""
    now = _shared()
    if before.folder and now.folder != before.folder:
        with suppress(OSError):  # the folder is gone
            os.chdir(before.folder)
    if before.dtype in (None, now.dtype):
        return None
    sys.modules["torch"].set_default_dtype(before.dtype)
    return now.dtype


def _modes() -> dict[str, Any]:
    """Return torch's modes, of this thread or of all; those that it begins with if it is not imported yet."""
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
    """Put back the modes that have changed."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    now = _modes()
    if before["grad"] != now["grad"]:
        torch.set_grad_enabled(before["grad"])
    if before["deterministic"] != now["deterministic"]:
        torch.use_deterministic_algorithms(before["deterministic"])
    if before["matmul"] != now["matmul"]:
        torch.set_float32_matmul_precision(before["matmul"])
    if before["device"] != now["device"]:
        torch.set_default_device(None if before["device"] == "cpu" else before["device"])
