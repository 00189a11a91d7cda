"""Config files: what FILE:NAME,VARIANT,... means, for the files of config/ and for a user's own anywhere."""

import difflib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict

from flow_grpo.base.errors import UserError
from flow_grpo.base.shipped import PACKAGE
from flow_grpo.settings import older, table

CHECKOUT = PACKAGE.parent.resolve()


def select(name: str, runs: Sequence[Callable], variants: Sequence[Callable], file: str) -> ConfigDict:
    """The config that NAME or NAME,VARIANT,... of a file's functions makes.

    Variants are applied in the order in which the file lists them, whatever the order on the command line. Raises
    UserError: no such run or variant, with the nearest; or a setting or type that there is not.

    Args:
        runs: () -> config, named by their functions.
        variants: config -> config, likewise.
        file: for messages.
    """
    runs, words = {run.__name__: run for run in runs}, name.split(",")
    variants = {variant.__name__: variant for variant in variants}
    for kind, known, wanted in (("run", runs, words[:1]), ("variant", variants, words[1:])):
        for wrong in (word for word in wanted if word not in known):
            near = difflib.get_close_matches(wrong, known, cutoff=0) or known
            raise UserError(f"no {kind} {wrong!r} in {file}; nearest: {', '.join(near)}; --list shows all")
    chosen = [variant for variant in variants if variant in words[1:]]
    config = _made(runs[words[0]], (), file)
    for variant in chosen:
        config = _made(variants[variant], (config,), file)
    config.name = "_".join([words[0], *chosen])
    return config


def _made(function: Callable, arguments: tuple, file: str) -> ConfigDict:
    """What a config file's function returns. Raises UserError for a setting that does not exist; a bug stays a bug."""
    try:
        config = function(*arguments)
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if not innermost.f_globals.get("__name__", "").startswith("ml_collections."):
            raise
        raise UserError(f"{function.__name__} in {file}: {_answer(str(error.args[0]))}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{function.__name__} in {file} returns {config!r} instead of a config")
    return config


def _answer(words: str) -> str:
    """What ml_collections says of a setting that it refuses, without the list of all others."""
    words = words.replace("\\n", " ")  # it quotes itself
    unknown = re.match(r"\W*Key \W*(\w+)", words) or re.match(r"\W*(\w+)\W*(?:Did|$)", words)
    if unknown is None:
        return words
    for key in (key for key in older.MOVED if key.rpartition(".")[2] == unknown[1]):
        return f"config.{key} is now {older.MOVED[key]}"
    near = difflib.get_close_matches(unknown[1], {part for key in table.BY_KEY for part in key.split(".")}, cutoff=0.75)
    advice = f"nearest: {', '.join(near)}" if near else "docs/reference/settings.md lists all"
    return f"there is no setting {unknown[1]!r}; {advice}"


def load(text: str) -> ConfigDict:
    """The config that FILE or FILE:NAME,VARIANT,... names; see `find` for FILE. Raises UserError: no such file, or one
    without get_config(), or whose get_config() looks at no variants."""
    file, colon, name = text.partition(":")
    path = find(file)
    if colon and not name:
        raise UserError(f"{text} names no run; --list shows all of {file}")
    get_config = getattr(module_of(path), "get_config", None)
    if get_config is None:
        raise UserError(f"{path} has no get_config(name); docs/howto/own_config.md shows a whole file")
    config = _made(get_config, (name,) if name else (), str(path))
    run, *variants = name.split(",")
    if variants and get_config(run) == config:  # select names a config after its variants
        raise UserError(f"get_config() of {path} makes of {name!r} what it makes of {run!r}; docs/howto/own_config.md")
    return config


def find(file: str) -> Path:
    """A config file. A relative path is looked up in the current directory, then in this checkout, whose scripts may
    be copied elsewhere. Raises UserError: there is no such file, with those of this checkout."""
    for path in (Path(file), CHECKOUT / file):
        if path.is_file():
            return path
    published = "config/dpo.py, config/grpo.py, config/nft.py"
    raise UserError(
        f"--config names {file!r}, which is neither in {Path.cwd()} nor in {CHECKOUT}; there are {published}"
    )


def module_of(path: Path) -> ModuleType:
    """A config file as a module. What lies beside it can be imported, and config/ of the checkout as `config`."""
    path = path.resolve()
    sys.path += [str(CHECKOUT)] if str(CHECKOUT) not in sys.path else []
    folder = str(path.parents[1] if (path.parent / "__init__.py").exists() else path.parent)
    sys.path[:0] = [folder] if folder not in sys.path else []
    spec = importlib.util.spec_from_file_location(f"config_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if error.name != "config" or not error.path or Path(error.path).parent != path.parent:
            raise
        raise UserError(f"{path} takes {error.path} for config/ of {CHECKOUT}: rename that file") from error
    return module
