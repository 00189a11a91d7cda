"""A pickle in the place of every file of every algorithm's run folder, in turn: no run executes the code in it."""

from functools import partial
from itertools import cycle

from faults_files import attempt, disguised, files_of
from faults_runs import TRAINED, Bench
from faults_tries import Dice, Try


def make(bench: Bench, seed: int, number: int) -> Try:
    """The file of this number; after the last file of the last algorithm comes the first one."""
    place = number
    for algorithm in cycle(TRAINED):
        files = files_of(bench, algorithm)
        if place < len(files):
            break
        place -= len(files)
    act = partial(attempt, bench, algorithm, files[place], disguised.__name__, Dice(seed, "pickles", number))
    return Try("pickles", number, f"{algorithm} {files[place]}", act)
