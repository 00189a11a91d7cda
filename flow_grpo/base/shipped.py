"""What the package ships, by the relative path that the published configs name: found from any directory; and what
Python has imported that neither the package nor an installed one ships."""

import os
import re
import sys
import sysconfig
from pathlib import Path

from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import in_one_line, quoted

PACKAGE = Path(__file__).parents[1]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # OWNER/NAME


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
    return bool(HUB_ID.fullmatch(name)) and not Path(find(name)).parent.is_dir()


def check_connection(model: str) -> None:
    """Raises UserError for a model that is no folder and not in the cache where the hub does not answer: a download
    would try for 30 seconds. What the hub answers to a name, the download says. Imports no torch."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if Path(find(model)).exists():
        return
    try:
        if isinstance(try_to_load_from_cache(model, "model_index.json"), str):
            return
        get_hf_file_metadata(hf_hub_url(model, "model_index.json"))
    except (errors.HfHubHTTPError, errors.HFValidationError):
        return
    except Exception as error:
        places = "no folder here and not in the Hugging Face cache, and the hub does not answer"
        raise UserError(f"config.model {quoted(model)} is {places}: {in_one_line(error)}") from error
