"""What the package ships, by the relative path that the published configs name: found from any directory; and what
Python has imported that neither the package nor an installed one ships."""

import os
import re
import sys
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def find(path: str) -> str:
    """The path itself where it exists or nothing of that name is shipped, otherwise what is shipped."""
    shipped = (folder / path for folder in (PACKAGE.parent, PACKAGE / "assets"))
    return path if Path(path).exists() else str(next((place for place in shipped if place.exists()), path))


def imported_beside(file: Path) -> dict[str, Path]:
    """What a user's file may depend on: modules that this process has imported from its folder, by their paths there,
    without the file itself, the running script and what is installed."""
    file, kinds = file.resolve(), ("stdlib", "platstdlib", "purelib", "platlib")
    installed = tuple(f"{folder}{os.sep}" for folder in (*map(sysconfig.get_path, kinds), PACKAGE))
    modules = [module for name, module in [*sys.modules.items()] if name != "__main__"]
    places = {str(place) for module in modules if (place := getattr(module, "__file__", None))}
    paths = {Path(place) for place in places if not place.startswith(installed)}  # thousands start with it
    paths = {path.resolve() for path in paths if path.is_absolute() and path.is_file()} - {file}
    return {
        str(path.relative_to(file.parent)): path
        for path in sorted(paths)
        if path.is_relative_to(file.parent) and not str(path).startswith(installed)
    }


def is_hub_id(name: str) -> bool:
    """Whether it may be a hub's OWNER/NAME: no folder of this name is here, nor one that would hold it."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(find(name)).parent.is_dir()
