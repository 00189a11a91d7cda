"""Config files: what FILE:NAME,VARIANT,... means, for the files of config/ and for a user's own anywhere."""

import difflib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict

from flow_grpo.base import locations
from flow_grpo.base.errors import UserError
from flow_grpo.settings import table, unknown_names

CHECKOUT = locations.ROOT.resolve()


def select(name: str, runs: Sequence[Callable], variants: Sequence[Callable], file: str) -> ConfigDict:
    """Return the config that NAME or NAME,VARIANT,... of a file's functions makes.

    Variants are applied in the order in which the file lists them, whatever the order on the command line. Raises
    UserError: no such run or variant, with the nearest; or a setting or type that there is not.

    Args:
        runs: () -> config, named by their functions.
        variants: config -> config, likewise.
        file: the config file, `__file__` there; for messages.
    """
    run, *wanted = name.split(",")
    runs_by_name = {function.__name__: function for function in runs}
    variants_by_name = {function.__name__: function for function in variants}
    _check_names("run", [run], list(runs_by_name), file)
    _check_names("variant", wanted, list(variants_by_name), file)
    chosen = [variant for variant in variants_by_name if variant in wanted]
    config = _made(runs_by_name[run], (), file)
    for variant in chosen:
        config = _made(variants_by_name[variant], (config,), file)
    config.name = "_".join([run, *chosen])
    return config


def _check_names(kind: str, wanted: list[str], known: list[str], file: str) -> None:
    """Raise UserError for the first name of a run or a variant that a file does not list, with the nearest."""
    for name in wanted:
        if name in known:
            continue
        sentence = f"no {kind} {name!r} in {shown(file)}"
        if _defines(file, name):
            sentence += f"; it has a function {name} that {kind.upper()}S does not list"
        if not known:
            raise UserError(f"{sentence}, which lists no {kind}s")
        nearest = difflib.get_close_matches(name, known, cutoff=0) or known
        raise UserError(f"{sentence}; nearest: {', '.join(nearest)}; --list shows all")


def shown(file: str | Path) -> str:
    """Return a config file as messages name it: one of this checkout without the checkout's folder."""
    path = Path(file)
    if path.is_relative_to(CHECKOUT):
        return str(path.relative_to(CHECKOUT))
    return str(file)


def _defines(file: str, name: str) -> bool:
    """Return whether a config file has a function of a name."""
    path = Path(file)
    if not path.is_file():
        return False
    definition = re.search(rf"^def {re.escape(name)}\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    return definition is not None


def _made(function: Callable, arguments: tuple, file: str) -> ConfigDict:
    """Call a config file's function and return its config. Raises UserError for a setting or a name that does not
    exist; a bug stays a bug."""
    try:
        config = function(*arguments)
    except NameError as error:
        raise UserError(f"{function.__name__} in {_place(file, error)}") from error
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        # Such an error is a bug, unless it is the way in which ml_collections refuses a setting.
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        module = innermost.f_globals.get("__name__", "")
        if not module.startswith("ml_collections."):
            raise
        raise UserError(f"{function.__name__} in {shown(file)}: {_answer(str(error.args[0]))}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{function.__name__} in {shown(file)} returns {config!r} instead of a config")
    return config


def _answer(message: str) -> str:
    """Return a sentence for what ml_collections refuses. Its own words about an unknown setting list all others."""
    # A message that quotes another one has its line breaks as two characters.
    message = message.replace("\\n", " ")
    names_setting = re.match(r"\W*Key \W*(\w+)", message) or re.match(r"\W*(\w+)\W*(?:Did|$)", message)
    if names_setting is None:
        return message
    name = names_setting[1]
    return unknown_names.answer(name, called=repr(name))


def parts(text: str) -> tuple[str, str]:
    """Split FILE:NAME,VARIANT,... into FILE and NAME,VARIANT,...; the latter is "" where there is none.

    The name follows the last colon, since folders may have colons in their names, too.
    """
    file, colon, name = text.rpartition(":")
    if not colon or "/" in name:
        return text, ""
    return file, name


def load(text: str) -> ConfigDict:
    """Return the config that FILE or FILE:NAME,VARIANT,... names; see `find` for FILE. Raises UserError: no such file,
    or one without get_config(), or whose get_config() looks at no variants."""
    file, name = parts(text)
    path = find(file)
    if text.endswith(":"):
        raise UserError(f"{text} names no run; --list shows all of {file}")
    get_config = getattr(module_of(path), "get_config", None)
    if get_config is None:
        raise UserError(f"{path} has no get_config(name); docs/howto/own_config.md shows a whole file")
    config = _of_name(get_config, name, path)
    _check_program(config, path)
    run, *variants = name.split(",")
    # A config of `select` is named after its variants, and so differs from its run's even if they change nothing.
    if variants and _of_name(get_config, run, path) == config:
        raise UserError(f"get_config() of {path} makes of {name!r} what it makes of {run!r}; docs/howto/own_config.md")
    return config


def _of_name(get_config: Callable, name: str, path: Path) -> ConfigDict:
    """Call get_config() with a name, or without one. Raises UserError if it takes none, asks for one, or does not
    know it."""
    arguments = (name,) if name else ()
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        wanted = "takes no name" if name else f"takes a name: --config {path}:NAME"
        raise UserError(f"get_config() of {path} {wanted}; docs/howto/own_config.md shows a whole file") from error
    try:
        return _made(get_config, arguments, str(path))
    except (KeyError, AttributeError) as error:
        # As of a dict or a module in which get_config() has looked the name up.
        missing_names = (*error.args[:1], getattr(error, "name", None))
        if not name or name not in missing_names:
            raise
        raise UserError(
            f"get_config() of {path} knows no {name!r}; variants, such as smoke, are those that a file gives to "
            f"select(): docs/howto/own_config.md"
        ) from error


def _check_program(config: ConfigDict, path: Path) -> None:
    """Raise UserError for a config without settings that each of ours has, such as one of Flow-GRPO's."""
    missing = [key for key in table.BY_KEY if not table.has(config, key)]
    if missing:
        raise UserError(
            f"{path} makes a config of another program: it lacks {len(missing)} of our {len(table.BY_KEY)} settings, "
            f"such as config.{missing[0]}; {unknown_names.PAGE} has the names of both, docs/howto/own_config.md a "
            "whole file"
        )


def find(file: str) -> Path:
    """Return the path of a config file. A relative one is looked up in the current directory, then in this checkout,
    whose scripts may be copied elsewhere. Raises UserError: there is no such file, with those of this checkout."""
    for path in (Path(file), CHECKOUT / file):
        if path.is_file():
            return path
    looked_in = f"neither in {Path.cwd()} nor in {CHECKOUT}"
    if Path(file).is_absolute() or Path.cwd() == CHECKOUT:
        looked_in = "not there"
    published = []
    for path in sorted(CHECKOUT.glob("config/*.py")):
        if "def get_config(" in path.read_text():
            published.append(shown(path))
    sentence = f"--config names {file!r}, which is {looked_in}; there are {', '.join(published)}"
    if Path(file).name == "dgx.py":
        sentence += "; the runs of TempFlow-GRPO's dgx.py are in config/grpo.py"
    raise UserError(sentence)


def module_of(path: Path) -> ModuleType:
    """Import a config file. What lies beside it can be imported, too, and config/ of the checkout as `config`."""
    path = path.resolve()
    if path.suffix != ".py":
        raise UserError(
            f"{path} is no Python file; {unknown_names.PAGE} has what the settings of other programs are here"
        )
    _let_import_neighbours(path)
    spec = importlib.util.spec_from_file_location(f"config_file_{path.stem}", path)
    assert spec is not None, "the file ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, NameError, SyntaxError) as error:
        hiding = _hiding_config(error)
        if hiding and hiding.parent == path.parent:
            raise UserError(f"{path} takes {hiding} for config/ of {CHECKOUT}: rename that file") from error
        raise UserError(_place(str(path), error)) from error
    return module


def _let_import_neighbours(path: Path) -> None:
    """Put the folder of a config file first in sys.path, or the one above where it is a package, and the checkout
    last."""
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    is_in_package = (path.parent / "__init__.py").exists()
    folder = path.parents[1] if is_in_package else path.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _hiding_config(error: Exception) -> Path | None:
    """Return the file that a failed import took for the package config."""
    if isinstance(error, ImportError) and error.name == "config" and error.path:
        return Path(error.path)
    return None


def _place(file: str, error: Exception) -> str:
    """Return FILE, line N: what is wrong there, of an error in a config file or in what it has called."""
    # The innermost call in the file; a SyntaxError knows by itself where it is, unless no line can be told.
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename) == Path(file):
            line = frame.lineno
    if isinstance(error, SyntaxError):
        line = error.lineno
    place = shown(file)
    if line is not None:
        place += f", line {line}"
    return f"{place}: {type(error).__name__}: {error}"
