"""The settings as a table: one row for each field of sections.py, and what follows from it.

The config that files and flags edit is an ml_collections ConfigDict; `typed` makes the frozen `Config` of it that a run
reads.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict

from flow_grpo.settings import sections
from flow_grpo.settings.sections import MAX_BATCH_SIZE, Config
from flow_grpo.settings.setting import ALL, DISTILL, DPO, GRPO, NFT, PR, Section, Setting

__all__ = ["ALL", "DISTILL", "DPO", "GRPO", "MAX_BATCH_SIZE", "NFT", "PR"]
SCRIPTS = {GRPO: "train_*.py"} | {name: f"train_*_{name}.py" for name in (PR, NFT, DPO, DISTILL)}
TOKEN_WAYS = "set REWARD_TOKEN in the environment, or name a file that holds the token by config.reward.token_file"


def _docstrings() -> dict[str, dict[str, str]]:
    """Section's class -> field -> the docstring below it, in one line, and "" -> the class's own.

    They are read from the source: Python keeps none of fields, and `python -OO` none of classes.
    """
    docstrings = {}
    for section in ast.parse(inspect.getsource(sections)).body:
        if not isinstance(section, ast.ClassDef):
            continue
        meanings = docstrings[section.name] = {"": " ".join(str(ast.get_docstring(section)).split())}
        for entry, below in pairwise(section.body):
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(below, ast.Expr):
                meanings[entry.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docstrings


def _subsections(section: type[Section]) -> dict[str, type[Section]]:
    """The sections in a section, by their names."""
    types = get_type_hints(section)
    return {name: kind for name, kind in types.items() if inspect.isclass(kind) and issubclass(kind, Section)}


def _rows(section: type[Section], prefix: str = "") -> Iterator[Setting]:
    """A row for each setting of a section and of the sections in it."""
    types, subsections = get_type_hints(section), _subsections(section)
    for entry in fields(section):
        if entry.name in subsections:
            yield from _rows(subsections[entry.name], f"{entry.name}.")
            continue
        facts, meaning = dict(entry.metadata), DOCSTRINGS[section.__name__][entry.name]
        if get_origin(types[entry.name]) is Literal:
            facts["choices"] = get_args(types[entry.name])
        elif isinstance(facts.get("choices"), Mapping):  # losses, by name
            cards = "; ".join(f"{name} = {loss.card}" for name, loss in facts["choices"].items())
            meaning = f"{meaning.removesuffix('.')}: {cards}."
        default = entry.default if entry.default_factory is MISSING else entry.default_factory().to_dict()
        yield Setting(prefix + entry.name, default, meaning, **facts)


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
    for open_section in (values.custom, values.reward_fn, values.reward.args):  # their keys are names, not settings
        open_section.unlock()
    return values


def value_of(config: ConfigDict, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = config[part]
    return config


def flat(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, of all that is no section."""
    values = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else {f"{prefix}{key}": value}
    return values


def ignored_by(algorithm: str) -> tuple[str, ...]:
    """The settings that an algorithm's script does not read."""
    return tuple(setting.key for setting in SETTINGS if algorithm not in setting.used_by)


def is_fixed(key: str) -> bool:
    """Whether a resumed run may not change the value of a dotted key. What `reward.args` says of one reward may change
    where it is its server, or the setting that it overrides may; the options of a reward's load() may not."""
    if key.startswith("reward.args."):
        option = [*key.split("."), ""][3]
        return option != "url" and is_fixed(f"reward.{option}")
    return not (key in BY_KEY and BY_KEY[key].resumable)


def check_values(config: ConfigDict) -> None:
    """Raises UserError for a value that its entry does not allow, with what it allows."""
    for setting in SETTINGS:
        setting.check(value_of(config, setting.key), setting.key)
