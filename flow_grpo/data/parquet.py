"""Opening and reading parquet files of other people: one sentence for a file that is none, or is damaged."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a parquet file. Raises UserError for any other file."""
    problem = folders.file_problem(path)
    if problem:
        raise UserError(f"{path} {problem}")
    try:
        # Checksums are compared where the file has any. Ranks of one machine share what is mapped.
        return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        problem = folders.file_problem(path) or f"is no parquet file: {in_one_line(error)}"
        raise UserError(f"{path} {problem}") from error


def read_columns(path: Path, file: pq.ParquetFile, columns: list[str], row_group: int | None = None) -> pa.Table:
    """Read columns of a file, or of one of its row groups. Raises UserError where a page is damaged."""
    try:
        if row_group is None:
            return file.read(columns)
        return file.read_row_group(row_group, columns)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is damaged: {in_one_line(error)}") from error
