"""Preference pairs: chosen from groups of images, stored as parquet, read back for training.

A folder of pairs holds train_*.parquet and validation_*.parquet, a pair a row, complete in itself: neither VAE nor text
encoder is needed to train on it. `scripts/prepare_preferences.py` makes such folders; its columns are `schema`'s.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from flow_grpo.algorithms.advantages import neighbours_with_signal
from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.data.parquet import open_parquet, read_columns
from flow_grpo.diffusers_patch.condition import TENSORS, Condition
from flow_grpo.diffusers_patch.size import Size

SPLITS = ("train", "validation")
ARROW = {"float32": pa.float32(), "bfloat16": pa.uint16()}  # parquet has no bfloat16: its bits
LATENTS = ("winner_latents", "loser_latents")
COLUMNS = {name: name for name in TENSORS} | {"text_embeds": "text"}  # of a Condition's fields
SOURCES = tuple(name for name in TENSORS if name.startswith("source_"))
ROW_GROUP_BYTES = 2**18  # a pair is read with its row group


@dataclass
class Pairs:
    """P pairs. Winner and loser share a prompt, and in training a noise."""

    winners: Tensor  # [P, ...] f32, latents
    losers: Tensor  # [P, ...] f32
    loss_weight: Tensor  # [P] f32, averages to 1; 0 where the rewards do not tell the images apart
    condition: Condition  # P rows
    numbers: Tensor  # [P] int64 on the CPU: of the pair, or of its group's first image, within the epoch
    num_rows: int = 0  # of the whole update, on this rank
    inner_epoch: int = 0  # passes over these pairs before this one

    @property
    def row_ids(self) -> Tensor:
        """[P, 2] int64, as in Minibatch."""
        return torch.stack([self.numbers, torch.zeros_like(self.numbers)], 1)

    def take(self, rows: slice, num_rows: int, inner_epoch: int = 0) -> "Pairs":
        """Some of them, as part of an update of `num_rows`."""
        columns = {name: getattr(self, name)[rows] for name in ("winners", "losers", "loss_weight", "numbers")}
        return Pairs(**columns, condition=self.condition.take(rows), num_rows=num_rows, inner_epoch=inner_epoch)


def dtype_of(precision: str) -> str:
    """Of stored pairs, by config.precision."""
    return "bfloat16" if precision == "bf16" else "float32"


def concat(batches: list[Pairs]) -> Pairs:
    """Join along P."""
    names = ("winners", "losers", "loss_weight", "numbers")
    joined = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    return Pairs(**joined, condition=batches[0].condition.concat([batch.condition for batch in batches]))


def minibatches(pairs: Pairs, updates: int, size: int, inner_epochs: int) -> Iterator[list[Pairs]]:
    """Per optimizer step its minibatches of up to `size` pairs, `inner_epochs` times.

    An update takes whole batches, in their order, so it trains the same pairs on any number of GPUs.
    """
    total = len(pairs.loss_weight) // updates
    for inner_epoch, start in itertools.product(range(inner_epochs), range(0, total * updates, total)):
        parts = [slice(at, min(at + size, start + total)) for at in range(start, start + total, size)]
        yield [pairs.take(part, total, inner_epoch) for part in parts]


def best_and_worst(
    latents: Tensor,
    condition: Condition,
    images: range,
    rewards: dict[str, Tensor],
    weights: dict[str, float],
    group: int,
    margin: float,
) -> Pairs:
    """Make a pair of each group of neighbours among B images, of weight 1 where the weighted rewards differ by over
    `margin` and by more than rounding, else 0.

    Args:
        latents: [B, ...]; condition has B rows.
        images: their numbers.
        rewards: name -> [B] f32 on the CPU, "avg" among them; NaN where an image has none.
        weights: config.reward_fn, whose sum is "avg".
    """
    scores = rewards["avg"].view(-1, group)
    high, low = scores.nan_to_num(-torch.inf), scores.nan_to_num(torch.inf)  # an image without a score is neither
    best, worst, first = high.amax(1), low.amin(1), torch.arange(0, scores.numel(), group)
    winners, losers = first + high.argmax(1), first + low.argmin(1)
    differs = (best - worst > margin) & neighbours_with_signal(rewards, weights, group)
    on_device = lambda index: index.to(latents.device)  # noqa: E731
    return Pairs(
        latents[on_device(winners)],
        latents[on_device(losers)],
        on_device(differs.float()),
        condition.take(on_device(first)),
        torch.tensor(images)[first],
    )


def schema(shapes: dict[str, tuple[int, ...]], dtype: str) -> pa.Schema:
    """The columns of a pair.

    Args:
        shapes: of latents and of a Condition's fields, one row each, from a model's `row_shapes`.
        dtype: "float32", or "bfloat16", which is stored as the uint16 of its bits.
    """
    array = lambda name: pa.fixed_shape_tensor(pa.uint8() if name == "mask" else ARROW[dtype], shapes[name])  # noqa: E731
    fields = {name: pa.string() for name in ("prompt", "negative_prompt", "model", "dtype")}
    fields |= {"height": pa.int32(), "width": pa.int32(), "winner_score": pa.float64(), "loser_score": pa.float64()}
    fields |= dict.fromkeys(LATENTS, array("latents"))
    return pa.schema(fields | {column: array(name) for name, column in COLUMNS.items() if name in shapes})


def write_pairs(path: Path, columns: dict[str, list | Tensor], shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    """Write P rows, in one rename. Tensors are [P, *shape], or P of `shape`; the same rows make the same file."""
    wanted = schema(shapes, dtype)
    arrays = [_to_arrow(columns[field.name], field.type, dtype) for field in wanted]
    table = pa.table(arrays, schema=wanted)
    rows = max(1, ROW_GROUP_BYTES * len(table) // max(1, table.nbytes))
    scratch = path.with_suffix(".tmp")
    pq.write_table(
        table, scratch, row_group_size=rows, compression="none", use_dictionary=False, write_page_checksum=True
    )
    scratch.replace(path)


def source_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Of the sources that a folder's first pair has."""
    for path in files_of(folder)["train"][:1]:
        fields = open_parquet(path).schema_arrow
        return {field.name: tuple(field.type.shape) for field in fields if field.name in SOURCES}
    return {}


def _to_arrow(values: list | Tensor, kind: pa.DataType, dtype: str) -> pa.Array:
    if not isinstance(values[0], Tensor):
        return pa.array(values, kind)
    values = torch.stack(list(values)).cpu()
    if kind.value_type == pa.uint8():
        stored = values.to(torch.uint8)
    else:
        stored = values.float() if dtype == "float32" else values.bfloat16().view(torch.uint16)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(stored.numpy()))


def open_pairs(folder: str, shapes: dict[str, tuple[int, ...]], model: str, size: Size) -> dict[str, "PairFiles"]:
    """Both splits, checked: columns, model and size. Latents are checked as they are read. Raises UserError, which
    names file and column."""
    if Path(folder, "unfinished").exists():
        raise UserError(f"{folder} is not complete: scripts/prepare_preferences.py, started again, goes on with it")
    paths = files_of(folder)
    if not paths["train"]:
        raise UserError(
            f"config.preferences.path {folder!r} holds no train_*.parquet: "
            "python scripts/prepare_preferences.py with the same --config makes them"
        )
    return {split: PairFiles(files, shapes, model, size) for split, files in paths.items()}


def files_of(folder: str | Path) -> dict[str, list[Path]]:
    """The files of each split in a folder of pairs; others that lie there are not opened."""
    return {split: sorted(Path(folder).glob(f"{split}_*.parquet")) for split in SPLITS}


def num_rows(folder: Path, split: str) -> int:
    """Pairs of a split."""
    return sum(open_parquet(path).metadata.num_rows for path in files_of(folder)[split])


class PairFiles:
    """Rows of parquet files, numbered through; memory-mapped, so that ranks of one machine share what is read."""

    def __init__(self, paths: list[Path], shapes: dict[str, tuple[int, ...]], model: str, size: Size):
        expected = dict(model=model, height=size.height, width=size.width)
        files, texts = [open_parquet(path) for path in paths], []
        for path, file in zip(paths, files):
            texts += _check_file(path, file, shapes, expected)
        self.prompts = [Prompt(text, {"pair": row}) for row, text in enumerate(texts)]
        self.groups = [(path, f, group) for path, f in zip(paths, files) for group in range(f.num_row_groups)]
        counts = (file.metadata.row_group(group).num_rows for _, file, group in self.groups)
        self.starts = [0, *itertools.accumulate(counts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, rows: list[int], numbers: list[int], device: torch.device) -> Pairs:
        group_of_row = [bisect.bisect_right(self.starts, row) - 1 for row in rows]
        columns = *LATENTS, *COLUMNS.values()
        groups = {number: _read_arrays(*self.groups[number], columns) for number in set(group_of_row)}
        places = [(groups[number], row - self.starts[number]) for number, row in zip(group_of_row, rows)]
        joined = {name: torch.stack([group[name][row] for group, row in places]).to(device) for name in places[0][0]}
        condition = Condition(**{name: joined[column] for name, column in COLUMNS.items() if column in joined})
        ones = torch.ones(len(rows), device=device)
        return Pairs(joined["winner_latents"], joined["loser_latents"], ones, condition, torch.tensor(numbers))


def _read(path: Path, file: pq.ParquetFile, columns: list[str], group: int | None = None) -> pa.Table:
    """Columns as `read_columns` has them. Raises UserError also where a row has no value."""
    table = read_columns(path, file, columns, group)
    if missing := [name for name in table.column_names if table[name].null_count]:
        raise UserError(f"{path}, column {missing[0]!r}: a row has no value")
    return table


def _read_arrays(path: Path, file: pq.ParquetFile, group: int, columns: tuple[str, ...]) -> dict[str, Tensor]:
    """Columns of a row group that are there, each [P, *shape] float32, or bool for the mask; all finite."""
    table, arrays = _read(path, file, [name for name in columns if name in file.schema_arrow.names], group), {}
    for name in table.column_names:
        values = torch.from_numpy(table.column(name).combine_chunks().to_numpy_ndarray().copy())
        values = values.view(torch.bfloat16) if values.dtype == torch.uint16 else values
        arrays[name] = values.bool() if values.dtype == torch.uint8 else values.float()
        finite = arrays[name].flatten(1).isfinite().all(1)
        if not finite.all():
            row = sum(file.metadata.row_group(n).num_rows for n in range(group)) + (~finite).nonzero()[0].item()
            raise UserError(f"{path}, row {row}, column {name!r}: not finite")
    return arrays


def _check_file(path: Path, file: pq.ParquetFile, shapes: dict, expected: dict) -> list[str]:
    """Everything but the arrays' values, which are checked as they are read; the rows' prompts."""
    if file.metadata.num_rows == 0:
        raise UserError(f"{path} has no row")
    schemas = file.schema_arrow, *(schema(shapes, dtype) for dtype in ARROW)
    stored, *wanted = ({field.name: field.type for field in one} for one in schemas)
    for name in wanted[0] | stored:
        types = [columns.get(name, "nothing") for columns in wanted]
        if stored.get(name, "nothing") not in types:
            raise UserError(
                f"{path}, column {name!r} holds {stored.get(name, 'nothing')}, not {types[0]}, which config.model, "
                "config.height, config.width and config.text_tokens ask for"
            )
    table = _read(path, file, ["prompt", *expected])
    for column, value in expected.items():
        if others := [other for other in table.column(column).unique().to_pylist() if other != value]:
            raise UserError(f"{path}, column {column!r}: {others[0]!r}, but this run has {value!r}")
    return table.column("prompt").to_pylist()
