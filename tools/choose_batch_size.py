"""How many rows a forward should have on this machine: short runs of a script with its own flags, one per number.

    python tools/choose_batch_size.py scripts/train_qwenimage.py --config config/grpo.py:pickscore_qwenimage,large_gpu
    python tools/choose_batch_size.py --gpus 8 scripts/train_sd3_pr.py --config my_config.py:my_run --config.seed=2

sample.batch_size is doubled for as long as that makes 2 % more images/s, or halved until it fits into memory; then
sample.completion_batch_size is doubled likewise, if the run has one. Each number takes a start and two epochs of few
images, of the data set's longest prompt. The last line has the flags of the fastest.

A run does not choose them by itself, since last bits depend on them: they belong to what is repeated or resumed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict
from one_prompt import one_prompt

from flow_grpo import batching, command_line
from flow_grpo.setting import DPO

GAIN = 1.02  # in images/s, below which more rows are not worth their memory
SHORT = {  # a third epoch begins, but is not awaited
    **{"num_epochs": 3, "eval_freq": 0, "save_freq": 0, "rollout_images_freq": 0, "max_hours": 0.0},
    **{"logger": "none", "run_name": "trial", "resume_from": "", "train.updates_per_epoch": 1},
}


class Rows(NamedTuple):
    """Of a forward."""

    batch_size: int
    completion_batch_size: int  # 0 = as many

    @property
    def flags(self) -> str:
        """For a command line."""
        return " ".join(f"--config.sample.{name}={value}" for name, value in self._asdict().items())


class Trials:
    """Short runs of a training command: a script and its flags."""

    def __init__(self, command: list[str], config: ConfigDict, gpus: int, folder: Path):
        self.command, self.config, self.gpus, self.folder = command, config, gpus, folder
        self.dataset, self.speeds = one_prompt(config.dataset, folder / "prompts"), {}

    def images_per_s(self, rows: Rows) -> float:
        """Of the second epoch; 0 where memory runs out. Says so, once for the same rows.

        Raises:
            ValueError: the run ends before, for another reason.
        """
        if rows not in self.speeds:
            epoch = second_epoch(self._words(rows), self.folder / "_".join(map(str, rows)))
            self.speeds[rows] = epoch["images_per_s"] if epoch else 0.0
            peak = f", {epoch['memory/peak_gib']:.1f} GiB" if epoch and epoch.get("memory/peak_gib") else ""
            found = f"{self.speeds[rows]:.3g} images/s{peak}" if epoch else "out of memory"
            print(f"{rows.flags}  {found}", flush=True)
        return self.speeds[rows]

    def _words(self, rows: Rows) -> list[str]:
        """The command of a run of few images."""
        settings = SHORT | {"dataset": self.dataset, "sample.num_prompts_per_epoch": self.num_prompts(rows)}
        flags = [f"--config.{name}={value}" for name, value in settings.items()]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.gpus}"]
        return [*launch, *self.command, *flags, *rows.flags.split()]

    def num_prompts(self, rows: Rows) -> int:
        """The fewest that fill forwards of so many rows on each GPU, and divide over the GPUs."""
        sample = self.config.sample
        for number in range(1, sample.num_prompts_per_epoch):
            images = number * sample.num_images_per_prompt * sample.num_branches
            if images >= rows.completion_batch_size * self.gpus and self.divide(rows.batch_size, number, updates=1):
                return number
        return sample.num_prompts_per_epoch

    def divide(self, batch_size: int, num_prompts: int | None = None, updates: int | None = None) -> bool:
        """Whether an epoch divides into batches of so many rows; by default that of the config."""
        config = self.config.copy_and_resolve_references()
        config.sample.batch_size = batch_size
        config.sample.num_prompts_per_epoch = num_prompts or config.sample.num_prompts_per_epoch
        config.train.updates_per_epoch = updates or config.train.updates_per_epoch
        try:
            plan_of(config, self.gpus)
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
    if re.search("out ?of ?memory", text, re.IGNORECASE):
        return None
    if said := re.search(r"^[\w.-]+\.py: .*", text, re.MULTILINE):
        raise ValueError(said[0])
    sys.stderr.write(text)
    raise ValueError(f"the run ended with status {run.returncode}, and what stands above")


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
    raise ValueError(f"not even {best} rows fit into memory; docs/will_it_fit.md says what else takes less")


def choose(trials: Trials) -> Rows:
    """The fastest rows that fit."""
    sample = trials.config.sample
    plan_of(trials.config, trials.gpus)
    completion = sample.completion_batch_size
    rows = climb(sample.batch_size, trials.divide, lambda number: trials.images_per_s(Rows(number, completion)))
    if sample.engine != "stepwise" and sample.num_branches == 1:
        return Rows(rows, completion)
    images = sample.num_prompts_per_epoch * sample.num_images_per_prompt * sample.num_branches // trials.gpus

    def both(number: int) -> Rows:
        return Rows(rows, completion if number == (completion or rows) else number)

    return both(
        climb(completion or rows, lambda number: number <= images, lambda number: trials.images_per_s(both(number)))
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="of this machine that the run will use")
    parser.add_argument("script", help="that trains")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the script: --config FILE:NAME --config.KEY=VALUE")
    return parser


def main(words: list[str]) -> None:
    args = parser().parse_args(words)
    with command_line.sentences(), tempfile.TemporaryDirectory() as folder:
        if args.gpus < 1 or not Path(args.script).is_file():
            raise ValueError(f"{args.script!r} on {args.gpus} GPUs: there must be such a file, and at least one GPU")
        config = command_line.config_of(args.flags, "")
        print(choose(Trials([args.script, *args.flags], config, args.gpus, Path(folder))).flags)


if __name__ == "__main__":
    main(sys.argv[1:])
