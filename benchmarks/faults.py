"""Tries to break runs for some minutes: a file of a run folder is damaged, or a run is killed at a random moment.

    python benchmarks/faults.py --minutes 20 --seed 1
    python benchmarks/faults.py --minutes 5 --kinds kills --parallel 2
    python benchmarks/faults.py --seed 1 --only files:17 kills:3

A try is good if the run, resumed, ends as the undisturbed one, bit for bit, or if its last line, which is no traceback,
names the file. It is named by kind and number; with the same seed it is the same again, but for the clock. The folder
of a bad one stays. OUT/tries.jsonl has a line for each, OUT/table.md counts them; the exit status is 1 if one is bad.
Odd settings, prompts, rewards, servers, pairs, full disks and two runs at once have tests of their own.
"""

import argparse
import io
import itertools
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from flow_grpo.base import checksums, rng

ROOT = Path(__file__).resolve().parents[1]
ENV = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
LIMIT_S, GONE_S = 300.0, 15.0  # of a run to its end; of a killed one until its processes are gone
BEFORE, WHOLE = 2, 3  # epochs of the run that is damaged, and of whole ones
CLOCKS = ("time/", "images_per_s", "memory/")  # figures that no two runs share
FLAG = "code_has_run"
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
FOREIGN = (None, -3, 10**9, "x", [], {}, 1e308, True, "\ud800")  # values in the place of another

SMALL = {"height": 32, "width": 32, "num_epochs": WHOLE, "save_freq": 1, "eval_freq": 1}
SMALL |= {"reward_fn.shapes": 0.0, "reward_fn.jpeg_compressibility": 1.0, "lora.rank": 2, "lora.alpha": 4}
SMALL |= {"sample.num_prompts_per_epoch": 2, "sample.num_images_per_prompt": 2, "sample.batch_size": 2}
SMALL |= {"sample.num_steps": 3, "eval.num_steps": 2, "eval.num_prompts": 2}
SMALL |= {"train.learning_rate": 1e-3, "train.updates_per_epoch": 1, "train.ema_interval": 1}
BRANCHES = {"sample.num_branches": 2, "sample.num_images_per_prompt": 1, "sample.batch_size": 1}
UNGUIDED = {"train.reference_guidance_scale": 0.0, "train.beta": 0.01}
RECIPES = {  # algorithm -> the end of its script's name, config and settings
    "grpo": ("", "grpo.py:shapes_qwenimage", {"sample.sde_window_range": (0, 2), "sample.sde_window_size": 1}),
    "pr": ("_pr", "grpo.py:shapes_qwenimage_pr", BRANCHES | {"train.timestep_fraction": 1.0}),
    "nft": ("_nft", "nft.py:shapes_qwenimage_nft", UNGUIDED | {"train.timestep_fraction": 1.0}),
    "dpo": ("_dpo", "dpo.py:shapes_qwenimage_dpo,online", {}),
}


class Verdict(NamedTuple):
    good: bool
    why: str


class Ended(NamedTuple):
    """What became of the processes of a run."""

    status: int | None  # exit status, or minus the signal; None = still at work at the limit
    output: str

    @property
    def last(self) -> str:
        return ([line for line in self.output.splitlines() if line.strip()] or [""])[-1].strip()


class Dice:
    """Random choices of one named stream."""

    def __init__(self, seed: int, kind: str, number: int):
        self.generator = rng.generator(seed, "faults", kind, number)

    def below(self, limit: int) -> int:
        return int(torch.randint(max(1, limit), (), generator=self.generator))

    def share(self) -> float:
        return float(torch.rand((), generator=self.generator))

    def pick(self, choices):
        return choices[self.below(len(choices))]

    def bytes(self, count: int) -> bytes:
        return torch.randint(256, (count,), generator=self.generator, dtype=torch.uint8).numpy().tobytes()


def start(words: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen:
    """A program with its arguments; what it says goes to a file."""
    with log.open("w") as file:
        command, env = [sys.executable, *words], os.environ | ENV | env
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)


def start_ranks(words: list[str], log: Path, ranks: int) -> list:
    """The processes that torchrun would start; one rank is a run without it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    envs = [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]
    return [start(words, log.with_name(f"{log.name}.{rank}.log"), env) for rank, env in enumerate(envs)]


def finish(processes: list, log: Path, limit_s: float) -> Ended:
    """Until all have ended or the time is over; then they are killed. The worst of their exit statuses."""
    end = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.01)
    statuses = [process.poll() for process in processes]
    for process in processes:
        send(process, signal.SIGKILL)
        process.wait()
    output = "\n".join(path.read_text(errors="replace") for path in sorted(log.parent.glob(f"{log.name}.*.log")))
    return Ended(None if None in statuses else max(statuses, key=abs), output)


def send(process, number: int) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


class Shared:
    """A few prompts, and whole runs by algorithm, made when they are first asked for."""

    def __init__(self, folder: Path):
        self.folder, self.prompts, self.lock = folder, folder / "prompts", threading.Lock()
        self.prompts.mkdir(parents=True, exist_ok=True)
        for name in (
            "train_metadata.jsonl",
            "test_metadata.jsonl",
        ):  # to check the shipped ones takes longer than a run
            lines = (ROOT / "dataset" / "shapes" / name).read_text().splitlines(keepends=True)
            (self.prompts / name).write_text("".join(lines[:: len(lines) // 8][:8]))

    def words(self, algorithm: str, output_dir: Path, **settings) -> list[str]:
        """The command of a smallest run."""
        script, config, own = RECIPES[algorithm]
        settings = SMALL | {"dataset": self.prompts, "output_dir": output_dir} | own | settings
        words = [f"scripts/train_qwenimage{script}.py", f"--config=config/{config},smoke"]
        return words + [f"--config.{key}={value}" for key, value in settings.items()]

    def whole(self, algorithm: str, ranks: int = 1, num_epochs: int = WHOLE) -> Path:
        """The folder of an undisturbed run."""
        place = self.folder / f"{algorithm}_{ranks}_{num_epochs}"
        with self.lock:
            if not place.with_suffix(".done").exists():
                shutil.rmtree(place, ignore_errors=True)
                log = self.folder / place.name
                ended = finish(
                    start_ranks(self.words(algorithm, place, num_epochs=num_epochs), log, ranks), log, LIMIT_S
                )
                if ended.status != 0:
                    raise RuntimeError(f"the whole run {place.name} ended with {ended.status}: {ended.last}")
                place.with_suffix(".done").touch()
        (run,) = (path for path in place.iterdir() if path.is_dir())
        return run


def differences(folder: Path, whole: Path, from_epoch: int = 0, *but: str) -> str:
    """In what two run folders differ, "" = in nothing; weights in whose path one of `but` is are left out."""
    for expected in sorted(whole.rglob("*.safetensors")):
        name = expected.relative_to(whole)
        if any(part in str(name) for part in but):
            continue
        try:
            tensors, wanted = load_file(folder / name), load_file(expected)
        except (OSError, SafetensorError) as error:
            return f"{name} is missing or unreadable: {error}"
        if tensors.keys() != wanted.keys() or not all(same(tensors[key], wanted[key]) for key in wanted):
            return f"tensors differ in {name}"
    try:
        lines, wanted = (lines_of(place, from_epoch, "best/" in but) for place in (folder, whole))
    except (OSError, ValueError) as error:
        return f"metrics.jsonl is unreadable: {error}"
    return "" if lines == wanted else f"metrics.jsonl has {len(lines)} other lines than the {len(wanted)}"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    return a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def lines_of(folder: Path, from_epoch: int, best_is_lost: bool) -> list[dict]:
    """What two runs share of metrics.jsonl: no clock, and no test in the middle, where a run that was prolonged had its
    end; from a later epoch on, no figure that compares with those before."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["epoch"] >= from_epoch]
    rows = [row for row in rows if row["kind"] != "test" or (row["epoch"] in (0, WHOLE) and not best_is_lost)]
    left_out = (*CLOCKS, "health/") if from_epoch else CLOCKS
    return [{key: value for key, value in row.items() if not key.startswith(left_out)} for row in rows]


def judge(ended: Ended, names: list[str]) -> Verdict:
    """Of a run that ended with an error: whether its last line is a sentence with one of `names`."""
    if ended.status is None:
        return Verdict(False, f"hang; it said: {ended.last[-200:]}")
    if ended.status < 0 or "Traceback (most recent call last)" in ended.output:
        return Verdict(False, f"crash or traceback, status {ended.status}: {ended.last[:300]}")
    if len(ended.last) > 2200 or not any(name in ended.last for name in names):
        return Verdict(False, f"a long message, or it names none of {', '.join(names)}: {ended.last[:300]}")
    return Verdict(True, f"refused: {ended.last[:300]}")


def files(shared: Shared, dice: Dice, folder: Path) -> Verdict:
    """Damage one file of a run of two epochs, and go on with it."""
    algorithm = dice.pick(list(RECIPES))
    source, whole = shared.whole(algorithm, num_epochs=BEFORE), shared.whole(algorithm)
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    newest = [name for name in names if f"epoch_{BEFORE:06d}" in name]
    file, damage = dice.pick(newest if dice.share() < 0.5 else names), dice.pick(DAMAGES)
    (folder / "what").write_text(f"{algorithm}, {damage.__name__} {file}")
    return damaged(shared, algorithm, file, damage, dice, folder, source, whole)


def damaged(shared, algorithm, file, damage, dice, folder, source, whole) -> Verdict:
    """What came of it."""
    run = folder / "runs" / source.name
    shutil.copytree(source, run, symlinks=True)
    damage(run / file, dice, folder / FLAG)
    log = folder / "resumed"
    words = shared.words(algorithm, folder / "runs", resume_from="latest")
    ended = finish(start_ranks(words, log, 1), log, LIMIT_S)
    if (folder / FLAG).exists():
        return Verdict(False, "code in the file has run")
    if ended.status != 0:
        return judge(ended, [Path(file).name, *(part for part in Path(file).parts if part.startswith("epoch_"))])
    left_out = f"epoch_{BEFORE:06d}/"  # a checkpoint that has done its part
    told = "not everything that others need" in ended.output  # of what is made of the exported weights
    first = BEFORE if Path(file).name == "metrics.jsonl" else 0  # damage to it may cost what it holds
    differ = differences(run, whole, first, left_out, "adapter_model" if told else left_out)
    if "best" in differ and "best/" in file and any(word in ended.output for word in ("damaged", "is no LoRA file")):
        differ = differences(run, whole, 0, left_out, "best/")
    again = f"epoch {BEFORE}/{WHOLE}" in ended.output
    if not differ and again and f"epoch_{BEFORE:06d}" not in ended.output:
        return Verdict(False, "went on from before the newest checkpoint without a word")
    return Verdict(not differ, f"silent: {differ}" if differ else "equal")


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, flag: Path):
        self.flag = flag

    def __reduce__(self):
        return os.system, (f"touch '{self.flag}'",)


def replace(path: Path, data: bytes) -> None:
    """New content, where a hard link's other names keep theirs."""
    path.unlink()
    path.write_bytes(data)


def flip(path: Path, dice: Dice, flag: Path) -> None:
    """One bit."""
    data = bytearray(path.read_bytes() or b"\0")
    data[dice.below(len(data))] ^= 1 << dice.below(8)
    replace(path, bytes(data))


def cut(path: Path, dice: Dice, flag: Path) -> None:
    data = path.read_bytes()
    replace(path, data[: dice.below(len(data))])


def zeros(path: Path, dice: Dice, flag: Path) -> None:
    """To the end, as a power loss leaves it."""
    data = path.read_bytes()
    intact = dice.below(len(data))
    replace(path, data[:intact] + bytes(len(data) - intact))


def noise(path: Path, dice: Dice, flag: Path) -> None:
    replace(path, path.read_bytes() * dice.below(2) + dice.bytes(1 + dice.below(2000)))


def gone(path: Path, dice: Dice, flag: Path) -> None:
    """Nothing in its place."""
    path.unlink()


def of_another(path: Path, dice: Dice, flag: Path) -> None:
    """The same file of the other checkpoint."""
    others = [other for other in path.parents[1].glob(f"*/{path.name}") if other != path and other.is_file()]
    replace(path, dice.pick(others).read_bytes() if others else b"another\n")


def altered(path: Path, dice: Dice, flag: Path) -> None:
    """A JSON file with one other value."""
    try:
        content = json.loads(path.read_text())
        content[dice.pick(sorted(content))] = dice.pick(FOREIGN)
    except (ValueError, TypeError):
        return flip(path, dice, flag)
    return replace(path, json.dumps(content).encode())


def pickled(path: Path, dice: Dice, flag: Path) -> None:
    """A pickle that runs code, plain or as torch writes it, with the checksum that fits."""
    buffer = io.BytesIO()
    torch.save({"state": Bomb(flag)}, buffer)
    data = dice.pick([pickle.dumps(Bomb(flag)), buffer.getvalue()])
    replace(path, data)
    for folder in path.parents:
        if (folder / checksums.FILE).is_file() and path.name != checksums.FILE:
            sums = json.loads((folder / checksums.FILE).read_text())
            sums[str(path.relative_to(folder))] = [len(data), zlib.crc32(data)]
            return replace(folder / checksums.FILE, json.dumps(sums).encode())
    return None


DAMAGES = (flip, flip, cut, zeros, noise, gone, of_another, altered, pickled, pickled)


def kills(shared: Shared, dice: Dice, folder: Path) -> Verdict:
    """One to three kills of a run on one or two ranks, then its end."""
    algorithm, ranks, times = dice.pick(list(RECIPES)), 1 + (dice.share() < 0.3), 1 + dice.below(3)
    name, moment = dice.pick(["SIGKILL", *SIGNALS]), dice.pick(MOMENTS)
    victims = dice.pick([[0], [ranks - 1], list(range(ranks))])
    (folder / "what").write_text(f"{algorithm}, {times} x {name} to {victims} of {ranks}, {moment.__name__}")
    whole = shared.whole(algorithm, ranks)
    words = shared.words(algorithm, folder / "runs", resume_from="latest")
    for kill in range(times):
        log = folder / f"killed_{kill}"
        processes, end = start_ranks(words, log, ranks), time.monotonic() + LIMIT_S / 3
        while not moment(folder / "runs", dice) and processes[0].poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        for victim in victims:
            send(processes[victim], SIGNALS[name])
        processes[victims[0]].wait()
        for process in processes:  # as torchrun does
            send(process, signal.SIGTERM)
        ended = finish(processes, log, GONE_S)
        if ended.status is None:
            return Verdict(False, f"it goes on after {name}: {ended.last[-200:]}")
        if name == "SIGINT" and ranks == 1 and ended.status and "Traceback" in ended.output:
            return Verdict(False, f"a traceback after Ctrl-C: {ended.last[-200:]}")
    log = folder / "last"
    ended = finish(start_ranks(words, log, ranks), log, LIMIT_S)
    if ended.status != 0:
        return Verdict(False, f"resumed, it ended with {ended.status}: {ended.last[-300:]}")
    (run,) = (path for path in (folder / "runs").iterdir() if path.is_dir())
    differ = differences(run, whole)
    return Verdict(not differ, f"silent: {differ}" if differ else "resumed, equal")


def at_a_line(output_dir: Path, dice: Dice) -> bool:
    """Soon after a line of metrics.jsonl: in a rollout, an update, an evaluation, or a save."""
    written = [path.stat().st_mtime for path in output_dir.glob("*/metrics.jsonl")]
    if not written or time.time() - written[0] > 0.1 or dice.share() > 0.02:
        return False
    time.sleep(0.3 * dice.share())
    return True


def in_a_save(output_dir: Path, dice: Dice) -> bool:
    """While a checkpoint is written."""
    return any(True for _ in output_dir.glob("*/checkpoints/.tmp-*")) and dice.share() < 0.3


def at_any_time(output_dir: Path, dice: Dice) -> bool:
    """Importing, loading or training."""
    time.sleep(12 * dice.share())
    return True


MOMENTS = (at_a_line, at_a_line, in_a_save, at_any_time)
KINDS: dict[str, Callable[[Shared, Dice, Path], Verdict]] = {"files": files, "kills": kills}


def attempt(shared: Shared, seed: int, kind: str, number: int, folder: Path) -> dict:
    """A line of tries.jsonl. The folder of a good try goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    try:
        good, why = KINDS[kind](shared, Dice(seed, kind, number), folder)
    except Exception as error:
        good, why = False, f"the try itself failed: {type(error).__name__}: {error}"
    what = (folder / "what").read_text() if (folder / "what").exists() else ""
    if good:
        shutil.rmtree(folder)
    seconds = round(time.monotonic() - started, 1)
    return dict(kind=kind, number=number, what=what, good=good, why=why[:400], seconds=seconds)


def tries(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(kind, number) of those asked for, until the time is over."""
    if args.only:
        yield from ((kind, int(number)) for kind, _, number in (name.partition(":") for name in args.only))
        return
    end = time.monotonic() + args.minutes * 60
    yield from itertools.takewhile(
        lambda _: time.monotonic() < end, ((k, n) for n in itertools.count() for k in args.kinds)
    )


def table(records: list[dict]) -> str:
    """Tries by kind, and a line for each bad one."""
    lines = ["| kind | tries | good | bad |", "|---|---|---|---|"]
    for kind in [*KINDS, "sum"]:
        tried = [record["good"] for record in records if kind in ("sum", record["kind"])]
        lines.append(f"| {kind} | {len(tried)} | {sum(tried)} | {len(tried) - sum(tried)} |")
    lines += [f"\nbad: {r['kind']}:{r['number']}, {r['what']}: {r['why']}" for r in records if not r["good"]]
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=20.0, help="a try that runs then is finished")
    add("--seed", type=int, default=1)
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--only", nargs="+", default=[], metavar="KIND:NUMBER", help="some tries again")
    add("--parallel", type=int, default=1, help="tries side by side")
    add("--out", type=Path, default=Path("runs/faults"), help="folder of the table, the lines and what bad tries left")
    return parser


def main(args: argparse.Namespace) -> int:
    """The number of bad tries."""
    out = args.out.resolve()
    shared, records, lock, asked = Shared(out / "shared"), [], threading.Lock(), tries(args)

    def work() -> None:
        while True:
            with lock:
                kind, number = next(asked, (None, None))
            if kind is None:
                return
            record = attempt(shared, args.seed, kind, number, out / "tries" / f"{kind}_{number:05d}")
            with lock, (out / "tries.jsonl").open("a") as file:
                records.append(record)
                file.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)

    with ThreadPoolExecutor(args.parallel) as pool:
        for worker in [pool.submit(work) for _ in range(args.parallel)]:
            worker.result()
    (out / "table.md").write_text(table(records), errors="backslashreplace")
    print(table(records))
    return sum(not record["good"] for record in records)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main(parser().parse_args()) > 0)
