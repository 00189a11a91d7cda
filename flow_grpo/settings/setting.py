"""One setting: what its field in sections.py says, and which values it allows."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypedDict, TypeVar, Unpack

from ml_collections import ConfigDict

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted

# Values of config.algorithm, one for each script.
GRPO = "grpo"
PR = "pr"
NFT = "nft"
DPO = "dpo"
DISTILL = "distill"
REFL = "refl"
ALL = (GRPO, PR, NFT, DPO, DISTILL, REFL)

# Bound of a number whose field states none: float32 has room for its products.
LARGEST = 1e9


class NoEntry(UserError, AttributeError):
    """A name that a FrozenDict lacks, read as an attribute."""


class FrozenDict(Mapping[str, Any]):
    """A dict of names that nobody changes. Its entries are attributes, too: `config.custom.temperature`.

    Args:
        key: dotted, of the setting that it is the value of, for messages.
    """

    def __init__(self, values: Mapping[str, Any], key: str = ""):
        entries = dict(values)
        for name, value in values.items():
            if isinstance(value, Mapping):
                entries[name] = FrozenDict(value, f"{key}.{name}")
        object.__setattr__(self, "_values", entries)
        object.__setattr__(self, "_key", key)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name!r} cannot be set: the settings of a run do not change")

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            key = f"{self._key}.{name}".lstrip(".")
            beside = f"beside {', '.join(self._values)}" if self._values else "nor anything else"
            raise NoEntry(
                f"there is no config.{key} {beside}: set --config.{key}=VALUE, or read it with a default, by "
                f".get({name!r}, DEFAULT)"
            )
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"FrozenDict({self._values})"

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict, of which anything but the entries of lists may be changed."""
        return plain(self)


class Section:
    """Some settings: a frozen dataclass of fields that `setting` makes, and of further sections."""

    __dataclass_fields__: ClassVar[dict[str, Field]]

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict, as config.json holds it: sorted by name."""
        names = sorted(entry.name for entry in fields(self))
        return {name: plain(getattr(self, name)) for name in names}


def plain(value: Any) -> Any:
    """Return a value with a plain dict in the place of each section and each dict of names."""
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return value


class Facts(TypedDict, total=False):
    """Facts that a field states about its setting; `Setting` has fields of the same names."""

    unit: str
    choices: Collection[str]
    min: float
    max: float
    used_by: tuple[str, ...]
    resumable: bool
    read_in: str
    when: tuple[tuple, ...]
    typed_when: tuple[tuple, ...]
    own_choice: str


T = TypeVar("T")


def setting(default: T, **facts: Unpack[Facts]) -> T:
    """Return the field of a section for a setting. Its type is that of its value, for the type checker."""
    made: Any
    if isinstance(default, Mapping):
        made = field(default_factory=lambda: FrozenDict(default), metadata=dict(facts))
    else:
        made = field(default=default, metadata=dict(facts))
    return made


@dataclass(frozen=True)
class Setting:
    """A setting: the facts that its field states, and the checks of a value that follow from them."""

    key: str  # dotted
    default: Any
    meaning: str
    unit: str = ""
    choices: Collection[str | float] = ()  # all values there are, of a dict its keys; () = no such list
    min: float = -LARGEST  # of a number
    max: float = LARGEST
    entry: Callable[..., Any] | None = None  # type of the entries of a tuple of any length, by its annotation
    used_by: tuple[str, ...] = ALL  # scripts that read it; another one refuses a value that is not the default
    resumable: bool = False  # a resumed run may change it, since it does not change the mathematics
    read_in: str = ""  # the one function of a script that reads it, by its argument of main; "" = several do
    when: tuple[tuple, ...] = ()  # (key, values): it is read only where each key has one of the values; () = is set
    own_choice: str = ""  # how a user adds a choice, the end of a sentence
    typed_when: tuple[tuple, ...] = ()  # likewise, but a config file may set it all the same, for all of its runs

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def is_any_text(self) -> bool:
        """Return whether the value may be any text, or a dict of texts."""
        return isinstance(self.default, dict) or (isinstance(self.default, str) and not self.choices)

    def description(self) -> str:
        """Return the meaning of the setting, which other settings it needs, and which values it allows."""
        sentences = [self.meaning]
        needs = []
        for key, *values in self.when + self.typed_when:
            alternatives = " or ".join(map(repr, values)) or "set"
            needs.append(f"`{key}` {alternatives}")
        if needs:
            sentences.append(f"Needs {' and '.join(needs)}.")
        if self.choices:
            choices = ", ".join(f"`{choice!r}`" for choice in self.choices)
            sentences.append(f"One of {choices}.")
        limits = self._limits()
        if self.unit and limits:
            sentences.append(f"In {self.unit}, {limits}.")
        elif self.unit:
            sentences.append(f"In {self.unit}.")
        elif limits:
            sentences.append(f"{limits.capitalize()}.")
        return " ".join(sentences)

    def _limits(self) -> str:
        """Return the limits that the field states, in words; "" = none."""
        if self.max < LARGEST:
            return f"from {self.min:.7g} to {self.max:.7g}"
        if self.min > -LARGEST:
            return f"at least {self.min:.7g}"
        return ""

    def is_like(self, value: Any) -> bool:
        """Return whether a value has the default's type, whatever its limits."""
        if self.entry is not None:
            return isinstance(value, tuple) and all(_is_like(each, self.entry()) for each in value)
        return _is_like(value, self.default)

    def check(self, value: Any, key: str) -> None:
        """Raise UserError, which names the value by `key`, unless the entry allows it."""
        if not self.is_like(value):
            raise UserError(f"config.{key} is {quoted(value)}; it must be {self._kind()}")
        if self.choices and value not in self.choices:
            choices = ", ".join(map(repr, self.choices))
            advice = f"; {self.own_choice}" if self.own_choice else ""
            raise UserError(f"config.{key} is {quoted(value)}; it may be {choices}{advice}")
        self._check_limits(value, key)
        if isinstance(value, ConfigDict):
            _check_stored(value, key)

    def _check_limits(self, value: Any, key: str) -> None:
        """Raise UserError for a number, or one in a tuple, that is beyond the limits."""
        entries = value if isinstance(value, tuple) else (value,)
        for entry in entries:
            # NaN compares false.
            if _is_number(entry) and not self.min <= entry <= self.max:
                limits = f"from {self.min:.7g} to {self.max:.7g}"
                raise UserError(f"config.{key} is {quoted(value)}; it must be {limits}")

    def _kind(self) -> str:
        """Say what a value must be, as the end of a sentence."""
        if self.entry is not None:
            example = "ocr" if self.entry is str else self.entry(1)
            return f"a tuple of {_KINDS[self.entry].several}, such as {(example,)}"
        if isinstance(self.default, tuple):
            kind = _KINDS[type(self.default[0])]
            return f"{len(self.default)} {kind.several}, such as {self.default}"
        return _KINDS[type(self.default)].one


class _Kind(NamedTuple):
    """Words for what a value must be."""

    one: str
    several: str  # in a tuple


_KINDS: dict[Callable[..., Any], _Kind] = {
    bool: _Kind("True or False", "True or False"),
    int: _Kind("a whole number", "whole numbers"),
    float: _Kind("a finite number", "finite numbers"),
    str: _Kind("text", "names"),
    dict: _Kind("a dict with names as its keys", "dicts"),
}


def _check_stored(value: ConfigDict, key: str) -> None:
    """Raise UserError for a dict with something in it that JSON has no form for."""
    entries = value.to_dict()
    try:
        json.dumps(entries)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"config.{key} is {quoted(entries)}, which config.json cannot hold: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_like(value: Any, default: Any) -> bool:
    """Return whether a value has a default's type. An int may stand for a float."""
    if isinstance(default, float):
        return _is_number(value)
    if isinstance(default, dict):
        return isinstance(value, Mapping | ConfigDict) and all(isinstance(key, str) for key in value)
    if isinstance(default, tuple) and isinstance(value, tuple):
        return len(value) == len(default) and all(map(_is_like, value, default))
    return type(value) is type(default)
