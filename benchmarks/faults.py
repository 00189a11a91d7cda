"""Tries to break the project for some minutes: kills, full disks, damaged files, hostile servers, clients, settings.

    python benchmarks/faults.py --minutes 20 --seed 1
    python benchmarks/faults.py --minutes 5 --kinds settings files
    python benchmarks/faults.py --seed 1 --only settings:17

Every try is a process of its own, with limits of time and memory and a folder, which stays if the try ended badly. A
try is named by kind and number; with the same seed it is the same again. OUT/tries.jsonl has a line for each,
OUT/table.md counts them and lists the bad ones. The exit status is 1 if there are any.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from faults_runs import Bench
from faults_tries import Record, Try, adopt_orphans, start

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
SHARES = {  # kind -> its part of the time; each is a module of this folder, faults_KIND.py
    "settings": 6,
    "prompts": 3,
    "rewards": 2,
    "files": 5,
    "pairs": 1,
    "pickles": 3,
    "kills": 8,
    "twice": 2,
    "disks": 2,
    "client": 3,
    "server": 3,
}
IMPORTS = ("evaluate", "prepare_preferences", "train_qwenimage_pr", "train_qwenimage_nft", "train_qwenimage_dpo")
IMPORTS += ("flow_grpo.scoring.serve", "flow_grpo.diffusers_patch.qwenimage_pipeline_with_logprob", "matplotlib.pyplot")


def run(args: argparse.Namespace, say: Callable[[Record], None]) -> list[Record]:
    """Tries of the chosen kinds, side by side if asked, until the time is over; each kind gets its share of it."""
    bench = Bench(args.out / "shared")
    kinds = {kind: importlib.import_module(f"faults_{kind}") for kind in args.kinds}
    waiting = {kind: tries_of(kind, kinds[kind], bench, args) for kind in args.kinds}
    spent, records, running = dict.fromkeys(args.kinds, 0.0), [], []
    end = time.monotonic() + args.minutes * 60
    while running or waiting:
        if time.monotonic() > end:
            waiting = {}
        if waiting and len(running) < args.parallel:
            kind = min(waiting, key=lambda kind: spent[kind] / SHARES[kind])
            attempt = next(waiting[kind], None)
            if attempt is None:
                del waiting[kind]
                continue
            spent[kind] += 0.05  # so that another kind is next where several run side by side
            running.append(start(attempt, args.out / "tries" / f"{kind}_{attempt.number:05d}"))
        for one in running[:]:
            if record := one.finished():
                running.remove(one)
                spent[record.kind] += record.seconds
                records.append(record)
                say(record)
        time.sleep(0.005)
    return records


def tries_of(name: str, module: ModuleType, bench: Bench, args: argparse.Namespace) -> Iterator[Try]:
    """The tries of a kind that are asked for. What a try needs is made before it is."""
    chosen = [name.partition(":") for name in args.only]
    numbers = [int(number) for kind, _, number in chosen if kind == name] if chosen else range(10**9)
    return (module.make(bench, args.seed, number) for number in numbers)


def table(records: list[Record], args: argparse.Namespace) -> str:
    """Tries, good and bad ones by kind, and a line for each bad one."""
    by_kind = defaultdict(list)
    for record in records:
        by_kind[record.kind].append(record)
    lines = [f"Seed {args.seed}, {args.minutes:g} minutes, {args.parallel} at a time.\n"]
    lines += ["| kind | tries | good | bad | s per try | tries per minute |", "|---|---|---|---|---|---|"]
    rows = [*by_kind.items(), ("sum", records)]
    for kind, tried in rows:
        good, seconds = Counter(record.outcome for record in tried)["good"], sum(record.seconds for record in tried)
        each = seconds / max(1, len(tried))
        lines.append(
            f"| {kind} | {len(tried)} | {good} | {len(tried) - good} | {each:.1f} | {60 / max(each, 1e-3):.0f} |"
        )
    lines += ["\n| bad try | what | why |", "|---|---|---|"]
    for record in records:
        if record.outcome == "bad":
            cells = [f"{record.kind}:{record.number}", record.what[:300], record.why[:300]]
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=20.0, help="a try that runs then is finished")
    add("--seed", type=int, default=1)
    add("--kinds", nargs="+", choices=SHARES, default=list(SHARES), metavar="KIND", help=", ".join(SHARES))
    add("--only", nargs="+", default=[], metavar="KIND:NUMBER", help="some tries again")
    add("--parallel", type=int, default=1, help="tries side by side")
    add("--out", type=Path, default=Path("runs/faults"), help="folder of the table, the lines and what bad tries left")
    return parser


def import_all() -> None:
    """What the commands import, once for all of them."""
    sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent)]
    for name in IMPORTS:
        importlib.import_module(name)


def main(args: argparse.Namespace) -> int:
    """The number of bad tries."""
    if args.only:
        args.kinds = list(dict.fromkeys(name.partition(":")[0] for name in args.only))
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    adopt_orphans()
    import_all()
    with (args.out / "tries.jsonl").open("w") as file:

        def say(record: Record) -> None:
            file.write(json.dumps(record._asdict()) + "\n")
            file.flush()
            print(
                f"{record.kind}:{record.number} {record.outcome} {record.seconds:.1f} s  {record.why[:150]}", flush=True
            )

        records = run(args, say)
    (args.out / "table.md").write_text(table(records, args), errors="backslashreplace")
    print(table(records, args))
    return sum(record.outcome == "bad" for record in records)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # what was tried may be no text
    os.environ.update(OMP_NUM_THREADS="1", WANDB_MODE="disabled", HF_HUB_OFFLINE="1")
    sys.exit(main(parser().parse_args()) > 0)
