"""Upload a run's weights and their model card to the Hugging Face hub.

    python scripts/push_to_hub.py runs/NAME --repo USER/NAME --dry-run
    python scripts/push_to_hub.py runs/NAME --repo USER/NAME

The best evaluation's weights, or --weights last. With --export-dtype bfloat16 a LoRA of half the size is uploaded; the
run's own file stays as it is. A dry run writes the card and lists the files without any connection;
read the card before it is public. `hf auth login` first. A repository that is there is added to.
"""

import argparse
from pathlib import Path

from flow_grpo.base import folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line
from flow_grpo.command_line import command_line


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    flags = command_line.parser(__doc__)
    flags.add_argument("run", type=Path, help="a run's folder")
    flags.add_argument("--repo", required=True, help="USER/NAME")
    flags.add_argument("--weights", choices=["best", "last"], default="best")
    flags.add_argument("--export-dtype", choices=["float32", "bfloat16"], help="of a LoRA's weights; default: its own")
    flags.add_argument("--private", action="store_true", help="only you can see a repository that is made")
    flags.add_argument("--dry-run", action="store_true", help="list what would be uploaded; no connection")
    return flags


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for a folder that is not there, or a name that is none on the hub."""
    if not args.run.is_dir():
        raise UserError(f"there is no folder {args.run}")
    if not locations.HUB_ID.fullmatch(args.repo):
        raise UserError(f"--repo is {args.repo!r}; it must be USER/NAME")


# Before torch is imported, so that --help and mistakes are answered at once.
args = None
if __name__ == "__main__":
    args = command_line.arguments(parser(), check_flags)

import torch
from huggingface_hub import CommitOperationAdd, HfApi
from safetensors.torch import load_file, save

from flow_grpo.base import checksums
from flow_grpo.checkpoints import best
from flow_grpo.evaluation import policies_to_compare
from flow_grpo.monitoring import model_card
from flow_grpo.settings.sections import Config
from flow_grpo.weights import finite, lora_files, safetensors_reader

PATTERNS = ("README.md", "*.png", lora_files.FILE, "transformer/*")


def chosen_folder(run_folder: Path, weights: str) -> Path:
    """Return the folder of a run's best or last weights. Raise UserError if it is no run, or has no such weights."""
    if not folders.is_run(run_folder):
        raise UserError(f"{run_folder} is no run's folder: it has no config.json and metrics.jsonl")
    candidate = policies_to_compare.find_candidate(str(run_folder), Config(), weights)
    if candidate.lora:
        return candidate.lora
    assert candidate.transformer is not None, "a run has trained an adapter or a transformer"
    return candidate.transformer.parent


def check_weights(folder: Path) -> None:
    """Raise UserError for weights that are not those that were written, or not finite."""
    if (folder / lora_files.FILE).is_file():
        lora_files.check_adapter(folder)
        return
    checksums.check_files(folder)
    for file in sorted((folder / "transformer").glob("*.safetensors")):
        problem = finite.problem_of_tensors(load_file(file))
        if problem:
            raise UserError(f"{file} is not uploaded: {problem}")


def files_to_upload(folder: Path) -> list[Path]:
    """Return the weights, the card and its pictures."""
    files = []
    for pattern in PATTERNS:
        files += [path for path in folder.glob(pattern) if path.is_file()]
    return sorted(files)


def content(file: Path, dtype: str | None) -> Path | bytes:
    """Return what is uploaded of a file: itself, or a LoRA file whose weights have a torch dtype."""
    if dtype is None or file.name != lora_files.FILE:
        return file
    weights = {}
    for name, weight in load_file(file).items():
        weights[name] = weight.to(getattr(torch, dtype))
    return save(weights, safetensors_reader.header_of(file).metadata)


def main(args: argparse.Namespace, hub: HfApi) -> None:
    """Write the model card, list the files and upload them."""
    folder = chosen_folder(args.run, args.weights)
    if args.export_dtype and not (folder / lora_files.FILE).is_file():
        raise UserError(f"--export-dtype is for a LoRA, and {args.run} trained all weights")
    check_weights(folder)
    caution = best.caution(folder)
    if caution:
        print(caution)
    for notice in model_card.write_cards(args.run, args.repo):
        print(notice)
    uploads = []
    for file in files_to_upload(folder):
        uploaded = content(file, args.export_dtype)
        num_bytes = len(uploaded) if isinstance(uploaded, bytes) else file.stat().st_size
        name = str(file.relative_to(folder))
        print(f"{num_bytes:>14,}  {name}")
        uploads.append(CommitOperationAdd(name, uploaded))
    if args.dry_run:
        print(f"nothing was uploaded; {folder / 'README.md'} is the card")
        return
    try:
        address = hub.create_repo(args.repo, private=args.private, exist_ok=True)
        hub.create_commit(args.repo, uploads, commit_message=args.run.name)
    # Errors of the connection, of the hub and of its client have no class in common.
    except Exception as error:
        raise UserError(f"{args.repo}: the hub has not taken the files: {in_one_line(error)}") from error
    print(f"uploaded to {address}")


if args is not None:
    with command_line.sentences():
        main(args, HfApi())
