"""Train a grid of settings: every combination of some values and seeds, side by side on the GPUs of this machine.

    python scripts/sweep.py --out runs/rates --vary train.learning_rate=1e-4,3e-4,1e-3 --vary seed=1,2,3 \\
        scripts/train_qwenimage_nft.py --config config/nft.py:shapes_qwenimage_nft

What follows the script are its own flags, for every run. A run is a folder of OUT that is named after its values, and
what it prints is in OUT/NAME.log. The same command goes on where it was interrupted, and makes what failed once more;
runs that have ended stay. In the end OUT has table.md, with a row for each combination, over seeds, and report.html.
With --slurm nothing is started: OUT/settings.txt is written, and the command of an array job is printed.
"""

import argparse
import itertools
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from flow_grpo.base import folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, quoted, with_error
from flow_grpo.base.signals import SIGNALS, STATUS
from flow_grpo.command_line import command_line
from flow_grpo.command_line.gpus import gpu_names, visible_gpus
from flow_grpo.command_line.overrides import keys_of
from flow_grpo.settings import unknown_names
from flow_grpo.settings.table import BY_KEY, default_config, flat

# Settings that the sweep itself gives to each run.
GIVEN = ("output_dir", "run_name", "resume_from")
# Sections in which a user may add names.
OPEN_SECTIONS = ("custom.", "reward.args.", "reward_fn.")
QUOTES = ("'", '"')
POLL_S = 0.2
# Signals that torchrun passes on to its ranks: SIGUSR1 would end it alone.
HANDLED = "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of all runs")
    add("--vary", action="append", required=True, metavar="KEY=VALUE,VALUE", help="a setting and its values; repeat it")
    add("--gpus", default="", help="such as 0,1; default: CUDA_VISIBLE_DEVICES, or else all of the machine")
    add("--ranks", type=int, default=1, help="GPUs of each run, by torchrun; without a GPU, processes of each run")
    add("--parallel", type=int, default=1, help="runs that share a GPU, or the CPU")
    add("--slurm", action="store_true", help="start nothing: write the file of an array job")
    add("script", help="the training script: its path, or its name if the package ships it")
    add("flags", nargs=argparse.REMAINDER, help="its flags, such as --config config/nft.py:shapes_qwenimage_nft")
    return parser


class Member(NamedTuple):
    """One run of the sweep."""

    name: str
    values: dict[str, str]  # key -> value

    def settings(self, out: Path) -> list[str]:
        """Return the flags that make it this run."""
        flags = [f"--config.{key}={value}" for key, value in self.values.items()]
        return [*flags, f"--config.output_dir={out}", f"--config.run_name={self.name}"]


def members_of(vary: list[str]) -> list[Member]:
    """Return every combination of the values, those of the first setting slowest."""
    grid = dict(map(_parsed, vary))
    if len(grid) < len(vary):
        raise UserError("--vary names a setting twice: give all of its values at once")
    members = []
    for combination in itertools.product(*grid.values()):
        values = dict(zip(grid, combination, strict=True))
        parts = []
        for key, value in values.items():
            as_name = re.sub(r"[^\w.+-]+", " ", value).strip().replace(" ", "-")
            parts.append(f"{key.rpartition('.')[2]}_{as_name}")
        members.append(Member("_".join(parts), values))
    if len({member.name for member in members}) < len(members):
        raise UserError("two combinations of --vary have one name: they differ only in brackets, commas or blanks")
    return members


def _parsed(text: str) -> tuple[str, list[str]]:
    """Parse KEY=VALUE,VALUE. Raise UserError for what is no setting, or has no value."""
    key, _, values = text.partition("=")
    if key not in BY_KEY and not key.startswith(OPEN_SECTIONS):
        raise UserError(unknown_names.answer(key, flat(default_config()), f"{quoted(key)} (--vary)"))
    if key in GIVEN:
        raise UserError(f"--vary {key} would be ignored: the sweep gives each run its own")
    choices = _separated(values)
    if not all(choices):
        raise UserError(f"--vary {quoted(text)} lacks a value: write KEY=VALUE,VALUE")
    command_line.check_no_repeats(f"--vary {key}", choices)
    return key, choices


def _separated(values: str) -> list[str]:
    """Return the values between commas. Those inside of brackets or quotes belong to a value, such as (0, 3)."""
    choices = [""]
    depth = 0  # of brackets
    quote = ""  # that is to end a text
    for letter in values:
        # Within a word, as in don't, it is no quote.
        begins_text = letter in QUOTES and (depth > 0 or not choices[-1].strip())
        if quote:
            if letter == quote:
                quote = ""
        elif begins_text:
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth = max(depth - 1, 0)
        elif letter == "," and not depth:
            choices.append("")
            continue
        choices[-1] += letter
    return [choice.strip() for choice in choices]


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UserError for what no run could be started with."""
    members = members_of(args.vary)
    if not locations.find_command(args.script).is_file():
        raise UserError(f"{args.script} is no file, and no script of the package")
    if args.slurm and (args.gpus or args.ranks > 1 or args.parallel > 1):
        raise UserError("--gpus, --ranks and --parallel would be ignored with --slurm: a task has its machine's GPUs")
    for name in ("ranks", "parallel"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; it is at least 1")
    for key in keys_of(args.flags):
        _check_flag(key, varied=members[0].values)
    command_line.check_no_repeats("--gpus", gpu_names(args.gpus))
    gpus = gpus_of(args.gpus)
    if gpus and len(gpus) < args.ranks:
        raise UserError(f"--ranks {args.ranks} needs {args.ranks} GPUs, and this sweep has {len(gpus)}")


def _check_flag(key: str, varied: Iterable[str]) -> None:
    """Raise UserError for a setting among the script's flags that each run is given anew; `varied` are those of
    --vary."""
    if key in GIVEN:
        raise UserError(f"--config.{key} would be ignored: the sweep gives each run its own")
    # The other way round, one reward's weight, say, may vary within all rewards that a flag gives.
    if any(f"{key}.".startswith(f"{whole}.") for whole in varied):
        raise UserError(f"--config.{key} would be ignored: --vary gives each run its own")


def gpus_of(text: str) -> list[str]:
    """Return the GPUs of --gpus, or else those that this process sees."""
    return gpu_names(text) or visible_gpus()


args = None
if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    args = command_line.arguments(parser(), check_arguments)

from flow_grpo.monitoring import provenance, report, run_history


class Sweep:
    """Runs of a sweep, of which as many are under way as there are places for."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.out = args.out.absolute()
        self.members = members_of(args.vary)
        self.places = places_of(gpus_of(args.gpus), args.ranks, args.parallel)
        self.running: dict[int, tuple[Member, subprocess.Popen]] = {}  # by place
        self.failed: list[str] = []
        self.signal = 0  # the first one that asked the sweep to end

    def command(self, member: Member) -> list[str]:
        """Return the command that begins a run or goes on with it."""
        start = [sys.executable]
        if self.args.ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.args.ranks}", HANDLED]
        return [*start, str(locations.find_command(self.args.script)), *self.flags(member)]

    def flags(self, member: Member) -> list[str]:
        """Return all flags of a run."""
        return [*self.args.flags, *member.settings(self.out), "--config.resume_from=latest"]

    def ended_before(self, member: Member) -> str:
        """Return what to say of a run that has ended: the flags that were others, too."""
        then = provenance.starts(self.out / member.name)[-1]["command"][1:]
        now = provenance.without_queries(self.flags(member))
        only_then = shlex.join(word for word in then if word not in now) or "none"
        only_now = shlex.join(word for word in now if word not in then) or "none"
        said = f"{member.name}: has ended before"
        if only_then == only_now:
            return said
        return f"{said} and stays, though its flags were others: {only_then} then, {only_now} now"

    def run(self) -> None:
        """Make every run that has not ended."""
        waiting = []
        for member in self.members:
            if provenance.has_ended(self.out / member.name):
                print(self.ended_before(member), flush=True)
            else:
                waiting.append(member)
        for number in SIGNALS:
            signal.signal(number, self.stop)
        while self.running or (waiting and not self.signal):
            for place in range(len(self.places)):
                if waiting and place not in self.running and not self.signal:
                    self.start(place, waiting.pop(0))
            time.sleep(POLL_S)
            self.collect()

    def start(self, place: int, member: Member) -> None:
        """Start a run in a place."""
        with (self.out / f"{member.name}.log").open("a") as log:
            process = subprocess.Popen(
                self.command(member), env=os.environ | self.places[place], stdout=log, stderr=subprocess.STDOUT
            )
        self.running[place] = (member, process)
        print(f"{member.name}: begins", flush=True)

    def collect(self) -> None:
        """Free the places of processes that are over."""
        for place, (member, process) in list(self.running.items()):
            status = process.poll()
            if status is None:
                continue
            del self.running[place]
            if provenance.has_ended(self.out / member.name):
                print(f"{member.name}: has ended", flush=True)
            elif not self.signal:
                self.failed.append(member.name)
                log = self.out / f"{member.name}.log"
                print(f"{member.name}: stopped with status {status}, {last_line(log)} ({log})", flush=True)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Start nothing more, and pass the signal on: runs save and end."""
        self.signal = self.signal or number
        for _, process in self.running.values():
            if process.poll() is None:
                process.send_signal(number)


def places_of(gpus: list[str], ranks: int, parallel: int) -> list[dict[str, str]]:
    """Return the environment of each place for a run: `ranks` GPUs, or the CPU where there is none."""
    if not gpus:
        return [{}] * parallel
    groups = []
    for first in range(0, len(gpus) - ranks + 1, ranks):
        groups.append({"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + ranks])})
    return groups * parallel


def last_line(log: Path) -> str:
    """Return the last line that a run has printed."""
    lines = log.read_text(errors="replace").split("\n")
    printed = [line for line in lines if line.strip()]
    return printed[-1] if printed else "and printed nothing"


class Row(NamedTuple):
    """Scores of a run by eval.best_by, as the columns of the table."""

    validation: float  # of the weights that the validation chose
    before: float  # tests: before training, at the end, and of the weights that the validation chose
    last: float
    best: float


def scores_of(folder: Path) -> run_history.Scores:
    """Return the scores of a run."""
    return run_history.scores(run_history.read_run(folder, folder.name))


def row_of(folder: Path) -> Row | None:
    """Return the scores of a run that has ended; None if it made no test or chose no best policy."""
    scores = scores_of(folder)
    values = []
    for score in (scores.best, scores.first_test, scores.last_test, scores.test_of_best):
        if score is None:
            return None
        values.append(score.value)
    return Row(*values)


def write_table(out: Path, members: list[Member], failed: Collection[str] = ()) -> str:
    """Write table.md: the scores of each combination, over its seeds, and why runs have none. Returns its text.

    Args:
        failed: names of runs that have stopped by themselves.
    """
    by_combination = defaultdict(list)
    for member in members:
        combination = tuple(value for key, value in member.values.items() if key != "seed")
        by_combination[combination].append(member)
    keys = [key for key in members[0].values if key != "seed"]
    head = [*keys, "runs", "validation: best", "test: before", "last", "best", "lowest best"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for combination, of_combination in by_combination.items():
        cells = [*combination, *_cells([out / member.name for member in of_combination], failed)]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    return text


def _cells(run_folders: list[Path], failed: Collection[str]) -> list[str]:
    """Return the cells of a combination: how many of its runs have scores, why others have none, and the scores."""
    rows = []
    missing = Counter()
    for folder in run_folders:
        row = row_of(folder) if provenance.has_ended(folder) else None
        if row:
            rows.append(row)
        else:
            missing[why_missing(folder, failed)] += 1
    number = str(len(rows))
    if missing:
        reasons = [f"{count} {reason}" for reason, count in missing.items()]
        number += f" ({', '.join(reasons)})"
    if not rows:
        return [number, *[""] * (len(Row._fields) + 1)]
    means = [_mean(list(column)) for column in zip(*rows, strict=True)]
    lowest = min(row.best for row in rows)
    return [number, *means, f"{lowest:.4g}"]


def why_missing(folder: Path, failed: Collection[str]) -> str:
    """Return why a run has no scores, for the table."""
    if provenance.has_ended(folder):
        # A run that tests chooses a best policy, unless none of its evaluations may be the best (eval.min_variety).
        return "without a best policy" if scores_of(folder).last_test else "without a test"
    if folder.name in failed:
        return "failed"
    return "not ended" if provenance.starts(folder) else "not begun"


def _mean(values: list[float]) -> str:
    """Return a mean over runs with its standard error."""
    # One run has no error to be shown, nor have the base's tests under shared noises, which are equal.
    error = statistics.stdev(values) / len(values) ** 0.5 if len(set(values)) > 1 else None
    return with_error(statistics.fmean(values), error)


def write_slurm(args: argparse.Namespace) -> None:
    """Write the settings of each run as a line of a file, and print how Slurm runs them."""
    members = members_of(args.vary)
    out = args.out.absolute()
    lines = [" ".join(member.settings(out)) for member in members]
    if any(re.search(r"[\s'\"]", setting) for member in members for setting in member.settings(out)):
        raise UserError("an array job takes no value and no folder with a blank or a quotation mark")
    (out / "settings.txt").write_text("\n".join(lines) + "\n")
    job = locations.ROOT / "scripts" / "multi_node" / "slurm.sh"
    environment = f"SWEEP={out / 'settings.txt'}"
    script = args.script
    if Path.cwd() != locations.ROOT.resolve():
        # A job takes the folder in which it is submitted for the checkout.
        environment += f" CHECKOUT={locations.ROOT}"
        script = str(locations.find_command(script).absolute())
    print(f"{environment} sbatch --nodes=1 --array=1-{len(members)} {job} {shlex.join([script, *args.flags])}")


def main(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    folders.ensure_folder(args.out, "--out")
    if args.slurm:
        write_slurm(args)
        return 0
    sweep = Sweep(args)
    sweep.run()
    done = []
    for member in sweep.members:
        if provenance.has_ended(sweep.out / member.name):
            done.append(sweep.out / member.name)
    print(write_table(sweep.out, sweep.members, sweep.failed))
    if done:
        report.write_page(done, sweep.out / "report.html")
        print(f"{sweep.out} holds table.md and report.html of {len(done)} of {counted(len(sweep.members), 'runs')}")
    if sweep.signal:
        print("the same command continues the sweep")
        return 128 + signal.SIGINT if sweep.signal == signal.SIGINT else STATUS
    if sweep.failed:
        print(f"failed: {', '.join(sweep.failed)}; the same command tries them again")
    return 1 if sweep.failed else 0


if args is not None:
    with command_line.sentences():
        sys.exit(main(args))
