"""Values and prompts in messages, shortened: a message is one line that can be read."""

import reprlib

LENGTH = 100  # characters of a text or a number
ENTRIES = 8  # of a dict, a tuple or a list


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = LENGTH
_SHORT.maxdict = _SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxset = ENTRIES


def gpus(number: int) -> str:
    """So many of them, in words."""
    return f"{number} GPU{'' if number == 1 else 's'}"


def quoted(value: object) -> str:
    """repr of a value in one line, without the middle of what is long."""
    try:
        return _SHORT.repr(value).replace("\n", " ")
    except ValueError:  # Python writes out no more than 4300 digits
        return "a number of thousands of digits"


def in_one_line(text: object, length: int = 1000) -> str:
    """A text, such as another error's, in one line, without a terminal's codes and the middle of what is long."""
    words = "".join(c if c.isprintable() else "?" for c in " ".join(str(text).split()))
    return words if len(words) <= length else f"{words[: length - length // 10]} ... {words[-(length // 10) :]}"


def markdown_table(head: list[str], rows: list[list[object]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def with_error(value: float, error: float | None) -> str:
    """A mean, and its standard error where that is known."""
    return f"{value:.4g}" if error is None or error != error else f"{value:.4g} ± {error:.2g}"
