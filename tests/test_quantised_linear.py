"""Layers of 8 and 4 bits a weight: what they compute, what a copy with an adapter holds, and feed-forwards of them."""

import pytest
import torch
from diffusers.models.attention import FeedForward
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional as F

from flow_grpo.kernels import compilation, quantised_linear
from flow_grpo.kernels.quantised_linear import LARGEST, NF4_LEVELS, EightBitLinear, NF4Linear, quantise, unpacked
from flow_grpo.kernels.stochastic_rounding import rounded_by
from flow_grpo.weights import policies, quantisation

WIDTH = 64
INNER = 208


def layer_of(kind, weight, bias=None):
    """A layer in the place of nn.Linear of this weight."""
    linear = nn.Linear(*reversed(weight.shape), bias=bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return kind.of(linear.requires_grad_(False))


def rounding(weight, bias=None):
    """A layer that rounds x, too."""
    layer = layer_of(EightBitLinear, weight, bias)
    layer.rounds_x = True
    return layer


def weight_of(layer):
    """W [out, in] of a layer of 8 bits, or of one that is not quantised."""
    stored = unpacked(layer.rows, layer.scale, torch.float32) if isinstance(layer, EightBitLinear) else layer.weight
    return stored.float()


def adapted(layer):
    """With an adapter beside it, as peft's module `only`."""
    holder = nn.ModuleDict(dict(only=nn.Linear(layer.in_features, layer.out_features)))
    options = dict(r=8, lora_alpha=8, target_modules=["only"], init_lora_weights=False)
    inject_adapter_in_model(LoraConfig(**options), holder).only.base_layer = layer
    return holder


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_numbers_that_8_bits_hold_are_multiplied_exactly():
    stream = torch.Generator().manual_seed(0)
    held = torch.tensor([7.0, -3.5, 1.75, 0.0])
    x = held[torch.randint(4, (6, 32), generator=stream)]
    weight = held[torch.randint(4, (48, 32), generator=stream)]
    bias = torch.arange(48.0)
    x[:, 0] = 7.0
    weight[:, 0] = -7.0

    # Rows of zeros have no largest.
    x[5] = 0.0
    weight[3] = 0.0
    layer = rounding(weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    for count in (2, 50):  # few rows and many
        assert torch.equal(layer(x.repeat(count, 1)[None])[0], exact.repeat(count, 1).bfloat16().float())
    assert torch.equal(layer(x), F.linear(x, weight, bias))  # one vector per image, in full


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_an_error_of_8_bits_is_that_of_4_bits_of_mantissa(scale):
    """Each factor is off by at most 2^-4 of itself, or for small ones by 2^-10 / 448 of its row's largest."""
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(200, 256, generator=stream) * torch.rand(200, 1, generator=stream) * scale
    weight = torch.randn(64, 256, generator=stream) * torch.rand(64, 1, generator=stream)
    result = rounding(weight)(x[None])[0]
    exact = F.linear(x.double(), weight.double())
    x_step = x.abs().double() * 2**-4 + x.abs().amax(1, keepdim=True) * 2**-10 / 448
    weight_step = weight.abs().double() * 2**-4 + weight.abs().amax(1, keepdim=True) * 2**-10 / 448
    bound = x_step @ weight.abs().double().T + x.abs().double() @ weight_step.T + x_step @ weight_step.T
    assert ((result - exact).abs() <= bound + exact.abs() * 2**-8).all()
    assert 0.02 < (result - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("width", [64, 96, 160])  # blocks of 64 and of 32
def test_four_bits_hold_their_levels_and_round_to_the_nearest(width):
    levels = torch.tensor(NF4_LEVELS)
    weight = levels[torch.randint(16, (8, width), generator=torch.Generator().manual_seed(0))]
    weight[:, ::32] = 1.0  # each block's largest
    identity = torch.eye(width)
    assert torch.equal(layer_of(NF4Linear, weight)(identity).T, weight)
    weight[:, 1::2] = draw(8, width // 2).clamp(-1, 1)
    nearest = levels[(weight[..., None] - levels).abs().argmin(-1)]
    assert torch.equal(layer_of(NF4Linear, weight)(identity).T, nearest)
    assert not layer_of(NF4Linear, torch.zeros(2, width))(identity).any()


@pytest.mark.parametrize(("kind", "tokens"), [(EightBitLinear, 101), (NF4Linear, 5)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
def test_the_gradient_is_that_of_the_stored_weight(kind, tokens, compiled):
    layer = layer_of(kind, draw(64, 128), draw(64))
    x = draw(2, tokens, 128, seed=1)
    grad = draw(2, tokens, 64, seed=2)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    call(x.requires_grad_()).backward(grad)
    weight = (layer(torch.eye(128)) - layer.bias).T  # as it is stored: in full for one vector per image
    error = (x.grad - grad @ weight).norm() / (grad @ weight).norm()
    assert error < 1e-5
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("kind", [EightBitLinear, NF4Linear])
def test_a_compiled_graph_keeps_no_unpacked_weight_for_the_backward(kind):
    """Stored weights are buffers, which are there anyway."""
    layer = layer_of(kind, draw(64, 128))
    # The compiler's own choice of what to keep, without code for a device.
    call = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    x = draw(2, 101, 128, seed=1).requires_grad_()
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call(x)
    result.backward(draw(2, 101, 64, seed=2))
    stored = {tensor.data_ptr() for tensor in layer.buffers()}
    assert {tensor.data_ptr() for tensor in kept} == stored


def gradient(layer, x, grad):
    """Result of a layer, and its gradient of x."""
    x = x.clone().requires_grad_()
    result = layer(x)
    result.backward(grad)
    return result.detach(), x.grad


def rounding_gradients(weight, bias=None):
    """A layer whose gradients of x are rounded, and the same one whose are not."""
    layer = layer_of(EightBitLinear, weight, bias)
    layer.rounds_gradients = True
    return layer, layer_of(EightBitLinear, weight, bias)


@pytest.mark.parametrize("tokens", [64, 75])  # the second is no multiple of the 16 rows that cuBLAS asks for
def test_rounded_gradients_of_numbers_that_8_bits_hold_are_exact(tokens):
    """Rows of W may have any scale, as long as it is a power of two."""
    stream = torch.Generator().manual_seed(0)
    held = torch.tensor([7.0, -3.5, 1.75, 0.0])
    weight = held[torch.randint(4, (48, 32), generator=stream)]
    grad = held[torch.randint(4, (2, tokens, 48), generator=stream)]
    weight[:, 0] = -7.0
    grad[..., 0] = 7.0
    sizes = torch.exp2(torch.arange(48.0) % 5)[:, None]
    # Times its scale, each gradient is one of the numbers again.
    layer, plain = rounding_gradients(weight * sizes, torch.arange(48.0))
    x = draw(2, tokens, 32)
    result, rounded = gradient(layer, x, grad / sizes.T)
    expected, exact = gradient(plain, x, grad / sizes.T)
    assert torch.equal(result, expected)
    torch.testing.assert_close(rounded, exact.bfloat16().float(), rtol=0, atol=0)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e6])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
def test_rounded_gradients_point_where_exact_ones_do_however_small(size, compiled):
    weight = draw(64, 128) * torch.exp2(draw(64, 1, seed=3))
    layer, plain = rounding_gradients(weight, draw(64))
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = draw(2, 101, 128, seed=1)
    grad = draw(2, 101, 64, seed=2) * size
    result, rounded = gradient(call, x, grad)
    expected, exact = gradient(plain, x, grad)
    assert torch.equal(result, expected)
    rounded = rounded.double() / size
    exact = exact.double() / size
    assert F.cosine_similarity(rounded.flatten(), exact.flatten(), 0) > 0.999
    assert 0.02 < (rounded - exact).norm() / exact.norm() < 0.05


def test_gradients_of_few_rows_and_of_one_vector_per_image_are_not_rounded():
    layer, plain = rounding_gradients(draw(64, 128))
    for shape in ((2, 60), (400,)):
        x = draw(*shape, 128, seed=1)
        grad = draw(*shape, 64, seed=2)
        assert torch.equal(gradient(layer, x, grad)[1], gradient(plain, x, grad)[1])


def test_layers_that_do_not_suit_a_precision_are_named():
    with pytest.raises(ValueError, match="a layer of 24 x 16 has no products of 8-bit floats"):
        rounding(draw(16, 24))
    with pytest.raises(ValueError, match="a layer of 7 columns has an odd number of 4-bit codes in a row"):
        layer_of(NF4Linear, draw(16, 7))


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "fp8", "size", "room"),
    [(EightBitLinear, True, size, 0.06) for size in (1e-3, 1e-2, 1.0, 30.0)]
    + [(None, True, 1e-3, 0.15), (None, False, 1e-4, 0.1)],
)
def test_a_merged_copy_has_the_adapter_however_small_and_is_the_base_without_one(base, fp8, size, room):
    """The nearest numbers to the smallest are off by 4 % in 8 bits, and by 6 % in bf16."""
    linear = nn.Linear(1024, 512, bias=False).bfloat16().requires_grad_(False)
    linear.weight.copy_(draw(512, 1024) * 0.02)
    holder = adapted(base.of(linear) if base else linear)
    layer = holder.only

    def merged():
        with policies.MergedWeights(holder, fp8).applied():
            return weight_of(layer.base_layer)

    weight = weight_of(layer.base_layer)
    layer.scaling["default"] *= size * weight.norm().item() / layer.get_delta_weight("default").norm().item()
    change = layer.get_delta_weight("default").float()
    with_adapter = merged()
    assert torch.equal(merged(), with_adapter)
    layer.scaling["default"] = 0.0
    without = merged()
    moved = with_adapter - without
    assert (moved * change).sum() / change.square().sum() == pytest.approx(1, abs=room)
    assert (moved - change).norm() < 0.05 * (weight.norm() + change.norm())
    assert torch.equal(without, weight) or (base is None and fp8)


@pytest.mark.parametrize("times", [1, 1 + 2**-23, 2, 2 + 2**-22, 16 + 2**-19, 1e30])
def test_no_row_of_a_merged_copy_outgrows_8_bits(times, monkeypatch):
    """Scales grow by powers of two, so that what 8 bits hold stays. log2 of 16 + 2^-19 is rounded to 4; what 8 bits do
    not hold is NaN in torch 2.11."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))  # every number that can goes up
    base = layer_of(EightBitLinear, F.normalize(draw(16, 32), p=torch.inf) * LARGEST)  # of scale 1
    base.rows[3] = 0
    copy = quantisation.merged_copy(base, weight_of(base) * (times - 1))
    largest = weight_of(base).abs().amax(1) * times
    torch.testing.assert_close(weight_of(copy).abs().amax(1), largest, rtol=2**-3, atol=0)
    growth = (copy.scale / base.scale).log2()
    assert (growth >= 0).all()
    assert torch.equal(growth, growth.round())


def test_only_a_row_that_outgrows_8_bits_gets_another_scale():
    base = layer_of(EightBitLinear, F.normalize(draw(16, 32), p=torch.inf) * LARGEST)  # of scale 1
    change = torch.zeros(16, 32)
    change[3] = -4 * LARGEST
    copy = quantisation.merged_copy(base, change)
    growth = (copy.scale / base.scale).flatten().tolist()
    assert growth == [8.0 if row == 3 else 1.0 for row in range(16)]


def test_on_gpus_a_merged_weight_comes_from_one_graph_with_the_same_bits():
    """The graph as it is traced; kernels are the compiler's."""
    base = layer_of(EightBitLinear, draw(16, 32))
    change = draw(16, 32, seed=1)
    noise = torch.rand(16, 32, generator=torch.Generator().manual_seed(0))
    plain = quantised_linear.rounded_sum(change, base.rows, base.scale, noise)
    traced = torch.compile(quantised_linear.rounded_sum, backend="aot_eager", fullgraph=True, dynamic=True)
    rows, scale = traced(change, base.rows, base.scale, noise)
    assert torch.equal(rows.float(), plain[0].float())
    assert torch.equal(scale, plain[1])


def layers(biases=1.0):
    """A feed-forward's two, of 8 bits."""
    first = rounding(draw(INNER, WIDTH) / 8, biases * draw(INNER))
    last = rounding(draw(WIDTH, INNER, seed=1) / 8, biases * draw(WIDTH))
    return first, last


@torch.no_grad()
@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_row_of_gelu_is_divided_by_its_largest_which_is_known_before(has_adapter, monkeypatch):
    """Results keep their bits; in rows of small numbers, and of negative ones, errors are no larger."""
    first, last = layers(biases=0.0)
    beside = adapted(last).only
    nn.init.zeros_(beside.lora_B["default"].weight)
    module = FeedForward(WIDTH, WIDTH, inner_dim=INNER, activation_fn="gelu-approximate", bias=True)
    module.net[0].proj = first
    module.net[2] = beside if has_adapter else last
    knows_largest = []

    def noting(x, largest=None):
        knows_largest.append(largest is not None)
        return quantise(x, largest)

    torch._dynamo.reset()
    compilation.compile_units(nn.ModuleList([nn.Sequential(module)]), ("Sequential",))  # not its own forward
    for size, bias, error in ((1.0, 0.0, 0.0), (1e-3, 0.0, 0.06), (1.0, -5.0, 0.06)):
        first.bias.fill_(bias)
        x = draw(4, 61, WIDTH, seed=1) * size
        plain = last(compilation.gelu(first(x)))
        with monkeypatch.context() as patch:
            patch.setattr(quantised_linear, "quantise", noting)
            result = module(x)
        assert (result - plain).norm() <= error * plain.norm()
    assert knows_largest == [False, True] * 3


@pytest.mark.parametrize("kind", [dict(dropout=0.5), dict(final_dropout=True), dict(activation_fn="gelu")], ids=str)
def test_a_feed_forward_of_another_kind_is_left_as_it_is(kind):
    module = FeedForward(16, 16, **dict(activation_fn="gelu-approximate") | kind)
    compilation.compile_units(nn.ModuleList([nn.Sequential(module)]), ("Sequential",))
    assert type(module) is FeedForward


def spread(dtype):
    """float32 numbers of every size that dtype holds, and 0."""
    limits = torch.finfo(dtype)
    low = torch.tensor(limits.smallest_normal * limits.eps).log2()
    high = torch.tensor(limits.max).log2()
    signs = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).sign()
    x = signs * torch.exp2(torch.linspace(low.clamp(min=-120), high - 1, 64 * 32).view(64, 32))
    x[0] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_number_becomes_one_of_its_two_neighbours_and_their_mean_is_the_number(dtype):
    x = spread(dtype).double()
    limits = torch.finfo(dtype)
    draws = []
    for seed in range(400):
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
        draws.append(rounded_by(noise, x.float(), dtype).double())
    rounded = torch.stack(draws)
    step = (x.abs() * limits.eps).clamp(min=limits.smallest_normal * limits.eps)
    low = rounded.amin(0)
    high = rounded.amax(0)
    assert ((rounded == low) | (rounded == high)).all()
    assert (((low <= x) & (x <= high)) | (low == high)).all()
    assert (high - low <= step).all()
    assert ((rounded.mean(0) - x).abs() < 0.2 * step).all()  # 8 standard errors
    assert (high > low).double().mean() > 0.5
