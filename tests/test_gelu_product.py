"""Feed-forwards that compute GELU and round it to 8 bits inside a product: what they compute, and when.

The kernel itself takes a GPU and the package.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention import FeedForward
from peft import LoraConfig, inject_adapter_in_model
from small import FEW, lines_of, train
from torch import nn
from torch.nn import functional as F

from flow_grpo.kernels import compilation, fused_mlp
from flow_grpo.kernels.quantised_linear import LARGEST, EightBitLinear, Float8Linear, quantise, unpacked

WIDTH, INNER = 64, 208
ROWS = 2, 70  # 140 rows, no multiple of 16


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(seed=0, biggest=1.0):
    """A feed-forward's two, of 8 bits; `biggest`: a factor of one row of the first."""
    pair = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
    for place, layer in enumerate(pair):
        layer.weight.data, layer.bias.data = draw(*layer.weight.shape, seed=seed + place) / 8, draw(layer.out_features)
    pair[0].weight.data[5] *= biggest
    return [Float8Linear.of(layer.requires_grad_(False)) for layer in pair]


def exact(x, first, last):
    """In float64, of the weights as they are stored."""
    for layer in (first, last):
        weight = unpacked(layer.rows, layer.scale, torch.float32).double()
        x = F.linear(x.double(), weight, layer.bias.double())
        x = F.gelu(x, approximate="tanh") if layer is first else x
    return x


def in_turn(x, first, last):
    """Each product by itself, GELU between them."""
    return last(F.gelu(first(x), approximate="tanh"))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("outlier", [1.0, 100.0])
@pytest.mark.parametrize("biggest", [1.0, 30.0])
def test_its_error_is_that_of_rounding_in_turn(size, outlier, biggest):
    first, last = layers(biggest=biggest)
    x = draw(*ROWS, WIDTH, seed=5) * size
    x[..., 3] *= outlier
    reference = exact(x, first, last)
    found, other = fused_mlp.feed_forward(x, first, last), in_turn(x, first, last)
    assert found.shape == x.shape
    assert found.dtype == last.dtype
    errors = [(out.double() - reference).norm() / reference.norm() for out in (found, other)]
    assert errors[0] < 0.045  # of two roundings to 4 bits
    if biggest == 1:  # else a row's largest decides, which is 448 in turn, without an error
        assert errors[0] < 1.1 * errors[1]


def test_no_number_is_cut_off_however_a_row_lies():
    """Each row of x points along a row of W, where the bound is tight."""
    first, last = layers()
    weight = unpacked(first.rows, first.scale, torch.float32)
    x = F.normalize(weight)[:160, None].expand(-1, 2, -1) * torch.tensor([1.0, 1e4])[:, None]
    reference = exact(x, first, last)
    assert ((fused_mlp.feed_forward(x, first, last) - reference).norm(dim=-1) < 0.08 * reference.norm(dim=-1)).all()


def test_rows_of_zeros_without_a_bias_stay_zeros():
    first, last = layers()
    first.bias.zero_()
    last.bias.zero_()
    assert not fused_mlp.feed_forward(torch.zeros(*ROWS, WIDTH), first, last).any()


def test_a_row_has_the_same_bits_wherever_it_stands():
    first, last = layers()
    x = draw(*ROWS, WIDTH, seed=6)
    out = fused_mlp.feed_forward(x, first, last)
    assert torch.equal(fused_mlp.feed_forward(x.flip(0, 1), first, last), out.flip(0, 1))
    assert torch.equal(fused_mlp.feed_forward(x.flatten(0, 1), first, last), out.flatten(0, 1))


def test_the_operation_is_what_it_says():
    first, _ = layers()
    rows, scale = quantise(draw(16, WIDTH))
    factor = torch.linspace(1, 20, 16)[:, None]
    inputs = rows, scale, first.rows, first.scale, first.bias, factor
    x = unpacked(rows, scale, torch.float32)
    y = F.linear(x.double(), unpacked(first.rows, first.scale, torch.float32).double(), first.bias.double())
    expected = F.gelu(y, approximate="tanh") * factor
    found = fused_mlp.gelu_of_product(*inputs).double()
    assert ((found - expected).abs() <= expected.abs() * 2**-4 * 1.01 + 2**-10).all()
    checks = "test_autograd_registration", "test_faketensor"  # the schema's compares numbers, and not those of 8 bits
    torch.library.opcheck(fused_mlp.gelu_of_product, inputs, test_utils=checks)


@pytest.mark.parametrize("kind", [EightBitLinear, Float8Linear])
def test_a_layer_knows_the_norm_of_its_longest_row(kind):
    linear = nn.Linear(WIDTH, INNER).requires_grad_(False)
    linear.weight[7] *= 3
    layer = kind.of(linear)

    def longest(layer):
        return unpacked(layer.rows, layer.scale, torch.float32).norm(dim=1).max()

    torch.testing.assert_close(layer.longest, longest(layer)[None])
    changed = Float8Linear(*layer.shape, layer.bias, layer.dtype, layer.rows.device)
    changed.store_sum(layer, draw(INNER, WIDTH))
    assert changed.longest > layer.longest
    torch.testing.assert_close(changed.longest, longest(changed)[None])


def adapted_feed_forward(fuse_gelu):
    """Of copies of 8 bits, with adapters beside them that are off, as with policies.MergedWeights. Its class is that of
    compiled blocks; its own forward is not compiled."""
    module = FeedForward(WIDTH, WIDTH, inner_dim=INNER, activation_fn="gelu-approximate", bias=True)
    module.net[0].proj, module.net[2] = (adapted(layer) for layer in layers())
    torch._dynamo.reset()
    compilation.compile_units(nn.ModuleList([nn.Sequential(module)]), ("Sequential",), fuse_gelu=fuse_gelu)
    return module


def adapted(layer):
    holder = nn.ModuleDict(dict(only=nn.Linear(layer.in_features, layer.out_features)))
    found = inject_adapter_in_model(LoraConfig(r=4, target_modules=["only"], init_lora_weights=False), holder)["only"]
    found.base_layer, found._disable_adapters = layer, True
    return found


class Called:
    """Its attribute says so: a list that grew with each call would have graphs compiled anew for each."""

    at_all = False


@pytest.fixture
def taken(monkeypatch):
    called, whole = Called(), fused_mlp.feed_forward

    def feed_forward(*inputs):
        called.at_all = True
        return whole(*inputs)

    monkeypatch.setattr(fused_mlp, "feed_forward", feed_forward)
    return called


@torch.no_grad()
@pytest.mark.parametrize("asked", [False, True])
def test_it_is_taken_where_it_is_asked_for(asked, taken):
    adapted_feed_forward(fuse_gelu=asked)(draw(*ROWS, WIDTH, seed=7))
    assert taken.at_all == asked


def test_it_is_taken_where_any_rounding_will_do_and_adapters_are_off(taken):
    module, x = adapted_feed_forward(fuse_gelu=True), draw(*ROWS, WIDTH, seed=7)

    def takes(x):
        taken.at_all = False
        module(x)
        return taken.at_all

    with torch.no_grad():
        assert takes(x)
        assert not takes(x.flatten()[: 127 * WIDTH].view(1, 127, WIDTH))  # few rows, whose products have all bits
        assert not takes(x.flatten(0, 1))  # one vector per image
        for layer in (module.net[0].proj, module.net[2]):
            for owner, name in ((layer, "_disable_adapters"), (layer.base_layer, "rounds_x")):
                setattr(owner, name, False)
                assert not takes(x)
                setattr(owner, name, True)
        assert takes(x)
    assert not takes(x)  # a gradient is asked for


def on_cpu(*inputs):
    """What the kernel would compute, for a GPU without the package and for sides that its tiles do not suit."""
    return fused_mlp.gelu_of_product(*(x.cpu() for x in inputs)).to(inputs[0].device)


def test_a_run_takes_it_for_images_and_not_for_log_probs_or_losses(shallow, tmp_path, taken, monkeypatch):
    """Else the first ratios would not be 1, and the reference would not be the policy that it is at first."""
    monkeypatch.setattr(fused_mlp, "available", lambda attention, device: True)
    monkeypatch.setattr(fused_mlp, "_kernels", lambda: SimpleNamespace(gelu_of_product=on_cpu))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    how = FEW | shallow | dict(num_epochs=1, eval_freq=0, sample__batch_size=8, train__beta=0.01, compile=True)
    how |= dict(base_precision="fp8_weights", sample__rollout_weights="merged_fp8")
    folder = train("shapes_qwenimage", tmp_path, **how)
    assert taken.at_all
    first = lines_of(folder, "update")[0]
    assert first["parity/log_prob_abs_diff_max"] == 0
    assert first["kl_reference"] == 0


@torch.no_grad()
def test_compiled_it_is_one_operation_and_a_product_and_as_good():
    module = adapted_feed_forward(fuse_gelu=True)
    first, last = module.net[0].proj.base_layer, module.net[2].base_layer
    x = draw(*ROWS, WIDTH, seed=7)
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph

    found = torch.compile(module.forward, backend=note)(x)
    assert torch.equal(found, fused_mlp.feed_forward(x, first, last))
    (graph,) = graphs
    operation = getattr(torch.ops.flow_grpo, f"gelu_of_product_{fused_mlp.VERSION}")
    (node,) = [node for node in graph.graph.nodes if node.target in (operation, operation.default)]
    assert len(node.meta["example_value"]) == 144  # 140 rows, in multiples of 16, which cuBLAS asks for
    reference = exact(x, first, last)
    assert (found - reference).norm() < 0.08 * reference.norm()


@pytest.mark.parametrize(
    ("attention", "capability", "expected"),
    [("flash_4", (9, 0), True), ("", (9, 0), False), ("flash_4", (10, 0), False)],
)
def test_it_is_used_with_flash_attention_4_on_hopper_alone(attention, capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fused_mlp, "_kernels", lambda: fused_mlp)
    assert fused_mlp.available(attention, SimpleNamespace(type="cuda")) == expected
    assert not fused_mlp.available(attention, torch.device("cpu"))


def test_a_package_that_cannot_be_imported_is_a_warning_and_the_slower_path(monkeypatch):
    """quack-kernels raises a TypeError where it lies outside a folder named site-packages."""

    def failing():
        raise TypeError("expected str, not NoneType")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fused_mlp, "_kernels", failing)
    with pytest.warns(UserWarning, match="TypeError: expected str"):
        assert not fused_mlp.available("flash_4", SimpleNamespace(type="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel takes a GPU")
@pytest.mark.parametrize("num_rows", [1152, 144])
def test_the_kernel_computes_what_the_operation_says(num_rows):
    pytest.importorskip("quack", reason="takes the extra flash4")
    rows, scale = quantise(draw(num_rows, 3072).cuda())
    weight, of_weight = quantise(draw(12288, 3072, seed=1).cuda() / 55)
    bias, factor = draw(12288, seed=2).cuda(), torch.linspace(1, LARGEST / 30, num_rows, device="cuda")[:, None]
    inputs = rows, scale, weight, of_weight, bias, factor
    found = fused_mlp.gelu_of_product(*inputs).float()
    expected = fused_mlp.gelu_of_product(*(x.cpu() for x in inputs)).float().cuda()
    sums = 2**-6 * factor  # whose 14 bits are those of a row's largest part
    assert ((found - expected).abs() <= expected.abs() * 2**-3 + sums).all()
    assert (found - expected).norm() < 0.03 * expected.norm()
    order = torch.randperm(num_rows, device="cuda")
    moved = fused_mlp.gelu_of_product(rows[order], scale[order], weight, of_weight, bias, factor[order])
    assert torch.equal(moved.float(), found[order])
