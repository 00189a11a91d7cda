"""Values and texts as messages and tables show them. A message is one line that can be read."""

import math
import reprlib

LENGTH = 100  # characters of a text or a number
ENTRIES = 8  # of a dict, a tuple or a list

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = LENGTH
_SHORT.maxdict = _SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxset = ENTRIES


def counted(number: int, things: str) -> str:
    """Return a number of things, which are named in the plural, in words: 1 batch, 1,024 batches."""
    if number != 1:
        return f"{number:,} {things}"
    ending = "es" if things.endswith("ches") else "s"
    return f"1 {things.removesuffix(ending)}"


def quoted(value: object) -> str:
    """Return the repr of a value in one line, shortened in its middle."""
    try:
        return _SHORT.repr(value).replace("\n", " ")
    except ValueError:
        # Python writes out no more than 4300 digits.
        return "a number of thousands of digits"


def in_one_line(text: object, length: int = 1000) -> str:
    """Return a text, such as another error's, in one line, without control codes, shortened in its middle."""
    line = " ".join(str(text).split())
    # The codes of a terminal would colour or overwrite what is around the message.
    printable = "".join(letter if letter.isprintable() else "?" for letter in line)
    if len(printable) <= length:
        return printable
    tail = length // 10
    return f"{printable[: length - tail]} ... {printable[-tail:]}"


def markdown_table(head: list[str], rows: list[list[object]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in [head, *rows]]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines)


def with_error(value: float, error: float | None) -> str:
    """Return a mean with its standard error, or alone if the error is None or NaN."""
    if error is None or math.isnan(error):
        return f"{value:.4g}"
    return f"{value:.4g} ± {error:.2g}"
