"""Errors whose text is written for the user. The command line prints that text; other errors keep their traceback."""


class UserError(ValueError):
    """Mistake that a user can cause and mend. The text has the numbers and the way out."""


class RunFailed(Exception):
    """Failure that ends a run and is not the fault of its code. The text says why, and how to go on."""


class WriteFailed(RunFailed, OSError):
    """Failure to write a file of the run, such as on a full disk."""
