"""Calls that must be refused: the kind of error, and words of its sentence."""

from flow_grpo.base.errors import UserError


def refusal(check, *arguments):
    """Return what a check says, "" if it says nothing. Any other error than ValueError is the test's."""
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def otherwise(call, words, error=UserError):
    """Return what a call does instead of refusing in one line that holds all words; "" if it does so."""
    try:
        call()
    except Exception as raised:
        said = f"{type(raised).__name__}: {raised}"
        good = isinstance(raised, error) and all(str(word) in said for word in words) and "\n" not in said
        return "" if good else said
    return "nothing"


def assert_refused(rows):
    """Args: rows: (name, call, words), or with the kind of error for a fourth."""
    wrong = []
    for name, call, words, *error in rows:
        said = otherwise(call, words, *error)
        if said:
            wrong.append(f"{name} -> {said}")
    assert not wrong, "\n".join(wrong)
