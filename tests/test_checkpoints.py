"""A resumed run is the unbroken run; a save that dies costs nothing but itself; exports load in diffusers.

Under torchrun this file is two ranks that train, save and resume; with "saves", a process whose children are killed.
"""

import json
import os
import resource
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import warm
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel
from two_ranks import LORA, base, build, ema_of, launch, optimizer_of, train, velocity

from flow_grpo import checkpoints, distributed, exports, fsdp_utils, offload

CONFIG = {"num_epochs": 3, "train": {"learning_rate": 1e-3, "beta": 0.0}, "sample": {"window": (0, 5)}}
ROWS = torch.linspace(-1, 1, 2 * 24 * 64).view(2, 24, 64)


def start(weights, mesh=None, lora=True):
    transformer = build(weights, mesh, lora=lora)
    return transformer, optimizer_of(transformer), ema_of(transformer)


def save(folder, run, epoch, *, step=None, config=CONFIG, **how):
    progress = checkpoints.Progress(epoch, epoch if step is None else step)
    return checkpoints.save(folder, checkpoints.training_state(*run), progress, config=config, **how)


def resume(checkpoint, run, config=CONFIG, **how):
    return checkpoints.load(checkpoint, checkpoints.training_state(*run), config=config, **how)


def whole(run):
    """Every tensor of a run, sharded ones whole."""
    return {name: fsdp_utils.full_tensor(t).clone() for name, t in checkpoints.training_state(*run).items()}


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def pipeline_of(transformer):
    parts = dict.fromkeys(["vae", "text_encoder", "tokenizer"])
    return QwenImagePipeline(transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), **parts)


@contextmanager
def largest_file(num_bytes):
    """The disk is full, for this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def two_ranks(folder, lora):
    mesh = fsdp_utils.make_mesh("shard", torch.device("cpu"))
    run = start(folder / "base", mesh, lora)
    train(*run[:2], range(3), run[2])
    checkpoint = save(folder / f"lora{lora}", run, 1)
    seen = {"saved": whole(run), "checkpoint": str(checkpoint)}
    with run[2].applied(), torch.no_grad():
        seen["averaged"] = velocity(run[0], ROWS)
    seen["restored"] = same(seen["saved"], whole(run))
    train(*run[:2], range(3, 5), run[2])
    seen["unbroken"] = whole(run)
    if lora:
        exports.save_lora(pipeline_of(run[0]), folder / "export")
    else:
        exports.save_transformer(run[0], folder / "transformer")
    fresh = start(folder / "base", mesh, lora)
    assert resume(checkpoint, fresh)[:2] == (1, 1)
    seen["loaded"] = whole(fresh)
    train(*fresh[:2], range(3, 5), fresh[2])
    seen["resumed"] = whole(fresh)
    return seen


def saved_while_offloaded(folder):
    run = start(folder / "base", fsdp_utils.make_mesh("shard", torch.device("cpu")))
    train(*run[:2], range(1))
    offload.offload_optimizer_state(run[1])
    try:
        save(folder / "offloaded", run, 1)
    except AssertionError as error:
        return str(error)


def full_disk_on_rank_1(folder, rank):
    run = start(folder / "base", fsdp_utils.make_mesh("shard", torch.device("cpu")))
    save(folder / "full", run, 1)
    try:
        with largest_file(20_000 if rank == 1 else resource.RLIM_INFINITY):
            save(folder / "full", run, 2)
    except OSError as error:
        return str(error)


def main(folder):
    rank = distributed.init_distributed().rank
    seen = {lora: two_ranks(folder, lora) for lora in (True, False)}
    seen["full disk"] = full_disk_on_rank_1(folder, rank)
    seen["offloaded"] = saved_while_offloaded(folder)
    torch.save(seen, folder / f"rank{rank}.pt")
    distributed.barrier()
    (folder / "done").touch()
    distributed.close()


def saves_until(folder, first, last):
    """Checkpoints number first, first + 1, ..., two to an epoch so that every second one replaces its predecessor."""
    for n in range(first, last):
        state = {"a": torch.full((40_000,), n, dtype=torch.int64), "b": torch.tensor(n)}
        checkpoints.save(folder, state, checkpoints.Progress(n // 2, n), config=CONFIG)
        (folder / "n").write_text(str(n))
        (folder / "n").rename(folder / "completed")


def check_newest(folder, completed):
    state = {"a": torch.zeros(40_000, dtype=torch.int64), "b": torch.tensor(0)}
    step = checkpoints.load(checkpoints.find(folder), state, config=CONFIG).step
    (folder / "found").write_text(str(step))
    assert step >= completed
    assert bool((state["a"] == step).all())
    assert state["b"] == step


def in_child(function, *args, killed_after_s=None):
    """Run in a fork, which saves importing torch once per kill. Exit code, or minus the signal."""
    child = os.fork()
    if child == 0:
        try:
            function(*args)
        except BaseException:
            os._exit(1)
        os._exit(0)
    if killed_after_s is not None:
        time.sleep(killed_after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def saves(folder):
    in_child(saves_until, folder, 1, 2)
    log, n = [], 2
    for delay in range(200, 320, 10):
        killed = in_child(saves_until, folder, n, 10**6, killed_after_s=delay / 1000)
        completed = int((folder / "completed").read_text())
        leftovers = sorted(path.name for path in folder.glob(".*"))
        log.append({"killed": killed, "leftovers": leftovers, "loads": in_child(check_newest, folder, completed) == 0})
        n = int((folder / "found").read_text()) + 1
    (folder / "log.json").write_text(json.dumps(log))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    base(folder / "base")
    launch(__file__, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full weights"])
def test_two_sharded_ranks_resume_bit_for_bit(ranks, lora):
    seen = ranks[0][lora]
    assert same(seen["loaded"], seen["saved"])
    assert not same(seen["unbroken"], seen["saved"])
    assert same(seen["resumed"], seen["unbroken"])
    assert same(seen["unbroken"], ranks[1][lora]["unbroken"])


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full weights"])
def test_two_sharded_ranks_resume_on_one(folder, ranks, lora):
    run = start(folder / "base", lora=lora)
    resume(ranks[0][lora]["checkpoint"], run)
    assert same(whole(run), ranks[0][lora]["saved"])
    with run[2].applied(), torch.no_grad():
        torch.testing.assert_close(velocity(run[0], ROWS), ranks[0][lora]["averaged"])
    train(*run[:2], range(3, 5), run[2])
    torch.testing.assert_close(whole(run), ranks[0][lora]["unbroken"], atol=1e-5, rtol=0)


def test_sharded_averages_leave_no_trace(ranks):
    assert all(rank[lora]["restored"] for rank in ranks for lora in (True, False))


def test_one_rank_with_a_full_disk_stops_both_and_costs_nothing(folder, ranks):
    assert all("rank 1 could not write" in rank["full disk"] for rank in ranks)
    assert [path.name for path in (folder / "full").iterdir()] == ["epoch_000001"]


@pytest.mark.parametrize("steps", [0, 3], ids=["before the first step", "later"])
def test_resume_is_bitwise(folder, tmp_path, steps):
    unbroken, resumed = start(folder / "base"), start(folder / "base")
    train(*unbroken[:2], range(steps), unbroken[2])
    checkpoint = save(tmp_path, unbroken, 4, step=steps)
    assert resume(checkpoint, resumed)[:2] == (4, steps)
    for run in (unbroken, resumed):
        train(*run[:2], range(steps, steps + 3), run[2])
    assert same(whole(resumed), whole(unbroken))


def test_saving_before_the_first_step_changes_nothing(folder, tmp_path):
    saved, unsaved = start(folder / "base"), start(folder / "base")
    save(tmp_path, saved, 0)
    for run in (saved, unsaved):
        train(*run[:2], range(2), run[2])
    assert same(whole(saved), whole(unsaved))


def test_another_config_is_refused_by_its_differing_keys(folder, tmp_path):
    checkpoint = save(tmp_path, start(folder / "base"), 1)
    other = CONFIG | {"num_epochs": 9, "train": {"learning_rate": 2e-3, "beta": 0.0}, "eval": {"every": 1}}
    with pytest.raises(ValueError, match=r"num_epochs: 3 -> 9, train\.learning_rate: 0.001 -> 0.002") as error:
        resume(checkpoint, start(folder / "base"), other)
    assert "beta" not in str(error.value)
    assert "window" not in str(error.value), "a tuple is JSON's list"
    resume(checkpoint, start(folder / "base"), other, may_differ=["num_epochs", "train", "eval.every"])
    with pytest.raises(ValueError, match="num_epochs"):
        resume(checkpoint, start(folder / "base"), other, may_differ=["train", "eval", "num"])


def test_another_model_is_refused_by_its_differing_tensors(folder, tmp_path):
    run = start(folder / "base")
    checkpoint = save(tmp_path, run, 1)
    state = checkpoints.training_state(*run)
    name = next(iter(state))
    with pytest.raises(ValueError, match=rf"1 tensors differ: {name} .* -> \(7,\)"):
        checkpoints.load(checkpoint, state | {name: torch.zeros(7)}, config=CONFIG)
    with pytest.raises(ValueError, match="1 tensors differ: more absent -> "):
        checkpoints.load(checkpoint, state | {"more": torch.zeros(7)}, config=CONFIG)


def test_offloaded_moments_cannot_be_saved_by_mistake(ranks):
    assert all("reload_optimizer_state" in rank["offloaded"] for rank in ranks)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept_and_found(folder, tmp_path):
    run = start(folder / "base")
    assert checkpoints.find(tmp_path) is None
    for epoch in (8, 9, 10, 11):
        save(tmp_path, run, epoch, keep=2)
    assert names(tmp_path) == ["epoch_000010", "epoch_000011"]
    assert checkpoints.find(tmp_path) == checkpoints.find("elsewhere", tmp_path) == tmp_path / "epoch_000011"
    assert checkpoints.find(tmp_path, str(tmp_path / "epoch_000010")) == tmp_path / "epoch_000010"
    with pytest.raises(ValueError, match=r"no checkpoint at .*nowhere"):
        checkpoints.find(tmp_path, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="keep = 0"):
        save(tmp_path, run, 12, keep=0)


def test_a_run_that_went_back_abandons_its_future(folder, tmp_path):
    run = start(folder / "base")
    for epoch in (1, 2, 3, 2):
        save(tmp_path, run, epoch, keep=3)
    assert names(tmp_path) == ["epoch_000001", "epoch_000002"]


def test_extra_files_appear_with_the_checkpoint_or_not_at_all(folder, tmp_path):
    run = start(folder / "base")
    checkpoint = save(tmp_path, run, 1, extra_files=lambda path: exports.save_lora(pipeline_of(run[0]), path / "lora"))
    assert (checkpoint / "lora" / "pytorch_lora_weights.safetensors").is_file()
    with pytest.raises(KeyError):
        save(tmp_path, run, 2, extra_files=lambda path: {}["no such export"])
    assert names(tmp_path) == ["epoch_000001"]


@pytest.mark.parametrize("num_bytes", [0, 20_000, 10**6], ids=["from the start", "in the tensors", "in the config"])
def test_a_full_disk_costs_only_the_checkpoint_that_did_not_fit(folder, tmp_path, num_bytes):
    run = start(folder / "base")
    save(tmp_path, run, 1, keep=1)
    train(*run[:2], range(1))
    with pytest.raises(OSError, match=r"could not write|too large"), largest_file(num_bytes):
        save(tmp_path, run, 2, keep=1, config={"notes": "x" * 10**6})
    assert names(tmp_path) == ["epoch_000001"]
    resume(checkpoints.find(tmp_path), start(folder / "base"))
    save(tmp_path, run, 2, keep=1)
    assert names(tmp_path) == ["epoch_000002"]


def test_a_kill_at_any_moment_leaves_the_newest_loadable(tmp_path):
    done = warm.run([__file__, tmp_path, "saves"], timeout_s=180)
    assert done.returncode == 0, done.stderr[-2000:]
    log = json.loads((tmp_path / "log.json").read_text())
    assert [kill["killed"] for kill in log] == [-signal.SIGKILL] * 12
    assert [kill["loads"] for kill in log] == [True] * 12
    assert sum(bool(kill["leftovers"]) for kill in log) >= 3, "the kills must hit saves"
    checkpoints.save(tmp_path, {"a": torch.zeros(1)}, checkpoints.Progress(10**6, 1), config=CONFIG)
    assert not list(tmp_path.glob(".*"))


def test_a_replaced_checkpoint_stays_until_its_successor_is_there(folder, tmp_path):
    save(tmp_path, start(folder / "base"), 1).rename(tmp_path / ".old-epoch_000001")
    assert checkpoints.find(tmp_path) == tmp_path / ".old-epoch_000001"
    resume(checkpoints.find(tmp_path), start(folder / "base"))


@pytest.mark.parametrize("source", ["one rank", "two sharded ranks"])
def test_diffusers_loads_the_exported_adapter_alpha_included(folder, ranks, tmp_path, source):
    run = start(folder / "base")
    if source == "one rank":
        exports.save_lora(pipeline_of(run[0]), tmp_path)
    else:
        tmp_path = folder / "export"
        for name, p in fsdp_utils.trainable_parameters(run[0]).items():
            p.data.copy_(ranks[0][True]["unbroken"][f"model/{name}"])
    pipeline = pipeline_of(QwenImageTransformer2DModel.from_pretrained(folder / "base"))
    with torch.no_grad():
        plain = velocity(pipeline.transformer, ROWS)
        pipeline.load_lora_weights(tmp_path)
        assert torch.equal(velocity(pipeline.transformer, ROWS), velocity(run[0], ROWS))
    assert (velocity(run[0], ROWS) - plain).abs().max() > 0.01
    assert LORA.lora_alpha != LORA.r


def test_diffusers_loads_exported_full_weights(folder, ranks, tmp_path):
    expected = {name.removeprefix("model/"): t for name, t in ranks[0][False]["unbroken"].items() if "model/" in name}
    run = start(folder / "transformer", lora=False)
    exports.save_transformer(run[0], tmp_path)
    for export in (folder / "transformer", tmp_path):
        loaded = QwenImageTransformer2DModel.from_pretrained(export)
        assert same(dict(loaded.named_parameters()), expected)
        assert json.loads((export / "config.json").read_text())["_class_name"] == "QwenImageTransformer2DModel"


if __name__ == "__main__":
    saves(Path(sys.argv[1])) if "saves" in sys.argv else main(Path(sys.argv[1]))
