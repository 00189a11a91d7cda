"""Damaged pairs: training on them names the file, or is the training on the pairs as they were."""

import shutil
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
from faults_commands import Command, judge
from faults_files import DAMAGES, FLAG, replace
from faults_runs import Bench, differences, only_folder
from faults_tries import Dice, Try, Verdict

LOST = ("gone", "directory", "loop", "of_another")  # a folder of fewer pairs is one, too
READ = ("prompt", "winner_latents", "loser_latents", "text", "mask")  # columns of which any bit matters


def make(bench: Bench, seed: int, number: int) -> Try:
    """Every second try flips a bit in the values of a column; the others do to a file what faults_files.py does."""
    dice = Dice(seed, "pairs", number)
    files = [path.name for path in sorted(bench.reference("prepare").glob("*.parquet"))]
    file, act = dice.pick(files), partial(damage_file, dice.pick(list(DAMAGES)))
    if number % 2 == 0:
        act = partial(flip_in_column, READ[number // 2 % len(READ)])
    return Try("pairs", number, f"{act.func.__name__} {act.args[0]} {file}", partial(attempt, bench, file, act, dice))


def damage_file(damage: str, path: Path, dice: Dice, flag: Path) -> None:
    """Anything that happens to files."""
    DAMAGES[damage](path, dice, flag)


def flip_in_column(name: str, path: Path, dice: Dice, flag: Path) -> None:
    """One bit of the last value of a column, in one of its row groups."""
    metadata = pq.ParquetFile(path).metadata
    group = metadata.row_group(dice.below(metadata.num_row_groups))
    columns = (group.column(number) for number in range(group.num_columns))
    column = next(column for column in columns if column.path_in_schema.split(".")[0] == name)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 1] ^= 1 << dice.below(8)
    replace(path, bytes(data))


def attempt(bench: Bench, file: str, act: partial, dice: Dice, folder: Path) -> Verdict:
    """Damage a copy of the pairs and train on it; what runs to its end is the run on the pairs as they were."""
    whole = bench.reference("dpo_offline")
    shutil.copytree(bench.pairs, folder / "pairs")
    act(folder / "pairs" / file, dice, folder / FLAG)
    ended = Command(bench.words("dpo_offline", folder / "runs", preferences__path=folder / "pairs"), folder).wait()
    if (folder / FLAG).exists():
        return Verdict(False, "code in the file has run")
    if ended.status != 0:
        return judge(ended, [file, "preferences.path", "pairs"], early=False)
    if act.func is flip_in_column:
        return Verdict(False, "a flipped bit of a value was not noticed")
    differ = differences(only_folder(folder / "runs"), whole)
    lost = act.args[0] in LOST
    return Verdict(not differ or lost, f"silent: {differ}" if differ else "equal")
