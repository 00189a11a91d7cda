"""Is an adapter that was trained on 8 or 4 bits as good? Algorithms on the tiny model, on several bases, three seeds.

    python benchmarks/learn_quantised.py --out runs/quantised --parallel 2
    python benchmarks/learn_quantised.py --out runs/quantised --parallel 36        several GPUs share the runs

All runs of an algorithm have the same epochs and settings but for the base. Afterwards each is evaluated on the
base that it was trained on and on the full one: strict accuracy on the test prompts, of the last averaged weights. OUT
gets lines.jsonl and table.md; what is finished is not run again.
"""

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from learn import DPO, GRPO, NFT, PR, SEEDS, execute

BASES = {  # by the name of a run
    "full": {},
    "8bit": {"base_precision": "8bit"},
    "8bit_fast": {"base_precision": "8bit", "sample.fast_precision": "fp8"},
    "8bit_merged": {"base_precision": "8bit", "sample.fast_precision": "fp8", "sample.merge_adapter": True},
    "fp8": {"base_precision": "fp8"},
    "fp8_merged": {"base_precision": "fp8", "sample.fast_precision": "fp8", "sample.merge_adapter": True},
    "4bit": {"base_precision": "4bit"},
}
FIGURE = "shapes_accuracy"
SHARED = {"lora.rank": 32, "lora.alpha": 64, "sample.merge_adapter": False, "save_freq": 0, "eval_freq": 0}


class Trained(NamedTuple):
    """An algorithm with the epochs that it takes to learn something."""

    title: str
    script: str
    config: str
    epochs: int
    settings: dict[str, float | int]


RUNS = {
    "window": Trained("window of 2 steps", GRPO, "config/grpo.py:shapes_qwenimage", 100, {"sample.batch_size": 128}),
    "branches": Trained("branches", PR, "config/grpo.py:shapes_qwenimage_pr", 28, {"sample.batch_size": 72}),
    "nft": Trained(
        *("DiffusionNFT", NFT, "config/nft.py:shapes_qwenimage_nft,long", 120),
        {"sample.batch_size": 288, "train.learning_rate": 2e-3},
    ),
    "dpo": Trained("DPO, online", DPO, "config/dpo.py:shapes_qwenimage_dpo,online", 60, {"sample.batch_size": 128}),
}


def settings_of(run: Trained, name: str, base: str, seed: int, args) -> dict[str, float | int | bool | str]:
    """Every setting of one run."""
    own = BASES[base] | {"num_epochs": args.epochs or run.epochs, "seed": seed}
    place = {"output_dir": str(args.out), "run_name": name, "eval.noises_per_prompt": args.noises}
    return SHARED | run.settings | own | place


def job(number: int, algorithm: str, base: str, seed: int, args) -> dict | None:
    """Train and evaluate; a line of the record, or None where a command failed."""
    run, name = RUNS[algorithm], f"{algorithm}_{base}_seed{seed}"
    folder, log = args.out / name, args.out / f"{name}.log"
    flags = [f"--config.{key}={value}" for key, value in settings_of(run, name, base, seed, args).items()]
    train = [sys.executable, run.script, f"--config={run.config}", *flags, *(f"--config.{text}" for text in args.set)]
    if not (folder / "README.md").exists() and execute(train, log, args.threads, number):
        print(f"{name}: training failed, see {log}", flush=True)
        return None
    line = dict(algorithm=algorithm, base=base, seed=seed)
    for on in dict.fromkeys((base, "full")):
        scores = args.out / f"{name}_on_{on}" / "scores.json"
        words = ["scripts/evaluate.py", folder, "--weights", "last", "--out", scores.parent]
        evaluate = [sys.executable, *map(str, words), *([] if on == base else ["--set", "base_precision=''"])]
        if not scores.exists() and execute(evaluate, log, args.threads, number):
            print(f"{name}: evaluation failed, see {log}", flush=True)
            return None
        line["own" if on == base else "full"] = json.loads(scores.read_text())["rows"][0]["all"][FIGURE]["mean"]
    print(json.dumps(line), flush=True)
    return line | {"full": line.get("full", line["own"])}


def table(lines: list[dict]) -> str:
    """Means over the seeds, with each seed, of every algorithm and base."""
    rows = [
        "| | trained on | evaluated on its own base | on the full base | seeds, on its own |",
        "|---|---|---|---|---|",
    ]
    for algorithm, run in RUNS.items():
        for base in BASES:
            chosen = [line for line in lines if (line["algorithm"], line["base"]) == (algorithm, base)]
            if chosen:
                own, full = (statistics.fmean(line[on] for line in chosen) for on in ("own", "full"))
                seeds = ", ".join(f"{line['own']:.3f}" for line in chosen)
                rows.append(f"| {run.title} | {base} | {own:.3f} | {full:.3f} | {seeds} |")
    return "\n".join(rows) + "\n"


def main(args) -> int:
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [(algorithm, base, seed) for seed in args.seeds for algorithm in args.only for base in args.bases]
    with ThreadPoolExecutor(args.parallel) as pool:
        lines = list(pool.map(lambda number: job(number, *jobs[number], args), range(len(jobs))))
    finished = [line for line in lines if line]
    (args.out / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in finished))
    (args.out / "table.md").write_text(table(finished))
    print(table(finished))
    return len(lines) - len(finished)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/quantised"), help="folder of the study")
    add("--only", nargs="+", choices=RUNS, default=list(RUNS), help="algorithms")
    add("--bases", nargs="+", choices=BASES, default=list(BASES), help="what is trained on")
    add("--seeds", type=int, nargs="+", default=SEEDS)
    add("--epochs", type=int, default=0, help="of every run; 0 = the algorithm's own")
    add("--noises", type=int, default=4, help="images of each test prompt")
    add("--parallel", type=int, default=1, help="processes side by side")
    add("--threads", type=int, default=1, help="of each process on the CPU")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run")
    return parser


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()) > 0)
