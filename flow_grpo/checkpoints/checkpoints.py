"""Checkpoints, to resume a run from.

A checkpoint is a folder `epoch_000010` that appears, complete, in one rename. All ranks write it in parallel, and any
number of ranks can resume from it. It holds no RNG state: randomness goes by name (see rng.py). It holds no program
either, as pickled ones did: tensors are safetensors, the rest is JSON, and checksums.json tells damage.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flow_grpo.base import checksums, distributed, folders
from flow_grpo.base.errors import UserError
from flow_grpo.checkpoints import shards
from flow_grpo.weights import fsdp_utils
from flow_grpo.weights.ema import Ema

FORMAT = 2  # 1 was torch.distributed.checkpoint's, whose .metadata is a pickle
STATE = "state"  # folder of the tensors
NAMES = r"(?:\.old-)?epoch_(\d+)"  # of checkpoints; .old- is one that is being replaced
KINDS = {int: "a whole number", float: "a number"}


class Progress(NamedTuple):
    """How far a run has come. Its fields' smallest and largest values are in LIMITS."""

    epoch: int  # epochs completed
    step: int  # optimizer steps taken
    learning_rate_factor: float = 1.0  # of the configured one
    num_roll_backs: int = 0  # by health.action
    reference_moves: int = -1  # how often the reference became the policy; -1 = written before this was recorded


LIMITS = Progress((0, 2**40), (0, 2**40), (0.0, 1.0), (0, 2**40), (-1, 2**40))


def training_state(transformer: nn.Module, optimizer: torch.optim.AdamW, ema: Ema | None) -> dict[str, Tensor]:
    """Every tensor a run needs to go on, by name and live: `save` reads them, `load` fills them in place.

    Add what else the script trains under names of your own. Learning rates are not among them: they are the config's.
    """
    learned = fsdp_utils.trainable_parameters(transformer)
    names = {p: name for name, p in learned.items()}
    state = {f"model/{name}": p.detach() for name, p in learned.items()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state |= {f"optimizer/{names[p]}/{key}": value for key, value in _adamw_state(optimizer, group, p).items()}
    if ema is not None:
        state |= {f"ema/{name}": shadow for name, shadow in ema.state_dict().items()}
    return state


def _adamw_state(optimizer: torch.optim.AdamW, group: dict[str, Any], p: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of one parameter; before the first step, the zeros that the first step would make."""
    assert isinstance(optimizer, torch.optim.AdamW)
    state = optimizer.state[p]
    if not state:
        on_device = group["fused"] or group["capturable"]
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.detach()), torch.zeros_like(p.detach())
    assert state["exp_avg"].shape == p.shape, "offloaded: reload_optimizer_state comes first"
    assert state["exp_avg"].device == p.device, "offloaded: reload_optimizer_state comes first"
    return state


def save(
    folder: Path | str,
    state: dict[str, Tensor],
    progress: Progress,
    *,
    config: dict[str, Any],
    keep: int = 2,
    extra_files: Callable[[Path], None] | None = None,
) -> Path:
    """Write `folder`/epoch_..., all ranks together. A kill at any moment leaves the checkpoint before it in place.

    Args:
        state: from `training_state`.
        config: the resolved config, of JSON values.
        keep: how many to keep, the newest. Later epochs than this one are an abandoned future and go.
        extra_files: puts more files into the folder that it is given, before anyone sees it; every rank calls it.
    Raises:
        OSError: it could not be written, e.g. the disk is full. Nothing is left behind and nothing was removed.
    """
    if keep < 1:
        raise UserError(f"keep = {keep} would remove the checkpoint just written; keep at least 1")
    folder = Path(folder)
    tmp = folder / f".tmp-epoch_{progress.epoch:06d}"
    distributed.on_main(_start, folder, tmp)
    try:
        sums = _write(state, tmp)
        if extra_files is not None:
            extra_files(tmp)
        distributed.on_main(_publish, tmp, progress, config, sums)
    except Exception:
        distributed.on_main(shutil.rmtree, tmp, True)
        raise
    distributed.on_main(prune, folder, progress.epoch, keep)
    return folder / f"epoch_{progress.epoch:06d}"


def load(checkpoint: Path | str, state: dict[str, Tensor]) -> Progress:
    """Fill `state` from a checkpoint, bit for bit, whatever the number of ranks that wrote it.

    Args:
        state: from `training_state`.
    Raises:
        UserError: the checkpoint holds other tensors than `state`.
    """
    checkpoint = Path(checkpoint)
    progress = read_progress(checkpoint)
    shards.read(state, checkpoint / STATE)
    return progress


def read_progress(checkpoint: Path) -> Progress:
    """Raises UserError for what no run has written."""
    path = checkpoint / "progress.json"
    stored = folders.read_json(path)
    if stored.get("format") != FORMAT:
        raise UserError(f"{path} has the format {stored.get('format')!r}; this version reads {FORMAT}")
    for name, kind in Progress.__annotations__.items():
        value, (least, most) = stored.get(name, Progress._field_defaults.get(name)), getattr(LIMITS, name)
        if type(value) not in (kind, int) or not least <= value <= most:
            raise UserError(f"{path}: {name!r} is {value!r}, not {KINDS[kind]} from {least} to {most}")
    known = {name: kind(stored[name]) for name, kind in Progress.__annotations__.items() if name in stored}
    return Progress(**known)


def choose(path: Path | str) -> tuple[Path | None, list[str]]:
    """The checkpoint at `path`, or the newest whole one in that folder, every byte of it read and compared with its
    checksum; None if there is none at all. And a sentence for each damaged one that is passed over.

    Raises:
        UserError: all that there are are damaged, or the newest is of an older format.
    """
    path = Path(path)
    candidates = [path] if _is_checkpoint(path) else [checkpoint for _, checkpoint in reversed(_checkpoints(path))]
    damaged = []
    for checkpoint in candidates:
        if not (problem := _problem(checkpoint)):
            return checkpoint, [f"{sentence}; the run goes on from {checkpoint}" for sentence in damaged]
        damaged.append(f"{checkpoint} is damaged: {problem}")
    if damaged:
        raise UserError(f"{'; '.join(damaged)}; resume from another checkpoint, or start a run of another run_name")
    return None, []


def _problem(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, "" for nothing. Raises UserError for one of another format."""
    if (checkpoint / ".metadata").exists() and not (checkpoint / checksums.FILE).exists():
        start = f", or start from its weights with --config.lora.path={checkpoint}"
        raise UserError(
            f"{checkpoint} was written by an earlier version of flow_grpo, with a pickle, which is not read since it "
            f"may run any program: resume with that version{start if [*checkpoint.glob('*.safetensors')] else ''}"
        )
    if problem := checksums.damage(checkpoint):
        return problem
    try:
        read_progress(checkpoint)
        shards.read_index(checkpoint / STATE)
    except ValueError as error:
        return str(error)
    return ""


def find(folder: Path | str, which: str = "latest") -> Path | None:
    """The newest checkpoint in `folder` ("latest", None if there is none), or the one at the path `which`.

    Raises:
        UserError: the path is neither a checkpoint nor a folder of them.
    """
    if which == "latest":
        return _newest(Path(folder))
    path = Path(which)
    checkpoint = path if _is_checkpoint(path) else _newest(path)
    if checkpoint is None:
        raise UserError(f"no checkpoint at {path}: expected a folder like epoch_000010, or one that holds such folders")
    return checkpoint


def later(folder: Path, epoch: int) -> list[Path]:
    """The checkpoints in `folder` of epochs after this one."""
    return [path for number, path in _checkpoints(folder) if number > epoch]


def named(checkpoint: Path | None) -> str:
    """The last checkpoint, for a sentence."""
    return f"the last checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"


def _start(folder: Path, tmp: Path) -> None:
    """Clear what a killed save left behind."""
    for leftover in folder.glob(".tmp-*"):
        folders.remove(leftover)
    (tmp / STATE).mkdir(parents=True)


def _write(state: dict[str, Tensor], tmp: Path) -> checksums.Sums:
    """Every rank its own rows; the checksums of all their files."""
    sums, error = {}, None
    try:
        sums = shards.write(state, tmp / STATE)
    except OSError as caught:
        error = caught
    outcomes = distributed.gather_objects([(sums, str(error or ""))])
    for rank, (_, problem) in enumerate(outcomes):
        if problem:
            raise OSError(f"rank {rank} could not write {tmp / STATE}: {problem}") from error
    return {f"{STATE}/{name}": value for files, _ in outcomes for name, value in files.items()}


def _publish(tmp: Path, progress: Progress, config: dict[str, Any], sums: checksums.Sums) -> None:
    (tmp / "config.json").write_text(json.dumps(config, indent=2))
    stored = {"format": FORMAT, **progress._asdict(), "torch": torch.__version__}
    (tmp / "progress.json").write_text(json.dumps(stored))
    checksums.write(tmp, sums)
    publish(tmp)


def publish(tmp: Path) -> None:
    """Make the folder .tmp-NAME durable, then visible as NAME.

    An older NAME is .old-NAME then, for the caller to remove: a folder cannot be renamed onto another, so readers have
    to know the old one until the new one is there.
    """
    for path in [*tmp.rglob("*"), tmp]:
        if not path.is_symlink():
            folders.sync(path)
    done = tmp.with_name(tmp.name.removeprefix(".tmp-"))
    if os.path.lexists(done):
        done.rename(done.with_name(f".old-{done.name}"))
    tmp.rename(done)
    folders.sync(done.parent)


def prune(folder: Path, epoch: int, keep: int) -> None:
    """Remove checkpoints that are older than the `keep` newest or of later epochs, and what a kill left behind."""
    for leftover in folder.glob(".tmp-*"):
        folders.remove(leftover)
    checkpoints = _checkpoints(folder)
    newest = [path for number, path in checkpoints if number <= epoch and not path.name.startswith(".")][-keep:]
    for _, path in checkpoints:
        if path not in newest:
            tmp = path.rename(folder / f".tmp-{path.name}")  # half removed, it must not look complete
            folders.remove(tmp)


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and bool(re.fullmatch(NAMES, path.name) or (path / "progress.json").is_file())


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(epoch, folder) of the complete ones, oldest first; one set aside comes before the one that replaces it."""
    matches = [(re.fullmatch(NAMES, path.name), path) for path in folder.glob("*")]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _newest(folder: Path) -> Path | None:
    return checkpoints[-1][1] if (checkpoints := _checkpoints(folder)) else None
