"""Make a data set folder of a file of prompts: train, validation and test, each prompt once.

    python tools/split_prompts.py prompts.txt --out data/mine
    python tools/split_prompts.py data/pickapic/*.parquet --column caption --out data/pickapic --test 2048

A source is a .txt (a prompt a line), a .jsonl or .json of objects, whose other keys stay, or of prompts, a .csv or .tsv
whose first line names its columns, or a .parquet. The prompts are in --column, or in the one that is called prompt or,
where none is, caption, text or instruction. Test and validation prompts are drawn by a hash of their text, whatever the
order of the sources. Empty prompts are left out, and with --longest those of more characters. A split of 0 prompts has
no file. Images to be edited are refused, as the same text may ask for edits of many.
"""

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted
from flow_grpo.command_line import command_line


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--column", default="", help="of the prompts; default: the one called prompt, or caption")
    parser.add_argument("--test", type=int, default=256, help="prompts; default %(default)s")
    parser.add_argument("--validation", type=int, default=256, help="prompts; default %(default)s")
    parser.add_argument("--longest", type=int, default=0, help="characters of a prompt; 0 = no limit")
    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for a number of prompts, or of characters, that is negative."""
    for name in ("test", "validation", "longest"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name} is {getattr(args, name)}; it must be 0 or more")


if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    args = command_line.arguments(parser(), check_flags)

from flow_grpo.base import folders
from flow_grpo.base.prompt import is_blank
from flow_grpo.data import prompt_files

SPLITS = ("test", "validation", "train")


def rows(path: Path, column: str) -> Iterator[dict]:
    """Yield the objects of a source, each with "prompt". Raises UserError for a source that has none, and for images to
    be edited: one text may stand for edits of many, and their paths are relative to the source."""
    for row in prompt_files.read_rows(path, column):
        if row.metadata.get("sources"):
            raise UserError(
                f'{row.place}: "sources" names images to be edited, but prompts are told apart by their text alone '
                "here: write the files of such a data set by hand"
            )
        yield row.metadata | {"prompt": row.text}


def order(text: str) -> bytes:
    """Return a key that puts prompts into an order of no meaning, the same one for ever."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def split(prompts: Iterable[dict], num_test: int, num_validation: int, longest: int) -> dict[str, list[dict]]:
    """Return the rows of each split, each prompt once, in the order of their sources.

    Raises UserError: fewer prompts than the splits need.
    """
    unique = {}
    for row in prompts:
        text = " ".join(row["prompt"].split())
        if not is_blank(text) and (not longest or len(text) <= longest):
            unique.setdefault(text, row | {"prompt": text})
    if len(unique) <= num_test + num_validation:
        raise UserError(
            f"{counted(len(unique), 'prompts')}: too few for {num_test} test and {num_validation} validation ones"
        )
    drawn = sorted(unique, key=order)
    split_of = dict.fromkeys(drawn[:num_test], "test")
    split_of |= dict.fromkeys(drawn[num_test : num_test + num_validation], "validation")
    splits = {name: [] for name in SPLITS}
    for text, row in unique.items():
        name = split_of.get(text, "train")
        splits[name].append(row)
    return splits


def lines_of(splits: dict[str, list[dict]]) -> dict[str, list[str]]:
    """Return the lines of each file by its name: of text, or of objects where a prompt has more than its text. A split
    without prompts has no file: a run refuses an empty one, and does without one of validation prompts."""
    all_rows = itertools.chain(*splits.values())
    has_text_alone = all(row.keys() == {"prompt"} for row in all_rows)
    lines = {}
    for name, split_rows in splits.items():
        if not split_rows:
            continue
        metadata_name, text_name = prompt_files.names_of_split(name)
        if has_text_alone:
            lines[text_name] = [row["prompt"] + "\n" for row in split_rows]
        else:
            lines[metadata_name] = [json.dumps(row, ensure_ascii=False) + "\n" for row in split_rows]
    return lines


def check_folder(out: Path, written: Iterable[str]) -> None:
    """Raise UserError where a folder has files of a data set that are not `written` now: a run would read them beside
    those that are, or in their place."""
    left = []
    for split in SPLITS:
        for name in prompt_files.names_of_split(split):
            if name not in written and (out / name).exists():
                left.append(name)
    if left:
        raise UserError(
            f"--out: {out} has {', '.join(left)} of another data set, which a run would read, too: remove it, or "
            "choose another folder"
        )


def write(splits: dict[str, list[dict]], out: Path) -> None:
    """Write the files of a data set. Raises UserError for a folder that cannot be made, or that has others."""
    files = lines_of(splits)
    folders.ensure_folder(out, "--out")
    check_folder(out, files)
    for name, lines in files.items():
        (out / name).write_text("".join(lines), encoding="utf-8")
        print(f"{out / name}: {counted(len(lines), 'prompts')}")


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    prompts = []
    for source in args.sources:
        prompts += rows(source, args.column)
    splits = split(prompts, args.test, args.validation, args.longest)
    write(splits, args.out)


if __name__ == "__main__":
    with command_line.sentences():
        main(args)
