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

# Version of the files; those of another version are not read.
FORMAT = 2
# Folder of the tensors in a checkpoint.
STATE = "state"
# Pattern of a checkpoint's name.
NAME = r"epoch_(\d+)"


class Progress(NamedTuple):
    """How far a run has come, and what it decides by that is no tensor."""

    epoch: int  # epochs completed
    step: int  # optimizer steps taken
    learning_rate_factor: float = 1.0  # of the configured one
    num_roll_backs: int = 0  # by health.action
    reference_moves: int = 0  # how often the reference became the policy
    evaluations_since: int = 0  # epochs completed at the first evaluation that can be compared with later ones
    evaluation: dict | None = None  # how the run evaluates, as `best.settings_of` says; None = it does not
    prompt_signals: dict[str, float] | None = None  # as PromptSignal has them; None = prompts are not drawn by them


def training_state(transformer: nn.Module, optimizer: torch.optim.AdamW, ema: Ema | None) -> dict[str, Tensor]:
    """Return every tensor that a run needs to go on, by name and live: `save` reads them, `load` fills them in place.

    Add what else the script trains under names of your own. Learning rates are not among them: the config sets them.
    """
    state = {}
    name_of = {}
    for name, parameter in fsdp_utils.trainable_parameters(transformer).items():
        name_of[parameter] = name
        state[f"model/{name}"] = parameter.detach()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in _adamw_state(optimizer, group, parameter).items():
                state[f"optimizer/{name_of[parameter]}/{key}"] = value
    if ema is not None:
        for name, average in ema.state_dict().items():
            state[f"ema/{name}"] = average
    return state


def _adamw_state(optimizer: torch.optim.AdamW, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return AdamW's state of one parameter; before the first step, the zeros that the first step would make."""
    assert isinstance(optimizer, torch.optim.AdamW)
    state = optimizer.state[parameter]
    if not state:
        # AdamW counts steps on the CPU, unless a kernel on the device reads the count.
        on_device = group["fused"] or group["capturable"]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
        state["exp_avg"] = torch.zeros_like(parameter.detach())
        state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
    average = state["exp_avg"]
    # Offloaded moments lie on the CPU, and those of sharded weights have the shape of this rank's part.
    is_in_place = average.shape == parameter.shape and average.device == parameter.device
    assert is_in_place, "offloaded: reload_optimizer_state comes first"
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
    """Write `folder`/epoch_..., all ranks together. After a kill at any moment, or a failure such as a full disk, the
    checkpoint before it is still in place.

    Args:
        state: from `training_state`.
        config: the resolved config, of JSON values.
        keep: number of checkpoints that stay, the newest. Those of later epochs than this one belong to an abandoned
            future and are removed.
        extra_files: writes more files into the folder that it is given, before anyone sees it; every rank calls it.
    """
    assert keep >= 1, "the checkpoint just written stays"
    checkpoint = Path(folder, f"epoch_{progress.epoch:06d}")
    with replaced(checkpoint) as scratch:
        distributed.on_main((scratch / STATE).mkdir)
        distributed.on_all(shards.write_tensors, state, scratch / STATE)
        if extra_files is not None:
            extra_files(scratch)
        distributed.on_main(_write_records, scratch, progress, config)
    distributed.on_main(prune, checkpoint.parent, progress.epoch, keep)
    return checkpoint


def load(checkpoint: Path | str, state: dict[str, Tensor], exact: bool = True) -> Progress:
    """Fill `state`, from `training_state`, from a checkpoint, bit for bit, whatever the number of ranks that wrote it.
    Raises UserError where the checkpoint lacks some of these tensors, or, if `exact`, holds others."""
    progress = read_progress(Path(checkpoint))
    shards.read_tensors(state, Path(checkpoint, STATE), exact)
    return progress


def without_missing(state: dict[str, Tensor], checkpoint: Path) -> dict[str, Tensor]:
    """Return `state` without the extra tensors that a checkpoint of another algorithm lacks.

    Weights, averages and optimizer state stay even if they are not stored, so that `load` refuses such a checkpoint.
    """
    required = ("model/", "optimizer/", "ema/")
    stored = shards.read_index(checkpoint / STATE)
    wanted = {}
    for name, tensor in state.items():
        if name in stored or name.startswith(required):
            wanted[name] = tensor
    return wanted


def stored_names(checkpoint: Path, prefix: str) -> list[str]:
    """Return the names of a checkpoint's tensors that begin with `prefix`."""
    return [name for name in shards.read_index(checkpoint / STATE) if name.startswith(prefix)]


def read_progress(checkpoint: Path) -> Progress:
    """Return how far a checkpoint's run had come. Raises UserError for a file that no run has written."""
    path = checkpoint / "progress.json"
    stored = folders.read_json(path)
    if stored.get("format") != FORMAT:
        raise UserError(f"{path} has the format {stored.get('format')!r}; this version reads {FORMAT}")
    return folders.record_within(Progress, stored, path)


def choose(path: Path | str) -> tuple[Path | None, list[str]]:
    """Return the checkpoint at `path`, or the newest undamaged one in that folder, None if there is none; and a
    sentence for each damaged one that is passed over.

    Every byte is read and compared with its checksum. Raises UserError where all are damaged.
    """
    damaged: list[str] = []
    for checkpoint in reversed(_checkpoints_at(Path(path))):
        damage = checksums.damage(checkpoint)
        if not damage:
            return checkpoint, [f"{sentence}; the run goes on from {checkpoint}" for sentence in damaged]
        damaged.append(f"{checkpoint} is damaged: {damage}")
    if damaged:
        raise UserError(f"{'; '.join(damaged)}; resume from another checkpoint, or start a run of another run_name")
    return None, []


def find_newest(path: Path) -> Path | None:
    """Return the checkpoint at a path, or the newest in the folder there; None if there is none."""
    checkpoints = _checkpoints_at(path)
    return checkpoints[-1] if checkpoints else None


def newest_in_words(checkpoint: Path | None) -> str:
    """Return the part of a sentence that names the newest checkpoint, as `find_newest` returns it."""
    return f"the last checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a folder for all ranks to write to, which takes the place of the one at `path` after the block.

    A failure leaves everything as it was; a kill leaves what `folders.publish` says.
    """
    scratch = distributed.on_main(_make_scratch, path)
    try:
        yield scratch
        distributed.on_main(folders.publish, scratch, path, True)
    except Exception:
        distributed.on_main(shutil.rmtree, scratch, True)
        raise


def _make_scratch(path: Path) -> Path:
    """Undo what a kill has left half done at a path, and make the folder that is to take its place."""
    folders.recover(path)
    scratch = folders.scratch_beside(path)
    scratch.mkdir(parents=True)
    return scratch


def _write_records(folder: Path, progress: Progress, config: dict[str, Any]) -> None:
    """Write the files of a checkpoint that are no tensors, the checksums of all last."""
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    stored = {"format": FORMAT, **progress._asdict(), "torch": torch.__version__}
    (folder / "progress.json").write_text(json.dumps(stored))
    checksums.write_checksums(folder)


def prune(folder: Path, epoch: int, keep: int) -> None:
    """Remove checkpoints of later epochs than `epoch`, all but the `keep` newest others, and what a kill left."""
    folders.remove_leftovers(folder, age_s=0.0)
    checkpoints = _numbered(folder)
    earlier = [path for number, path in checkpoints if number <= epoch]
    for _, path in checkpoints:
        if path not in earlier[-keep:]:
            folders.remove(path)


def _checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint at a path alone, or those in the folder there, oldest first."""
    if path.is_dir() and (re.fullmatch(NAME, path.name) or (path / "progress.json").is_file()):
        return [path]
    return [checkpoint for _, checkpoint in _numbered(path)]


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return (epoch, folder) of each complete checkpoint, oldest first."""
    checkpoints = []
    for path in folder.glob("*"):
        if match := re.fullmatch(NAME, path.name):
            checkpoints.append((int(match[1]), path))
    return sorted(checkpoints)
