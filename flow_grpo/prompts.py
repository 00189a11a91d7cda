"""Prompt files, and which prompts an epoch draws on which rank."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flow_grpo import rng, shipped


@dataclass(frozen=True)
class Prompt:
    text: str
    metadata: dict[str, Any]  # what the reward needs besides the text; {} for a plain text file


class Split(NamedTuple):
    """Prompts that are evaluated together."""

    name: str  # "validation", "test", "train", or the name of a file
    prompts: list[Prompt]


@dataclass(frozen=True)
class Batch:
    """Images of one rank that are sampled together, or finished together."""

    prompts: list[str]  # B
    metadata: list[dict[str, Any]]  # B
    groups: list[int]  # B, number of the prompt within the epoch
    images: Sequence[int]  # B global image numbers within the epoch
    block: int | None = None  # smallest run of batches that holds whole groups; its images share an SDE window


def load_prompts(folder: str, split: str) -> list[Prompt]:
    """`{split}_metadata.jsonl` (GenEval's format: an object with "prompt" a line) or `{split}.txt` (a prompt a line).

    Raises:
        ValueError: no such file, an empty one, or a malformed line; names file and line.
    """
    path = find_file(folder, split)
    if path is None:
        names = " or ".join(_file_names(split))
        raise ValueError(f"config.dataset {folder!r} needs {names}; neither is there")
    return load_file(path)


def find_file(folder: str | Path, split: str) -> Path | None:
    """The file of a split; None if there is none."""
    folder = shipped.find(str(folder))
    return next((path for name in _file_names(split) if (path := Path(folder, name)).is_file()), None)


def _file_names(split: str) -> tuple[str, str]:
    return f"{split}_metadata.jsonl", f"{split}.txt"


def load_file(path: Path) -> list[Prompt]:
    """The prompts of one file: GenEval's format where its name ends in .jsonl, a prompt a line elsewhere.

    Raises:
        ValueError: an empty file, or a malformed line; names file and line.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    parse = _parse_json if path.suffix == ".jsonl" else _parse_text
    prompts = [parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    if not prompts:
        raise ValueError(f"{path} is empty: it needs one prompt a line")
    return prompts


def _parse_json(line: str, place: str) -> Prompt:
    try:
        metadata = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}): {line[:80]!r}") from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get("prompt"), str):
        raise ValueError(f'{place}: needs an object with a "prompt" string, has {line[:80]!r}')
    return Prompt(_parse_text(metadata["prompt"], place).text, metadata)


def _parse_text(line: str, place: str) -> Prompt:
    if not line.strip():
        raise ValueError(f"{place}: empty prompt")
    return Prompt(line.strip(), {})


def epoch_prompts(num_prompts: int, per_epoch: int, seed: int, epoch: int) -> list[int]:
    """Which `per_epoch` of `num_prompts` prompts an epoch draws, from shuffled passes over all of them."""
    picks, passes = [], {}
    for n in range(epoch * per_epoch, (epoch + 1) * per_epoch):
        number, position = divmod(n, num_prompts)
        if number not in passes:
            passes[number] = torch.randperm(num_prompts, generator=rng.generator(seed, "prompts", number)).tolist()
        picks.append(passes[number][position])
    return picks


def epoch_batches(dataset: list[Prompt], plan, seed: int, epoch: int, rank: int, world_size: int) -> Iterator[Batch]:
    """This rank's batches; each prompt is repeated `plan.group_size` times.

    Neighbours in the order of all images share a batch, and batch n goes to rank n % world_size, so that a batch holds
    the same images on any number of GPUs.
    """
    picks = epoch_prompts(len(dataset), plan.num_groups, seed, epoch)
    for number in range(rank, plan.batches_per_epoch * world_size, world_size):
        images = range(number * plan.batch_size, (number + 1) * plan.batch_size)
        groups = [image // plan.group_size for image in images]
        rows = [dataset[picks[group]] for group in groups]
        block = images.start // math.lcm(plan.batch_size, plan.group_size)
        yield Batch([r.text for r in rows], [r.metadata for r in rows], groups, images, block)


def pick(rows: Iterable[tuple[Batch, int]]) -> Batch:
    """The given rows of some batches."""
    columns = zip(*((b.prompts[row], b.metadata[row], b.groups[row], b.images[row]) for b, row in rows))
    return Batch(*(list(column) for column in columns))
