"""Files of prompts in the formats that are read: text, objects of JSON, tables. Anything else is one sentence."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted
from flow_grpo.data.preferences import open_parquet, read_columns

PROMPT = "prompt", "prompts"  # names of the column of prompts, in any case
CAPTION = "caption", "captions", "text", "instruction"  # other names of it, where there is no PROMPT
TEXT = "string", "large_string", "string_view", "null"  # types of parquet's columns
MISSING = object()
OTHER_COLUMN = "`python tools/split_prompts.py FILE --column NAME --out FOLDER` takes any column"
NO_PROMPTS = "readme", "license", "licence", "copying", "notice", "changelog"  # files that lie beside those of prompts
PACKED = {  # first bytes -> kind of file, and how to get at its prompts
    b"\x1f\x8b": "is compressed by gzip: unpack it by gunzip",
    b"\x28\xb5\x2f\xfd": "is compressed by Zstandard: unpack it by unzstd",
    b"BZh": "is compressed by bzip2: unpack it by bunzip2",
    b"\xfd7zXZ": "is compressed by xz: unpack it by unxz",
    b"PK\x03\x04": "is a zip archive, or an Excel table: unpack it, or save the table as .csv",
    b"SQLite format 3": "is an SQLite database: save its table of prompts as .csv",
}


class Row(NamedTuple):
    """One entry of a file of prompts."""

    place: str  # its file and line, for messages
    text: str  # may be blank
    metadata: dict[str, Any]  # the whole object, with "prompt"; {} in formats without objects


def read_rows(path: Path, column: str = "") -> list[Row]:
    """The rows of a file, by the ending of its name. Raises UserError for a file without prompts; names file and line.

    Args:
        column: that of the prompts; "" for the one whose name is PROMPT or, without such a one, CAPTION.
    """
    if problem := folders.problem_of(path):
        raise UserError(f"{in_one_line(path)} {problem}")
    _check_kind(path)
    return READERS[path.suffix.lower()](path, column)


def is_prompt_file(path: Path) -> bool:
    """Whether a name ends as one of those that are read."""
    return path.suffix.lower() in READERS


def _check_kind(path: Path) -> None:
    """Raises UserError for a file that holds something else, by its name or its first bytes."""
    with path.open("rb") as file:
        start = file.read(64)
    for first, problem in PACKED.items():
        if start.startswith(first):
            raise UserError(f"{in_one_line(path)} {problem}")
    if start.startswith(b"PAR1") and path.suffix.lower() != ".parquet":
        raise UserError(f"{in_one_line(path)} is a parquet file: let its name end in .parquet")
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise UserError(f"{in_one_line(path)} is a page of HTML, not the file that it shows: fetch the raw file")
    if path.stem.lower() in NO_PROMPTS:
        raise UserError(f"{in_one_line(path)} is called as a text about other files is; rename it if it holds prompts")
    if not is_prompt_file(path):
        raise UserError(
            f"{in_one_line(path)} is no file of prompts by its name, which must end in {', '.join(READERS)}; "
            "one with a prompt a line is called .txt"
        )


def read_lines(path: Path) -> list[str]:
    """The lines of a file as an editor counts them: a byte order mark is none of the text, and only a line feed, with
    or without a carriage return before it, ends a line. Raises UserError: it cannot be read, or is not UTF-8; names
    file and line."""
    lines = [line.removesuffix("\r") for line in _text_of(path).split("\n")]
    return lines if lines[-1] else lines[:-1]


def _text_of(path: Path) -> str:
    """Raises UserError: it cannot be read, is a Git LFS pointer, or not UTF-8; names file and line."""
    try:
        stored = path.read_bytes()
        text = stored.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = stored.count(b"\n", 0, error.start) + 1, stored[error.start]
        raise UserError(f"{path}, line {line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if stored.startswith(folders.LFS_POINTER):
        raise UserError(f"{in_one_line(path)} {folders.problem_of(path)}")
    if "\0" in text:  # UTF-16 without a mark decodes as UTF-8
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{path}, line {line}: a zero byte, so it is not UTF-8; save the file as UTF-8")
    return text


def parse_line(line: str, place: str) -> Any:
    """What a line of JSON says. Raises UserError: it is no JSON, names a key twice, or characters that are none (lone
    surrogates); names `place`."""
    try:
        value = json.loads(line, object_pairs_hook=_without_repeated_keys)
        if "\\u" in line:  # only so can JSON name them
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON of whole characters ({error}): {quoted(line)}") from error
    return value


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for an object with a key twice, of which JSON would keep the last."""
    stored = dict(pairs)
    if len(stored) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {quoted(repeated)} twice")
    return stored


def _read_text(path: Path, column: str) -> list[Row]:
    """A prompt a line."""
    if column:
        raise UserError(f"{in_one_line(path)} is text without columns, so it has no column {quoted(column)}")
    lines = read_lines(path)
    if lines:
        _check_is_text(path, lines[0].strip())
    rows = [Row(f"{path}, line {number}", line, {}) for number, line in enumerate(lines, start=1)]
    for row in rows:
        if "\r" in row.text:
            raise UserError(f"{row.place}: a carriage return inside; save the file with line feeds between its lines")
        if row.text.startswith(("<<<<<<< ", ">>>>>>> ")):
            raise UserError(f"{row.place}: the mark of a merge that git could not make: {quoted(row.text)}")
    return rows


def _check_is_text(path: Path, first: str) -> None:
    """Raises UserError for a file whose first line is JSON's or a table's: its ending is not its own."""
    fields = [field.strip(' "').lower() for field in first.split("\t" if "\t" in first else ",")]
    if len(fields) > 1 and set(fields) & {*PROMPT}:
        ending = ".tsv" if "\t" in first else ".csv"
        raise UserError(f"{in_one_line(path)} begins as a table does ({quoted(first)}): let its name end in {ending}")
    if first == "[" or _is_json(first, list):
        raise UserError(f"{in_one_line(path)} begins as a list of JSON ({quoted(first)}): let its name end in .json")
    if first == "{" or _is_json(first, dict):
        raise UserError(f"{in_one_line(path)} begins as JSON does ({quoted(first)}): let its name end in .jsonl")


def _is_json(line: str, kind: type) -> bool:
    try:
        return line[:1] in "[{" and isinstance(json.loads(line), kind)
    except (ValueError, RecursionError):
        return False


def _read_json_lines(path: Path, column: str) -> list[Row]:
    """An object, or a text, a line."""
    entries = []
    for number, line in enumerate(read_lines(path), start=1):
        place = f"{path}, line {number}"
        if not line.strip():
            raise UserError(f"{place}: an empty line; each needs an object with a prompt")
        entries.append((place, parse_line(line, place), line))
    return _rows_of_entries(entries, column)


def _read_json(path: Path, column: str) -> list[Row]:
    """A list of objects, or of texts."""
    text = _text_of(path)
    first, _, rest = text.strip().partition("\n")
    if rest and _is_json(first, dict):
        raise UserError(f"{in_one_line(path)} holds an object a line: let its name end in .jsonl")
    stored = parse_line(text, str(path))
    if not isinstance(stored, list):
        holds = f"an object with the keys {_names(list(stored))}" if isinstance(stored, dict) else quoted(stored)
        raise UserError(f"{path} holds {holds}; it needs a list of prompts, or of objects with a prompt")
    entries = [(f"{path}, entry {number}", entry, entry) for number, entry in enumerate(stored, start=1)]
    return _rows_of_entries(entries, column)


def _rows_of_entries(entries: list[tuple[str, Any, Any]], column: str) -> list[Row]:
    """Args: entries: place, value, and what to quote of it."""
    rows, name = [], ""
    for place, value, shown in entries:
        if isinstance(value, str) and not column:
            rows.append(Row(place, value, {}))
            continue
        if isinstance(value, dict) and not name:  # the first object decides, so that one file has one column
            name = _column_of(list(value), column, place)
        if not isinstance(value, dict) or not isinstance(value.get(name, MISSING), str | None):
            wanted = name or column or "prompt"
            raise UserError(f'{place}: needs an object with a "{wanted}" string, has {quoted(shown)}')
        rows.append(Row(place, value[name] or "", _with_prompt(value, name)))
    return rows


def _with_prompt(entry: dict[str, Any], column: str) -> dict[str, Any]:
    """An object whose prompts are called "prompt"."""
    if column == "prompt":
        return entry
    others = {name: value for name, value in entry.items() if name != column}
    return others | {"prompt": entry[column]}


def _read_table(path: Path, column: str) -> list[Row]:
    """A table of text, whose first line has the names of its columns."""
    dialect = csv.excel_tab if path.suffix.lower() == ".tsv" else csv.excel
    reader = csv.reader(io.StringIO(_text_of(path), newline=""), dialect, strict=True)
    try:
        lines = [(f"{path}, line {reader.line_num}", fields) for fields in reader]
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not as a table is written ({error})") from error
    lines = [(place, fields) for place, fields in lines if fields]
    if not lines:
        return []
    place, names = lines[0]
    number = names.index(_column_of(names, column, f"{place}, which names the columns"))
    rows = []
    for place, fields in lines[1:]:
        if len(fields) != len(names):
            raise UserError(
                f"{place}: {len(fields)} fields, but {len(names)} columns ({_names(names)}); "
                "a field with the separator in it must be in quotes"
            )
        rows.append(Row(place, fields[number], {}))
    return rows


def _read_parquet(path: Path, column: str) -> list[Row]:
    """A column of a parquet file."""
    file = open_parquet(path)
    names = file.schema_arrow.names
    name = _column_of(names, column, str(path))
    kind = str(file.schema_arrow.field(name).type)
    if kind not in TEXT and not kind.startswith("dictionary<values=string"):
        raise UserError(f"{path}, column {name!r} holds {in_one_line(kind, 100)}, not text; {OTHER_COLUMN}")
    try:
        texts = read_columns(path, file, [name])[name].to_pylist()
    except ValueError as error:
        raise UserError(f"{path}, column {name!r}: {in_one_line(error)}") from error
    return [Row(f"{path}, row {number}", text or "", {}) for number, text in enumerate(texts, start=1)]


def _column_of(names: Sequence[str], column: str, place: str) -> str:
    """The column of prompts. Raises UserError where there is none, or more than one; names `place`."""
    if column or names.count("prompt") == 1:
        matches = [name for name in names if name == (column or "prompt")]
    else:
        matches = _called(names, PROMPT) or _called(names, CAPTION)
    if len(set(matches)) < len(matches):
        raise UserError(f"{place}: two columns are called {quoted(matches[0])}; rename one")
    if column and not matches:
        raise UserError(f"{place}: no column {quoted(column)}; it has {_names(names)}")
    if len(matches) > 1:
        raise UserError(f"{place}: the prompts may be in each of {_names(matches)}; {OTHER_COLUMN}")
    if not matches:
        wanted = '"prompt" (or caption, text, instruction)'
        raise UserError(f"{place}: no column {wanted}; it has {_names(names)}; {OTHER_COLUMN}")
    return matches[0]


def _called(names: Sequence[str], words: Sequence[str]) -> list[str]:
    return [name for name in names if name.strip().lower() in words]


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(in_one_line(name, 40) for name in names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown or "none"


READERS: dict[str, Callable[[Path, str], list[Row]]] = {  # by the ending of a name, in any case
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".parquet": _read_parquet,
}
