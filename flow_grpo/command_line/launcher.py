"""Read what torchrun, or another launcher, says about this process in the environment."""

import os

from flow_grpo.base.errors import UserError

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT")
WAY_OUT = "start with torchrun, which sets all of them, or unset RANK and WORLD_SIZE for a run of one process"


def world_size() -> int:
    """How many ranks have been started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


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
        if int(os.environ["RANK"]) >= world_size():
            raise UserError(f"RANK is {os.environ['RANK']}, but WORLD_SIZE is {world_size()}; {WAY_OUT}")
    elif world_size() != 1:
        raise UserError(f"WORLD_SIZE is {world_size()} in the environment, but RANK is not set; {WAY_OUT}")
