"""Read what torchrun, or another launcher, says about this process in the environment."""

import os

from flow_grpo.base.errors import UserError

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT")
WAY_OUT = "start with torchrun, which sets all of them, or unset RANK and WORLD_SIZE for a run of one process"


def world_size() -> int:
    """Return how many ranks have been started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_name() -> str:
    """Return this process's number among the ranks, "0" without a launcher. It is text, which `check` may refuse."""
    return os.environ.get("RANK", "0")


def is_main() -> bool:
    """Return whether this process speaks for all ranks."""
    return rank_name() == "0"


def check() -> None:
    """Raise UserError unless the environment describes one of several ranks, or none."""
    for name in NUMBERS:
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            raise UserError(f"{name} in the environment is {value!r}, which is no number of a rank; {WAY_OUT}")
    if "RANK" in os.environ:
        missing = [name for name in ("WORLD_SIZE", *MEETING_PLACE) if name not in os.environ]
        if missing:
            raise UserError(f"RANK is set in the environment without {' and '.join(missing)}; {WAY_OUT}")
        if int(rank_name()) >= world_size():
            raise UserError(f"RANK is {rank_name()}, but WORLD_SIZE is {world_size()}; {WAY_OUT}")
    elif world_size() != 1:
        raise UserError(f"WORLD_SIZE is {world_size()} in the environment, but RANK is not set; {WAY_OUT}")
