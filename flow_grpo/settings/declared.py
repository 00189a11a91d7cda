"""Declarations of a fork's own functions: which settings they read, and what a model card calls the method.

A script's `main` takes other functions in the place of its `rollout`, `add_gradients`, `advantages` or `updates`. What
only such a function reads (`read_in` of a field of sections.py) another one would ignore, unless it declares that it
reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ml_collections import ConfigDict

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.settings import table, unknown_names

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Declaration:
    """Facts that a function declares, stored as its attribute."""

    reads: tuple[str, ...] = ()  # dotted settings
    card: str = ""  # what the model card says that trained the weights
    is_ours: bool = False  # whether it is a script's own


def reads(*keys: str, card: str = "") -> Callable[[Function], Function]:
    """Return a decorator of a function of one's own. One that functools.wraps a script's function reads what that
    reads, too.

    Args:
        keys: dotted settings that it reads, of those that only the script's own function in its place reads.
        card: what the model card says that trained the weights; "" = the function's name.

    Raises:
        UserError: there is no such setting.
    """
    for key in keys:
        if key not in table.BY_KEY:
            raise UserError(f"reads({key!r}): {unknown_names.answer(key)}")

    def declare(function: Function) -> Function:
        return _with_declaration(function, Declaration((*keys, *_declaration_of(function).reads), card))

    return declare


def ours(role: str) -> Callable[[Function], Function]:
    """Return a decorator of a script's own function: it reads all settings of its role, and the config names the
    method."""
    keys = tuple(setting.key for setting in table.SETTINGS if setting.read_in == role)

    def declare(function: Function) -> Function:
        return _with_declaration(function, Declaration(keys, is_ours=True))

    return declare


def _with_declaration(function: Function, declaration: Declaration) -> Function:
    # An attribute of the function: functools.wraps gives it to a wrapper, too.
    vars(function)["declaration"] = declaration
    return function


def _declaration_of(function: Callable[..., Any]) -> Declaration:
    return getattr(function, "declaration", Declaration())


def _is_ours(function: Callable[..., Any]) -> bool:
    """Return whether a function is a script's own, not one around it that functools.wraps gave its declaration."""
    return _declaration_of(function).is_ours and not hasattr(function, "__wrapped__")


def check(config: ConfigDict, **functions: Callable) -> None:
    """Let config.method name functions that are not the script's own. `functions`: by role, in the order of the epoch.

    Raises:
        UserError: a setting is not its default, and the function that would read it does not declare that it does.
    """
    for role, function in functions.items():
        declared = _declaration_of(function).reads
        for setting in table.SETTINGS:
            if setting.read_in == role and setting.key not in declared:
                _check_unread(setting.key, table.value_of(config, setting.key), role, function)
    foreign = [function for function in functions.values() if not _is_ours(function)]
    if foreign and not config.method:
        config.method = _method_of(foreign)


def _method_of(functions: list[Callable]) -> str:
    """Return what a model card calls the method of foreign functions: by their cards or, where none has one, by their
    names."""
    cards = []
    for function in functions:
        card = _declaration_of(function).card
        if card:
            cards.append(card)
    if cards:
        return " with ".join(cards)
    names = ", ".join(map(_name, functions))
    return f"functions of its author's own ({names})"


def _check_unread(key: str, value, role: str, function: Callable) -> None:
    """Raise UserError for a setting that is not its default and that `function`, in the place of `role`, ignores."""
    default = table.BY_KEY[key].default
    if value != default:
        page = "own_advantage.md" if role == "advantages" else "own_loss.md"
        raise UserError(
            f"config.{key} is {quoted(value)}, but {_name(function)}, which stands in the place of {role}, does not "
            f"declare that it reads it: write @declared.reads({key!r}) above it if it does "
            f"(flow_grpo.settings.declared, docs/howto/{page}), or set it to {default!r}"
        )


def _name(function: Callable) -> str:
    """Return the name of a function, or of the class of another thing that can be called."""
    qualified = getattr(function, "__qualname__", type(function).__name__)
    return qualified.rpartition(".")[2]
