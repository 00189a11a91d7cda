"""Peak memory and images/s of full-size epochs on cards of 24 to 80 GB, imitated on a larger one, as JSON lines.

    python benchmarks/memory_table.py --out memory_table.jsonl --seconds 480          one H100 or H200, no download
    python benchmarks/memory_table.py --out memory_table.jsonl --seconds 480 --at-once 3
    python benchmarks/memory_table.py --list

Each cell is a `benchmarks/bench.py --size full` in a process of its own, whose allocator is limited to what a card of
that size leaves to it. Cells come in order of value; what is still running after --seconds is ended. Cells that the
file already holds are not measured again, so the same command goes on where it was cut. Every GPU takes cells;
--at-once puts several on one GPU as long as their memory fits: the memory is right then, the times are not, and the
line says so. A limit makes a large card small, not slow: the times are the large card's.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

LIMIT_GIB = {24: 23.0, 32: 31.0, 48: 44.0, 80: 78.0, 141: 138.0}  # card in GB: its memory less a CUDA context
LOAD_GIB = {"qwenimage": 60.0, "sd3": 16.0, "flux": 34.0}  # random weights of transformer, text encoders and VAE
OFFLOAD = "fsdp.mode=shard fsdp.offload_weights=True"
GROUP_OF_8 = "sample.num_prompts_per_epoch=1 sample.num_images_per_prompt=8"
GROUP_OF_16 = "sample.num_prompts_per_epoch=1 sample.num_images_per_prompt=16"
GROUP_OF_24 = "sample.num_prompts_per_epoch=1 sample.num_images_per_prompt=24"


@dataclass(frozen=True)
class Cell:
    """One epoch to be measured. Its few images change the time of an epoch, neither its memory nor images/s."""

    card: int  # GB
    script: str
    variants: str = ""
    settings: str = ""  # of the config, behind --set

    @property
    def model(self) -> str:
        return self.script.split("_")[1]

    @property
    def offloads(self) -> bool:
        return OFFLOAD in self.settings

    @property
    def name(self) -> str:
        return " ".join(filter(None, (str(self.card), self.script, self.variants, self.settings)))


CELLS = (  # in order of value
    Cell(48, "train_flux", settings=GROUP_OF_24),
    Cell(48, "train_qwenimage", settings=f"lora.rank=16 lora.alpha=32 sample.batch_size=2 {GROUP_OF_8}"),
    Cell(24, "train_sd3", ",large_gpu", GROUP_OF_24),
    Cell(24, "train_qwenimage", settings=f"{OFFLOAD} sample.batch_size=16 {GROUP_OF_16}"),
    Cell(32, "train_flux", settings=f"sample.batch_size=4 {GROUP_OF_8}"),
    Cell(80, "train_qwenimage_pr"),
    Cell(24, "train_sd3_pr", ",large_gpu", "sample.num_prompts_per_epoch=2"),
    Cell(24, "train_sd3_nft", ",large_gpu", GROUP_OF_24),
    Cell(24, "train_flux", settings=f"{OFFLOAD} {GROUP_OF_24}"),
    Cell(48, "train_flux_pr"),
    Cell(48, "train_flux_nft", settings=GROUP_OF_24),
    Cell(24, "train_qwenimage_nft", settings=f"{OFFLOAD} sample.batch_size=16"),
    Cell(80, "train_qwenimage", settings=GROUP_OF_16),
    Cell(80, "train_qwenimage_nft"),
    Cell(48, "train_qwenimage", settings=f"{OFFLOAD} sample.batch_size=32 sample.num_prompts_per_epoch=2"),
    Cell(24, "train_qwenimage_pr", settings=OFFLOAD),
    Cell(24, "train_sd3", settings=f"fsdp.activation_checkpointing=True {GROUP_OF_24}"),
    Cell(24, "train_sd3_dpo", settings="fsdp.activation_checkpointing=True"),
    Cell(80, "train_qwenimage_dpo"),
    Cell(48, "train_flux_pr", ",large_gpu", "sample.num_prompts_per_epoch=2"),
    Cell(80, "train_flux", ",large_gpu", GROUP_OF_24),
)


@dataclass
class Started:
    """A cell at work."""

    cell: Cell
    gpu: int
    command: str
    process: subprocess.Popen
    folder: Path  # of what it prints
    shared: bool  # whether another cell was at work on the same GPU at any time
    began: float = field(default_factory=time.monotonic)


def bench_arguments(cell: Cell, size: str) -> list[str]:
    """Of benchmarks/bench.py."""
    arguments = ["--script", cell.script, "--size", size, "--limit-gib", str(LIMIT_GIB[cell.card])]
    arguments += ["--variants", cell.variants] if cell.variants else []
    return [*arguments, "--set", *cell.settings.split()] if cell.settings else arguments


def command_of(cell: Cell, size: str) -> list[str]:
    """Offloaded weights need torchrun, on one GPU too."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"] if cell.offloads else []
    return [sys.executable, *launcher, "benchmarks/bench.py", *bench_arguments(cell, size)]


def start(cell: Cell, gpu: int, size: str, shared: bool) -> Started:
    """The cell's process, in a session of its own, so that its children end with it."""
    command, folder = command_of(cell, size), Path(tempfile.mkdtemp())
    environment = os.environ | {"WANDB_MODE": "disabled"}
    environment |= {"CUDA_VISIBLE_DEVICES": str(gpu)} if torch.cuda.is_available() else {}
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)
    return Started(cell, gpu, shlex.join(["python", *command[1:]]), process, folder, shared)


def outcome(status: int | None, stdout: str, stderr: str) -> dict:
    """What a cell's process says: its figures, or why there are none.

    Args:
        status: of the process; None = it was ended with the time.
    """
    if status == 0:
        return {"outcome": "fits"} | json.loads(stdout.splitlines()[-1])
    if status is None:
        return {"outcome": "cut"}
    if "OutOfMemoryError" in stderr or "out of memory" in stderr:
        return {"outcome": "out of memory"}
    return {"outcome": "failed", "error": stderr[-2000:]}


def end(started: Started, out: Path) -> None:
    """Write the cell's line, and end its process if it is still at work."""
    status = started.process.poll()
    if status is None:
        os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()
    texts = [(started.folder / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    line = dict(cell=started.cell.name, card_gb=started.cell.card, command=started.command, shared=started.shared)
    line |= dict(wall_s=round(time.monotonic() - started.began, 1)) | outcome(status, *texts)
    shutil.rmtree(started.folder)
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{line['wall_s']:7.1f} s  {line['outcome']:14s} {started.cell.name}", flush=True)


def measured(out: Path) -> set[str]:
    """Names of the cells that a file settles; one that was cut or failed is measured again."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {line["cell"] for line in lines if line["outcome"] in ("fits", "out of memory")}


def need_gib(cell: Cell) -> float:
    """Of a GPU, with the random weights before the limit and a CUDA context."""
    return max(LIMIT_GIB[cell.card], LOAD_GIB[cell.model]) + 1


def free_gpu(cell: Cell, at_work: list[Started], totals: list[float], at_once: int) -> int | None:
    """The first GPU that has room for it; None = none."""
    for gpu, total in enumerate(totals):
        others = [started.cell for started in at_work if started.gpu == gpu]
        if len(others) < at_once and need_gib(cell) + sum(map(need_gib, others)) <= total:
            return gpu
    return None


def measure(cells: list[Cell], out: Path, totals: list[float], args: argparse.Namespace) -> None:
    """All cells that the time allows, the first ones first. `totals`: GiB of each GPU."""
    deadline, at_work = time.monotonic() + args.seconds, []
    while (cells or at_work) and time.monotonic() < deadline:
        for cell in list(cells):
            gpu = free_gpu(cell, at_work, totals, args.at_once)
            if gpu is None:
                break  # the order is that of value
            neighbours = [started for started in at_work if started.gpu == gpu]
            for started in neighbours:
                started.shared = True
            at_work.append(start(cell, gpu, args.size, bool(neighbours)))
            cells.remove(cell)
        time.sleep(0.5)
        for started in [started for started in at_work if started.process.poll() is not None]:
            end(started, out)
            at_work.remove(started)
    for started in at_work:
        end(started, out)


def main(args: argparse.Namespace) -> None:
    cells = [cell for cell in CELLS if all(word in cell.name for word in args.only)]
    if args.list:
        print("\n".join(cell.name for cell in cells))
        return
    count = torch.cuda.device_count()
    totals = [torch.cuda.get_device_properties(i).total_memory / 2**30 for i in range(count)] or [float("inf")]
    done = measured(args.out)
    cells = [cell for cell in cells if cell.name not in done]
    too_large = [cell for cell in cells if need_gib(cell) > max(totals)]
    for cell in too_large:
        print(f"this GPU is too small: {cell.name}")
    measure([cell for cell in cells if cell not in too_large], args.out, totals, args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("memory_table.jsonl"), help="file to add lines to")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to end what is still running")
    parser.add_argument("--at-once", type=int, default=1, help="cells on one GPU at once, as far as memory reaches")
    parser.add_argument("--only", nargs="*", default=[], help="words of the cells' names, all of which must be there")
    parser.add_argument("--size", choices=["tiny", "full"], default="full", help="tiny: Qwen-Image only, to try this")
    parser.add_argument("--list", action="store_true", help="print the cells' names and end")
    main(parser.parse_args())
