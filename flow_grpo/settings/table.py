"""The settings as a table: one row for each field of sections.py, and what follows from it.

The config that files and flags edit is an ml_collections ConfigDict; `typed` makes the frozen `Config` of it that a run
reads.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict

from flow_grpo.settings import sections
from flow_grpo.settings.sections import MAX_BATCH_SIZE, Config
from flow_grpo.settings.setting import ALL, DISTILL, DPO, GRPO, NFT, PR, REFL, FrozenDict, Section, Setting

__all__ = ["ALL", "DISTILL", "DPO", "GRPO", "MAX_BATCH_SIZE", "NFT", "PR", "REFL"]
SCRIPTS = {GRPO: "train_*.py"} | {name: f"train_*_{name}.py" for name in (PR, NFT, DPO, DISTILL, REFL)}
TOKEN_WAYS = "set REWARD_TOKEN in the environment, or name a file that holds the token by config.reward.token_file"


def _docstrings() -> dict[str, dict[str, str]]:
    """Return section's class -> field -> the docstring below it, and "" -> the class's own, in one line each.

    They are read from the source: Python keeps none of fields, and `python -OO` none of classes.
    """
    docstrings = {}
    for node in ast.parse(inspect.getsource(sections)).body:
        if isinstance(node, ast.ClassDef):
            docstrings[node.name] = _docstrings_in(node)
    return docstrings


def _docstrings_in(section: ast.ClassDef) -> dict[str, str]:
    """Return the docstrings of a section's fields by their names, and "" -> its own."""
    docstrings = {"": _in_one_line(str(ast.get_docstring(section)))}
    for entry, below in pairwise(section.body):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(below, ast.Expr):
            docstrings[entry.target.id] = _in_one_line(ast.literal_eval(below.value))
    return docstrings


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _subsections(section: type[Section]) -> dict[str, type[Section]]:
    """Return the sections in a section, by their names."""
    subsections = {}
    for name, kind in get_type_hints(section).items():
        if _is_section(kind):
            subsections[name] = kind
    return subsections


def _is_section(kind: Any) -> bool:
    """Return whether a field's type is a section. Others, such as tuple[int, ...], are no classes."""
    return inspect.isclass(kind) and issubclass(kind, Section)


def _rows(section: type[Section], prefix: str = "") -> Iterator[Setting]:
    """Yield a row for each setting of a section and of the sections in it."""
    types = get_type_hints(section)
    subsections = _subsections(section)
    for entry in fields(section):
        if entry.name in subsections:
            yield from _rows(subsections[entry.name], f"{entry.name}.")
        else:
            meaning = DOCSTRINGS[section.__name__][entry.name]
            yield _row(prefix + entry.name, entry, types[entry.name], meaning)


def _row(key: str, entry: Field, kind: Any, meaning: str) -> Setting:
    """Return the row of a setting: its field, the field's type, and the docstring below it."""
    facts = dict(entry.metadata)
    facts["entry"] = _entry_type(kind)
    if get_origin(kind) is Literal:
        facts["choices"] = get_args(kind)
    # Losses and paths, by name.
    elif isinstance(facts.get("choices"), Mapping):
        cards = "; ".join(f"{name} = {record.card}" for name, record in facts["choices"].items())
        meaning = f"{meaning.removesuffix('.')}: {cards}."
    default = entry.default
    if entry.default_factory is not MISSING:
        default = entry.default_factory().to_dict()
    return Setting(key, default, meaning, **facts)


def _entry_type(kind: Any) -> type | None:
    """Return the type of the entries of a tuple of any length, tuple[float, ...]; None of any other type."""
    arguments = get_args(kind)
    if get_origin(kind) is tuple and arguments[-1] is Ellipsis:
        return arguments[0]
    return None


DOCSTRINGS = _docstrings()
SECTIONS = {  # "" is the top
    name: DOCSTRINGS[section.__name__][""].removesuffix(".")
    for name, section in {"": Config, **_subsections(Config)}.items()
}
SETTINGS = tuple(_rows(Config))
BY_KEY = {setting.key: setting for setting in SETTINGS}


def default_config() -> ConfigDict:
    """Every setting's default, to be edited; a name that is no setting is an error."""
    return editable(Config())


def editable(config: Config) -> ConfigDict:
    """Return a copy of a run's config that files and flags may edit; a name that is no setting is an error."""
    values = ConfigDict(config.to_dict())
    values.lock()
    # Their keys are names, not settings.
    for open_section in (values.custom, values.reward_fn, values.reward.args):
        open_section.unlock()
    return values


def typed(config: ConfigDict) -> Config:
    """Return the config that a run reads. Raises UserError for a value that its setting does not allow."""
    check_values(config)
    return _filled(Config, config)


def of_stored(values: Mapping[str, Any]) -> Config:
    """Return the config that a run has stored, whose names and types `stored_config.read` has checked."""
    return _filled(Config, values)


SomeSection = TypeVar("SomeSection", bound=Section)
# By itself it reads annotations anew with each call.
_types_of = cache(get_type_hints)


def _filled(section: type[SomeSection], values: ConfigDict | Mapping[str, Any], prefix: str = "") -> SomeSection:
    """Return a section of values by the names of its fields; `prefix` is its own in dotted keys."""
    types = _types_of(section)
    entries = {}
    for entry in fields(section):
        entries[entry.name] = _converted(values[entry.name], types[entry.name], prefix + entry.name)
    return section(**entries)


def _converted(value: Any, kind: Any, key: str) -> Any:
    """Return the value of a dotted key as its field of type `kind` holds it: JSON has lists for tuples, and may have an
    int for a float."""
    if _is_section(kind):
        return _filled(kind, value, f"{key}.")
    if isinstance(value, ConfigDict):
        return FrozenDict(value.to_dict(), key)
    if isinstance(value, Mapping):
        return FrozenDict(value, key)
    if isinstance(value, list):
        return tuple(value)
    if kind is float:
        return float(value)
    return value


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config in which some dotted keys have other values."""
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        changed = {name: value}
        if section:
            changed = {section: replace(getattr(config, section), **changed)}
        config = replace(config, **changed)
    return config


def value_of(config: ConfigDict | Config | Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part) if isinstance(value, Section) else value[part]
    return value


def has(config: ConfigDict, key: str) -> bool:
    """Return whether a config has a dotted key."""
    try:
        value_of(config, key)
    except (KeyError, TypeError):
        return False
    return True


def flat(config: ConfigDict | Config | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of all that is no section."""
    values = {}
    entries = config.to_dict() if isinstance(config, Section) else config
    for key, value in entries.items():
        if isinstance(value, ConfigDict | Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def ignored_by(algorithm: str) -> tuple[str, ...]:
    """Return the settings that an algorithm's script does not read."""
    return tuple(setting.key for setting in SETTINGS if algorithm not in setting.used_by)


def is_fixed(key: str) -> bool:
    """Return whether a resumed run must keep the value of a dotted key. In `reward.args` a value may change if it
    is a reward's server, or if the setting that it overrides may change; the options of a reward's load() may not."""
    if key.startswith("reward.args."):
        parts = key.split(".")
        option = parts[3] if len(parts) > 3 else ""
        return option != "url" and is_fixed(f"reward.{option}")
    return not (key in BY_KEY and BY_KEY[key].resumable)


def decides_scores(key: str) -> bool:
    """Return whether the value of a dotted key decides how images are scored: by which rewards, with which weights and
    options of their load(), and by how many frames of a video. Other settings of `reward` are of requests."""
    section, _, name = key.rpartition(".")
    if section.startswith("reward.args."):
        is_load_option = f"reward.{name}" not in BY_KEY and name != "url"
        return is_load_option or name == "frames"
    return section == "reward_fn" or key == "reward.frames"


def check_values(config: ConfigDict) -> None:
    """Raise UserError for a value that its entry does not allow, with what it allows."""
    for setting in SETTINGS:
        setting.check(value_of(config, setting.key), setting.key)
