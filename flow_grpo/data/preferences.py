"""Preference pairs: chosen from groups of images, stored as parquet, read back for training.

A folder of pairs holds train_*.parquet and validation_*.parquet. Each row is a pair, complete in itself: neither VAE
nor text encoder is needed to train on it. `scripts/prepare_preferences.py` makes such folders; `schema` lists the
columns.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from flow_grpo.algorithms.advantages import neighbours_with_signal
from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.data.parquet import RowGroup, open_parquet, read_columns, row_groups
from flow_grpo.diffusers_patch.condition import SOURCES, TENSORS, Condition
from flow_grpo.diffusers_patch.size import Size

SPLITS = ("train", "validation")
ARROW = {"float32": pa.float32(), "bfloat16": pa.uint16()}  # parquet has no bfloat16: its bits
LATENTS = ("winner_latents", "loser_latents")
COLUMNS = {name: name for name in TENSORS} | {"text_embeds": "text"}  # of a Condition's fields
ROW_GROUP_BYTES = 2**18  # a pair is read with its row group


@dataclass
class Pairs:
    """P pairs. Winner and loser share a prompt, and in training a noise."""

    winners: Tensor  # [P, ...] f32, latents
    losers: Tensor  # [P, ...] f32
    loss_weight: Tensor  # [P] f32, averages to 1; 0 where the rewards do not tell the images apart
    condition: Condition  # P rows
    numbers: Tensor  # [P] int64 on the CPU: of the pair, or of its group's first image, within the epoch
    num_update_rows: int = 0  # of the whole update, on this rank
    inner_epoch: int = 0  # passes over these pairs before this one
    num_outcomes: ClassVar[int] = 1  # of each row, as in Minibatch

    @property
    def row_ids(self) -> Tensor:
        """[P, 2] int64, as in Minibatch."""
        return torch.stack([self.numbers, torch.zeros_like(self.numbers)], 1)

    def take(self, rows: slice, num_update_rows: int, inner_epoch: int = 0) -> "Pairs":
        """Return some of the pairs, as part of an update of `num_update_rows`."""
        return Pairs(
            winners=self.winners[rows],
            losers=self.losers[rows],
            loss_weight=self.loss_weight[rows],
            condition=self.condition.take(rows),
            numbers=self.numbers[rows],
            num_update_rows=num_update_rows,
            inner_epoch=inner_epoch,
        )


def dtype_of(precision: str) -> str:
    """Return the type of stored pairs for a config.precision."""
    return "bfloat16" if precision == "bf16" else "float32"


def concat(batches: list[Pairs]) -> Pairs:
    """Join along P."""
    columns = {}
    for name in ("winners", "losers", "loss_weight", "numbers"):
        columns[name] = torch.cat([getattr(pairs, name) for pairs in batches])
    return Pairs(**columns, condition=Condition.concat([pairs.condition for pairs in batches]))


def minibatches(pairs: Pairs, updates: int, batch_size: int, inner_epochs: int) -> Iterator[list[Pairs]]:
    """Yield the minibatches of each update, of up to `batch_size` pairs; all updates `inner_epochs` times.

    An update takes whole batches, in their order, so it trains the same pairs on any number of GPUs.
    """
    num_update_rows = len(pairs.loss_weight) // updates
    for inner_epoch in range(inner_epochs):
        for update in range(updates):
            first = update * num_update_rows
            end = first + num_update_rows
            of_update = []
            for start in range(first, end, batch_size):
                rows = slice(start, min(start + batch_size, end))
                of_update.append(pairs.take(rows, num_update_rows, inner_epoch))
            yield of_update


def best_and_worst(
    latents: Tensor,
    condition: Condition,
    images: Sequence[int],
    rewards: dict[str, Tensor],
    weights: dict[str, float],
    *,
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
        group: images of a group.
    """
    scores = rewards["avg"].view(-1, group)
    # An image without a score is neither the best nor the worst.
    for_best = scores.nan_to_num(-torch.inf)
    for_worst = scores.nan_to_num(torch.inf)
    differs = for_best.amax(1) - for_worst.amin(1) > margin
    differs &= neighbours_with_signal(rewards, weights, group)

    first = torch.arange(0, scores.numel(), group)
    winners = (first + for_best.argmax(1)).to(latents.device)
    losers = (first + for_worst.argmin(1)).to(latents.device)
    return Pairs(
        winners=latents[winners],
        losers=latents[losers],
        loss_weight=differs.float().to(latents.device),
        condition=condition.take(first.to(latents.device)),
        numbers=torch.tensor(images)[first],
    )


def schema(shapes: dict[str, tuple[int, ...]], dtype: str) -> pa.Schema:
    """Return the columns of a pair.

    Args:
        shapes: of latents and of a Condition's fields, one row each, from a model's `row_shapes`.
        dtype: "float32", or "bfloat16", which is stored as the uint16 of its bits.
    """
    fields = dict.fromkeys(("prompt", "negative_prompt", "model", "dtype"), pa.string())
    fields |= {"height": pa.int32(), "width": pa.int32(), "winner_score": pa.float64(), "loser_score": pa.float64()}
    for column in LATENTS:
        fields[column] = pa.fixed_shape_tensor(ARROW[dtype], shapes["latents"])
    for name, column in COLUMNS.items():
        if name in shapes:
            kind = pa.uint8() if name == "mask" else ARROW[dtype]
            fields[column] = pa.fixed_shape_tensor(kind, shapes[name])
    return pa.schema(fields)


def write_pairs(path: Path, columns: dict[str, list | Tensor], shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    """Write P >= 1 pairs to a parquet file, which appears whole or not at all. The same pairs give the same bytes.

    Args:
        columns: P values for each column of `schema`; those of latents and conditions are a tensor [P, *shape], or a
            list of P tensors.
        shapes, dtype: as in `schema`.
    """
    wanted = schema(shapes, dtype)
    arrays = [_to_arrow(columns[field.name], field.type, dtype) for field in wanted]
    table = pa.table(arrays, schema=wanted)
    rows_per_group = max(1, ROW_GROUP_BYTES * len(table) // table.nbytes)
    scratch = path.with_suffix(".tmp")
    # Latents neither compress nor repeat.
    pq.write_table(
        table,
        scratch,
        row_group_size=rows_per_group,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    scratch.replace(path)


def _to_arrow(values: list | Tensor, kind: pa.DataType, dtype: str) -> pa.Array:
    """Return a column's P values as Arrow has them: bfloat16 as the bits of uint16, flags as uint8."""
    if not isinstance(values[0], Tensor):
        return pa.array(values, kind)
    stacked = torch.stack(list(values)).cpu()
    if kind.value_type == pa.uint8():
        stored = stacked.to(torch.uint8)
    elif dtype == "float32":
        stored = stacked.float()
    else:
        stored = stacked.bfloat16().view(torch.uint16)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(stored.numpy()))


def source_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the sources that a folder's first pair has."""
    paths = files_of(folder)["train"]
    if not paths:
        return {}
    shapes = {}
    for field in open_parquet(paths[0]).schema_arrow:
        if field.name in SOURCES:
            shapes[field.name] = tuple(field.type.shape)
    return shapes


def open_pairs(folder: str, shapes: dict[str, tuple[int, ...]], model: str, size: Size) -> dict[str, "PairFiles"]:
    """Open both splits and check columns, model and size; latents are checked as they are read. Raises UserError, which
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
    """Return the files of each split in a folder of pairs; others that lie there are not opened."""
    return {split: sorted(Path(folder).glob(f"{split}_*.parquet")) for split in SPLITS}


def num_rows(folder: Path, split: str) -> int:
    """Count the pairs of a split."""
    return sum(open_parquet(path).metadata.num_rows for path in files_of(folder)[split])


class PairFiles:
    """Rows of parquet files, numbered through; memory-mapped, so that ranks of one machine share what is read."""

    def __init__(self, paths: list[Path], shapes: dict[str, tuple[int, ...]], model: str, size: Size):
        expected = dict(model=model, height=size.height, width=size.width)
        self.prompts: list[Prompt] = []
        self.row_groups: list[RowGroup] = []
        self.starts = [0]  # of each row group its first row, over all files, and at the end the number of rows
        for path in paths:
            file = open_parquet(path)
            for text in _checked_texts(path, file, shapes, expected):
                self.prompts.append(Prompt(text, {"pair": len(self.prompts)}))
            for row_group in row_groups(path, file):
                self.row_groups.append(row_group)
                self.starts.append(self.starts[-1] + row_group.num_rows)

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, rows: list[int], numbers: list[int], device: torch.device) -> Pairs:
        """Read the pairs of P rows, which get these numbers."""
        arrays: dict[int, dict[str, Tensor]] = {}
        columns: dict[str, list[Tensor]] = {}
        for row in rows:
            group = bisect.bisect_right(self.starts, row) - 1
            # Neighbours in an epoch often share a row group, which is read once.
            if group not in arrays:
                arrays[group] = _read_arrays(self.row_groups[group])
            for name, values in arrays[group].items():
                columns.setdefault(name, []).append(values[row - self.starts[group]])

        joined = {name: torch.stack(values).to(device) for name, values in columns.items()}
        of_condition: dict[str, Any] = {name: joined.get(column) for name, column in COLUMNS.items()}
        return Pairs(
            winners=joined["winner_latents"],
            losers=joined["loser_latents"],
            loss_weight=torch.ones(len(rows), device=device),
            condition=Condition(**of_condition),
            numbers=torch.tensor(numbers),
        )


def _read_whole(path: Path, file: pq.ParquetFile, columns: list[str], row_group: int | None = None) -> pa.Table:
    """Read columns as `read_columns` does. Raises UserError also where a row has no value."""
    table = read_columns(path, file, columns, row_group)
    for name in table.column_names:
        if table[name].null_count:
            raise UserError(f"{path}, column {name!r}: a row has no value")
    return table


def _read_arrays(row_group: RowGroup) -> dict[str, Tensor]:
    """Read latents and condition of a row group, each [P, *shape] float32, or bool for the mask; all finite."""
    path, file, number, first_row, _ = row_group
    stored = [name for name in (*LATENTS, *COLUMNS.values()) if name in file.schema_arrow.names]
    table = _read_whole(path, file, stored, number)
    arrays = {}
    for name in table.column_names:
        values = torch.from_numpy(table.column(name).combine_chunks().to_numpy_ndarray().copy())
        if values.dtype == torch.uint8:
            values = values.bool()
        elif values.dtype == torch.uint16:
            values = values.view(torch.bfloat16).float()
        finite = values.flatten(1).isfinite().all(1)
        if not finite.all():
            row = first_row + int((~finite).nonzero()[0])
            raise UserError(f"{path}, row {row}, column {name!r}: not finite")
        arrays[name] = values
    return arrays


def _checked_texts(
    path: Path, file: pq.ParquetFile, shapes: dict[str, tuple[int, ...]], expected: dict[str, Any]
) -> list[str]:
    """Return the rows' prompts. Raises UserError for a wrong column, and for another model or size than expected. The
    arrays' values are checked as they are read."""
    if file.metadata.num_rows == 0:
        raise UserError(f"{path} has no row")
    _check_types(path, file, shapes)
    table = _read_whole(path, file, ["prompt", *expected])
    for column, value in expected.items():
        for stored in table.column(column).unique().to_pylist():
            if stored != value:
                raise UserError(f"{path}, column {column!r}: {stored!r}, but this run has {value!r}")
    return table.column("prompt").to_pylist()


def _check_types(path: Path, file: pq.ParquetFile, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise UserError unless a file has the columns of `schema`, of either type of floats."""
    stored = _types_of(file.schema_arrow)
    full = _types_of(schema(shapes, "float32"))
    half = _types_of(schema(shapes, "bfloat16"))
    # Missing columns first, in their order, then those that nobody asked for.
    for name in full | stored:
        kind = stored.get(name, "nothing")
        wanted = full.get(name, "nothing")
        if kind not in (wanted, half.get(name, "nothing")):
            raise UserError(
                f"{path}, column {name!r} holds {kind}, not {wanted}, which config.model, "
                "config.height, config.width, config.frames and config.text_tokens ask for"
            )


def _types_of(columns: pa.Schema) -> dict[str, pa.DataType]:
    return dict(zip(columns.names, columns.types, strict=True))
