"""Layouts differ in memory, not in numbers; weights arrive whole; ranks agree. Under torchrun this is the two ranks."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from refused import assert_refused
from rounding import rounding
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parameters_to_vector
from two_ranks import MAX_NORM, TINY, UNITS, adapter_weights, base, build, done, launch, optimizer_of, train, velocity

from flow_grpo.base import distributed
from flow_grpo.kernels import compilation
from flow_grpo.weights import fsdp_utils, offload, safetensors_reader
from flow_grpo.weights.fsdp_utils import DTensor

CPU = torch.device("cpu")
STEPS = range(2)
LAYOUTS = {
    "replicate": ("replicate", 2),
    "shard": ("shard", 2),
    "hybrid": ("hybrid", 1),
    "hybrid of one machine": ("hybrid", 2),
}


def trained(weights, mesh, lora, **how):
    transformer = build(weights, mesh, lora=lora, checkpointed=True, **how)
    norms = train(transformer, optimizer_of(transformer), STEPS)
    return {"norms": norms, "weights": fsdp_utils.full_state_dict(transformer)}


def trained_with_offload(weights, mesh):
    """The moments are away between the steps."""
    transformer = build(weights, mesh, lora=True)
    optimizer = optimizer_of(transformer)
    for step in STEPS:
        offload.reload_optimizer_state(optimizer)  # at first there is nothing to undo
        train(transformer, optimizer, range(step, step + 1))
        offload.offload_optimizer_state(optimizer)
        for state in optimizer.state.values():
            assert not isinstance(state["exp_avg"], DTensor)
    return fsdp_utils.full_state_dict(transformer)


def loaded(weights, mesh, precision, lora):
    transformer = build(weights, mesh, lora=lora, precision=precision)
    held = {}
    for name, parameter in transformer.named_parameters():
        if isinstance(parameter, DTensor):
            held[name] = parameter.to_local().numel()
    return {"held": held, "weights": fsdp_utils.full_state_dict(transformer, trainable_only=False)}


def check_units(weights, mesh):
    """Each will be compiled, and each but the first one walked back to is fetched ahead."""
    transformer = build(weights, mesh, lora=False)
    num_fetched = []
    for module in vars(transformer)["network"].modules():
        if isinstance(module, FSDPModule):
            num_fetched.append(len(fully_shard.state(module)._states_to_backward_prefetch))
    assert sorted(num_fetched) == [0, *[1] * TINY["num_layers"]]
    compilation.compile_units(transformer, UNITS)
    assert sum("forward" in vars(module) for module in transformer.modules()) == TINY["num_layers"]


def gradients_of_two_forwards(weights, mesh):
    """Gradients of a loss with two forwards, as guidance has them, and how many weights have one when the backward of
    the first forward begins, and at the end."""
    transformer = build(weights, mesh, lora=False)
    counts = []
    sharded = list(transformer.parameters())  # a module has others while it computes

    def count(_=None):
        counts.append(sum(p.grad is not None for p in sharded))

    first = velocity(transformer, torch.zeros(2, 24, 64))
    second = velocity(transformer, torch.ones(2, 24, 64))
    first.register_hook(count)
    first += 1  # a script may write into what it gets
    (first - second).square().mean().backward()
    count()
    whole = {}
    for name, parameter in transformer.named_parameters():
        if parameter.grad is not None:
            whole[name] = fsdp_utils.full_tensor(parameter.grad)
    return {"counts": counts, "gradients": whole}


def check_ranks_agree(rank):
    def fail():
        raise OSError("no space on rank 0")

    with pytest.raises((OSError, RuntimeError), match="no space on rank 0"):
        distributed.on_main(fail)
    all_rows = torch.arange(6).view(2, 3), torch.arange(6).view(2, 3) + 10
    gathered = distributed.gather(all_rows[rank].T)  # not contiguous
    assert torch.equal(gathered, torch.cat([rows.T for rows in all_rows]))
    assert torch.equal(distributed.local_rows(gathered), all_rows[rank].T)
    assert distributed.gather_objects(["a", {"b": 1}][: rank + 1]) == ["a", "a", {"b": 1}]
    assert distributed.broadcast_object({"run": rank}) == {"run": 0}


def mesh_of(mode, device, ranks_per_machine):
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_machine)
    return fsdp_utils.make_mesh(mode, device)


def main(folder):
    rank, world_size, device = distributed.init_distributed()
    assert (world_size, device) == (2, CPU)
    meshes = {name: mesh_of(mode, device, size) for name, (mode, size) in LAYOUTS.items()}
    seen = {"offload": {}, "loaded": {}}
    for lora in (True, False):
        for name, mesh in meshes.items():
            seen[name, lora] = trained(folder / "base", mesh, lora)
        seen["offload", lora] = trained(folder / "base", meshes["shard"], lora, offload=True)
    seen["two forwards"] = gradients_of_two_forwards(folder / "base", meshes["shard"])
    for name in ("replicate", "shard"):
        seen["offload"][name] = trained_with_offload(folder / "base", meshes[name])
    for precision in ("fp32", "bf16"):
        seen["loaded"][precision] = loaded(folder / "split", meshes["shard"], precision, True)
    check_units(folder / "base", meshes["shard"])
    check_ranks_agree(rank)
    done(folder, seen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    base(folder / "base")
    base(folder / "split", max_shard_size="300KB")
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return launch(__file__, folder)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full weights"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "offload"])
def test_every_layout_learns_what_one_rank_learns(folder, ranks, layout, lora):
    before = fsdp_utils.full_state_dict(build(folder / "base", lora=lora))
    one = trained(folder / "base", None, lora)
    two = ranks[0][layout, lora]
    assert min(one["norms"]) > MAX_NORM, "the clipping must bite"
    for name, weight in before.items():
        if "to_q" in name:
            assert (one["weights"][name] - weight).abs().max() > 1e-3, name
    torch.testing.assert_close(two["norms"], one["norms"], atol=0, rtol=1e-4)
    torch.testing.assert_close(two["weights"], one["weights"], atol=1e-5, rtol=0)  # 3e-7 a step: optimizer_of
    assert ranks[1][layout, lora]["norms"] == two["norms"]
    assert ranks[1][layout, lora]["weights"] == {}


def test_a_backward_through_sharded_weights_reduces_gradients_forward_by_forward_to_those_of_one_rank(folder, ranks):
    expected = gradients_of_two_forwards(folder / "base", None)["gradients"]
    for rank in ranks:
        torch.testing.assert_close(rank["two forwards"]["gradients"], expected, atol=1e-6, rtol=1e-5)
        assert rank["two forwards"]["counts"] == [71, 71]


@pytest.mark.parametrize("layout", ["replicate", "shard"])
def test_offloaded_moments_come_back_bit_for_bit(ranks, layout):
    torch.testing.assert_close(ranks[0]["offload"][layout], ranks[0][layout, True]["weights"], atol=0, rtol=0)


def test_the_norm_is_that_of_all_gradients_in_a_row(folder):
    transformer = build(folder / "base", lora=False)
    velocity(transformer, torch.ones(2, 24, 64)).square().sum().backward()
    gradients = [parameter.grad for parameter in transformer.parameters() if parameter.grad is not None]
    expected = parameters_to_vector(gradients).double().norm()
    norm = fsdp_utils.clip_grad_norm(transformer.parameters(), 0.5)
    close = dict(rtol=rounding(max(map(torch.numel, gradients))), atol=0)
    torch.testing.assert_close(norm.double(), expected, **close)
    clipped = parameters_to_vector(gradients).double().norm()
    torch.testing.assert_close(clipped, torch.tensor(0.5).double(), **close)
    with pytest.raises(ValueError, match="no trained weight has a gradient"):
        fsdp_utils.clip_grad_norm([torch.nn.Parameter(torch.ones(2))], 1.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shards_are_filled_with_the_weights_that_diffusers_loads(folder, ranks, precision):
    expected = QwenImageTransformer2DModel.from_pretrained(folder / "base", torch_dtype=fsdp_utils.DTYPES[precision])
    assert len(list((folder / "split").glob("*.safetensors"))) > 2
    seen = ranks[0]["loaded"][precision]
    frozen = {}
    for name, weight in seen["weights"].items():
        if "lora_" in name:
            torch.testing.assert_close(weight, adapter_weights(name, weight.shape), atol=0, rtol=0)
        else:
            frozen[name.replace(".base_layer", "")] = weight
        held = [rank["loaded"][precision]["held"][name] for rank in ranks]
        assert sum(held) == weight.numel()
        assert held[0] - held[1] in (0, weight[0].numel())
    torch.testing.assert_close(frozen, dict(expected.named_parameters()), atol=0, rtol=0)


def test_weights_that_learn_stay_float32_whatever_the_precision(folder):
    """And adapters: above, with their shards."""
    full = loaded(folder / "base", None, "bf16", lora=False)
    expected = dict(QwenImageTransformer2DModel.from_pretrained(folder / "base").named_parameters())
    torch.testing.assert_close(full["weights"], expected, atol=0, rtol=0)


def test_without_torchrun_there_is_one_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert distributed.init_distributed()[:2] == (0, 1)
    assert fsdp_utils.make_mesh("shard", CPU) is None
    assert distributed.gather_objects([1]) == [1]
    assert distributed.peak_memory_gib(CPU) > 0.1


WRONG = [  # what takes the place of a bias in a file of weights, and words of the sentence
    ({}, "missing: proj_out.bias"),
    ({"proj_out.bais": torch.zeros(64)}, "unexpected: proj_out.bais"),
    ({"proj_out.bias": torch.zeros(32)}, "proj_out.bias", "[32]", "[64]"),
]


def test_weights_that_are_missing_or_of_another_model_are_named(folder, tmp_path):
    def refused(*words):
        assert_refused([(str(words), lambda: build(tmp_path, lora=True), words)])

    refused(safetensors_reader.WEIGHTS)
    index = safetensors_reader.WEIGHTS + ".index.json"
    (tmp_path / index).write_text((folder / "split" / index).read_text())
    refused(min(json.loads((tmp_path / index).read_text())["weight_map"].values()))
    (tmp_path / index).unlink()
    weights = load_file(folder / "base" / safetensors_reader.WEIGHTS)
    del weights["proj_out.bias"]
    for replacement, *words in WRONG:
        save_file(weights | replacement, tmp_path / safetensors_reader.WEIGHTS)
        refused(*words)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
