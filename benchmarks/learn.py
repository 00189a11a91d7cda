"""A study of all algorithms on the tiny model: the same seconds for each, three seeds, a table and a report.

    python benchmarks/learn.py train --out runs/learn --seconds 600 --parallel 2
    python benchmarks/learn.py draw --out runs/learn

`train` starts what is not finished, resumes what was interrupted, and draws in the end. A run is finished when its
metrics.jsonl ends with the test of its best weights. `draw` reads the metrics.jsonl of every run and writes
OUT/table.md and OUT/report.html. docs/howto/evaluate.md says more.
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
import torch

from flow_grpo.checkpoints import checkpoints
from flow_grpo.command_line import command_line
from flow_grpo.monitoring.plots import read_metrics

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
NUM_POINTS = 10  # evaluations of a run, about
NUM_EPOCHS = 5_000  # more than any run has time for
PAIRS = "pairs"  # folder of the preparation of pairs


class Trained(NamedTuple):
    """A row of the table: a script with settings, trained once for each seed."""

    name: str
    title: str
    script: str  # from the repository's root
    config: str
    settings: dict[str, float | int | bool | str]  # by dotted name
    epoch_s: float  # roughly, without evaluation: how often to evaluate follows from it
    gpu_epoch_s: float  # the same where ten runs share a GPU
    gpu_batch_size: int  # sample.batch_size of --gpu


GRPO, PR, NFT, DPO = (f"scripts/train_qwenimage{kind}.py" for kind in ("", "_pr", "_nft", "_dpo"))
ALL_STEPS = {"sample.sde_window_size": 0, "train.learning_rate": 1e-4}
OWN = {"train.flow_matching_weight": 0.1, "train.beta": 0.25, "train.learning_rate": 5e-4}
LORA_OWN = OWN | {"lora.rank": 32, "train.learning_rate": 2e-3}
GUIDED = {"train.beta": 0.1, "train.reference_guidance_scale": 3.0}
SHAPES = "config/grpo.py:shapes_qwenimage,long"
NFT_SHAPES, DPO_SHAPES = "config/nft.py:shapes_qwenimage_nft", "config/dpo.py:shapes_qwenimage_dpo"
RUNS = (
    Trained("grpo", "Flow-GRPO, noise in all steps", GRPO, SHAPES, ALL_STEPS, 10, 1.2, 288),
    Trained("window", "Flow-GRPO, window of 2 steps", GRPO, SHAPES, {}, 5, 0.9, 288),
    Trained("mixgrpo", "MixGRPO, window of 4, held to the guided base", GRPO, f"{SHAPES},mixgrpo", GUIDED, 9, 1.4, 288),
    Trained("fast", "Flow-GRPO-Fast, window of 2 steps", GRPO, f"{SHAPES},fast", {}, 5, 0.9, 288),
    Trained("guard", "GRPO-Guard, noise in all steps", GRPO, f"{SHAPES},guard", ALL_STEPS, 10, 1.2, 288),
    Trained("guided", "Flow-GRPO held to the guided base", GRPO, SHAPES, ALL_STEPS | GUIDED, 15, 1.5, 288),
    Trained("dppo", "Flow-DPPO, window of 2 steps", GRPO, f"{SHAPES},dppo", {}, 5, 0.9, 288),
    Trained("branches", "per-step branches", PR, "config/grpo.py:shapes_qwenimage_pr,long", {}, 14, 1.8, 72),
    Trained("nft", "DiffusionNFT, all weights", NFT, NFT_SHAPES, {}, 6, 1.2, 288),
    Trained("nft_own", "the same + flow matching", NFT, NFT_SHAPES, OWN, 6, 1.2, 288),
    Trained("elbo", "policy gradient of the ELBO", NFT, f"{NFT_SHAPES},elbo", {}, 6, 1.2, 288),
    Trained("elbo_own", "the same + flow matching", NFT, f"{NFT_SHAPES},long,elbo", {}, 6, 1.2, 288),
    Trained("dgpo", "DGPO", NFT, f"{NFT_SHAPES},dgpo", {}, 6, 1.2, 288),
    Trained("awm", "AWM", NFT, f"{NFT_SHAPES},awm", {}, 6, 1.2, 288),
    Trained("nft_lora", "DiffusionNFT + flow matching, LoRA", NFT, NFT_SHAPES, LORA_OWN, 6, 1.2, 288),
    Trained("dpo_online", "DPO, online", DPO, f"{DPO_SHAPES},online", {}, 8, 1.5, 128),
    Trained("dpo", "DPO, offline", DPO, DPO_SHAPES, {}, 4, 0.7, 128),
)
GPU = {"reward.batch_size": 544, "eval.batch_size": 544, "vae_batch_size": 288}


def settings_of(run: Trained, seed: int, args) -> dict[str, float | int | bool | str]:
    every = max(1, round(args.seconds / NUM_POINTS / (run.gpu_epoch_s if args.gpu else run.epoch_s)))
    settings = dict(run.settings) | {"eval.noises_per_prompt": args.noises} | (GPU if args.gpu else {})
    settings |= {"eval_freq": every, "eval.test_freq": every, "save_freq": every, "keep_checkpoints": 1}
    settings |= {"eval.best_by": learn_record.FIGURE, "num_epochs": NUM_EPOCHS, "seed": seed, "resume_from": "latest"}
    settings |= {"output_dir": str(args.out), "run_name": f"{run.name}_seed{seed}"}
    if run.name == "dpo":
        settings["preferences.path"] = str(args.out / "preferences")
    if args.gpu:
        settings["sample.batch_size"] = run.gpu_batch_size
        settings["cache_dir"] = str(args.out / "cache")
    return settings


def flags_of(settings: dict, extra: list[str]) -> list[str]:
    """On the command line; what the user says comes last and wins."""
    return [f"--config.{key}={value}" for key, value in settings.items()] + [f"--config.{text}" for text in extra]


def spent_s(folder: Path) -> float:
    """Seconds that are in a run's newest checkpoint."""
    newest = checkpoints.find_newest(folder / "checkpoints") if (folder / "checkpoints").is_dir() else None
    epochs = int(newest.name.split("_")[-1]) if newest else 0
    return sum(line.get("time/epoch_s", 0.0) for line in read_metrics(folder) if line["epoch"] < epochs)


def command_of(run: Trained, seed: int, args) -> list[str]:
    """The command that begins a run, or goes on with it for the seconds that are left."""
    left_s = max(args.seconds - spent_s(args.out / f"{run.name}_seed{seed}"), 1e-3)
    settings = settings_of(run, seed, args) | {"max_hours": left_s / 3600}
    return [sys.executable, run.script, f"--config={run.config}", *flags_of(settings, args.set)]


def execute(command: list[str], log: Path, num_threads: int, number: int) -> int:
    """Run a command, its words appended to a file; its exit status. Several GPUs are dealt by its number."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"OMP_NUM_THREADS": str(num_threads), "WANDB_MODE": "disabled"} | os.environ | {"PYTHONPATH": paths}
    if count := torch.cuda.device_count():
        env["CUDA_VISIBLE_DEVICES"] = str(number % count)
    with log.open("a") as file:
        return subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, check=False).returncode


def job(number: int, name: str, command: list[str], args) -> bool:
    """Run what is not finished, and say how it ended; whether it is finished now."""
    folder, log = args.out / name, args.out / f"{name}.log"
    if learn_record.is_finished(read_metrics(folder)):
        print(f"{name}: finished before", flush=True)
        return True
    start, threads = time.monotonic(), max(1, (os.cpu_count() or 1) // args.parallel)
    status = execute(command, log, threads, number)
    finished = learn_record.is_finished(read_metrics(folder))
    outcome = "finished" if finished else f"ended with exit status {status} before its end, see {log}"
    print(f"{name}: {outcome}, {time.monotonic() - start:.0f} s", flush=True)
    return finished


def prepare_pairs(args) -> bool:
    """Make the pairs of offline DPO, once; write how many images and seconds they took as a line of metrics.jsonl."""
    path, folder = args.out / "preferences", args.out / PAIRS
    settings = {"preferences.path": str(path), "seed": 1} | (GPU if args.gpu else {})
    settings |= {"sample.batch_size": 256} if args.gpu else {}
    command = [sys.executable, "scripts/prepare_preferences.py", "--config=config/dpo.py:shapes_qwenimage_dpo"]
    if read_metrics(folder):
        return True
    start = time.monotonic()
    status = execute(command + flags_of(settings, args.set), args.out / f"{PAIRS}.log", os.cpu_count() or 1, 0)
    if status == 0:
        learn_record.write_pairs_line(folder, path / "report.json", time.monotonic() - start)
    print(f"{PAIRS}: exit status {status}, {time.monotonic() - start:.0f} s", flush=True)
    return status == 0


def train(args) -> int:
    """Run everything that is not finished; the number of runs that are not finished then."""
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [run for run in RUNS if run.name in args.only]
    ready = prepare_pairs(args) if any(run.name == "dpo" for run in chosen) else True
    jobs = [
        (f"{run.name}_seed{seed}", lambda run=run, seed=seed: command_of(run, seed, args))
        for seed in args.seeds  # first a seed of every run
        for run in chosen
        if ready or run.name != "dpo"
    ]
    with ThreadPoolExecutor(args.parallel) as pool:
        finished = pool.map(lambda number: job(number, jobs[number][0], jobs[number][1](), args), range(len(jobs)))
        return list(finished).count(False)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("train", help="make the runs").add_argument
    add("--out", type=Path, default=Path("runs/learn"), help="folder of the study")
    add("--seconds", type=float, default=600.0, help="of each run, its evaluations included")
    add("--parallel", type=int, default=1, help="processes side by side")
    add("--only", nargs="+", choices=[run.name for run in RUNS], default=[run.name for run in RUNS])
    add("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS)
    add("--gpu", action="store_true", help="larger batches, and embeddings that the runs share")
    add("--noises", type=int, help="images of each prompt in an evaluation; default: 4 with --gpu, else 1")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run, such as eval.num_prompts=24")
    add = commands.add_parser("draw", help="make the table and the report").add_argument
    add("--out", type=Path, default=Path("runs/learn"), help="folder of the study")
    return parser


def main(args) -> int:
    unfinished = 0
    if args.command == "train":
        args.noises = args.noises or (4 if args.gpu else 1)
        unfinished = train(args)
    print(learn_record.draw(args.out, [(run.name, run.title) for run in RUNS], SEEDS))
    return unfinished


if __name__ == "__main__":
    try:
        sys.exit(main(command_line.arguments(parser())) > 0)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"learn.py: {error}") from error
