"""The command line: what is answered, what is refused, and the process that a script runs in."""
