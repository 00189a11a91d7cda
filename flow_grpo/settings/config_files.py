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
    """The config that NAME or NAME,VARIANT,... of a file's functions makes.

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
        if name not in known:
            near = difflib.get_close_matches(name, known, cutoff=0) or known
            defined = f"it has a function {name} that {kind.upper()}S does not list; " if _defines(file, name) else ""
            raise UserError(
                f"no {kind} {name!r} in {shown(file)}; {defined}nearest: {', '.join(near)}; --list shows all"
            )


def shown(file: str | Path) -> str:
    """A config file as messages name it: one of this checkout without the checkout's folder."""
    path = Path(file)
    return str(path.relative_to(CHECKOUT)) if path.is_relative_to(CHECKOUT) else str(file)


def _defines(file: str, name: str) -> bool:
    """Return whether a config file has a function of a name."""
    path = Path(file)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return bool(re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE))


def _made(function: Callable, arguments: tuple, file: str) -> ConfigDict:
    """Call a config file's function and return its config. Raises UserError for a setting or a name that does not
    exist; a bug stays a bug."""
    try:
        config = function(*arguments)
    except NameError as error:
        raise UserError(f"{function.__name__} in {_place(file, error)}") from error
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if not innermost.f_globals.get("__name__", "").startswith("ml_collections."):
            raise
        raise UserError(f"{function.__name__} in {shown(file)}: {_answer(str(error.args[0]))}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{function.__name__} in {shown(file)} returns {config!r} instead of a config")
    return config


def _answer(message: str) -> str:
    """Sentence for a setting that ml_collections refuses, whose own words list all other settings."""
    message = message.replace("\\n", " ")  # it quotes itself
    refused = re.match(r"\W*Key \W*(\w+)", message) or re.match(r"\W*(\w+)\W*(?:Did|$)", message)
    return unknown_names.answer(refused[1], called=repr(refused[1])) if refused else message


def parts(text: str) -> tuple[str, str]:
    """Split FILE:NAME,VARIANT,... into FILE and NAME,VARIANT,...; the latter is "" where there is none.

    The name follows the last colon, since folders may have colons in their names, too.
    """
    file, colon, name = text.rpartition(":")
    if not colon or "/" in name:
        return text, ""
    return file, name


def load(text: str) -> ConfigDict:
    """The config that FILE or FILE:NAME,VARIANT,... names; see `find` for FILE. Raises UserError: no such file, or one
    without get_config(), or whose get_config() looks at no variants."""
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
    if variants and _of_name(get_config, run, path) == config:  # select names a config after its variants
        raise UserError(f"get_config() of {path} makes of {name!r} what it makes of {run!r}; docs/howto/own_config.md")
    return config


def _of_name(get_config: Callable, name: str, path: Path) -> ConfigDict:
    """Call get_config() with a name, or without one. Raises UserError if it takes none, asks for one, or does not
    know it."""
    try:
        inspect.signature(get_config).bind(*filter(None, [name]))
    except TypeError as error:
        wanted = "takes no name" if name else f"takes a name: --config {path}:NAME"
        raise UserError(f"get_config() of {path} {wanted}; docs/howto/own_config.md shows a whole file") from error
    try:
        return _made(get_config, (name,) if name else (), str(path))
    except (KeyError, AttributeError) as error:
        if name and (error.args[:1] == (name,) or getattr(error, "name", None) == name):
            raise UserError(
                f"get_config() of {path} knows no {name!r}; variants, such as smoke, are those that a file gives to "
                f"select(): docs/howto/own_config.md"
            ) from error
        raise


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
    """A config file. A relative path is looked up in the current directory, then in this checkout, whose scripts may
    be copied elsewhere. Raises UserError: there is no such file, with those of this checkout."""
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
    same = "; the runs of TempFlow-GRPO's dgx.py are in config/grpo.py" if Path(file).name == "dgx.py" else ""
    raise UserError(f"--config names {file!r}, which is {looked_in}; there are {', '.join(published)}{same}")


def module_of(path: Path) -> ModuleType:
    """A config file as a module. What lies beside it can be imported, and config/ of the checkout as `config`."""
    path = path.resolve()
    if path.suffix != ".py":
        raise UserError(
            f"{path} is no Python file; {unknown_names.PAGE} has what the settings of other programs are here"
        )
    sys.path += [str(CHECKOUT)] if str(CHECKOUT) not in sys.path else []
    folder = str(path.parents[1] if (path.parent / "__init__.py").exists() else path.parent)
    sys.path[:0] = [folder] if folder not in sys.path else []
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


def _hiding_config(error: Exception) -> Path | None:
    """Return the file that a failed import took for the package config."""
    if isinstance(error, ImportError) and error.name == "config" and error.path:
        return Path(error.path)
    return None


def _place(file: str, error: Exception) -> str:
    """FILE, line N: what is wrong there, of an error in a config file or in what it has called."""
    # The innermost call in the file; a SyntaxError knows by itself where it is.
    line = 0
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename) == Path(file):
            line = frame.lineno
    if isinstance(error, SyntaxError):
        line = error.lineno
    return f"{shown(file)}, line {line}: {type(error).__name__}: {error}"
