"""Reading files of prompts: lines of text, objects of JSON, tables. Any other file is refused in one sentence."""

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, in_one_line, quoted
from flow_grpo.data.parquet import open_parquet, read_columns

PROMPT = ("prompt", "prompts")  # names of the column of prompts, in any case
CAPTION = ("caption", "captions", "text", "instruction")  # other names of it, where there is no PROMPT
TEXT = ("string", "large_string", "string_view", "null")  # types of parquet's columns
MISSING = object()
NUM_NAMES = 8  # columns that a message names
OTHER_COLUMN = "`python tools/split_prompts.py FILE --column NAME --out FOLDER` takes any column"
# First line of a list in Python or YAML, such as `prompts = [` or `prompts:`.
CODE = re.compile(r"\w+\s*(:\s*\w*\s*)?=\s*[\[({].*|(prompt|caption|text)s?\s*:|---|import \w+")
# Files that lie beside those of prompts.
NO_PROMPTS = ("readme", "license", "licence", "copying", "notice", "changelog")
# First bytes -> kind of file, and how to get at its prompts.
KINDS = {
    b"\x1f\x8b": "is compressed by gzip: unpack it by gunzip",
    b"\x28\xb5\x2f\xfd": "is compressed by Zstandard: unpack it by unzstd",
    b"BZh": "is compressed by bzip2: unpack it by bunzip2",
    b"\xfd7zXZ": "is compressed by xz: unpack it by unxz",
    b"PK\x03\x04": "is a zip archive, or an Excel table: unpack it, or save the table as .csv",
    b"SQLite format 3": "is an SQLite database: save its table of prompts as .csv",
    b"\xd0\xcf\x11\xe0": "is an Excel table or a Word text of an older kind: save it as .csv or .txt",
    b"{\\rtf": "is a text with fonts (RTF): save it as plain text",
    b"%PDF-": "is a PDF: save its prompts as plain text",
    b"<?xml": "is XML: save its prompts as plain text",
    b"ARROW1": "is an Arrow file: save its table as .parquet (pyarrow.parquet.write_table)",
}


class Row(NamedTuple):
    """One entry of a file of prompts."""

    place: str  # its file and line, for messages
    text: str  # may be blank
    metadata: dict[str, Any]  # the whole object, with "prompt"; {} in formats without objects


def read_rows(path: Path, column: str = "") -> list[Row]:
    """Read a file in the format that its name's ending stands for. Raises UserError for a file without prompts; names
    file and line.

    Args:
        column: name of the column of prompts; "" for the one that is called as PROMPT or else CAPTION says.
    """
    folders.check_file(path)
    _check_kind(path)
    return READERS[path.suffix.lower()](path, column)


def names_of_split(split: str) -> tuple[str, str]:
    """Return the names that the file of a split may have in a data set: of objects, which is read if both are there,
    and of text."""
    return f"{split}_metadata.jsonl", f"{split}.txt"


def is_prompt_file(path: Path) -> bool:
    """Return whether a name's ending is one of those that can be read."""
    return path.suffix.lower() in READERS


def _check_kind(path: Path) -> None:
    """Raise UserError for a file that holds something else, by its name or its first bytes."""
    # Some formats are told apart by their first bytes alone: names are often wrong.
    with path.open("rb") as file:
        start = file.read(64)
    for first, problem in KINDS.items():
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
    """Read the lines of a file as an editor counts them: a byte order mark is no part of the text, and only a line
    feed, with or without a carriage return before it, ends a line. Raises UserError: the file cannot be read, or is not
    UTF-8; names file and line."""
    lines = [line.removesuffix("\r") for line in _text_of(path).split("\n")]
    # A line feed at the end of the file begins no further line.
    if lines[-1] == "":
        lines.pop()
    return lines


def _text_of(path: Path) -> str:
    """Return the text of a file, without a byte order mark. Raise UserError, which names file and line, if it cannot be
    read or is not UTF-8."""
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    try:
        text = stored.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = stored.count(b"\n", 0, error.start) + 1
        byte = stored[error.start]
        raise UserError(f"{path}, line {line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8") from error
    # UTF-16 without a byte order mark decodes as UTF-8, with a zero after each letter.
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{path}, line {line}: a zero byte, so it is not UTF-8; save the file as UTF-8")
    return text


def parse_line(line: str, place: str) -> Any:
    """Parse a line of JSON. Raises UserError, which names `place`: it is no JSON, has a key twice, or holds half a
    character (a lone surrogate)."""
    try:
        value = json.loads(line, object_pairs_hook=_without_repeated_keys)
        # JSON can name a lone surrogate only as \uXXXX; then encoding raises UnicodeEncodeError, a ValueError.
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON of whole characters ({error}): {quoted(line)}") from error
    return value


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object. Raise ValueError for a key that stands twice: JSON would keep the last."""
    stored: dict[str, Any] = {}
    for name, value in pairs:
        if name in stored:
            raise ValueError(f"the key {quoted(name)} twice")
        stored[name] = value
    return stored


def _read_text(path: Path, column: str) -> list[Row]:
    """Read a prompt from each line."""
    if column:
        raise UserError(f"{in_one_line(path)} is text without columns, so it has no column {quoted(column)}")
    lines = read_lines(path)
    if lines:
        _check_is_text(path, lines[0].strip())
    rows = []
    for number, line in enumerate(lines, start=1):
        place = f"{path}, line {number}"
        if "\r" in line:
            raise UserError(f"{place}: a carriage return inside; save the file with line feeds between its lines")
        if line.startswith(("<<<<<<< ", ">>>>>>> ")):
            raise UserError(f"{place}: the mark of a merge that git could not make: {quoted(line)}")
        rows.append(Row(place, line, {}))
    return rows


def _check_is_text(path: Path, first_line: str) -> None:
    """Raise UserError for a file that begins as JSON or a table does, whatever its name's ending says."""
    separator = "\t" if "\t" in first_line else ","
    fields = [field.strip(' "').lower() for field in first_line.split(separator)]
    if len(fields) > 1 and not set(PROMPT).isdisjoint(fields):
        kind = "a table does"
        ending = ".tsv" if separator == "\t" else ".csv"
    elif first_line == "[" or _is_json(first_line, list):
        kind = "a list of JSON"
        ending = ".json"
    elif first_line == "{" or _is_json(first_line, dict):
        kind = "JSON does"
        ending = ".jsonl"
    elif CODE.fullmatch(first_line):
        raise UserError(
            f"{in_one_line(path)} begins as Python or YAML does ({quoted(first_line)}): keep only its prompts"
        )
    else:
        return
    raise UserError(f"{in_one_line(path)} begins as {kind} ({quoted(first_line)}): let its name end in {ending}")


def _is_json(line: str, kind: type) -> bool:
    """Return whether a line is JSON of a kind, list or dict."""
    try:
        return isinstance(json.loads(line), kind)
    except (ValueError, RecursionError):
        return False


class _Entry(NamedTuple):
    """A value of a file of JSON."""

    place: str  # its file and line, for messages
    value: Any
    shown: Any  # what a message quotes: the line, or the value


def _read_json_lines(path: Path, column: str) -> list[Row]:
    """Read an object, or a text, from each line."""
    entries = []
    for number, line in enumerate(read_lines(path), start=1):
        place = f"{path}, line {number}"
        if not line.strip():
            raise UserError(f"{place}: an empty line; each needs an object with a prompt")
        if number == 1 and _goes_on(line) and not _is_json(line, object):
            raise UserError(
                f"{place}: {quoted(line)} goes on in the next line, but each line of a .jsonl is a whole JSON object; "
                "a list over several lines belongs into a file whose name ends in .json"
            )
        entries.append(_Entry(place, parse_line(line, place), line))
    return _rows_of_entries(entries, column)


def _goes_on(line: str) -> bool:
    """Return whether a list or an object begins in a line, and does not end there."""
    ends = {"[": "]", "{": "}"}
    end = ends.get(line.lstrip()[:1])
    return end is not None and not line.rstrip(", \t").endswith(end)


def _read_json(path: Path, column: str) -> list[Row]:
    """Read a list of objects, or of texts."""
    text = _text_of(path)
    first_line, _, rest = text.strip().partition("\n")
    if rest and _is_json(first_line, dict):
        raise UserError(f"{in_one_line(path)} holds an object a line: let its name end in .jsonl")
    stored = parse_line(text, str(path))
    if not isinstance(stored, list):
        holds = quoted(stored)
        if isinstance(stored, dict):
            holds = f"an object with the keys {_some_of(list(stored))}"
        raise UserError(f"{path} holds {holds}; it needs a list of prompts, or of objects with a prompt")
    entries = [_Entry(f"{path}, entry {number}", value, value) for number, value in enumerate(stored, start=1)]
    return _rows_of_entries(entries, column)


def _rows_of_entries(entries: list[_Entry], column: str) -> list[Row]:
    """Make a row of each text or object. `column` names the column of prompts; "" = as the first object has it."""
    rows = []
    name = ""
    for place, value, shown in entries:
        if isinstance(value, str) and not column:
            rows.append(Row(place, value, {}))
            continue
        # The first object decides, so that one file has one column.
        if isinstance(value, dict) and not name:
            name = _column_of(list(value), column, place)
        if not isinstance(value, dict) or not isinstance(value.get(name, MISSING), str | None):
            wanted = name or column or "prompt"
            raise UserError(f'{place}: needs an object with a "{wanted}" string, has {quoted(shown)}')
        # null is a blank prompt, which is refused where blank ones are.
        rows.append(Row(place, value[name] or "", _with_prompt(value, name)))
    return rows


def _with_prompt(entry: dict[str, Any], column: str) -> dict[str, Any]:
    """Rename the column of prompts to "prompt"; a column of that name gives way."""
    if column == "prompt":
        return entry
    renamed = dict(entry)
    prompt = renamed.pop(column)
    renamed["prompt"] = prompt
    return renamed


def _read_table(path: Path, column: str) -> list[Row]:
    """Read a table of text, whose first line names the columns."""
    lines = _lines_of_table(path)
    if not lines:
        return []
    place, names = lines[0]
    number = names.index(_column_of(names, column, f"{place}, which names the columns"))
    rows = []
    for place, fields in lines[1:]:
        if len(fields) != len(names):
            raise UserError(
                f"{place}: {counted(len(fields), 'fields')}, but {counted(len(names), 'columns')} ({_some_of(names)}); "
                "a field with the separator in it must be in quotes"
            )
        rows.append(Row(place, fields[number], {}))
    return rows


def _lines_of_table(path: Path) -> list[tuple[str, list[str]]]:
    """Return the place and the fields of each line that has any."""
    dialect = csv.excel_tab if path.suffix.lower() == ".tsv" else csv.excel
    text = _text_of(path)
    _check_separator(path, text.partition("\n")[0], dialect.delimiter)
    reader = csv.reader(io.StringIO(text, newline=""), dialect, strict=True)
    try:
        return [(f"{path}, line {reader.line_num}", fields) for fields in reader if fields]
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not as a table is written ({error})") from error


def _check_separator(path: Path, first_line: str, separator: str) -> None:
    """Raise UserError for a table whose columns are separated by something else, as Excel does by country."""
    if separator in first_line:
        return
    for other in (";", "\t", ","):
        names = [name.strip(' "') for name in first_line.strip().split(other)]
        if len(names) > 1 and _named_as(names, PROMPT + CAPTION):
            raise UserError(
                f"{path}, line 1: {quoted(other)} separates the columns of {quoted(first_line.strip())}; in a .csv a "
                "comma does, in a .tsv a tab"
            )


def _read_parquet(path: Path, column: str) -> list[Row]:
    """Read a column of a parquet file."""
    file = open_parquet(path)
    name = _column_of(file.schema_arrow.names, column, str(path))
    kind = str(file.schema_arrow.field(name).type)
    if kind not in TEXT and not kind.startswith("dictionary<values=string"):
        raise UserError(f"{path}, column {name!r} holds {in_one_line(kind, 100)}, not text; {OTHER_COLUMN}")
    try:
        texts = read_columns(path, file, [name])[name].to_pylist()
    except ValueError as error:
        raise UserError(f"{path}, column {name!r}: {in_one_line(error)}") from error
    return [Row(f"{path}, row {number}", text or "", {}) for number, text in enumerate(texts, start=1)]


def _column_of(names: Sequence[str], column: str, place: str) -> str:
    """Return the name of the column of prompts. Raises UserError, which names `place`, unless there is one."""
    # "prompt" wins over "Prompt" and "prompts", these over a caption: tables often have both.
    if column or "prompt" in names:
        matches = [name for name in names if name == (column or "prompt")]
    else:
        matches = _named_as(names, PROMPT) or _named_as(names, CAPTION)
    if len(set(matches)) < len(matches):
        raise UserError(f"{place}: two columns are called {quoted(matches[0])}; rename one")
    if column and not matches:
        raise UserError(f"{place}: no column {quoted(column)}; it has {_some_of(names)}")
    if len(matches) > 1:
        raise UserError(f"{place}: the prompts may be in each of {_some_of(matches)}; {OTHER_COLUMN}")
    if not matches:
        wanted = '"prompt" (or caption, text, instruction)'
        raise UserError(f"{place}: no column {wanted}; it has {_some_of(names)}; {OTHER_COLUMN}")
    return matches[0]


def _named_as(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    return [name for name in names if name.strip().lower() in wanted]


def _some_of(names: Sequence[str]) -> str:
    """List the first NUM_NAMES names for a message."""
    if not names:
        return "none"
    listed = ", ".join(in_one_line(name, 40) for name in names[:NUM_NAMES])
    if len(names) > NUM_NAMES:
        return f"{listed} and {len(names) - NUM_NAMES} more"
    return listed


# By the ending of a name, in any case.
READERS: dict[str, Callable[[Path, str], list[Row]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".parquet": _read_parquet,
}
