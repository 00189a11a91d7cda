"""Weak scaling: bench.py with the same work per GPU on 1, 2, 4 and 8 GPUs of one host, one JSON line each.

    python benchmarks/scaling.py lines.jsonl --runs branches branches_8_bit     measure, or go on measuring
    python benchmarks/scaling.py lines.jsonl                                    what the lines say

Runs on fewer GPUs than the host has go side by side, on GPUs of their own. What the file holds is not measured again,
and after `--minutes` nothing is begun, so a host can be used for ten minutes at a time. `start` writes 57 GB of
weights to --model once, and reads them. In `reward` the last GPU scores what the others draw: `reward_alone_s` is the
time that an epoch's scores take on their own, and `hidden_share` the share of it that the epoch does not wait.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from build_random_pipeline import clip_model, clip_tokenizer
from transformers import CLIPImageProcessor, CLIPProcessor

from flow_grpo.base.formatting import counted
from flow_grpo.base.prompt import Prompt
from flow_grpo.command_line import command_line
from flow_grpo.command_line.gpus import visible_gpus
from flow_grpo.rewards.clients.client import Server, ServerError
from flow_grpo.scoring.pool import Pool
from flow_grpo.settings.sections import Reward

CACHES = Path("/proc/sys/vm/drop_caches")
PORTS = 18087, 18088  # of the servers of one reward


class Configuration(NamedTuple):
    """A run of bench.py: the script, how many prompts each GPU gets, and settings."""

    words: str  # value of --script, with further flags
    prompts: int
    changes: str = ""  # for --set
    alone: bool = False  # with nothing beside it


FAST = "--size full --variants ,large_gpu"
EIGHT_BITS = "--size full --variants ,large_gpu,eight_bit_base"
BRANCHES = "sample.num_branches=2 sample.num_steps=6"  # a shorter epoch, less work between collectives
SHARDED = "lora.rank=0 fsdp.mode=shard compile=False sample.batch_size=8 train.updates_per_epoch=1"
RUNS = {
    "branches": Configuration(f"train_qwenimage_pr {FAST}", 2, BRANCHES),
    "branches_8_bit": Configuration(f"train_qwenimage_pr {EIGHT_BITS}", 2, BRANCHES),
    "windows": Configuration(f"train_qwenimage {FAST}", 1),
    "windows_8_bit": Configuration(f"train_qwenimage {EIGHT_BITS}", 1),
    "nft": Configuration(f"train_qwenimage_nft {FAST}", 1),
    "nft_8_bit": Configuration(f"train_qwenimage_nft {EIGHT_BITS}", 1),
    "full_weights": Configuration("train_qwenimage --size full", 1, SHARDED),
    "start": Configuration("train_qwenimage --size full --variants ,eight_bit_base", 1, alone=True),
    "reward": Configuration(f"train_qwenimage {EIGHT_BITS}", 2, alone=True),
}


class Job:
    """A run of bench.py on some of the GPUs that this process sees."""

    def __init__(self, name: str, gpus: list[str], args: argparse.Namespace, stack: contextlib.ExitStack):
        self.name = name
        self.gpus = gpus
        self.most_gib = {}  # memory of the host, by kind
        self.servers = []
        words = bench_words(name, len(gpus), args)
        if name == "start":
            drop_caches()
        if name == "reward":
            self.servers = start_servers(len(gpus), args.lines.with_name("clip"), stack)
            words += ['reward_fn={"pickscore": 1.0}', f"reward.args={json.dumps(served_by(self.servers))}"]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={len(gpus)}"]
        command = [*launch, "benchmarks/bench.py", *words]
        self.out = args.lines.with_name(f"{name}_{len(gpus)}.json")
        self.log = args.lines.with_name(f"{name}_{len(gpus)}.log")
        with self.out.open("w") as out, self.log.open("w") as log:
            self.process = stack.enter_context(started(command, env=environment(gpus), stdout=out, stderr=log))

    def is_running(self) -> bool:
        """Say whether the process has not ended; note how much of the host's memory it uses."""
        for kind, gib in host_gib(self.process.pid).items():
            self.most_gib[kind] = max(self.most_gib.get(kind, 0.0), gib)
        return self.process.poll() is None

    def line(self) -> dict:
        """Return what the run measured; if it failed, print the end of its log and return {}."""
        if self.process.returncode:
            print(f"{self.name} on {counted(len(self.gpus), 'GPUs')}: {self.log.read_text()[-3000:]}", file=sys.stderr)
            return {}
        line = json.loads(self.out.read_text().splitlines()[-1])
        line |= self.most_gib
        line["configuration"] = self.name
        if self.servers:
            line["reward_alone_s"] = seconds_to_score(int(line["images"]), self.servers)
            line["hidden_share"] = 1 - line["time/reward_s"] / line["reward_alone_s"]
        return line


def environment(gpus: list[str]) -> dict[str, str]:
    """Return the variables of a run on some of the GPUs that this process sees."""
    variables = dict(os.environ)
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    # torchrun gives each of several ranks one thread of the CPU, but a single rank as many as the host has cores, which
    # single runs side by side then fight for.
    variables.setdefault("OMP_NUM_THREADS", "1")
    return variables


def bench_words(name: str, num_gpus: int, args: argparse.Namespace) -> list[str]:
    """Return the arguments of bench.py; those of --set come last, so that more of them can follow."""
    run = RUNS[name]
    words = ["--script", *run.words.split()]
    if name == "start":
        words += ["--folder", str(args.model)]
    if name == "full_weights":
        words += ["--layers", str(args.layers)]
    changes = [f"sample.num_prompts_per_epoch={run.prompts * num_gpus}", "logger=none", *run.changes.split()]
    return [*words, "--set", *changes, *args.set]


@contextlib.contextmanager
def started(command: list[str], **how) -> Iterator[subprocess.Popen]:
    """Start a process that does not outlive the block."""
    process = subprocess.Popen(command, **how)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def host_gib(pid: int) -> dict[str, float]:
    """Return the GiB of the host that a process and its descendants hold, what they share counted once.

    Memory of their own and files that they map are counted apart.
    """
    kinds = {"Pss_Anon:": "host/own_gib", "Pss_File:": "host/files_gib"}
    found = dict.fromkeys(kinds.values(), 0.0)
    waiting = [str(pid)]
    while waiting:
        process = Path("/proc", waiting.pop())
        with contextlib.suppress(OSError):  # it has ended
            children = process / "task" / process.name / "children"
            waiting += children.read_text().split()
            for line in (process / "smaps_rollup").read_text().splitlines():
                words = line.split()
                if words[0] in kinds:
                    found[kinds[words[0]]] += int(words[1]) / 2**20
    return found


def drop_caches() -> None:
    """Have the system forget what it has read of the disk, where this user may."""
    os.sync()
    if os.access(CACHES, os.W_OK):
        CACHES.write_text("3")


def write_model(folder: Path) -> None:
    """Write random weights of Qwen-Image, unless they are there."""
    if not (folder / "model_index.json").exists():
        build = [sys.executable, "tools/build_random_pipeline.py", "--published", "qwenimage", str(folder)]
        subprocess.run(build, check=True)


def pending(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the configurations that are not measured yet, each with a number of GPUs: those of --gpus, else powers of
    two, few before many; at the end `reward`, on all GPUs but one."""
    most = len(visible_gpus())
    counts = args.gpus or powers_of_two(most)
    runs = []
    for count in counts:
        runs += [(name, count) for name in args.runs if name != "reward"]
    if "reward" in args.runs:
        runs.append(("reward", most - 1))
    measured = [(line["configuration"], line["gpus"]) for line in read(args.lines)]
    return [run for run in runs if run not in measured]


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, up to a number."""
    powers = []
    power = 1
    while power <= most:
        powers.append(power)
        power *= 2
    return powers


def measure(args: argparse.Namespace, end_s: float, stack: contextlib.ExitStack) -> None:
    """Run what is pending wherever GPUs are free and write a line for each."""
    jobs = []
    left = pending(args)
    free = visible_gpus()
    while jobs or (left and time.monotonic() < end_s):
        if time.monotonic() < end_s:
            begin(left, free, jobs, args, stack)
        time.sleep(1)
        for job in list(jobs):
            if not job.is_running():
                jobs.remove(job)
                free += job.gpus
                free.sort()
                write(args.lines, job.line())


def begin(
    left: list[tuple[str, int]],
    free: list[str],
    jobs: list[Job],
    args: argparse.Namespace,
    stack: contextlib.ExitStack,
) -> None:
    """Start what is left as far as GPUs are free: move runs from `left` to `jobs`, and take their GPUs from `free`."""
    for run in list(left):
        name, count = run
        # A run that is to be alone waits for the others, and they wait for it.
        has_to_wait = bool(jobs) and (RUNS[name].alone or any(RUNS[job.name].alone for job in jobs))
        if len(free) >= count and not has_to_wait:
            left.remove(run)
            gpus = free[:count]
            del free[:count]
            jobs.append(Job(name, gpus, args, stack))


def start_servers(gpu: int, folder: Path, stack: contextlib.ExitStack) -> list[str]:
    """Serve a scorer of random weights on a GPU, at each of PORTS; return the addresses once all answer."""
    clip_model().save_pretrained(folder)
    CLIPProcessor(CLIPImageProcessor(), clip_tokenizer()).save_pretrained(folder)
    device = f"cuda:{gpu}" if torch.cuda.is_available() else "cpu"
    serve = [sys.executable, "scripts/serve_reward.py", "pickscore", "--device", device, "--options"]
    options = json.dumps(dict(model=str(folder), processor=str(folder)))
    processes = {}
    for port in PORTS:
        process = stack.enter_context(started([*serve, options, "--port", str(port)]))
        processes[f"http://127.0.0.1:{port}"] = process
    urls = list(processes)
    server = Server(urls)
    for url, process in processes.items():
        while not answers(server, url):
            if process.poll() is not None:
                raise RuntimeError(f"the reward server at {url} ended with exit status {process.returncode}")
            time.sleep(1)
    return urls


def answers(server: Server, url: str) -> bool:
    with contextlib.suppress(ServerError):
        return bool(server.health(url))
    return False


def served_by(urls: list[str]) -> dict:
    """Return config.reward.args of a reward with these servers; requests are small enough that both share a batch."""
    return {"pickscore": {"url": urls, "batch_size": 8}}


def seconds_to_score(num_images: int, urls: list[str]) -> float:
    """Return the seconds that the servers need for some images with nothing else going on."""
    pool = Pool(torch.device("cpu"), {"pickscore": 1.0}, (), Reward(args=served_by(urls)))
    images = torch.rand(num_images, 3, 512, 512)
    prompts = [Prompt("a red circle")] * num_images
    start = time.perf_counter()
    pool.submit(images, prompts)()
    return time.perf_counter() - start


def read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, line: dict) -> None:
    # The file comes about with the first run that ends, even if that one has failed.
    with path.open("a") as file:
        if line:
            file.write(json.dumps(line) + "\n")


COLUMNS = [
    "images_per_s",
    "collectives/cpu_s",
    "collectives/gpu_s",
    "parity/log_prob_abs_diff_max",
    "first_update_s",
    "host/own_gib",
    "host/files_gib",
    "memory/reserved_gib",
    "hidden_share",
]


def table(lines: list[dict]) -> str:
    """Return a table of all lines, with images per second as a share of what as many single GPUs make."""
    of_one_gpu = {line["configuration"]: line["images_per_s"] for line in lines if line["gpus"] == 1}
    rows = [["configuration", "gpus", "efficiency", *COLUMNS]]
    for line in lines:
        ideal = of_one_gpu.get(line["configuration"], math.nan) * line["gpus"]
        figures = [line["images_per_s"] / ideal]
        figures += [line.get(name, math.nan) for name in COLUMNS]
        cells = [f"{figure:.3g}" for figure in figures]
        rows.append([line["configuration"], str(line["gpus"]), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(args: argparse.Namespace) -> None:
    if "reward" in args.runs and len(visible_gpus()) < 2:
        sys.exit("reward takes at least two GPUs: one scores what the others draw")
    if "start" in args.runs:
        write_model(args.model)
    with contextlib.ExitStack() as stack:
        measure(args, time.monotonic() + 60 * args.minutes, stack)
    print(table(read(args.lines)))


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for a flag that names a value twice, and for a setting without a value."""
    command_line.check_no_repeats("--runs", args.runs)
    command_line.check_no_repeats("--gpus", args.gpus)
    command_line.check_set(args.set)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[], metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--minutes", type=float, default=8.0, help="after which nothing is begun")
    parser.add_argument("--model", type=Path, default=Path("random_qwenimage"), help="folder of start's weights")
    parser.add_argument("--gpus", type=int, nargs="+", default=[], help="numbers of GPUs; default: powers of two")
    parser.add_argument("--layers", type=int, default=12, help="blocks of full_weights, of which one GPU holds all")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the config, as of bench.py")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # through the blocks that end what it has started
    main(command_line.arguments(parser(), check_flags))
