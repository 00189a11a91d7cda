"""Measures how many rows per forward are fastest on this machine, by short runs of a script with its own flags.

    python tools/choose_batch_size.py scripts/train_qwenimage.py --config config/grpo.py:pickscore_qwenimage,large_gpu
    python tools/choose_batch_size.py --gpus 8 scripts/train_sd3_pr.py --config my_config.py:my_run --config.seed=2

sample.batch_size is doubled as long as each doubling makes at least 2 % more images/s, or halved until it fits into
memory; then sample.completion_batch_size is doubled likewise, if the run has slots. Trying a number costs one start and
two epochs of few images, all of the data set's longest prompt. The last line has the flags of the fastest.

A run does not choose by itself: sample.batch_size also decides which images share a minibatch, so a run that is to be
repeated or resumed names it.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict
from one_prompt import one_prompt

from flow_grpo import batching, command_line, settings
from flow_grpo.setting import DPO

GAIN = 1.02  # in images/s, below which more rows are not worth their memory
SHORT = {  # a third epoch begins, but is not awaited
    **{"num_epochs": 3, "eval_freq": 0, "save_freq": 0, "rollout_images_freq": 0, "max_hours": 0.0},
    **{"logger": "none", "run_name": "trial", "resume_from": "", "health.action": "log"},
    **{"train.updates_per_epoch": 1, "train.target_update_size": 0.0},
}
OUT_OF_MEMORY = "OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
SENTENCE = rf"^[\w.-]+\.py(?:, rank \d+)?: (?!{command_line.ANOTHER_RANK}).*"


class Rows(NamedTuple):
    """How many a forward has."""

    batch_size: int
    completion_batch_size: int | None = None  # None = the run has no slots; 0 = batch_size

    @property
    def flags(self) -> str:
        """To append to the script's own."""
        numbers = {name: value for name, value in self._asdict().items() if value is not None}
        return " ".join(f"--config.sample.{name}={value}" for name, value in numbers.items())


class Trials:
    """Short runs of a training command: a script and its flags."""

    def __init__(self, command: list[str], config: ConfigDict, gpus: int, folder: Path):
        self.command, self.config, self.gpus, self.folder = command, config, gpus, folder
        self.data = {} if config.preferences.path else {"dataset": one_prompt(config.dataset, folder / "prompts")}
        self.speeds = {}

    def images_per_s(self, rows: Rows) -> float:
        """Of the second epoch; 0 where there is not enough memory. Prints each measurement once.

        Raises:
            ValueError: the run ends for another reason, before any has been measured. Later ones count as 0.
        """
        if rows not in self.speeds:
            print(rows.flags, end="  ", flush=True)
            self.speeds[rows], found = self._measured(rows)
            print(found, flush=True)
        return self.speeds[rows]

    def _measured(self, rows: Rows) -> tuple[float, str]:
        """Images/s, and what to print."""
        try:
            epoch = second_epoch(self.short_run(rows), self.folder / "_".join(map(str, rows)))
        except ValueError as error:
            if not any(self.speeds.values()):
                raise
            return 0.0, str(error)
        if not epoch:
            return 0.0, "out of memory"
        peak = f", {epoch['memory/peak_gib']:.1f} GiB" if "memory/peak_gib" in epoch else ""
        return epoch["images_per_s"], f"{epoch['images_per_s']:.3g} images/s{peak}"

    def short_run(self, rows: Rows) -> list[str]:
        """The command of a run of few images."""
        num_prompts = few_prompts(self.config, self.gpus, rows)
        short = SHORT | self.data | {"sample.num_prompts_per_epoch": num_prompts}
        flags = [f"--config.{name}={value}" for name, value in short.items()]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.gpus}"]
        return [*launch, *self.command, *flags, *rows.flags.split()]


def few_prompts(config: ConfigDict, gpus: int, rows: Rows) -> int:
    """The fewest that fill forwards of so many rows on each GPU, and divide over the GPUs in one update. Those of twice
    the config's rows are filled anyway, so that the first trials draw the same images."""
    twice = 2 * config.sample.batch_size
    batch_size = max(rows.batch_size, twice if divides(changed(config, twice), gpus) else 0)
    free_rows = max(rows.completion_batch_size or 0, 2 * config.sample.completion_batch_size)
    for number in range(1, config.sample.num_prompts_per_epoch):
        few = changed(config, batch_size)
        few.sample.num_prompts_per_epoch, few.train.updates_per_epoch = number, 1
        if num_images(few) >= free_rows * gpus and divides(few, gpus):
            return number
    return config.sample.num_prompts_per_epoch


def num_images(config: ConfigDict) -> int:
    """Of an epoch."""
    sample = config.sample
    return sample.num_prompts_per_epoch * sample.num_images_per_prompt * sample.num_branches


def changed(config: ConfigDict, batch_size: int) -> ConfigDict:
    """The same with another sample.batch_size."""
    config = config.copy_and_resolve_references()
    config.sample.batch_size = batch_size
    return config


def divides(config: ConfigDict, gpus: int) -> bool:
    """Whether an epoch does, into batches."""
    try:
        plan_of(config, gpus)
    except ValueError:
        return False
    return True


def plan_of(config: ConfigDict, gpus: int) -> batching.BatchPlan:
    """As the config's script divides an epoch. Raises ValueError where it does not divide."""
    return (batching.plan_pairs if config.algorithm == DPO else batching.plan_batches)(config, gpus)


def second_epoch(command: list[str], folder: Path) -> dict | None:
    """The line of a run's second epoch, after which the run is ended; None where memory runs out before.

    Args:
        folder: for the run and for all that it says.
    Raises:
        ValueError: it ends before for another reason: with its sentence, or after all that it said.
    """
    folder.mkdir()
    log = folder / "log.txt"
    with log.open("w") as file:
        run = subprocess.Popen([*command, f"--config.output_dir={folder}"], stdout=file, stderr=file)
        try:
            while run.poll() is None and len(epochs(folder)) < 2:
                time.sleep(0.2)
        finally:
            run.terminate()  # torchrun ends its ranks then, which have sessions of their own
            run.wait()
    if len(lines := epochs(folder)) >= 2:
        return lines[1]
    text = log.read_text(errors="replace")
    if re.search(OUT_OF_MEMORY, text):
        return None
    if said := re.search(SENTENCE, text, re.MULTILINE):
        raise ValueError(said[0])
    sys.stderr.write(text)
    raise ValueError(f"the run ended with status {run.returncode}; its output is above")


def epochs(folder: Path) -> list[dict]:
    """Lines of a run's epochs so far."""
    lines = [line for path in folder.glob("*/metrics.jsonl") for line in path.read_text().split("\n")[:-1]]
    return [row for row in map(json.loads, lines) if row["kind"] == "epoch"]


def climb(start: int, allowed: Callable[[int], bool], speed: Callable[[int], float]) -> int:
    """The fastest of start, its doubles and its halves; speed is 0 where a number does not fit into memory.

    Raises:
        ValueError: none fits.
    """
    best, fastest = start, speed(start)
    if fastest:
        while allowed(2 * best) and speed(2 * best) >= GAIN * fastest:
            best, fastest = 2 * best, speed(2 * best)
        return best
    while best % 2 == 0 and allowed(best // 2):
        best //= 2
        if speed(best):
            return best
    raise ValueError(f"not even {best} rows fit into memory; docs/will_it_fit.md lists other ways to save memory")


def choose(config: ConfigDict, gpus: int, speed: Callable[[Rows], float]) -> Rows:
    """The fastest rows that fit.

    Raises:
        ValueError: none fit, or the config's own rows do not divide.
    """
    plan_of(config, gpus)
    sample = config.sample
    slots = config.algorithm != DPO and (sample.engine == "stepwise" or sample.num_branches > 1)
    free_rows = sample.completion_batch_size if slots else None
    if free_rows and not speed(Rows(sample.batch_size, free_rows)):
        free_rows = 0  # fewer, in most configs

    def dividing(number: int) -> bool:
        return divides(changed(config, number), gpus)

    rows = climb(sample.batch_size, dividing, lambda number: speed(Rows(number, free_rows)))
    if not slots:
        return Rows(rows)

    def both(number: int) -> Rows:
        return Rows(rows, free_rows if number == (free_rows or rows) else number)

    most = num_images(config) // gpus
    return both(climb(free_rows or rows, lambda number: number <= most, lambda number: speed(both(number))))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs of this machine (default: 1)")
    parser.add_argument("script", help="training script")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the script's own: --config FILE:NAME and others")
    return parser


def main(words: list[str]) -> None:
    args = parser().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and with it the run
    with command_line.sentences(), tempfile.TemporaryDirectory() as folder:
        config = checked_config(args)
        trials = Trials([args.script, *args.flags], config, args.gpus, Path(folder))
        print(choose(config, args.gpus, trials.images_per_s).flags)


def checked_config(args: argparse.Namespace) -> ConfigDict:
    """Of the script. Raises ValueError for a command that cannot be meant."""
    if args.gpus < 1:
        raise ValueError(f"--gpus is {args.gpus}; it must be at least 1")
    if not (Path(args.script).is_file() and Path(args.script).name.startswith("train_")):
        raise ValueError(f"{args.script!r} is no training script, such as scripts/train_qwenimage.py")
    if not any(re.match("--?config(=|$)", flag) for flag in args.flags):
        raise ValueError(f"give {args.script} a config: --config FILE:NAME")
    config = command_line.config_of(args.flags, "")
    settings.check_values(config)
    return config


if __name__ == "__main__":
    main(sys.argv[1:])
