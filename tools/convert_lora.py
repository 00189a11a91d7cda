"""Write a LoRA as peft's folder, for `PeftModel.from_pretrained(transformer, FOLDER)`.

    python tools/convert_lora.py runs/NAME/best --out FOLDER

The LoRA may be a run's folder, its best/, or any file or folder that lora.path takes, of older versions too. peft reads
no file of another name and no names of diffusers. ComfyUI reads the run's own file. The LoRA of lora.base, on which a
run's LoRA was trained, is named, and left out.
"""

import argparse
from pathlib import Path

from flow_grpo.base.errors import UserError
from flow_grpo.command_line import command_line


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    flags = command_line.parser(__doc__)
    flags.add_argument("lora", type=Path, help="a LoRA file, or a folder with one")
    flags.add_argument("--out", type=Path, required=True, help="folder to be made")
    return flags


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for a folder that is there already."""
    if args.out.exists():
        raise UserError(f"--out: {args.out} is there already")


# Before torch is imported, so that --help and mistakes are answered at once.
if __name__ == "__main__":
    args = command_line.arguments(parser(), check_flags)

from peft import LoraConfig
from safetensors.torch import load_file, save_file

from flow_grpo.base import folders
from flow_grpo.base.formatting import counted, in_one_line
from flow_grpo.weights import base_lora, lora_files


def write_for_peft(lora: Path, out: Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json into a folder that is made. Raises UserError for what is
    no LoRA."""
    file = lora_files.find_file(lora)
    adapter = lora_files.check_adapter(file)
    weights = {}
    for name, weight in load_file(file).items():
        parameter = name.removeprefix(lora_files.PEFT_PREFIX).removeprefix("transformer.")
        weights[lora_files.PEFT_PREFIX + parameter] = weight
    config = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.layers), inference_mode=True
    )
    folders.ensure_folder(out.parent, "--out")
    with folders.published(out) as scratch:
        config.save_pretrained(str(scratch))
        save_file(weights, scratch / lora_files.PEFT_FILE, {"format": "pt"})
    print(f"{out}: {counted(len(adapter.layers), 'layers')} of rank {adapter.rank}")
    base = base_lora.base_of_run(str(file))
    if base:
        print(f"it was trained with lora.base {in_one_line(base)}: add that LoRA to the transformer first")


if __name__ == "__main__":
    with command_line.sentences():
        write_for_peft(args.lora, args.out)
