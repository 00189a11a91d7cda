"""Named tensors on a disk: every rank writes its rows of them, and any number of ranks can read them in any layout.

They are in safetensors files of up to FILE_BYTES, or of one larger tensor. A tensor that is not whole in a file has an
entry NAME -> [number of its first row there, rows in all] in the file's metadata "rows".
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
from flow_grpo.base.formatting import counted
from flow_grpo.weights import fsdp_utils

# Size of a file, whose tensors are copied to the CPU together.
FILE_BYTES = 2**30
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}

Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a whole tensor


class Part(NamedTuple):
    """Rows of a tensor in a file."""

    name: str
    rows: Any  # slice of the open file
    first: int  # number of the first row
    shape: tuple[int, ...]  # of the rows in the file
    whole: Kind


def write_tensors(state: dict[str, Tensor], folder: Path) -> None:
    """Write this rank's part of `state`."""
    for number, parts in enumerate(_divided_by_file(_rows_to_write(state))):
        tensors = {}
        cut = {}
        for name, rows in parts.items():
            tensors[name] = rows.tensor.detach().cpu().contiguous()
            if rows.tensor.shape != state[name].shape:
                cut[name] = [rows.first, len(state[name])]
        path = folder / f"rank_{distributed.rank():04d}_{number:04d}.safetensors"
        save_file(tensors, path, {"rows": json.dumps(cut)})


def _divided_by_file(rows_to_write: dict[str, fsdp_utils.Rows]) -> list[dict[str, fsdp_utils.Rows]]:
    """Return the rows of each file: as many tensors as fit into FILE_BYTES, in their order, at least one."""
    files: list[dict[str, fsdp_utils.Rows]] = []
    file_bytes = 0  # of the last file
    for name, rows in rows_to_write.items():
        if not files or file_bytes + rows.tensor.nbytes > FILE_BYTES:
            files.append({})
            file_bytes = 0
        files[-1][name] = rows
        file_bytes += rows.tensor.nbytes
    return files


def _rows_to_write(state: dict[str, Tensor]) -> dict[str, fsdp_utils.Rows]:
    """Return the rows that this rank writes. Ranks that hold the same rows each write about as much of them."""
    # Elements that each copy's holder writes so far, among tensors of as many copies. Every rank comes to the same
    # assignment, since it depends on names, sizes and layout alone.
    loads: dict[int, Counter[int]] = defaultdict(Counter)
    mine = {}
    for name, tensor in state.items():
        rows = fsdp_utils.rows_of(tensor)
        load = loads[rows.num_copies]
        least_loaded = min(range(rows.num_copies), key=load.__getitem__)
        load[least_loaded] += tensor.numel()
        is_empty = rows.tensor.numel() == 0
        if rows.copy == least_loaded and not is_empty:
            mine[name] = rows
    return mine


def read_index(folder: Path) -> dict[str, Kind]:
    """Return the tensors that a folder holds. Raises UserError where a file is no part of them, or rows are missing."""
    index: dict[str, Kind] = {}
    num_rows: Counter[str] = Counter()
    for part in _parts(folder):
        index[part.name] = part.whole
        num_rows[part.name] += _num_rows(part.shape)
    for name, (_, shape) in index.items():
        if num_rows[name] != _num_rows(shape):
            raise UserError(f"{folder} does not hold all rows of {name}, each once")
    return index


def _num_rows(shape: tuple[int, ...]) -> int:
    """Return the rows of a tensor; a number, which has no shape, counts as one."""
    return shape[0] if shape else 1


def _parts(folder: Path) -> Iterator[Part]:
    """Yield the rows of each tensor in each file, while the file is open."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                table = json.loads((file.metadata() or {})["rows"])
                for name in file.keys():  # noqa: SIM118 (safe_open is no dict)
                    yield _part_of(name, file.get_slice(name), table)
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} is no part of a checkpoint: {error}") from error


def _part_of(name: str, rows: Any, table: dict[str, list[int]]) -> Part:
    """Return a tensor of a file; `table` is the file's metadata "rows". Damaged metadata raises as Python does."""
    shape = tuple(rows.get_shape())
    whole = shape
    first = 0
    if name in table:
        first, num_rows = table[name]
        whole = (num_rows, *shape[1:])
    dtype = DTYPES[rows.get_dtype()]
    return Part(name, rows, first, shape, (dtype, whole))


@torch.no_grad()
def read_tensors(state: dict[str, Tensor], folder: Path, exact: bool) -> None:
    """Fill `state`; each rank reads its own rows. Raises UserError for other tensors, or more of them if `exact`."""
    stored = read_index(folder)
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    differences = []
    for name in sorted(stored.keys() | wanted.keys()):
        is_ignored = name not in wanted and not exact
        if stored.get(name) != wanted.get(name) and not is_ignored:
            differences.append(name)
    if differences:
        names = ", ".join(differences[:8])
        tensors = counted(len(differences), "tensors")
        raise UserError(f"{folder} does not fit this run in {tensors}: {names}")
    for part in _parts(folder):
        if part.name in state:
            _fill(fsdp_utils.rows_of(state[part.name]), part)


def _fill(target: fsdp_utils.Rows, part: Part) -> None:
    """Copy the rows that a part of a file and this rank's part of the tensor have in common."""
    if not part.shape:
        target.tensor.copy_(part.rows[...])
        return
    # Both are row numbers in the whole tensor.
    start = max(target.first, part.first)
    stop = min(target.first + len(target.tensor), part.first + part.shape[0])
    if start < stop:
        rows = part.rows[start - part.first : stop - part.first]
        target.tensor[start - target.first : stop - target.first].copy_(rows)
