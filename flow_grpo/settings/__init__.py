"""Every setting, what it may be, config files, and configs of older versions."""

from importlib import import_module
from types import ModuleType

MOVED_TO_COMMAND_LINE = ("checks", "command_line", "launcher", "overrides", "terminal")


def __getattr__(name: str) -> ModuleType:
    """Return a module that is in `flow_grpo.command_line` now: scripts of one's own may import it from here."""
    if name in MOVED_TO_COMMAND_LINE:
        return import_module(f"flow_grpo.command_line.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
