"""Damaged files: a run goes on from what is intact, bit for bit, or a sentence names the file; no code in it runs."""

import io
import json
import os
import pickle
import shutil
import zlib
from functools import partial
from pathlib import Path

import torch
from faults_commands import Command, Ended, judge
from faults_runs import BEST, TRAINED, Bench, differences
from faults_tries import Dice, Try, Verdict

from flow_grpo import checksums

BEFORE, WHOLE = 2, 3  # epochs of the run that is damaged, and after it has gone on
FORGETFUL = ("metrics.jsonl",)  # whose damage may cost what it recorded of earlier epochs
FLAG = "code_has_run"
FOREIGN = (None, -3, 10**9, "x", [], {}, 1e308, True, "\ud800")


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, flag: Path):
        self.flag = flag

    def __reduce__(self):
        return os.system, (f"touch '{self.flag}'",)


def make(bench: Bench, seed: int, number: int) -> Try:
    """One file, one kind of damage, one algorithm."""
    dice = Dice(seed, "files", number)
    algorithm = TRAINED[number % len(TRAINED)] if dice.share() < 0.5 else "grpo"
    files = files_of(bench, algorithm)
    newest = [file for file in files if f"epoch_{BEFORE:06d}" in file]
    file = dice.pick(newest if dice.share() < 0.5 else files)
    damage = dice.pick(list(DAMAGES))
    return Try("files", number, f"{algorithm} {damage} {file}", partial(attempt, bench, algorithm, file, damage, dice))


def files_of(bench: Bench, algorithm: str) -> list[str]:
    """The files of a run folder that is to be damaged, below it."""
    source, _ = bench.reference(algorithm, num_epochs=BEFORE), bench.reference(algorithm)
    return sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())


def attempt(bench: Bench, algorithm: str, file: str, damage: str, dice: Dice, folder: Path) -> Verdict:
    """Damage a copy and go on with it."""
    source, whole = bench.reference(algorithm, num_epochs=BEFORE), bench.reference(algorithm)
    run = folder / "runs" / source.name
    shutil.copytree(source, run, symlinks=True)
    DAMAGES[damage](run / file, dice, folder / FLAG)
    words = bench.words(algorithm, folder / "runs", resume_from="latest", num_epochs=WHOLE)
    ended = Command(words, folder).wait()
    if (folder / FLAG).exists():
        return Verdict(False, "code in the file has run")
    if ended.status != 0:
        return judge(ended, names_of(file), early=False)
    first = BEFORE if Path(file).name in FORGETFUL else 0
    export = f"checkpoints/epoch_{BEFORE:06d}/pytorch_lora_weights.safetensors"  # which no run reads again
    told = "not everything that others need" in ended.stdout  # of what is made of the exported weights
    differ = differences(run, whole, from_epoch=first, but="adapter_model" if told else export)
    if not differ:
        return said_so(ended)
    lost = any(words in ended.stdout + ended.stderr for words in ("damaged", "is no LoRA file"))
    if BEST in file and "best" in differ and lost:
        differ = differences(run, whole, but=BEST)
        return Verdict(not differ, f"silent: {differ}" if differ else "it said that the best policy is lost")
    return Verdict(False, f"silent: {differ}")


def names_of(file: str) -> list[str]:
    """What a message may call it: the file, or the checkpoint that it is part of."""
    path = Path(file)
    return [path.name, *(part for part in path.parts if part.startswith("epoch_"))]


def said_so(ended: Ended) -> Verdict:
    """Whether a run that went on from an older checkpoint, or began anew, named the newest one."""
    again = f"epoch {BEFORE}/{WHOLE}" in ended.stdout
    if again and f"epoch_{BEFORE:06d}" not in ended.stdout + ended.stderr:
        return Verdict(False, "went on from before the newest checkpoint without a word")
    return Verdict(True, "equal, from an older checkpoint, which it said" if again else "equal")


def flip(path: Path, dice: Dice, flag: Path) -> None:
    """One bit."""
    data = bytearray(path.read_bytes() or b"\0")
    data[dice.below(len(data))] ^= 1 << dice.below(8)
    replace(path, bytes(data))


def cut(path: Path, dice: Dice, flag: Path) -> None:
    data = path.read_bytes()
    replace(path, data[: dice.below(len(data))])


def empty(path: Path, dice: Dice, flag: Path) -> None:
    replace(path, b"")


def zeros(path: Path, dice: Dice, flag: Path) -> None:
    """A part, as a power loss leaves it."""
    data = bytearray(path.read_bytes())
    start = dice.below(len(data))
    end = start + dice.below(len(data) - start) + 1
    data[start:end] = bytes(len(data[start:end]))
    replace(path, bytes(data))


def noise(path: Path, dice: Dice, flag: Path) -> None:
    replace(path, dice.bytes(1 + dice.below(2000)))


def longer(path: Path, dice: Dice, flag: Path) -> None:
    replace(path, path.read_bytes() + dice.bytes(1 + dice.below(100)))


def gone(path: Path, dice: Dice, flag: Path) -> None:
    path.unlink()


def directory(path: Path, dice: Dice, flag: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path, dice: Dice, flag: Path) -> None:
    """A link onto itself."""
    path.unlink()
    path.symlink_to(path.name)


def pickled(path: Path, dice: Dice, flag: Path) -> None:
    """A pickle that runs code, plain or as torch writes it."""
    buffer = io.BytesIO()
    torch.save({"state": Bomb(flag)}, buffer)
    replace(path, dice.pick([pickle.dumps(Bomb(flag)), buffer.getvalue()]))


def disguised(path: Path, dice: Dice, flag: Path) -> None:
    """The same where a foreign checkpoint has it: with the checksum that fits."""
    pickled(path, dice, flag)
    for folder in path.parents:
        if (folder / checksums.FILE).is_file() and path.name != checksums.FILE:
            sums, data = json.loads((folder / checksums.FILE).read_text()), path.read_bytes()
            sums[str(path.relative_to(folder))] = [len(data), zlib.crc32(data)]
            return replace(folder / checksums.FILE, json.dumps(sums).encode())
    return None


def of_another(path: Path, dice: Dice, flag: Path) -> None:
    """The same file of the other checkpoint."""
    others = [other for other in path.parents[1].glob(f"*/{path.name}") if other != path and other.is_file()]
    replace(path, dice.pick(others).read_bytes() if others else b"another\n")


def altered(path: Path, dice: Dice, flag: Path) -> None:
    """A JSON file with one other value."""
    try:
        content = json.loads(path.read_text())
        key = dice.pick(sorted(content))
    except (ValueError, TypeError):
        return flip(path, dice, flag)
    content[key] = dice.pick(FOREIGN)
    return replace(path, json.dumps(content).encode())


def replace(path: Path, data: bytes) -> None:
    """New content, where a hard link's other names keep theirs."""
    path.unlink()
    path.write_bytes(data)


EVERY = (flip, flip, cut, empty, zeros, noise, longer, gone, directory, loop, pickled, disguised, of_another, altered)
DAMAGES = {damage.__name__: damage for damage in EVERY}
