"""A ladder of model sizes: which learning rate is best for each algorithm at each size, and which algorithm.

    python tools/build_tiny_qwenimage.py --out runs/small --layers 3 --heads 4 --vae flow_grpo/assets/tiny_qwenimage
    python tools/build_tiny_qwenimage.py --out runs/large --layers 10 --heads 8 --vae flow_grpo/assets/tiny_qwenimage
    python benchmarks/ladder.py train --out runs/ladder --seconds 460 --parallel 25 --gpu \\
        --bases 1.9M=runs/small/step_008168 2.5M=flow_grpo/assets/tiny_qwenimage 24M=runs/large/step_001408
    python benchmarks/ladder.py draw --out runs/ladder

Bases are those evaluations of their builder that are right as often as the shipped one, about 0.4. `train` makes what
is not finished, `draw` reads the metrics.jsonl of every run. Runs are called SIZE_ALGORITHM_RATE_SEED. Ranks of LoRA
are sizes, too, each with a call of its own: `--bases rank8=flow_grpo/assets/tiny_qwenimage --set lora.rank=8`.
"""

import argparse
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import learn
import learn_record

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import markdown_table, quoted
from flow_grpo.command_line import command_line
from flow_grpo.monitoring.plots import read_metrics
from flow_grpo.settings import config_files

# Of each algorithm's own learning rate.
FACTORS = (1 / 9, 1 / 3, 1, 3, 9)
REFL = learn.Trained(
    "refl",
    "reward gradients",
    "scripts/train_qwenimage_refl.py",
    "config/refl.py:shapes_proxy_qwenimage_refl,leap",
    {},
    epoch_s=12,
    gpu_epoch_s=1.2,
    gpu_batch_size=36,
)
ALGORITHMS = {run.name: run for run in (*learn.RUNS, REFL) if run.name in ("window", "branches", "nft", "elbo", "refl")}
HEAD = ["size", "algorithm", "rate", "seeds", "accuracy", "highest", "variety", "forwards"]


class Rung(NamedTuple):
    """A run: an algorithm with a rate, from a base."""

    size: str
    algorithm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.size}_{self.algorithm}_{self.rate:g}_{self.seed}"

    @classmethod
    def of_folder(cls, name: str) -> "Rung":
        """Return the run of a folder's name. Raises ValueError for another name."""
        size, algorithm, rate, seed = name.split("_")
        return cls(size, algorithm, float(rate), int(seed))


def own_rate(run: learn.Trained) -> float:
    """Return the learning rate of an algorithm's config on the shipped model."""
    config = config_files.load(run.config)
    return float(run.settings.get("train.learning_rate", config.train.learning_rate))


def rungs(sizes: list[str], algorithms: list[str], seeds: list[int]) -> list[Rung]:
    """Return all runs, those of one seed before those of the next."""
    found = []
    for seed in seeds:
        for size in sizes:
            for name in algorithms:
                for factor in FACTORS:
                    rate = factor * own_rate(ALGORITHMS[name])
                    found.append(Rung(size, name, float(f"{rate:.2g}"), seed))
    return found


def command_of(rung: Rung, base: str, args: argparse.Namespace) -> list[str]:
    """Return the command that makes a run."""
    run = ALGORITHMS[rung.algorithm]
    settings = learn.settings_of(run, rung.seed, args)
    settings |= {
        "model": base,
        "train.learning_rate": rung.rate,
        "run_name": rung.name,
        "max_hours": args.seconds / 3600,
    }
    return [sys.executable, run.script, f"--config={run.config}", *learn.flags_of(settings, args.set)]


def train(args: argparse.Namespace) -> int:
    """Make every run that is not finished; return how many are not finished then."""
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    bases = dict(text.split("=", 1) for text in args.bases)
    chosen = rungs(list(bases), args.only, args.seeds)

    def make(number: int) -> bool:
        rung = chosen[number]
        return learn.job(number, rung.name, command_of(rung, bases[rung.size], args), args)

    with ThreadPoolExecutor(args.parallel) as pool:
        return list(pool.map(make, range(len(chosen)))).count(False)


def accuracy_at(lines: list[dict], forwards: float) -> float | None:
    """Return the accuracy of the last test that a run made with at most this many forwards; None without one."""
    spent = 0.0
    accuracy = None
    for line in lines:
        if line["kind"] == "epoch":
            spent += line.get("forwards", 0.0)
        if learn_record.TEST in line and spent <= forwards:
            accuracy = line[learn_record.TEST]
    return accuracy


def draw(out: Path) -> str:
    """Return the table of all runs in a folder, at the forwards that all runs of a size have made."""
    lines_of = {}
    for folder in sorted(out.iterdir()):
        if (folder / "metrics.jsonl").exists():
            lines_of[Rung.of_folder(folder.name)] = read_metrics(folder)
    spent = defaultdict(list)
    for rung, lines in lines_of.items():
        spent[rung.size].append(sum(line.get("forwards", 0.0) for line in lines if line["kind"] == "epoch"))
    seeds = defaultdict(list)
    for rung in lines_of:
        seeds[rung._replace(seed=0)].append(rung)
    rows = []
    for key, same in sorted(seeds.items()):
        forwards = min(spent[key.size])
        rows.append(_row(key, [lines_of[rung] for rung in same], forwards))
    return markdown_table(HEAD, rows)


def _row(key: Rung, runs: list[list[dict]], forwards: float) -> list[str]:
    """Return the cells of HEAD for the seeds of a rate."""
    accuracies = []
    highest = []
    variety = []
    for lines in runs:
        accuracy = accuracy_at(lines, forwards)
        if accuracy is None:
            continue
        accuracies.append(accuracy)
        tests = [line for line in lines if learn_record.TEST in line]
        highest.append(max(line[learn_record.TEST] for line in tests))
        variety.append(tests[-1].get(learn_record.VARIETY, 0.0))
    numbers = ["-"] * 3
    if accuracies:
        numbers = [f"{fmean(accuracies):.3f}", f"{fmean(highest):.3f}", f"{fmean(variety):.2f}"]
    return [key.size, key.algorithm, f"{key.rate:g}", str(len(accuracies)), *numbers, f"{forwards:,.0f}"]


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for flags of `train` that name something twice, or a base without its folder."""
    if args.command == "draw":
        return
    learn.check_flags(args)
    sizes = []
    for text in args.bases:
        size, has_folder, _ = text.partition("=")
        # The parts of a run's name are between underscores.
        if not size or not has_folder or "_" in size:
            raise UserError(f"--bases {quoted(text)}: write SIZE=FOLDER, with a SIZE without _")
        sizes.append(size)
    command_line.check_no_repeats("--bases", sizes)


def parser() -> argparse.ArgumentParser:
    """Return the parser of both commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("train", help="make the runs").add_argument
    add("--out", type=Path, default=Path("runs/ladder"), help="folder of all runs")
    add("--bases", nargs="+", required=True, metavar="SIZE=FOLDER", help="pipelines, by names without _")
    add("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="of the algorithms")
    add("--seconds", type=float, default=150.0, help="of each run, its evaluations included")
    add("--parallel", type=int, default=1, help="processes side by side")
    add("--seeds", type=int, nargs="+", default=[1])
    add("--gpu", action="store_true", help="larger batches, and embeddings that the runs share")
    add("--noises", type=int, default=4, help="images of each prompt in an evaluation")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run")
    add = commands.add_parser("draw", help="print the table").add_argument
    add("--out", type=Path, default=Path("runs/ladder"), help="folder of all runs")
    return parser


def main(args: argparse.Namespace) -> int:
    """Return how many runs are not finished."""
    unfinished = train(args) if args.command == "train" else 0
    print(draw(args.out))
    return unfinished


if __name__ == "__main__":
    try:
        sys.exit(main(command_line.arguments(parser(), check_flags)) > 0)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"ladder.py: {error}") from error
