"""Checkpoints, to resume a run from.

A checkpoint is a folder `epoch_000010` that appears, complete, in one rename. All ranks write it in parallel, and any
number of ranks can resume from it. It holds no RNG state: randomness goes by name (see rng.py). Tensors are
safetensors, the rest is JSON, and checksums.json tells damage.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flow_grpo.base import checksums, distributed, folders
from flow_grpo.base.errors import UserError
from flow_grpo.checkpoints import shards
from flow_grpo.weights import fsdp_utils
from flow_grpo.weights.ema import Ema

FORMAT = 2  # of the files; those of another are not read
STATE = "state"  # folder of the tensors
NAME = r"epoch_(\d+)"  # of a checkpoint


class Progress(NamedTuple):
    epoch: int  # epochs completed
    step: int  # optimizer steps taken
    learning_rate_factor: float = 1.0  # of the configured one
    num_roll_backs: int = 0  # by health.action
    reference_moves: int = 0  # how often the reference became the policy
    evaluations_since: int = 0  # epochs completed at the first evaluation that can be compared with later ones
    evaluation: dict | None = None  # how the run evaluates, as `best.settings_of` says; None = it does not


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
        state |= {f"ema/{name}": average for name, average in ema.state_dict().items()}
    return state


def _adamw_state(optimizer: torch.optim.AdamW, group: dict[str, Any], p: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of one parameter; before the first step, the zeros that the first step would make."""
    assert isinstance(optimizer, torch.optim.AdamW)
    state = optimizer.state[p]
    if not state:
        on_device = group["fused"] or group["capturable"]
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.detach()), torch.zeros_like(p.detach())
    average = state["exp_avg"]
    assert (average.shape, average.device) == (p.shape, p.device), "offloaded: reload_optimizer_state comes first"
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
    """Write `folder`/epoch_..., all ranks together. A kill at any moment leaves the checkpoint before it in place, and
    so does a failure, such as of a full disk.

    Args:
        state: from `training_state`.
        config: the resolved config, of JSON values.
        keep: how many to keep, the newest. Later epochs than this one are an abandoned future and go.
        extra_files: puts more files into the folder that it is given, before anyone sees it; every rank calls it.
    """
    assert keep >= 1, "the checkpoint just written stays"
    checkpoint = Path(folder, f"epoch_{progress.epoch:06d}")
    with replaced(checkpoint) as tmp:
        distributed.on_main((tmp / STATE).mkdir)
        distributed.on_all(shards.write, state, tmp / STATE)
        if extra_files is not None:
            extra_files(tmp)
        distributed.on_main(_describe, tmp, progress, config)
    distributed.on_main(prune, checkpoint.parent, progress.epoch, keep)
    return checkpoint


def load(checkpoint: Path | str, state: dict[str, Tensor], exact: bool = True) -> Progress:
    """Fill `state`, from `training_state`, from a checkpoint, bit for bit, whatever the number of ranks that wrote it.
    Raises UserError where the checkpoint lacks some of these tensors, or, if `exact`, holds others."""
    progress = read_progress(Path(checkpoint))
    shards.read(state, Path(checkpoint, STATE), exact)
    return progress


def stored_of(checkpoint: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` without what a checkpoint of another algorithm lacks; what is learned stays, stored or not."""
    stored = shards.read_index(checkpoint / STATE)
    return {name: p for name, p in state.items() if name in stored or name.startswith(("model/", "optimizer/", "ema/"))}


def stored_names(checkpoint: Path, prefix: str) -> list[str]:
    """Names of the tensors of a checkpoint that begin so."""
    return [name for name in shards.read_index(checkpoint / STATE) if name.startswith(prefix)]


def read_progress(checkpoint: Path) -> Progress:
    """Raises UserError for what no run has written."""
    path = checkpoint / "progress.json"
    stored = folders.read_json(path)
    if stored.get("format") != FORMAT:
        raise UserError(f"{path} has the format {stored.get('format')!r}; this version reads {FORMAT}")
    fields = {name: stored[name] for name in Progress._fields if name in stored}
    return folders.record_of(Progress, fields, path)


def choose(path: Path | str) -> tuple[Path | None, list[str]]:
    """The checkpoint at `path`, or the newest whole one in that folder, every byte of it read and compared with its
    checksum, and a sentence for each damaged one that is passed over; None without any. All damaged is a UserError."""
    damaged = []
    for checkpoint in reversed(_at(Path(path))):
        if not (problem := checksums.damage(checkpoint)):
            return checkpoint, [f"{sentence}; the run goes on from {checkpoint}" for sentence in damaged]
        damaged.append(f"{checkpoint} is damaged: {problem}")
    if damaged:
        raise UserError(f"{'; '.join(damaged)}; resume from another checkpoint, or start a run of another run_name")
    return None, []


def find(path: Path) -> Path | None:
    """The checkpoint at a path, or the newest in the folder there; None if there is none."""
    return checkpoints[-1] if (checkpoints := _at(path)) else None


def named(checkpoint: Path | None) -> str:
    """The last checkpoint, for a sentence."""
    return f"the last checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A folder for all ranks to write to, which takes the place of the one at `path` after the block.

    A failure leaves everything as it was; a kill leaves what `folders.publish` says.
    """
    scratch = distributed.on_main(_start, path)
    try:
        yield scratch
        distributed.on_main(folders.publish, scratch, path, True)
    except Exception:
        distributed.on_main(shutil.rmtree, scratch, True)
        raise


def _start(path: Path) -> Path:
    folders.recover(path)
    scratch = folders.scratch_beside(path)
    scratch.mkdir(parents=True)
    return scratch


def _describe(tmp: Path, progress: Progress, config: dict[str, Any]) -> None:
    (tmp / "config.json").write_text(json.dumps(config, indent=2))
    stored = {"format": FORMAT, **progress._asdict(), "torch": torch.__version__}
    (tmp / "progress.json").write_text(json.dumps(stored))
    checksums.write(tmp)


def prune(folder: Path, epoch: int, keep: int) -> None:
    """Remove checkpoints that are older than the `keep` newest or of later epochs, and what a kill left behind."""
    folders.remove_leftovers(folder, age_s=0.0)
    checkpoints = _checkpoints(folder)
    newest = [path for number, path in checkpoints if number <= epoch][-keep:]
    for _, path in checkpoints:
        if path not in newest:
            folders.remove(path)


def _at(path: Path) -> list[Path]:
    """The checkpoint at a path alone, or those in the folder there, oldest first."""
    if path.is_dir() and (re.fullmatch(NAME, path.name) or (path / "progress.json").is_file()):
        return [path]
    return [checkpoint for _, checkpoint in _checkpoints(path)]


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(epoch, folder) of the complete ones, oldest first."""
    matches = [(re.fullmatch(NAME, path.name), path) for path in folder.glob("*")]
    return sorted((int(match[1]), path) for match, path in matches if match)
