"""The prompts of a data set, and which of them an epoch draws on which rank."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.algorithms.prompt_signal import weighted_draw
from flow_grpo.base import folders, locations, rng
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.base.prompt import Prompt, is_blank, picture_size
from flow_grpo.data import prompt_files
from flow_grpo.data.prompt_files import Row

SPLITS = ("train", "validation", "test")
DATASET = "config.dataset"  # the setting that names a data set, unless a flag does
SAVED_DATASET = {"dataset_info.json", "dataset_dict.json"}  # names of files that `datasets` writes
LONGEST = 100_000  # characters of a prompt: far more than any model reads
ADDRESSES = ("http://", "https://", "data:")


class Split(NamedTuple):
    """Prompts that are evaluated together."""

    name: str  # "validation", "test", "train", or the name of a file
    prompts: list[Prompt]


class PromptFile(NamedTuple):
    """A file of prompts that was opened."""

    path: Path
    prompts: list[Prompt]


@dataclass(frozen=True)
class Batch:
    """Images of one rank that are sampled together, or finished together."""

    prompts: list[Prompt]  # B
    groups: list[int]  # B, number of the prompt within the epoch
    image_numbers: Sequence[int]  # B, global within the epoch


@dataclass(frozen=True)
class PlannedBatch(Batch):
    """Images that are sampled together, as the epoch's plan has them."""

    block: int  # smallest run of batches that holds whole groups; its images share an SDE window


class BatchRow(NamedTuple):
    """One image of a batch."""

    batch: Batch
    row: int


def load_prompts(folder: str, split: str, setting: str = DATASET) -> list[Prompt]:
    """Load the prompts of a split; see `open_split`."""
    return open_split(folder, split, setting).prompts


def open_split(folder: str, split: str, setting: str = DATASET) -> PromptFile:
    """Load `{split}_metadata.jsonl` (GenEval's format: an object with "prompt" a line) or `{split}.txt` (a prompt a
    line). Raises UserError: no such file, an empty one, or a malformed line; names file and line.

    Args:
        setting: what gave the folder, for messages.
    """
    path = find_file(folder, split, setting)
    if path is None:
        names = " or ".join(prompt_files.names_of_split(split))
        raise UserError(f"{setting} {quoted(folder)} needs {names}; neither is there{_hint_of_content(folder)}")
    return PromptFile(path, load_file(path))


def find_file(folder: str | Path, split: str, setting: str = DATASET) -> Path | None:
    """Return the file of a split, or whatever else has its name, such as a link to a file that is gone, for its reader
    to refuse; None if there is none. Raises UserError, which names the setting, if the folder cannot be looked into."""
    try:
        located = Path(locations.resolve(str(folder)))
        for name in prompt_files.names_of_split(split):
            path = located / name
            if path.is_symlink() or path.exists():
                return path
    except OSError as error:  # a name that is too long, or a folder that nobody may look into
        raise UserError(f"{setting} is {quoted(str(folder))}: {error.strerror}") from error
    return None


def _hint_of_content(folder: str) -> str:
    """Say what a folder has in place of prompts, as the end of a sentence."""
    names = sorted(path.name for path in Path(locations.resolve(folder)).glob("[!.]*"))
    if not names:
        return ""
    if SAVED_DATASET & set(names):
        return ", but what `save_to_disk` of `datasets` writes: load it, and save its column of prompts by `to_csv`"
    splits = [name for split in SPLITS for name in prompt_files.names_of_split(split)]
    for name in names:
        if prompt_files.is_prompt_file(Path(name)) and name not in splits:
            return f", but {quoted(name)}: tools/split_prompts.py makes a data set of such a file"
    return f", but {quoted(names)}"


def load_file(path: Path) -> list[Prompt]:
    """Load the prompts of one file. Raises UserError: it holds none, or has a malformed line; names file and line."""
    prompts = [_prompt_of(row, path.parent) for row in prompt_files.read_rows(path)]
    if not prompts:
        raise UserError(f"{path} is empty: it needs a prompt")
    return prompts


def _prompt_of(row: Row, folder: Path) -> Prompt:
    """Make the prompt of a row; `folder` is that of its file. Raise UserError for a blank text or one of over LONGEST
    characters, a "tag" that is no text of one line, and missing sources."""
    text = row.text.strip()
    if is_blank(text):
        raise UserError(f"{row.place}: empty prompt")
    # To count the tokens of such a text takes minutes.
    if len(text) > LONGEST:
        raise UserError(f"{row.place}: the prompt has {len(text):,} characters; it may have {LONGEST:,} at most")
    tag = row.metadata.get("tag", "")
    if not isinstance(tag, str | int | float | None) or not str(tag).isprintable():
        raise UserError(f'{row.place}: "tag", the category, is {quoted(tag)}; it must be a text of one line')
    return Prompt(text, row.metadata, source_paths(row.metadata, row.place, folder))


def source_paths(metadata: dict[str, Any], place: str, folder: Path) -> tuple[Path, ...]:
    """Return the files of "sources", images to be edited, whose names are relative to `folder`. Raises UserError unless
    each is a picture; names `place`."""
    names = metadata.get("sources", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{place}: "sources" is {quoted(names)}; it must be a list of names of image files')
    paths = []
    for name in names:
        if name.startswith(ADDRESSES):
            raise UserError(f'{place}: "sources" has {quoted(name)}; it must name image files: fetch them first')
        path = folder / name
        if "\\" in name and not folders.exists(path):
            raise UserError(f'{place}: "sources" has {quoted(name)}, which does not exist: write / in place of \\')
        picture_size(path, f'{place}: "sources"')
        paths.append(path)
    return tuple(paths)


def with_absolute_sources(prompts: list[Prompt]) -> list[Prompt]:
    """Return the same prompts with absolute paths of their sources: a reward may change the working directory."""
    located = []
    for prompt in prompts:
        # Most prompts have no source: they stay the same object.
        if prompt.sources:
            sources = [source.absolute() if isinstance(source, Path) else source for source in prompt.sources]
            located.append(replace(prompt, sources=tuple(sources)))
        else:
            located.append(prompt)
    return located


def epoch_prompts(num_prompts: int, per_epoch: int, seed: int, epoch: int, weights: Tensor | None = None) -> list[int]:
    """Return which `per_epoch` of `num_prompts` prompts an epoch draws.

    Args:
        weights: [num_prompts] float64, above 0, by which different prompts are drawn; None = from shuffled passes over
            all of them.
    """
    if weights is not None:
        assert per_epoch <= num_prompts, "an epoch draws a prompt once"
        return weighted_draw(weights, per_epoch, rng.generator(seed, "prompts by weight", epoch))
    picks = []
    passes: dict[int, list[int]] = {}
    for draw in range(epoch * per_epoch, (epoch + 1) * per_epoch):
        # An epoch may begin within a pass, and go on in the next ones.
        number, position = divmod(draw, num_prompts)
        if number not in passes:
            passes[number] = torch.randperm(num_prompts, generator=rng.generator(seed, "prompts", number)).tolist()
        picks.append(passes[number][position])
    return picks


def epoch_batches(
    prompts: list[Prompt],
    plan: BatchPlan,
    seed: int,
    epoch: int,
    rank: int,
    world_size: int,
    weights: Tensor | None = None,
) -> Iterator[PlannedBatch]:
    """Yield this rank's batches; each prompt is repeated `plan.group_size` times.

    Neighbours in the order of all images share a batch, and batch n goes to rank n % world_size, so that a batch holds
    the same images on any number of GPUs.

    Args:
        weights: of the prompts, as in `epoch_prompts`.
    """
    picks = epoch_prompts(len(prompts), plan.num_groups, seed, epoch, weights)
    for number in range(rank, plan.batches_per_epoch * world_size, world_size):
        images = range(number * plan.batch_size, (number + 1) * plan.batch_size)
        groups = [image // plan.group_size for image in images]
        # Batches and groups begin together at every common multiple of their sizes: there a block begins.
        block = images.start // math.lcm(plan.batch_size, plan.group_size)
        yield PlannedBatch([prompts[picks[group]] for group in groups], groups, images, block)


def pick(rows: Iterable[BatchRow]) -> Batch:
    """Make a batch of the given rows of other batches."""
    prompts = []
    groups = []
    image_numbers = []
    for batch, row in rows:
        prompts.append(batch.prompts[row])
        groups.append(batch.groups[row])
        image_numbers.append(batch.image_numbers[row])
    return Batch(prompts, groups, image_numbers)
