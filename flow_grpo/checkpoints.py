"""What survives a run: checkpoints to resume from, and exports that diffusers loads.

A checkpoint is a folder `epoch_000010` that appears, complete, in one rename. All ranks write it in parallel, and any
number of ranks can resume from it. It holds no RNG state: randomness goes by name (see rng.py).
"""

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from peft import get_peft_model_state_dict
from torch import Tensor, nn

from flow_grpo import distributed, fsdp_utils, stored_weights
from flow_grpo.ema import Ema

logging.getLogger("huggingface_hub").setLevel(logging.WARNING)  # it announces every file that it writes


class Progress(NamedTuple):
    epoch: int  # epochs completed
    step: int  # optimizer steps taken


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
    *,
    epoch: int,
    step: int,
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
        raise ValueError(f"keep = {keep} would remove the checkpoint just written; keep at least 1")
    folder = Path(folder)
    tmp = folder / f".tmp-epoch_{epoch:06d}"
    distributed.on_main(_start, folder, tmp)
    try:
        _write(state, tmp)
        if extra_files is not None:
            extra_files(tmp)
        progress = {"epoch": epoch, "step": step, "torch": torch.__version__}
        distributed.on_main(_publish, tmp, progress, config)
    except Exception:
        distributed.on_main(shutil.rmtree, tmp, True)
        raise
    distributed.on_main(_prune, folder, epoch, keep)
    return folder / f"epoch_{epoch:06d}"


def load(
    checkpoint: Path | str, state: dict[str, Tensor], *, config: dict[str, Any] | None, may_differ: Iterable[str] = ()
) -> Progress:
    """Fill `state` from a checkpoint, bit for bit, whatever the number of ranks that wrote it.

    Args:
        state: from `training_state`.
        config: what the checkpoint's is compared with; None = the run's own, no comparison.
        may_differ: dotted config keys that may have changed since; "eval" stands for all below it.
    Raises:
        ValueError: the checkpoint's config differs, or it holds other tensors than `state`.
    """
    checkpoint = Path(checkpoint)
    if config is not None:
        compare_configs(checkpoint, config, tuple(may_differ))
    reader = dcp.FileSystemReader(checkpoint)
    stored = {name: tuple(tensor.size) for name, tensor in reader.read_metadata().state_dict_metadata.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if stored != wanted:
        names = sorted(name for name, _ in stored.items() ^ wanted.items())
        differ = ", ".join(f"{name} {stored.get(name, 'absent')} -> {wanted.get(name, 'absent')}" for name in names[:8])
        raise ValueError(f"{checkpoint} does not fit this run: {len(set(names))} tensors differ: {differ}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        dcp.load(state, storage_reader=reader)
    progress = json.loads((checkpoint / "progress.json").read_text())
    return Progress(progress["epoch"], progress["step"])


def compare_configs(checkpoint: Path, config: dict[str, Any], may_differ: tuple[str, ...]) -> None:
    """Raises ValueError with the keys in which a checkpoint's config differs, `may_differ` and all below excepted."""
    stored, current = json.loads((checkpoint / "config.json").read_text()), json.loads(json.dumps(config))
    stored, current = dict(_flatten(stored)), dict(_flatten(current))
    keys = [key for key in sorted(stored.keys() | current.keys()) if stored.get(key, ...) != current.get(key, ...)]
    keys = [key for key in keys if not any(key == k or key.startswith(k + ".") for k in may_differ)]
    if keys:
        changes = ", ".join(f"{key}: {stored.get(key, 'absent')} -> {current.get(key, 'absent')}" for key in keys)
        raise ValueError(f"{checkpoint} comes from another config ({changes}); restore these, or start a new run")


def find(folder: Path | str, which: str = "latest") -> Path | None:
    """The newest checkpoint in `folder` ("latest", None if there is none), or the one at the path `which`.

    Raises:
        ValueError: the path is neither a checkpoint nor a folder of them.
    """
    if which == "latest":
        return _newest(Path(folder))
    path = Path(which)
    checkpoint = path if (path / "progress.json").is_file() else _newest(path)
    if checkpoint is None:
        raise ValueError(
            f"no checkpoint at {path}: expected a folder like epoch_000010, or one that holds such folders"
        )
    return checkpoint


def named(checkpoint: Path | None) -> str:
    """The last checkpoint, for a sentence."""
    return f"the last checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"


def save_lora(pipeline: Any, folder: Path | str, adapter: str = "default") -> None:
    """Write an adapter, alpha included, as the safetensors file that `pipeline.load_lora_weights(folder)` reads."""
    weights = fsdp_utils.full_state_dict(pipeline.transformer)
    distributed.on_main(_save_lora, pipeline, folder, adapter, weights)


def _save_lora(pipeline: Any, folder: Path | str, adapter: str, weights: dict[str, Tensor]) -> None:
    layers = get_peft_model_state_dict(pipeline.transformer, state_dict=weights, adapter_name=adapter)
    type(pipeline).save_lora_weights(
        folder,
        transformer_lora_layers=layers,
        # Without it the loader would take alpha = rank.
        transformer_lora_adapter_metadata=pipeline.transformer.peft_config[adapter].to_dict(),
    )


def save_transformer(transformer: nn.Module, folder: Path | str) -> None:
    """Write all weights as diffusers does, for its `from_pretrained` and for `fsdp_utils.prepare`."""
    weights = fsdp_utils.full_state_dict(transformer, trainable_only=False)
    distributed.on_main(_save_transformer, transformer, Path(folder), weights)


def _save_transformer(transformer: nn.Module, folder: Path, weights: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(transformer.to_json_string())
    config["_class_name"] = config["_class_name"].removeprefix("FSDP")  # fully_shard subclasses the transformer's class
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    pattern = stored_weights.WEIGHTS.replace(".", "{suffix}.")
    save_torch_state_dict(weights, folder, filename_pattern=pattern, max_shard_size="5GB")


def _start(folder: Path, tmp: Path) -> None:
    """Clear what a killed save left behind."""
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)
    tmp.mkdir(parents=True)


def _write(state: dict[str, Tensor], tmp: Path) -> None:
    """Every rank its own shards. Replicated tensors are written once."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")
            dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp))
    except dcp.CheckpointException as error:  # a BaseException, which would pass every handler between here and main
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank} could not write {tmp}: {cause}; earlier checkpoints are intact") from cause


def _publish(tmp: Path, progress: dict[str, Any], config: dict[str, Any]) -> None:
    (tmp / "config.json").write_text(json.dumps(config, indent=2))
    (tmp / "progress.json").write_text(json.dumps(progress))
    publish(tmp)


def publish(tmp: Path) -> None:
    """Make the folder .tmp-NAME durable, then visible as NAME.

    An older NAME is .old-NAME then, for the caller to remove: a folder cannot be renamed onto another, so readers have
    to know the old one until the new one is there.
    """
    for path in [*tmp.rglob("*"), tmp]:
        if not path.is_symlink():
            _fsync(path)
    done = tmp.with_name(tmp.name.removeprefix(".tmp-"))
    if done.exists():
        done.rename(done.with_name(f".old-{done.name}"))
    tmp.rename(done)
    _fsync(done.parent)


def _prune(folder: Path, epoch: int, keep: int) -> None:
    checkpoints = _checkpoints(folder)
    newest = [path for number, path in checkpoints if number <= epoch and not path.name.startswith(".")][-keep:]
    for _, path in checkpoints:
        if path not in newest:
            tmp = path.rename(folder / f".tmp-{path.name}")  # half removed, it must not look complete
            shutil.rmtree(tmp)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(epoch, folder) of the complete ones, oldest first; one set aside comes before the one that replaces it."""
    matches = [(re.fullmatch(r"(?:\.old-)?epoch_(\d+)", path.name), path) for path in folder.glob("*")]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _newest(folder: Path) -> Path | None:
    return checkpoints[-1][1] if (checkpoints := _checkpoints(folder)) else None


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flatten(config: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """{"train": {"beta": 0}} -> ("train.beta", 0)."""
    for key, value in config.items():
        if isinstance(value, dict):  # an empty one is as good as none
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
