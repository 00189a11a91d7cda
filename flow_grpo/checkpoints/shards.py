"""Named tensors on a disk that every rank writes its rows of, and that any number of ranks can read in any layout.

They lie in safetensors files of up to FILE_BYTES, or one tensor. A tensor that is not whole in a file has an entry
NAME -> [its first row there, rows in all] in the file's metadata "rows".
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flow_grpo.base import distributed
from flow_grpo.base.errors import UserError
from flow_grpo.weights import fsdp_utils

FILE_BYTES = 2**30  # of a file, whose tensors are copied to the CPU together
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}

Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a whole tensor


class Part(NamedTuple):
    """Rows of a tensor in a file."""

    name: str
    rows: Any  # slice of the open file
    first: int  # number of the first row
    shape: tuple[int, ...]  # of what is in the file
    whole: Kind


def write(state: dict[str, Tensor], folder: Path) -> None:
    """Write this rank's part of `state`."""
    files, size = [], FILE_BYTES
    for name, rows in _mine(state).items():
        size += rows.tensor.nbytes
        if size > FILE_BYTES:
            files.append({})
            size = rows.tensor.nbytes
        files[-1][name] = rows
    for number, parts in enumerate(files):
        cut = {name: rows for name, rows in parts.items() if rows.tensor.shape != state[name].shape}
        table = {name: [rows.first, len(state[name])] for name, rows in cut.items()}
        tensors = {name: rows.tensor.detach().cpu().contiguous() for name, rows in parts.items()}
        path = folder / f"rank_{distributed.rank():04d}_{number:04d}.safetensors"
        save_file(tensors, path, {"rows": json.dumps(table)})


def _mine(state: dict[str, Tensor]) -> dict[str, fsdp_utils.Rows]:
    """The rows that this rank writes: of what several ranks hold alike, each writes about the same amount."""
    loads, mine = defaultdict(Counter), {}
    for name, tensor in state.items():
        rows = fsdp_utils.rows_of(tensor)
        load = loads[rows.num_copies]
        writer = min(range(rows.num_copies), key=load.__getitem__)
        load[writer] += tensor.numel()
        if rows.copy == writer and rows.tensor.numel():
            mine[name] = rows
    return mine


def read_index(folder: Path) -> dict[str, Kind]:
    """Which tensors a folder holds. Raises UserError where a file is none of these, or rows are missing."""
    index, num_rows = {}, Counter()
    for part in _parts(folder):
        index[part.name] = part.whole
        num_rows[part.name] += part.shape[0] if part.shape else 1
    for name, (_, shape) in index.items():
        if num_rows[name] != (shape[0] if shape else 1):
            raise UserError(f"{folder} does not hold all rows of {name}, each once")
    return index


def _parts(folder: Path) -> Iterator[Part]:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                table = json.loads((file.metadata() or {})["rows"])
                for name in file.keys():  # noqa: SIM118 (safe_open is no dict)
                    rows = file.get_slice(name)
                    shape, dtype = tuple(rows.get_shape()), DTYPES[rows.get_dtype()]
                    first, *num_rows = table.get(name, (0, *shape[:1]))
                    yield Part(name, rows, first, shape, (dtype, (*num_rows, *shape[1:])))
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} is no part of a checkpoint: {error}") from error


@torch.no_grad()
def read(state: dict[str, Tensor], folder: Path, exact: bool = True) -> None:
    """Fill `state`; each rank reads its own rows. Raises UserError for other tensors, or more of them if `exact`."""
    stored = {name: kind for name, kind in read_index(folder).items() if exact or name in state}
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    if stored != wanted:
        names = sorted({name for name, _ in stored.items() ^ wanted.items()})
        raise UserError(f"{folder} does not fit this run: {len(names)} tensors differ: {', '.join(names[:8])}")
    for part in _parts(folder):
        if part.name in state:
            _fill(fsdp_utils.rows_of(state[part.name]), part)


def _fill(own: fsdp_utils.Rows, part: Part) -> None:
    """The rows that a part of a file and this rank's part of a tensor have in common."""
    if not part.shape:
        own.tensor.copy_(part.rows[...])
        return
    start, stop = max(own.first, part.first), min(own.first + len(own.tensor), part.first + part.shape[0])
    if start < stop:
        own.tensor[start - own.first : stop - own.first].copy_(part.rows[start - part.first : stop - part.first])
