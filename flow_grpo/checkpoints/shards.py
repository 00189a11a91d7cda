"""Named tensors on a disk that every rank writes its rows of, and that any number of ranks can read in any layout.

They lie in safetensors files of up to FILE_BYTES, or one tensor. A tensor that is not whole in a file has an entry
NAME -> [its first row there, rows in all] in the file's metadata "rows". Nothing is pickled.
"""

import json
import zlib
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flow_grpo.base import distributed
from flow_grpo.base.checksums import Sums
from flow_grpo.base.errors import UserError
from flow_grpo.weights import fsdp_utils

FILE_BYTES = 2**30  # of a file: several are read side by side
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Piece(NamedTuple):
    """Rows of a tensor in a file."""

    file: Path
    first: int  # row
    shape: tuple[int, ...]  # of what is in the file
    whole: tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of the whole tensor


def write(state: dict[str, Tensor], folder: Path) -> Sums:
    """Write what this rank has to write of `state`; the checksums of its files, by their names in `folder`."""
    batch, size, sums = {}, 0, {}
    for name, rows in _mine(state).items():
        num_bytes = rows.tensor.numel() * rows.tensor.element_size()
        if batch and size + num_bytes > FILE_BYTES:
            sums |= _write_file(batch, state, folder, len(sums))
            batch, size = {}, 0
        batch[name], size = rows, size + num_bytes
    return sums | _write_file(batch, state, folder, len(sums)) if batch else sums


def _mine(state: dict[str, Tensor]) -> dict[str, fsdp_utils.Rows]:
    """The rows that this rank writes: of what several ranks hold alike, each writes about the same amount."""
    loads, mine = defaultdict(dict), {}
    for name, tensor in state.items():
        rows = fsdp_utils.rows_of(tensor)
        load = loads[rows.num_copies] or dict.fromkeys(range(rows.num_copies), 0)
        writer = min(load, key=load.get)
        loads[rows.num_copies] = load | {writer: load[writer] + tensor.numel()}
        if rows.copy == writer and rows.tensor.numel():
            mine[name] = rows
    return mine


def _write_file(batch: dict[str, fsdp_utils.Rows], state: dict[str, Tensor], folder: Path, number: int) -> Sums:
    """Write a safetensors file tensor by tensor: the library's own `save` copies all of it in memory, three times."""
    batch = dict(sorted(batch.items(), key=lambda item: -item[1].tensor.element_size()))  # so that all are aligned
    parts = {name: rows for name, rows in batch.items() if rows.tensor.shape != state[name].shape}
    table = json.dumps({name: [rows.first, len(state[name])] for name, rows in parts.items()})
    header, end = {"__metadata__": {"rows": table}}, 0
    for name, (tensor, *_) in batch.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = dict(dtype=CODES[tensor.dtype], shape=list(tensor.shape), data_offsets=[start, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path, crc = folder / f"rank_{distributed.rank():04d}_{number:04d}.safetensors", 0
    with path.open("wb") as file:
        for data in chain([len(text).to_bytes(8, "little"), text], map(_bytes, batch.values())):
            crc = zlib.crc32(data, crc)
            file.write(data)
    return {path.name: [8 + len(text) + end, crc]}


def _bytes(rows: fsdp_utils.Rows) -> np.ndarray:
    return rows.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def read_index(folder: Path) -> dict[str, list[Piece]]:
    """Where each tensor's rows are, in their order.

    Raises:
        UserError: a file is none of these, or rows are missing.
    """
    pieces = defaultdict(list)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            for name, piece in _pieces_of(path).items():
                pieces[name].append(piece)
        except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is no part of a checkpoint: {error}") from error
    for name, parts in pieces.items():
        parts.sort(key=lambda piece: piece.first)
        _check_whole(folder, name, parts)
    return dict(pieces)


def _pieces_of(path: Path) -> dict[str, Piece]:
    pieces = {}
    with safe_open(path, framework="pt") as file:
        table = json.loads((file.metadata() or {})["rows"])
        for name in file.keys():  # noqa: SIM118 (safe_open is no dict)
            stored = file.get_slice(name)
            shape, dtype = tuple(stored.get_shape()), DTYPES[stored.get_dtype()]
            first, num_rows = table.get(name, (0, shape[0] if shape else 1))
            pieces[name] = Piece(path, int(first), shape, (dtype, (int(num_rows), *shape[1:]) if shape else ()))
    return pieces


def _check_whole(folder: Path, name: str, pieces: list[Piece]) -> None:
    ends = [piece.first + (piece.shape[0] if piece.shape else 1) for piece in pieces]
    (_, shape), *others = {piece.whole for piece in pieces}
    if others or [piece.first for piece in pieces] != [0, *ends[:-1]] or ends[-1] != (shape[0] if shape else 1):
        raise UserError(f"{folder} does not hold all rows of {name}, each once")


@torch.no_grad()
def read(state: dict[str, Tensor], folder: Path) -> None:
    """Fill `state`, bit for bit; each rank reads its own rows.

    Raises:
        UserError: the folder holds other tensors than these.
    """
    index = read_index(folder)
    stored = {name: pieces[0].whole for name, pieces in index.items()}
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    if stored != wanted:
        names = sorted({name for name, _ in stored.items() ^ wanted.items()})
        differ = ", ".join(f"{name} {_words(stored, name)} -> {_words(wanted, name)}" for name in names[:8])
        raise UserError(f"{folder} does not fit this run: {len(names)} tensors differ: {differ}")
    by_file = defaultdict(dict)
    for name, pieces in index.items():
        for piece in pieces:
            by_file[piece.file][name] = piece
    for path, pieces in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name, piece in pieces.items():
                _fill(fsdp_utils.rows_of(state[name]), piece, file.get_slice(name))


def _words(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], name: str) -> str:
    return f"{tensors[name][1]} {tensors[name][0]}".replace("torch.", "") if name in tensors else "absent"


def _fill(rows: fsdp_utils.Rows, piece: Piece, source) -> None:
    """The rows that a piece and this rank's part have in common."""
    if not piece.shape:
        rows.tensor.copy_(source[...])
        return
    start, stop = max(rows.first, piece.first), min(rows.first + len(rows.tensor), piece.first + piece.shape[0])
    if start < stop:
        rows.tensor[start - rows.first : stop - rows.first].copy_(source[start - piece.first : stop - piece.first])
