"""Make a data set folder of a file of prompts: train, validation and test, each prompt once.

    python tools/split_prompts.py prompts.txt --out data/mine
    python tools/split_prompts.py data/pickapic/*.parquet --column caption --out data/pickapic --test 2048

A source is a .txt (a prompt a line), a .jsonl (an object with "prompt" a line, whose other keys stay) or a .parquet
(its --column). Test and validation prompts are drawn by a hash of their text, whatever the order of the sources. Empty
prompts are left out, and with --longest those of more characters.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from flow_grpo.settings import command_line


def parser() -> argparse.ArgumentParser:
    parser = command_line.parser(__doc__)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--column", default="prompt", help="of a .parquet; default %(default)s")
    parser.add_argument("--test", type=int, default=256, help="prompts; default %(default)s")
    parser.add_argument("--validation", type=int, default=256, help="prompts; default %(default)s")
    parser.add_argument("--longest", type=int, default=0, help="characters of a prompt; 0 = no limit")
    return parser


if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    args = command_line.arguments(parser())

import pyarrow.parquet as pq

from flow_grpo.base.errors import UserError
from flow_grpo.data.prompts import parse_line, read_lines

SPLITS = ("test", "validation", "train")


def rows(path: Path, column: str) -> Iterator[dict]:
    """Objects with "prompt". Raises UserError for a source that has none."""
    if path.suffix == ".parquet":
        names = pq.read_schema(path).names
        if column not in names:
            raise UserError(f"{path} has no column {column!r}; it has {', '.join(names)}")
        yield from ({"prompt": text} for text in pq.read_table(path, columns=[column])[column].to_pylist())
    elif path.suffix == ".jsonl":
        yield from (parse_line(line, str(path)) for line in read_lines(path))
    else:
        yield from ({"prompt": text} for text in read_lines(path))


def order(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def split(prompts: Iterable[dict], num_test: int, num_validation: int, longest: int) -> dict[str, list[dict]]:
    """The rows of each split, each prompt once, in the order of their sources. Raises UserError: fewer prompts than the
    splits need."""
    unique = {}
    for row in prompts:
        text = " ".join((row["prompt"] or "").split())
        if text and (not longest or len(text) <= longest):
            unique.setdefault(text, row | {"prompt": text})
    if len(unique) <= num_test + num_validation:
        raise UserError(f"{len(unique)} prompts are too few for {num_test} test and {num_validation} validation ones")
    drawn = sorted(unique, key=order)
    held = dict.fromkeys(drawn[:num_test], "test") | dict.fromkeys(drawn[num_test:][:num_validation], "validation")
    return {name: [row for text, row in unique.items() if held.get(text, "train") == name] for name in SPLITS}


def write(splits: dict[str, list[dict]], out: Path) -> None:
    """NAME.txt, or NAME_metadata.jsonl where a prompt has more than its text."""
    out.mkdir(parents=True, exist_ok=True)
    plain = all(row.keys() == {"prompt"} for rows in splits.values() for row in rows)
    for name, lines in splits.items():
        file = out / (f"{name}.txt" if plain else f"{name}_metadata.jsonl")
        text = "".join((row["prompt"] if plain else json.dumps(row, ensure_ascii=False)) + "\n" for row in lines)
        file.write_text(text, encoding="utf-8")
        print(f"{file}: {len(lines)} prompts")


def main(args: argparse.Namespace) -> None:
    prompts = (row for source in args.sources for row in rows(source, args.column))
    write(split(prompts, args.test, args.validation, args.longest), args.out)


if __name__ == "__main__":
    with command_line.sentences():
        main(args)
