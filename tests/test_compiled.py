"""Blocks as they are compiled: adapters, and how the compiler chooses its kernels. The paths through a run:
test_fast_path.py; layers of 8 bits: test_quantised_linear.py.
"""

import os
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import bench_blocks
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from small import config_of, loaded, move
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.exc import InductorError
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.kernels import compilation, lora_linear, one_kernel
from flow_grpo.weights import policies, quantisation


class Block(nn.Module):
    """Two layers, like a feed-forward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.last = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.last(F.gelu(self.first(x), approximate="tanh"))


class OneLayer(nn.Module):
    """The layer before an activation, for which the compiler writes half of a block's kernels."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x):
        return x + F.gelu(self.first(x), approximate="tanh")


def adapted(base="", block=Block, **options):
    """Two blocks whose layers have an adapter that leads somewhere."""
    torch.manual_seed(0)
    options = dict(r=4, lora_alpha=8, target_modules=["first", "last"]) | options
    model = inject_adapter_in_model(LoraConfig(**options), nn.Sequential(block(), block()).requires_grad_(False))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    quantisation.quantise_units(model, (block.__name__,), base)
    return model


def adapted_layers(model):
    return [module for module in model.modules() if isinstance(module, Linear)]


def without_adapters(model):
    return policies.adapters_off(policies.adapted_layers(model))


def rows():
    return torch.randn(3, 50, 32, generator=torch.Generator().manual_seed(1))


def step(model):
    """Result and gradients, of the input first."""
    x = rows().requires_grad_()
    out = model(x)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().mean(), [x, *trained])]


@pytest.fixture
def uncompiled(monkeypatch):
    """Blocks as they are before the compiler reads them."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)


@pytest.mark.parametrize(("base", "alpha"), [("", 8), ("fp8_weights", 8), ("nf4", 8), ("", 7)])
def test_an_adapter_scaled_in_its_smaller_factor_is_pefts(base, alpha, uncompiled):
    """Bit for bit where alpha / rank is a power of two, as in all configs."""
    expected = step(adapted(base, lora_alpha=alpha))
    model = adapted(base, lora_alpha=alpha)
    compilation.compile_units(model, ("Block",))
    assert all(type(layer) is not Linear for layer in adapted_layers(model))
    room = dict(rtol=0, atol=0) if alpha == 8 else dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step(model), expected, **room)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_is_left_out_where_it_is_off_or_merged(dtype, uncompiled):
    """And results keep the dtype of the base, without autocast."""
    model = adapted()
    plain = adapted()
    for layer in adapted_layers(model) + adapted_layers(plain):
        layer.base_layer.to(dtype)
    compilation.compile_units(model, ("Block",))
    x = torch.randn(2, 5, 32).to(dtype)
    with without_adapters(model), without_adapters(plain):
        assert torch.equal(model(x), plain(x))
    with policies.MergedWeights(model).applied(), policies.MergedWeights(plain).applied():
        assert torch.equal(model(x), plain(x))
    with without_adapters(model):
        assert not torch.equal(model(x), plain(x))
    assert model(x).dtype == dtype
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("kind", ["dropout", "bias", "DoRA", "two", "merged"])
def test_an_adapter_of_another_kind_stays_pefts(kind, uncompiled):
    options = dict(dropout=dict(lora_dropout=0.5), bias=dict(lora_bias=True), DoRA=dict(use_dora=True))
    model = adapted(**options.get(kind, {}))
    if kind == "two":
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["first", "last"]), model, adapter_name="other")
    if kind == "merged":
        for layer in adapted_layers(model):
            layer.merge()
    before = model(torch.ones(1, 2, 32)) if kind != "dropout" else None
    compilation.compile_units(model, ("Block",))
    assert all(type(layer) is Linear for layer in adapted_layers(model))
    assert before is None or torch.equal(model(torch.ones(1, 2, 32)), before)


def velocity(model):
    torch.manual_seed(2)
    return policies.predict(model, "fp32", *bench_blocks.inputs(model, 3, Size(64, 64), 8, True))


def drawn(model):
    """Velocity and gradients of Qwen-Image's adapters."""
    trained = [p for p in model.transformer.parameters() if p.requires_grad]
    out = velocity(model)
    # The last block's text is not used: its gradients are zeros.
    gradients = torch.autograd.grad(out.square().mean(), trained, materialize_grads=True)
    return [out.detach(), *gradients]


def test_queries_keys_and_values_share_one_product_of_their_adapters_inputs(uncompiled, tmp_path, monkeypatch):
    model = loaded("qwenimage")
    policies.attach(model.transformer, config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    move(p for p in model.transformer.parameters() if p.requires_grad)
    model.fuse("flash_4")
    plain = drawn(model)
    with without_adapters(model.transformer):
        without = velocity(model)
    compilation.compile_units(model.transformer, model.SHARD_UNITS)
    products = []
    product = lora_linear._product

    def noting(x, down):
        products.append(len(down))
        return product(x, down)

    monkeypatch.setattr(lora_linear, "_product", noting)
    results = drawn(model)

    # Of image and of text: queries, keys and values together, attention's result, and two layers.
    rank = config_of("shapes_qwenimage").lora.rank
    ranks_of_block = [3 * rank] * 2 + [rank] * 6
    assert sorted(products) == sorted(ranks_of_block * len(model.transformer.transformer_blocks))
    assert sum(other.any().item() for other in plain) > 0.8 * len(plain)
    products.clear()
    with without_adapters(model.transformer):
        results.append(velocity(model).detach())
    assert not products
    for one, other in zip(results, [*plain, without], strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()


@pytest.mark.parametrize(
    "kind",
    [
        "merged",
        pytest.param("merged, 8 bits", marks=pytest.mark.slow),
        pytest.param("adapters beside", marks=pytest.mark.slow),
        "gradients",
    ],
)
def test_four_blocks_of_a_transformer_are_compiled_once(kind, tmp_path, monkeypatch):
    """With gradients, too, though nothing before the first one learns."""
    model = loaded("qwenimage", torch_dtype=torch.bfloat16)
    policies.attach(model.transformer, config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    model.fuse("flash_4")
    merged = policies.MergedWeights(model.transformer, "8 bits" in kind).applied if "merged" in kind else nullcontext
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    compilation.compile_units(model.transformer, model.SHARD_UNITS)
    with torch.set_grad_enabled(kind == "gradients"), merged():
        policies.predict(model, "bf16", *bench_blocks.inputs(model, 8, Size(64, 64), 8, True))
    assert len(model.transformer.transformer_blocks) == 4
    assert counters["stats"]["unique_graphs"] == 1


def test_functions_become_kernels_on_gpus_once_blocks_are_compiled(monkeypatch):
    """Tensors of a GPU as the compiler sees them, without numbers."""
    made = []

    def note(function, **options):
        made.append(options)
        return function

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(one_kernel, "_options", None)
    doubled = one_kernel.one_kernel(lambda x: 2 * x)
    with FakeTensorMode():
        on_gpu = torch.empty(3, device="cuda")
        doubled(on_gpu)
        compilation.compile_units(nn.Sequential(), ())
        doubled(torch.empty(3))
        assert made == []
        doubled(on_gpu)
        doubled(on_gpu)
    assert made == [dict(dynamic=True, options=compilation.CHOICES)]


@torch.no_grad()
def test_a_second_start_finds_the_graphs_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # put back when the test ends
    compilation.keep_graphs(tmp_path, torch.device("cpu"))
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(OneLayer())
        x = rows()
        expected = model(x)
        compilation.compile_units(model, ("OneLayer",))
        torch.testing.assert_close(model(x), expected)
        found.append(counters["inductor"]["fxgraph_cache_hit"])
    assert found == [0, 1]
    [folder] = tmp_path.iterdir()
    assert torch.__version__ in folder.name


def test_compiled_blocks_keep_the_share_that_they_may(monkeypatch):
    """Graphs are cut as they are for compiled kernels, which take seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))

    def kept(share):
        torch._dynamo.reset()
        sizes = {}
        module = nn.Sequential(Block())
        x = torch.randn(512, 32, requires_grad=True)
        compilation.compile_units(module, ("Block",), share)

        def note(tensor):
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            module(x).sum().backward()
        return sum(sizes.values())

    whole = kept(1.0)
    part = kept(0.25)
    torch._functorch.config.activation_memory_budget = 1.0
    assert part < 0.8 * whole


@torch.no_grad()
def test_no_graph_of_a_decoder_has_sums_that_were_chosen_by_their_time():
    """Blocks as they are traced; the test below has their kernels."""
    modes = []
    block = Block()

    def note(graph):
        modes.append(inductor.deterministic)
        raise RuntimeError("kernels, which take seconds, are next")

    torch._dynamo.reset()
    loading.compile_decoder(SimpleNamespace(vae=SimpleNamespace(decoder=block)))
    with inductor.patch(post_grad_custom_post_pass=note), pytest.raises(InductorError, match="are next"):
        block(torch.randn(2, 5, 32))
    assert modes == [True]


@pytest.mark.slow
@pytest.mark.skipif(
    "ATEN_CPU_CAPABILITY" in os.environ,
    reason="inductor (torch 2.13) writes for the CPU's own instructions, ATen's headers for that setting's",
)
def test_kernels_give_a_rollout_the_updates_bits_and_see_its_new_weights():
    """Blocks of one layer, each kernel of which takes seconds; whole runs: test_models.py, test_ranks.py."""
    model = adapted(block=OneLayer, target_modules=["first"])
    plain = adapted(block=OneLayer, target_modules=["first"])
    modes = []
    torch._dynamo.reset()
    compilation.compile_units(model, ("OneLayer",))
    for _ in range(2):
        for each in (model, plain):
            move(p for p in each.parameters() if p.requires_grad)
        with inductor.patch(post_grad_custom_post_pass=lambda graph: modes.append(inductor.deterministic)):
            results = step(model)
        for one, other in zip(results, step(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        with torch.no_grad(), compilation.training_graph(model, compilation.modules_of(model, ("OneLayer",))):
            assert torch.equal(model(rows()), results[0])
    assert modes == [True] * 2, "of the forward and of the backward"
