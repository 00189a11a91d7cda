"""A study of all algorithms on the tiny model: the same seconds for each, three seeds, a table and a report.

    python benchmarks/learn.py train --out runs/learn --seconds 600 --parallel 2
    python benchmarks/learn.py draw --out runs/learn

`train` starts what is not finished, resumes what was interrupted, and draws in the end. A run is finished when its
run.json notes its end. `draw` reads the metrics.jsonl of every run and writes OUT/table.md and OUT/report.html.
docs/howto/evaluate.md says more.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import learn_record

from flow_grpo.checkpoints import checkpoints
from flow_grpo.command_line import command_line
from flow_grpo.command_line.gpus import visible_gpus
from flow_grpo.monitoring import provenance
from flow_grpo.monitoring.plots import read_metrics

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
NUM_POINTS = 10  # evaluations of a run, about
NUM_EPOCHS = 5_000  # more than any run has time for
PAIRS = "pairs"  # folder of the preparation of pairs


Settings = dict[str, float | int | bool | str]  # by dotted name


class Trained(NamedTuple):
    """A row of the table: a script with settings, trained once for each seed."""

    name: str
    title: str
    script: str  # from the repository's root
    config: str
    settings: Settings
    epoch_s: float  # roughly, without evaluation: how often to evaluate follows from it
    gpu_epoch_s: float  # the same where ten runs share a GPU
    gpu_batch_size: int  # sample.batch_size of --gpu


GRPO = "scripts/train_qwenimage.py"
PR = "scripts/train_qwenimage_pr.py"
NFT = "scripts/train_qwenimage_nft.py"
DPO = "scripts/train_qwenimage_dpo.py"
ALL_STEPS = {"sample.sde_window_size": 0, "train.learning_rate": 1e-4}
OWN = {"train.flow_matching_weight": 0.1, "train.beta": 0.25, "train.learning_rate": 5e-4}
LORA_OWN = OWN | {"lora.rank": 32, "train.learning_rate": 2e-3}
GUIDED = {"train.beta": 0.1, "train.reference_guidance_scale": 3.0}
SHAPES = "config/grpo.py:shapes_qwenimage,long"
NFT_SHAPES = "config/nft.py:shapes_qwenimage_nft"
DPO_SHAPES = "config/dpo.py:shapes_qwenimage_dpo"
RUNS = (
    Trained("grpo", "Flow-GRPO, noise in all steps", GRPO, SHAPES, ALL_STEPS, 10, 1.2, 288),
    Trained("window", "Flow-GRPO, window of 2 steps", GRPO, SHAPES, {}, 5, 0.9, 288),
    Trained("mixgrpo", "MixGRPO, window of 4, held to the guided base", GRPO, f"{SHAPES},mixgrpo", GUIDED, 9, 1.4, 288),
    Trained("fast", "Flow-GRPO-Fast, window of 2 steps", GRPO, f"{SHAPES},fast", {}, 5, 0.9, 288),
    Trained("guard", "GRPO-Guard, noise in all steps", GRPO, f"{SHAPES},guard", ALL_STEPS, 10, 1.2, 288),
    Trained("guided", "Flow-GRPO held to the guided base", GRPO, SHAPES, ALL_STEPS | GUIDED, 15, 1.5, 288),
    Trained("dppo", "Flow-DPPO, window of 2 steps", GRPO, f"{SHAPES},dppo", {}, 5, 0.9, 288),
    Trained("branches", "per-step branches", PR, "config/grpo.py:shapes_qwenimage_pr,long", {}, 14, 1.8, 72),
    Trained("rsm", "RSM, per-step branches", PR, "config/grpo.py:shapes_qwenimage_pr,long,rsm", {}, 14, 1.8, 72),
    Trained("nft", "DiffusionNFT, all weights", NFT, NFT_SHAPES, {}, 6, 1.2, 288),
    Trained("nft_own", "the same + flow matching", NFT, NFT_SHAPES, OWN, 6, 1.2, 288),
    Trained("elbo", "policy gradient of the ELBO", NFT, f"{NFT_SHAPES},elbo", {}, 6, 1.2, 288),
    Trained("elbo_own", "the same + flow matching", NFT, f"{NFT_SHAPES},long,elbo", {}, 6, 1.2, 288),
    Trained("dgpo", "DGPO", NFT, f"{NFT_SHAPES},dgpo", {}, 6, 1.2, 288),
    Trained("ram", "RAM", NFT, f"{NFT_SHAPES},ram", {}, 6, 1.2, 288),
    Trained("crd", "CRD", NFT, f"{NFT_SHAPES},crd", {}, 6, 1.2, 288),
    Trained("awm", "AWM", NFT, f"{NFT_SHAPES},awm", {}, 6, 1.2, 288),
    Trained("nft_lora", "DiffusionNFT + flow matching, LoRA", NFT, NFT_SHAPES, LORA_OWN, 6, 1.2, 288),
    Trained("dpo_online", "DPO, online", DPO, f"{DPO_SHAPES},online", {}, 8, 1.5, 128),
    Trained("dpo", "DPO, offline", DPO, DPO_SHAPES, {}, 4, 0.7, 128),
)
GPU = {"reward.batch_size": 544, "eval.batch_size": 544, "vae_batch_size": 288}


def settings_of(run: Trained, seed: int, args: argparse.Namespace) -> Settings:
    """Return the settings of a run by dotted name, those of the study after its own."""
    epoch_s = run.gpu_epoch_s if args.gpu else run.epoch_s
    num_epochs_between = max(1, round(args.seconds / NUM_POINTS / epoch_s))
    settings = dict(run.settings)
    if args.gpu:
        settings |= GPU
        settings["sample.batch_size"] = run.gpu_batch_size
        settings["cache_dir"] = str(args.out / "cache")
    settings |= {
        "eval.noises_per_prompt": args.noises,
        "eval.best_by": learn_record.FIGURE,
        "eval_freq": num_epochs_between,
        "eval.test_freq": num_epochs_between,
        "save_freq": num_epochs_between,
        "keep_checkpoints": 1,
        "num_epochs": NUM_EPOCHS,
        "seed": seed,
        "resume_from": "latest",
        "logger": "none",  # tables are of metrics.jsonl, and a machine for benchmarks may have no tracker
        "output_dir": str(args.out),
        "run_name": f"{run.name}_seed{seed}",
    }
    if run.name == "dpo":
        settings["preferences.path"] = str(args.out / "preferences")
    return settings


def flags_of(settings: Settings, extra: list[str]) -> list[str]:
    """Return the settings as flags. Those that the user gave come last and win."""
    settings_flags = [f"--config.{key}={value}" for key, value in settings.items()]
    extra_flags = [f"--config.{text}" for text in extra]
    return settings_flags + extra_flags


def spent_s(folder: Path) -> float:
    """Return the seconds that a run had trained for at its newest checkpoint."""
    if not (folder / "checkpoints").is_dir():
        return 0.0
    newest = checkpoints.find_newest(folder / "checkpoints")
    if newest is None:
        return 0.0
    num_epochs = int(newest.name.split("_")[-1])
    seconds = 0.0
    for line in read_metrics(folder):
        # Epochs after the checkpoint are lost.
        if line["epoch"] < num_epochs:
            seconds += line.get("time/epoch_s", 0.0)
    return seconds


def command_of(run: Trained, seed: int, args: argparse.Namespace) -> list[str]:
    """Return the command that begins a run, or goes on with it for the seconds that are left."""
    left_s = max(args.seconds - spent_s(args.out / f"{run.name}_seed{seed}"), 1e-3)
    settings = settings_of(run, seed, args)
    settings["max_hours"] = left_s / 3600
    return [sys.executable, run.script, f"--config={run.config}", *flags_of(settings, args.set)]


def execute(command: list[str], log: Path, num_threads: int, number: int) -> int:
    """Run a command and return its exit status; append its output to a file. Its number chooses one of the GPUs."""
    paths = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    # The user's environment goes before these two.
    env = {"OMP_NUM_THREADS": str(num_threads), "WANDB_MODE": "disabled"} | os.environ
    env["PYTHONPATH"] = os.pathsep.join(paths)
    gpus = visible_gpus()
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    with log.open("a") as file:
        return subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, check=False).returncode


def job(number: int, name: str, command: list[str], args: argparse.Namespace) -> bool:
    """Make a run that is not finished and say how it ended; return whether it is finished now."""
    folder = args.out / name
    log = args.out / f"{name}.log"
    if provenance.has_ended(folder):
        print(f"{name}: finished before", flush=True)
        return True
    num_threads = max(1, (os.cpu_count() or 1) // args.parallel)
    start = time.monotonic()
    status = execute(command, log, num_threads, number)
    finished = provenance.has_ended(folder)
    outcome = "finished" if finished else f"ended with exit status {status} before its end, see {log}"
    print(f"{name}: {outcome}, {time.monotonic() - start:.0f} s", flush=True)
    return finished


def prepare_pairs(args: argparse.Namespace) -> bool:
    """Make the pairs of offline DPO, once; write how many images and seconds they took as a line of metrics.jsonl."""
    path = args.out / "preferences"
    folder = args.out / PAIRS
    if read_metrics(folder):
        return True
    settings = {"preferences.path": str(path), "seed": 1}
    if args.gpu:
        settings |= GPU | {"sample.batch_size": 256}
    command = [sys.executable, "scripts/prepare_preferences.py", "--config=config/dpo.py:shapes_qwenimage_dpo"]
    start = time.monotonic()
    status = execute(command + flags_of(settings, args.set), args.out / f"{PAIRS}.log", os.cpu_count() or 1, 0)
    if status == 0:
        learn_record.write_pairs_line(folder, path / "report.json", time.monotonic() - start)
    print(f"{PAIRS}: exit status {status}, {time.monotonic() - start:.0f} s", flush=True)
    return status == 0


def train(args: argparse.Namespace) -> int:
    """Make every run that is not finished; return how many are not finished then."""
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    names = list(args.only)
    # Offline DPO needs pairs: without them it is left out.
    if "dpo" in names and not prepare_pairs(args):
        names.remove("dpo")
    chosen = [run for run in RUNS if run.name in names]
    # One seed of every run before the next seed of any.
    trained = []
    for seed in args.seeds:
        trained += [(run, seed) for run in chosen]

    def make(number: int) -> bool:
        run, seed = trained[number]
        # The command is made when the run begins: it counts the seconds that an earlier start has used.
        return job(number, f"{run.name}_seed{seed}", command_of(run, seed, args), args)

    with ThreadPoolExecutor(args.parallel) as pool:
        return list(pool.map(make, range(len(trained)))).count(False)


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for a flag of `train` that names a value twice, for which two runs would share one folder, or a
    setting without a value."""
    if args.command == "draw":
        return
    command_line.check_no_repeats("--only", args.only)
    command_line.check_no_repeats("--seeds", args.seeds)
    command_line.check_set(args.set)


def parser() -> argparse.ArgumentParser:
    """Return the parser of both commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("train", help="make the runs").add_argument
    add("--out", type=Path, default=Path("runs/learn"), help="folder of the study")
    add("--seconds", type=float, default=600.0, help="of each run, its evaluations included")
    add("--parallel", type=int, default=1, help="processes side by side")
    names = [run.name for run in RUNS]
    add("--only", nargs="+", choices=names, default=names)
    add("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS)
    add("--gpu", action="store_true", help="larger batches, and embeddings that the runs share")
    add("--noises", type=int, help="images of each prompt in an evaluation; default: 4 with --gpu, else 1")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run, such as eval.num_prompts=24")
    add = commands.add_parser("draw", help="make the table and the report").add_argument
    add("--out", type=Path, default=Path("runs/learn"), help="folder of the study")
    return parser


def main(args: argparse.Namespace) -> int:
    """Return how many runs are not finished."""
    unfinished = 0
    if args.command == "train":
        if not args.noises:
            args.noises = 4 if args.gpu else 1
        unfinished = train(args)
    print(learn_record.draw(args.out, [(run.name, run.title) for run in RUNS], SEEDS))
    return unfinished


if __name__ == "__main__":
    try:
        sys.exit(main(command_line.arguments(parser(), check_flags)) > 0)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"learn.py: {error}") from error
