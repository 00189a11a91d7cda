"""Errors whose text is written for the user. The command line prints it without a traceback; all others keep theirs."""


class UserError(ValueError):
    """What a user can cause and mend. The text has the numbers and the way out."""


class RunFailed(Exception):
    """A run cannot go on, and its code is not to blame. The text says why, and how to go on."""


class WriteFailed(RunFailed, OSError):
    """A file of the run could not be written, such as on a full disk."""
