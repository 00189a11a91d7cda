"""Locations that a config names: a path here, a file that the package ships, or an id on the Hugging Face hub."""

import re
from pathlib import Path

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted

PACKAGE = Path(__file__).parents[1]
# Where scripts/, config/ and dataset/ lie: the checkout, or what an installed package carries of it.
_IS_CHECKOUT = (PACKAGE.parent / "config" / "grpo.py").is_file()
ROOT = PACKAGE.parent if _IS_CHECKOUT else PACKAGE / "assets"
# Of those in tools/, what a user of an installed package needs.
TOOLS = ("check_parity", "convert_lora", "split_prompts")
# Of diffusers and of peft.
LORA_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # OWNER/NAME


def resolve(path: str) -> str:
    """Return the path itself if it exists, otherwise the file or folder of this name that the package ships.

    Published configs name shipped data by a path relative to the checkout; an installed package has it in assets/.
    """
    if Path(path).exists():
        return path
    for folder in (PACKAGE.parent, PACKAGE / "assets"):
        if (folder / path).exists():
            return str(folder / path)
    return path


def is_shipped(model: str) -> bool:
    """Return whether a model is one of the package's, by its path in a checkout."""
    return model.startswith("flow_grpo/assets/")


def commands() -> dict[str, Path]:
    """Return the files that `python -m flow_grpo NAME` runs, by their names without `.py`, sorted."""
    files = {path.stem: path for path in (ROOT / "scripts").glob("*.py")}
    for name in TOOLS:
        files[name] = ROOT / "tools" / f"{name}.py"
    return dict(sorted(files.items()))


def find_command(name: str) -> Path:
    """Return the file of a script: one here, or else a shipped one by its path in a checkout or by its name. Where
    there is none, the path has no file."""
    path = Path(resolve(name))
    if path.is_file():
        return path
    return commands().get(name.removesuffix(".py"), path)


def is_hub_id(name: str) -> bool:
    """Return whether a name may be OWNER/NAME on a hub: there is no such folder here, nor one that would hold it."""
    return bool(HUB_ID.fullmatch(name)) and not Path(resolve(name)).parent.is_dir()


def download_hint(name: str) -> str:
    """Return how an id of the hub becomes a folder here, as the rest of a sentence."""
    return f"; `hf download {name} --local-dir FOLDER` fetches it from the hub, and FOLDER is then its path"


def check_hub_connection(model: str) -> None:
    """Raise UserError for a model that only the hub can have while the hub does not answer. Imports no torch."""
    reason = unreachable(model)
    if reason:
        places = "no folder here and not in the Hugging Face cache, and the hub does not answer"
        raise UserError(f"config.model {quoted(model)} is {places}: {reason}")


def unreachable(model: str) -> str:
    """Return why a model can neither be found on this machine nor be asked for on the hub; "" = it can.

    A download would try for 30 seconds before it says so. A hub that answers is left to refuse the name itself, when
    the model is loaded. Raises UserError for a LoRA in the place of a model. Imports no torch.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if Path(resolve(model)).exists():
        return ""
    try:
        if isinstance(try_to_load_from_cache(model, "model_index.json"), str):
            return ""
        for name in LORA_FILES:
            lora = try_to_load_from_cache(model, name)
            if isinstance(lora, str):
                raise UserError(f"{quoted(model)} is a LoRA of the hub, no model; its path here is {Path(lora).parent}")
        get_hf_file_metadata(hf_hub_url(model, "model_index.json"))
    except (errors.HfHubHTTPError, errors.HFValidationError):
        return ""
    except UserError:
        raise
    except Exception as error:
        return in_one_line(error)
    return ""
