"""Values and prompts in messages, shortened: a message is one line that can be read."""

import reprlib

LENGTH = 100  # characters of a text or a number
ENTRIES = 8  # of a dict, a tuple or a list


class Quotes(reprlib.Repr):
    """reprlib's, for ints of any size too: Python refuses to write out those of more than 4300 digits."""

    def __init__(self):
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = LENGTH
        self.maxdict = self.maxtuple = self.maxlist = self.maxset = ENTRIES

    def repr_int(self, x: int, level: int) -> str:
        """Of an int."""
        return super().repr_int(x, level) if x.bit_length() < 10_000 else f"a number of {x.bit_length()} bits"


def quoted(value: object) -> str:
    """repr of a value in one line, without the middle of what is long."""
    return Quotes().repr(value).replace("\n", " ")


def in_one_line(text: object, length: int = 1000) -> str:
    """A text, such as another error's, in one line, without the middle of what is long."""
    words = " ".join(str(text).split())
    return words if len(words) <= length else f"{words[: length - length // 10]} ... {words[-(length // 10) :]}"
