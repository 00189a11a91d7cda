"""The smallest run of every algorithm, whole ones to compare with, and in what two run folders differ."""

import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from faults_commands import ROOT, Command, Ended
from safetensors import SafetensorError
from safetensors.torch import load_file

CLOCKS = ("time/", "images_per_s", "memory/")  # figures that no two runs share
NUM_EPOCHS = 3
BEST = "best/"
PARTLY = ("train_metadata.jsonl", "test_metadata.jsonl")


class Recipe(NamedTuple):
    script: str
    config: str
    flags: Mapping[str, object]


SMALL = {
    "height": 32,
    "width": 32,
    "num_epochs": NUM_EPOCHS,
    "save_freq": 1,
    "eval_freq": 1,
    "reward_fn.shapes": 0.0,
    "reward_fn.jpeg_compressibility": 1.0,
    "lora.rank": 2,
    "lora.alpha": 4,
    "sample.num_prompts_per_epoch": 2,
    "sample.num_images_per_prompt": 2,
    "sample.batch_size": 2,
    "sample.num_steps": 3,
    "train.learning_rate": 1e-3,
    "train.updates_per_epoch": 1,
    "train.ema_interval": 1,
    "eval.num_steps": 2,
    "eval.num_prompts": 2,
}
WINDOW = {"sample.sde_window_range": (0, 2), "sample.sde_window_size": 1}
BRANCHES = {
    "sample.num_branches": 2,
    "sample.num_images_per_prompt": 1,
    "sample.batch_size": 1,
    "train.timestep_fraction": 1.0,
}
UNGUIDED = {"train.reference_guidance_scale": 0.0, "train.beta": 0.01, "train.timestep_fraction": 1.0}
GRPO, NFT, DPO = (
    "config/grpo.py:shapes_qwenimage",
    "config/nft.py:shapes_qwenimage_nft",
    "config/dpo.py:shapes_qwenimage_dpo",
)
PREPARED = {"sample.num_images_per_prompt": 2, "preferences.part_size": 2, "preferences.validation_share": 0.3}
RECIPES = {
    "grpo": Recipe("train_qwenimage.py", f"{GRPO},smoke", WINDOW),
    "pr": Recipe("train_qwenimage_pr.py", f"{GRPO}_pr,smoke", BRANCHES),
    "nft": Recipe("train_qwenimage_nft.py", f"{NFT},smoke", UNGUIDED),
    "dpo": Recipe("train_qwenimage_dpo.py", f"{DPO},online,smoke", {}),
    "dpo_offline": Recipe("train_qwenimage_dpo.py", f"{DPO},smoke", {}),
    "prepare": Recipe("prepare_preferences.py", f"{DPO},smoke", PREPARED),
}
TRAINED = ("grpo", "pr", "nft", "dpo", "dpo_offline")


class Bench:
    """What tries share: a few prompts, whole runs by algorithm, prepared pairs. Made once, before the tries."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.prompts = self.folder / "prompts"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_prompts(self.prompts)

    def words(self, algorithm: str, output_dir: Path | str, **flags: object) -> list[str]:
        """The command of a smallest run; flags by dotted name, "." written as "__"."""
        recipe = RECIPES[algorithm]
        settings = SMALL | {"dataset": self.prompts, "output_dir": output_dir} | dict(recipe.flags)
        if algorithm == "dpo_offline":
            settings["preferences.path"] = self.pairs
        if algorithm == "prepare":
            settings |= {"preferences.path": output_dir, "output_dir": "runs"}
        settings |= {key.replace("__", "."): value for key, value in flags.items()}
        words = [str(ROOT / "scripts" / recipe.script), f"--config={recipe.config}"]
        return words + [f"--config.{key}={value}" for key, value in settings.items()]

    @property
    def pairs(self) -> Path:
        return self.folder / "prepare"

    def reference(self, algorithm: str, ranks: int = 1, **flags: object) -> Path:
        """The folder of a whole run, made when it is first asked for; one seed and setting for all its callers."""
        name = "_".join([algorithm, *(f"{key}{value}" for key, value in flags.items())]) + "_two" * (ranks == 2)
        place = self.folder / name
        if algorithm == "dpo_offline":
            self.reference("prepare")
        if not (self.folder / f"{name}.done").exists():
            shutil.rmtree(place, ignore_errors=True)
            ended = run_whole(self.words(algorithm, place, **flags), self.folder, name, ranks)
            if ended.status != 0:
                raise RuntimeError(f"the whole run {name} ended with {ended.status}: {ended.stderr[-2000:]}")
            (self.folder / f"{name}.done").touch()
        return place if algorithm == "prepare" else only_folder(place)


def write_prompts(folder: Path) -> None:
    """A data set of few prompts: checking the shipped one takes longer than a smallest run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PARTLY:
        lines = (ROOT / "dataset" / "shapes" / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:: len(lines) // 8][:8]))


def only_folder(output_dir: Path) -> Path:
    """The run folder in a folder that holds one. Raises ValueError if there are others."""
    folders = [path for path in sorted(output_dir.iterdir()) if path.is_dir()]
    if len(folders) != 1:
        raise ValueError(f"{output_dir} holds {len(folders)} run folders: {[path.name for path in folders]}")
    return folders[0]


def run_whole(words: Sequence[str], folder: Path, name: str, num_ranks: int = 1, limit_s: float = 300.0) -> Ended:
    """A run on some ranks, to its end."""
    commands = start_ranks(words, folder, name, num_ranks)
    for command in commands:
        command.wait(limit_s)
    return said(commands)


def free_port() -> int:
    """Nobody listens there now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_ranks(words: Sequence[str], folder: Path, name: str, num_ranks: int, **how) -> list[Command]:
    """The processes that torchrun would start; one rank is a run without torchrun."""
    if num_ranks == 1:
        return [Command(words, folder, name, **how)]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    return [
        Command(words, folder, f"{name}_{rank}", world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **how)
        for rank in range(num_ranks)
    ]


def lines_of(folder: Path) -> list[dict]:
    """metrics.jsonl without clocks."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(CLOCKS)} for row in rows]


def differences(folder: Path, reference: Path, from_epoch: int = 0, but: str = "//") -> str:
    """In what two run folders differ, "" = in nothing.

    Args:
        from_epoch: of the lines of metrics.jsonl that are compared.
        but: weights in whose path it is are left out; with BEST what was measured of them, too.
    """
    for expected in sorted(reference.rglob("*.safetensors")):
        name = expected.relative_to(reference)
        path = folder / name
        if but in str(name):
            continue
        if not path.is_file():
            return f"{name} is missing"
        try:
            tensors, wanted = load_file(path), load_file(expected)
        except SafetensorError as error:
            return f"{name} is unreadable: {error}"
        differ = [key for key in {**tensors, **wanted} if not same(tensors.get(key), wanted.get(key))]
        if differ:
            return f"{len(differ)} of {len(wanted)} tensors differ in {name}"
    try:
        lines, wanted = (compared(place, from_epoch, but) for place in (folder, reference))
    except (OSError, ValueError) as error:
        return f"metrics.jsonl is unreadable: {error}"
    if lines != wanted:
        differ = sum(a != b for a, b in zip(lines, wanted))
        return f"metrics.jsonl has {len(lines)} lines instead of {len(wanted)}, {differ} of them differ"
    return ""


def compared(folder: Path, from_epoch: int, but: str) -> list[dict]:
    """The lines that two runs must share. From a later epoch on, without figures that compare it with those before."""
    lines = [line for line in lines_of(folder) if line["epoch"] >= from_epoch]
    if from_epoch:
        lines = [{key: value for key, value in line.items() if not key.startswith("health/")} for line in lines]
    return [line for line in lines if but != BEST or line["kind"] != "test"]


def same(a, b) -> bool:
    """Bit for bit, NaN included."""
    return a is not None and b is not None and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def prepared(folder: Path) -> tuple[dict, dict]:
    """What prepare_preferences.py left: the bytes of every file of pairs, and what was dropped."""
    report = json.loads((folder / "report.json").read_text())
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}
    return files, {key: value for key, value in report.items() if key != "made_by"}


def said(commands: Sequence[Command]) -> Ended:
    """What the ranks of one run have said, as one command; the worst of their exit statuses."""
    statuses = [command.poll() for command in commands]
    worst = None if None in statuses else max(statuses, key=abs)
    outputs = [command.output() for command in commands]
    return Ended(worst, os.linesep.join(out for out, _ in outputs), os.linesep.join(err for _, err in outputs))
