"""A resumed run is the unbroken run; a save that dies costs nothing but itself. Under torchrun, two ranks do this."""

import itertools
import json
import os
import resource
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel
from safetensors import SafetensorError
from small import flip_a_bit, no_file_above, record
from two_ranks import base, build, done, ema_of, launch, optimizer_of, train, velocity

from flow_grpo.base import checksums, distributed, folders
from flow_grpo.checkpoints import best, checkpoints, exports, shards
from flow_grpo.run import save as saving
from flow_grpo.settings import stored_config
from flow_grpo.settings.table import default_config
from flow_grpo.weights import fsdp_utils, offload

CONFIG = {"num_epochs": 3, "train": {"learning_rate": 1e-3, "beta": 0.0}, "sample": {"window": (0, 5)}}
ROWS = torch.linspace(-1, 1, 2 * 24 * 64).view(2, 24, 64)


def start(weights, mesh=None, lora=True):
    transformer = build(weights, mesh, lora=lora)
    return transformer, optimizer_of(transformer), ema_of(transformer)


def save(folder, run, epoch, *, step=None, config=CONFIG, **how):
    progress = checkpoints.Progress(epoch, epoch if step is None else step)
    return checkpoints.save(folder, checkpoints.training_state(*run), progress, config=config, **how)


def restore(checkpoint, run):
    return checkpoints.load(checkpoint, checkpoints.training_state(*run))


def whole(run):
    """Every tensor of a run, sharded ones whole."""
    tensors = checkpoints.training_state(*run)
    return {name: fsdp_utils.full_tensor(tensor).clone() for name, tensor in tensors.items()}


def same(a, b):
    assert a.keys() == b.keys()
    return all(map(torch.equal, a.values(), map(b.get, a)))


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
    assert restore(checkpoint, fresh)[:2] == (1, 1)
    seen["loaded"] = whole(fresh)
    train(*fresh[:2], range(3, 5), fresh[2])
    seen["resumed"] = whole(fresh)
    offload.offload_optimizer_state(run[1])
    with pytest.raises(AssertionError, match="reload_optimizer_state"):  # they cannot be saved by mistake
        checkpoints.training_state(*run)
    return seen


def full_disk_on_rank_1(folder, rank):
    run = start(folder / "base", fsdp_utils.make_mesh("shard", torch.device("cpu")))
    save(folder / "full", run, 1)
    try:
        with largest_file(20_000 if rank == 1 else resource.RLIM_INFINITY):
            save(folder / "full", run, 2)
    except (SafetensorError, RuntimeError) as error:
        return str(error)


def replicated(folder, rank):
    """Two ranks that hold the same weights write half of them each, and read what one rank wrote."""
    run = start(folder / "base")
    train(*run[:2], range(2), run[2])
    checkpoint = save(folder / "replicated", run, 1)
    written = whole(run)
    of_one = []
    for mesh in (None, fsdp_utils.make_mesh("shard", torch.device("cpu"))):
        other = start(folder / "base", mesh)
        restore(folder / "one" / "epoch_000001", other)
        of_one.append(whole(other))
    return {"checkpoint": str(checkpoint), "written": written, "of one": of_one}


def main(folder):
    rank = distributed.init_distributed().rank
    seen = {True: two_ranks(folder, True), False: two_ranks(folder, False)}
    seen["full disk"] = full_disk_on_rank_1(folder, rank)
    seen["replicated"] = replicated(folder, rank)
    done(folder, seen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    base(folder / "base")
    one = start(folder / "base")
    train(*one[:2], range(2), one[2])
    save(folder / "one", one, 1)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return launch(__file__, folder)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full weights"])
def test_two_sharded_ranks_resume_bit_for_bit_and_on_one_but_for_rounding(folder, ranks, lora):
    seen = ranks[0][lora]
    assert same(seen["loaded"], seen["saved"])
    assert not same(seen["unbroken"], seen["saved"])
    assert same(seen["resumed"], seen["unbroken"])
    assert same(seen["unbroken"], ranks[1][lora]["unbroken"])
    assert all(rank[lora]["restored"] for rank in ranks), "averages leave no trace"
    one = start(folder / "base", lora=lora)
    restore(seen["checkpoint"], one)
    assert same(whole(one), seen["saved"])
    with one[2].applied(), torch.no_grad():
        torch.testing.assert_close(velocity(one[0], ROWS), seen["averaged"])
    train(*one[:2], range(3, 5), one[2])
    torch.testing.assert_close(whole(one), seen["unbroken"], atol=1e-5, rtol=0)


def test_two_ranks_with_the_same_weights_write_half_each_and_read_ones_checkpoint_in_either_layout(folder, ranks):
    one = start(folder / "base")
    of_two = start(folder / "base")
    restore(folder / "one" / "epoch_000001", one)
    for rank in ranks:
        for read in rank["replicated"]["of one"]:
            assert same(read, whole(one))
    state = Path(ranks[0]["replicated"]["checkpoint"], "state")
    sizes = {path.name: path.stat().st_size for path in state.iterdir()}
    assert sorted(sizes) == ["rank_0000_0000.safetensors", "rank_0001_0000.safetensors"]
    assert max(sizes.values()) < 1.1 * min(sizes.values())
    restore(state.parent, of_two)
    assert same(whole(of_two), ranks[1]["replicated"]["written"])


def test_rows_that_are_missing_are_noticed_without_checksums(ranks, tmp_path):
    state = shutil.copytree(Path(ranks[0][True]["checkpoint"], "state"), tmp_path / "state")
    assert len(shards.read_index(state)) > 10
    (state / "rank_0001_0000.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{state} does not hold all rows of "):
        shards.read_index(state)


def test_one_rank_with_a_full_disk_stops_both_and_costs_nothing(folder, ranks):
    for rank in ranks:
        assert "too large" in rank["full disk"]
    assert names(folder / "full") == ["epoch_000001"]


def compare(tmp_path, stored, config):
    """The settings in which a resumed run's config must not differ from a stored one, but does."""
    return stored_config.changes(json.loads(json.dumps(stored)), config.to_dict(), tmp_path / "config.json")


def test_another_config_is_refused_by_its_differing_keys(tmp_path):
    """Not by those that may differ, nor by those that are younger than the checkpoint and have their defaults, nor by a
    new name."""
    stored = default_config().to_dict()
    del stored["health"], stored["train"]["reward_aggregation"]
    config = default_config()
    config.num_epochs = 999
    config.eval.num_steps = 3
    config.fsdp.mode = "shard"
    assert not compare(tmp_path, stored, config)
    config.train.beta = 0.5
    config.sample.rollout_weights = "merged"
    changed = {"sample.rollout_weights": ("exact", "merged"), "train.beta": (0.0, 0.5)}
    assert compare(tmp_path, stored, config) == changed
    with pytest.raises(ValueError, match=r"config.json is damaged: its 'sample' is 5, no section of settings"):
        compare(tmp_path, {"sample": 5}, config)
    for key, value in (("num_steps", "10"), ("rewards", [3]), ("rewards", None)):
        (tmp_path / "config.json").write_text(json.dumps({"eval": {key: value}}))
        with pytest.raises(ValueError, match=rf"config.json is damaged: its 'eval.{key}' is "):
            stored_config.read(tmp_path / "config.json")


REWARD_CHANGES = [  # a reward's settings before and after, and whether they change its scores
    ({"url": "http://node1:18087"}, {"url": "http://node2:18087"}, False),
    ({}, {"url": "http://node2:18087", "timeout_s": 9.0, "device": "cuda:7"}, False),
    ({"checkpoint": "a"}, {"checkpoint": "b"}, True),
    ({"more": {"url": 1}}, {"more": {"url": 2}}, True),
]


def test_of_one_rewards_settings_those_may_change_that_change_no_score(tmp_path):
    for before, after, refused in REWARD_CHANGES:
        config = default_config()
        config.reward.args = {"pickscore": before}
        stored = config.to_dict()
        config.reward.args = {"pickscore": after}
        assert bool(compare(tmp_path, stored, config)) == refused, (before, after)


TENSORS = {"a": torch.arange(300.0).view(100, 3), "b": torch.tensor(7), "c": torch.ones(5, dtype=torch.float64)}


def small(folder, epoch, config=CONFIG, keep=9, **fields):
    return checkpoints.save(folder, TENSORS, checkpoints.Progress(epoch, epoch, **fields), config=config, keep=keep)


def test_another_model_is_refused_by_its_differing_tensors_and_another_format_by_its_number(tmp_path):
    checkpoint = small(tmp_path, 1)
    with pytest.raises(ValueError, match=r"does not fit this run in 1 tensor: a$"):
        checkpoints.load(checkpoint, TENSORS | {"a": torch.zeros(7)})
    with pytest.raises(ValueError, match=r"does not fit this run in 1 tensor: more$"):
        checkpoints.load(checkpoint, TENSORS | {"more": torch.zeros(7)})
    # What a checkpoint has beyond a run is refused, too, unless the run asks for its own tensors alone.
    fewer = {"a": torch.zeros(100, 3)}
    with pytest.raises(ValueError, match=r"does not fit this run in 2 tensors: b, c$"):
        checkpoints.load(checkpoint, fewer)
    checkpoints.load(checkpoint, fewer, exact=False)
    assert torch.equal(fewer["a"], TENSORS["a"])
    (checkpoint / "progress.json").write_text('{"format": 3}')
    with pytest.raises(ValueError, match=r"has the format 3"):
        checkpoints.load(checkpoint, TENSORS)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_chosen(tmp_path):
    damages = {
        "state/rank_0000_0000.safetensors": [flip_a_bit, lambda path: path.write_bytes(path.read_bytes()[:-8])],
        "progress.json": [lambda path: path.write_text(""), flip_a_bit],
        "config.json": [Path.unlink],
        "checksums.json": [Path.unlink, *(lambda path, s=s: path.write_text(s) for s in ("[1]", "{}", "[" * 10**5))],
    }
    older = small(tmp_path / "run", 1)
    for name, ways in damages.items():
        for damage in (*ways, lambda path: path.write_bytes(b"")):
            newest = small(tmp_path / "run", 2)
            damage(newest / name)
            checkpoint, (sentence,) = checkpoints.choose(tmp_path / "run")
            assert checkpoint == older
            assert sentence.startswith(f"{newest} is damaged: ")
            assert name in sentence
            with pytest.raises(ValueError, match=f"{newest} is damaged: .*{name}"):
                checkpoints.choose(newest)
    flip_a_bit(older / "config.json")
    with pytest.raises(ValueError, match=f"{newest} is damaged: .*; {older} is damaged: config.json"):
        checkpoints.choose(tmp_path / "run")
    assert checkpoints.choose(tmp_path / "nowhere") == (None, [])


def test_a_reference_has_its_checkpoints_moves_or_none_where_it_stays(tmp_path, monkeypatch):
    for name, moves in (("reference/a", 5), ("a", 0)):
        tensors = {name: torch.ones(3)}
        monkeypatch.setattr(saving, "state", lambda run, tensors=tensors: tensors)
        progress = checkpoints.Progress(7, 7, reference_moves=5)
        checkpoint = checkpoints.save(tmp_path / name, tensors, progress, config=CONFIG)
        run = SimpleNamespace(reference=SimpleNamespace(num_moves=0), extra_policies={})
        saving.load_state(run, checkpoint)
        assert run.reference.num_moves == moves


def test_a_state_of_many_files_is_the_same_and_no_pickle_beside_them_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 100)
    checkpoint = small(tmp_path, 1)
    assert len(list((checkpoint / "state").iterdir())) == 2
    for name in (".metadata", "state/.metadata", "state/__0_0.distcp"):
        (checkpoint / name).write_bytes(b"a pickle of another program")
    assert checkpoints.choose(checkpoint) == (checkpoint, [])
    read = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    checkpoints.load(checkpoint, read)
    assert same(read, TENSORS)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept_and_found_but_for_an_abandoned_future(tmp_path):
    assert checkpoints.find_newest(tmp_path) is None
    for epoch in (8, 9, 10, 11):
        small(tmp_path, epoch, keep=2)
    assert names(tmp_path) == ["epoch_000010", "epoch_000011"]
    assert checkpoints.find_newest(tmp_path) == tmp_path / "epoch_000011"
    assert checkpoints.find_newest(tmp_path / "epoch_000010") == tmp_path / "epoch_000010"
    small(tmp_path, 9)
    assert names(tmp_path) == ["epoch_000009"]


@pytest.mark.parametrize("num_bytes", [0, 1000, 10**6], ids=["from the start", "in the tensors", "in the config"])
def test_a_full_disk_costs_only_the_checkpoint_that_did_not_fit(tmp_path, num_bytes):
    small(tmp_path, 1, keep=1)
    with pytest.raises((OSError, SafetensorError), match="too large"), largest_file(num_bytes):
        small(tmp_path, 2, keep=1, config={"notes": "x" * 10**6})
    assert checkpoints.choose(tmp_path) == (tmp_path / "epoch_000001", [])
    assert names(tmp_path) == ["epoch_000001"]
    small(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["epoch_000002"]


STEPS = [
    (Path, "rename"),
    (Path, "replace"),
    (folders, "sync"),
    (folders, "remove"),
    (shutil, "rmtree"),
    (shards, "write_tensors"),
    (Path, "mkdir"),
    (Path, "write_text"),
]


def counted(plain, left):
    """A step on the disk, at which the process dies if none are left."""

    def step(*args, **options):
        if not next(left):
            os._exit(9)
        return plain(*args, **options)

    return step


def dies_before(number, write):
    """Let a process run `write` and die before the step on the disk of this number. Returns whether it died."""
    child = os.fork()
    if child == 0:
        left = itertools.count(number, -1)
        for owner, name in STEPS:
            plain = getattr(owner, name)
            setattr(owner, name, counted(plain, left))
        write()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def write_checkpoint(folder, number):
    state = {"a": torch.full((1000,), number), "b": torch.tensor(number)}
    how = dict(config=CONFIG, extra_files=lambda path: (path / "x").write_text(str(number)))
    checkpoints.save(folder, state, checkpoints.Progress(number, number), **how)


def read_checkpoint(folder):
    state = {"a": torch.zeros(1000, dtype=torch.int64), "b": torch.tensor(0)}
    checkpoint, damage = checkpoints.choose(folder)
    step = checkpoints.load(checkpoint, state).step
    assert not damage
    assert set(state["a"].tolist()) == {step} == {state["b"].item()} == {int((checkpoint / "x").read_text())}
    return step


def write_best(folder, number):
    best.write_best(folder, record(number), lambda to: (to / "x").write_text(str(number)))


def read_best(folder):
    checksums.check_files(best.find_best(folder))
    step = json.loads((best.find_best(folder) / best.FILE).read_text())["epoch"]
    assert (best.find_best(folder) / "x").read_text() == str(step)
    return step


@pytest.mark.parametrize(("write", "read"), [(write_checkpoint, read_checkpoint), (write_best, read_best)])
def test_a_kill_before_any_step_of_a_save_leaves_the_old_or_the_new_one_whole(write, read, tmp_path):
    write(tmp_path, 1)
    seen = [1]
    number = 1
    for step in itertools.count():
        number += 1
        died = dies_before(step, lambda number=number: write(tmp_path, number))
        seen.append(read(tmp_path))
        assert seen[-1] in ((number, seen[-2]) if died else (number,))
        if not died:
            break
    assert step > 5
    assert 1 < len(set(seen)) < len(seen), "kills before and after it was there"
    write(tmp_path, number + 2)
    assert not list(tmp_path.glob("*.scratch-*"))


def test_the_adapter_that_two_ranks_exported_is_byte_for_byte_that_of_one(folder, ranks):
    """Diffusers loads it: test_policies.py."""
    run = start(folder / "base")
    for name, p in fsdp_utils.trainable_parameters(run[0]).items():
        p.data.copy_(ranks[0][True]["unbroken"][f"model/{name}"])
    expected = (folder / "export" / "pytorch_lora_weights.safetensors").read_bytes()
    for number in range(8):
        exports.save_lora(pipeline_of(run[0]), folder / f"again_{number}")
        assert (folder / f"again_{number}" / "pytorch_lora_weights.safetensors").read_bytes() == expected


def test_diffusers_loads_exported_full_weights(folder, ranks, tmp_path):
    expected = {}
    for name, tensor in ranks[0][False]["unbroken"].items():
        if "model/" in name:
            expected[name.removeprefix("model/")] = tensor
    run = start(folder / "transformer", lora=False)
    exports.save_transformer(run[0], tmp_path)
    for export in (folder / "transformer", tmp_path):
        loaded = QwenImageTransformer2DModel.from_pretrained(export)
        assert same(dict(loaded.named_parameters()), expected)
        assert json.loads((export / "config.json").read_text())["_class_name"] == "QwenImageTransformer2DModel"
        modes = {file.stat().st_mode for file in export.iterdir()}
        assert len(modes) == 1, "whoever may read config.json may read the weights"


def test_full_weights_that_a_disk_refuses_leave_those_of_before(folder, tmp_path):
    run = start(folder / "base", lora=False)
    exports.save_transformer(run[0], tmp_path / "transformer")
    before = contents(tmp_path / "transformer")
    with no_file_above(20_000), pytest.raises(Exception, match=r"os error 27|File too large"):
        exports.save_transformer(run[0], tmp_path / "transformer")
    assert contents(tmp_path / "transformer") == before
    assert names(tmp_path) == ["transformer"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
