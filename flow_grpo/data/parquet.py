"""Opening and reading parquet files of other people: one sentence for a file that is none, or is damaged."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line


class RowGroup(NamedTuple):
    """Rows of a file that are read at once."""

    path: Path
    file: pq.ParquetFile
    number: int  # within the file
    first_row: int  # within the file
    num_rows: int


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a parquet file. Raises UserError for any other file."""
    folders.check_file(path)
    try:
        # Checksums are compared where the file has any. Ranks of one machine share what is mapped.
        return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        problem = folders.file_problem(path) or f"is no parquet file: {in_one_line(error)}"
        raise UserError(f"{path} {problem}") from error


def row_groups(path: Path, file: pq.ParquetFile) -> Iterator[RowGroup]:
    """Yield the row groups of an open file, in their order."""
    first_row = 0
    for number in range(file.num_row_groups):
        num_rows = file.metadata.row_group(number).num_rows
        yield RowGroup(path, file, number, first_row, num_rows)
        first_row += num_rows


def read_columns(path: Path, file: pq.ParquetFile, columns: list[str], row_group: int | None = None) -> pa.Table:
    """Read columns of a file, or of one of its row groups. Raises UserError where a page is damaged."""
    try:
        if row_group is None:
            return file.read(columns)
        return file.read_row_group(row_group, columns)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is damaged: {in_one_line(error)}") from error
