"""Layers of 8 and 4 bits a weight: what they compute, and what a copy with an adapter holds."""

import pytest
import torch
from diffusers.models.attention import FeedForward
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from flow_grpo.kernels import compilation, quantised_linear
from flow_grpo.kernels.quantised_linear import NF4_LEVELS, EightBitLinear, Float8Linear, NF4Linear, quantise, unpacked
from flow_grpo.weights import quantisation


def layer_of(kind, weight, bias=None):
    """A layer in the place of nn.Linear of this weight."""
    linear = nn.Linear(*reversed(weight.shape), bias=bias is not None)
    linear.weight, linear.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
    return kind.of(linear.requires_grad_(False))


def reference(x, weight, bias):
    return x.double() @ weight.double().T + bias.double()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_numbers_that_8_bits_hold_are_multiplied_exactly():
    stream = torch.Generator().manual_seed(0)
    x, weight = (torch.tensor([7.0, -3.5, 1.75, 0.0])[torch.randint(4, (n, 32), generator=stream)] for n in (6, 48))
    x[:, 0], weight[:, 0], bias = 7.0, -7.0, torch.arange(48.0)
    layer = layer_of(Float8Linear, weight, bias)
    for count in (2, 50):  # few rows and many
        rows = x.repeat(count, 1)
        assert torch.equal(layer(rows[None])[0], reference(rows, weight, bias).bfloat16().float())
    assert torch.equal(layer(x), nn.functional.linear(x, weight, bias))  # one vector per image, in full


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_an_error_of_8_bits_is_that_of_4_bits_of_mantissa(scale):
    """Each factor is off by at most 2^-4 of itself, or for small ones by 2^-10 / 448 of its row's largest."""
    stream = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 256, generator=stream) * torch.rand(n, 1, generator=stream) for n in (200, 64))
    x, bias = x * scale, torch.zeros(64)
    found, exact = layer_of(Float8Linear, weight, bias)(x[None])[0], reference(x, weight, bias)
    step = [v.abs().double() * 2**-4 + v.abs().amax(1, keepdim=True) * 2**-10 / 448 for v in (x, weight)]
    bound = step[0] @ weight.abs().double().T + x.abs().double() @ step[1].T + step[0] @ step[1].T
    assert ((found - exact).abs() <= bound + exact.abs() * 2**-8).all()
    assert 0.02 < (found - exact).norm() / exact.norm() < 0.05


def test_a_row_of_zeros_stays_one():
    rows, scale = quantise(torch.zeros(1, 16))
    assert not (rows.float() * scale).any()
    assert not layer_of(NF4Linear, torch.zeros(2, 64))(torch.ones(1, 64)).any()


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


@pytest.mark.parametrize(("kind", "tokens"), [(EightBitLinear, 101), (NF4Linear, 5)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
def test_the_gradient_is_that_of_the_stored_weight(kind, tokens, compiled):
    layer, x, grad = layer_of(kind, draw(64, 128), draw(64)), draw(2, tokens, 128, seed=1), draw(2, tokens, 64, seed=2)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    call(x.requires_grad_()).backward(grad)
    weight = (layer(torch.eye(128)) - layer.bias).T  # as it is stored: in full for one vector per image
    error = (x.grad - grad @ weight).norm() / (grad @ weight).norm()
    assert error < 1e-5
    assert all(p.grad is None for p in layer.parameters())


def test_layers_of_8_bits_round_x_in_the_context_alone():
    weight, x = draw(64, 128), draw(1, 200, 128, seed=1)
    stored, rounding = (nn.ModuleList([layer_of(kind, weight)]) for kind in (EightBitLinear, Float8Linear))
    before = stored[0](x)
    with quantisation.products_of_8_bits(stored), quantisation.products_of_8_bits(rounding):
        assert torch.equal(stored[0](x), rounding[0](x))
    assert torch.equal(stored[0](x), before)
    assert (rounding[0](x) - before).norm() > 0.01 * before.norm()


def test_a_small_step_of_x_moves_the_result_by_itself_unless_x_is_rounded():
    """Why no log-prob is of such products: numbers jump to the next level, or stay."""
    weight, x, step = draw(64, 128), draw(1, 2000, 128, seed=1), 1e-3 * draw(1, 2000, 128, seed=2)
    errors = {}
    for kind in (EightBitLinear, Float8Linear):
        layer = layer_of(kind, weight)
        expected = step @ layer(torch.eye(128))  # one vector per image: in full
        errors[kind] = ((layer(x + step) - layer(x) - expected).norm() / expected.norm()).item()
    assert errors[EightBitLinear] < 1e-2 < 1 < errors[Float8Linear]


def test_layers_that_do_not_suit_a_precision_are_named():
    with pytest.raises(ValueError, match="a layer of 24 x 16 has no products of 8-bit floats"):
        layer_of(Float8Linear, draw(16, 24))
    with pytest.raises(ValueError, match="a layer of 7 columns has an odd number of 4-bit codes in a row"):
        layer_of(NF4Linear, draw(16, 7))


def change_of(base, size):
    """A low-rank change [out, in] of `size` times the norm of W, and W."""
    weight = unpacked(base.rows, base.scale, torch.float32)
    change = draw(base.out_features, 8, seed=3) @ draw(8, base.in_features, seed=4)
    return change * size * weight.norm() / change.norm(), weight


@pytest.mark.parametrize("size", [1e-3, 1e-2, 1.0, 30.0])
def test_a_merged_copy_of_a_base_of_8_bits_has_the_adapter_however_small(size):
    """A copy of the nearest rows has 4 % of the smallest one."""
    base = layer_of(EightBitLinear, draw(512, 1024) * 0.02)
    change, weight = change_of(base, size)
    copy = quantisation.merged_copy(base, change)
    moved = unpacked(copy.rows, copy.scale, torch.float32) - weight
    assert (moved * change).sum() / change.square().sum() == pytest.approx(1, abs=0.06)
    assert (moved - change).norm() < 0.04 * (weight.norm() + change.norm())
    again = quantisation.merged_copy(base, change)
    assert torch.equal(again.rows.float(), copy.rows.float())
    assert torch.equal(again.scale, copy.scale)
    nearest = unpacked(*quantise(weight + change), torch.float32) - weight
    assert size > 1e-3 or (nearest * change).sum() < 0.1 * change.square().sum()


def test_a_row_just_beyond_a_power_of_two_stays_within_8_bits(monkeypatch):
    """16 + 2^-19 times 448; log2 of the first is rounded to 4. What 8 bits do not hold is NaN in torch 2.11."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))  # every number that can goes up
    base = layer_of(EightBitLinear, torch.eye(16) * 448)
    copy = quantisation.merged_copy(base, torch.eye(16) * (15 * 448 + 2**-11))
    assert torch.equal(unpacked(copy.rows, copy.scale, torch.float32), torch.eye(16) * 16 * 448)


@pytest.mark.parametrize("times", [1, 1 + 2**-23, 2, 2 + 2**-22, 1e30])
def test_no_row_of_a_merged_copy_outgrows_8_bits(times, monkeypatch):
    """Scales grow by powers of two, so that what 8 bits hold stays."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))  # every number that can goes up
    base = layer_of(EightBitLinear, draw(16, 32))
    base.rows[3] = 0
    weight = unpacked(base.rows, base.scale, torch.float32)
    copy = quantisation.merged_copy(base, weight * (times - 1))
    largest = weight.abs().amax(1) * times
    torch.testing.assert_close(
        unpacked(copy.rows, copy.scale, torch.float32).abs().amax(1), largest, rtol=2**-3, atol=0
    )
    growth = (copy.scale / base.scale).log2()
    assert (growth >= 0).all()
    assert torch.equal(growth, growth.round())


def test_a_merged_copy_of_weights_of_bf16_has_the_adapter_that_their_steps_would_lose():
    linear = nn.Linear(1024, 512, bias=False).bfloat16().requires_grad_(False)
    linear.weight.copy_(draw(512, 1024) * 0.02)
    change = draw(512, 8, seed=3) @ draw(8, 1024, seed=4)
    change *= 1e-3 * linear.weight.norm().item() / change.norm()
    copies = [quantisation.merged_copy(linear, factor * change) for factor in (0, 1)]
    without, moved = (unpacked(copy.rows, copy.scale, torch.float32) for copy in copies)
    assert ((moved - without) * change).sum() / change.square().sum() == pytest.approx(1, abs=0.15)


@torch.no_grad()
@pytest.mark.parametrize("adapted", [False, True])
def test_a_row_of_gelu_is_divided_by_its_largest_which_is_known_before(adapted, monkeypatch):
    """Results keep their bits; in rows of small numbers, and of negative ones, errors are no larger."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    module = FeedForward(64, 64, activation_fn="gelu-approximate").requires_grad_(False)
    for layer in (module.net[0].proj, module.net[2]):
        layer.weight.copy_(draw(*layer.weight.shape) / 8)
        nn.init.zeros_(layer.bias)
    module.net[0].proj.weight[:, 0] = 1 / 8
    module.net[0].proj, module.net[2] = (Float8Linear.of(layer) for layer in (module.net[0].proj, module.net[2]))
    if adapted:
        holder = nn.ModuleDict(dict(last=nn.Linear(256, 64)))
        adapted_layer = inject_adapter_in_model(LoraConfig(r=4, target_modules=["last"]), holder)["last"]
        adapted_layer.base_layer, module.net[2] = module.net[2], adapted_layer
    plain_rows, small, negative = draw(4, 61, 64, seed=1), draw(4, 61, 64, seed=2) * 1e-3, draw(4, 61, 64, seed=3)
    negative[..., 0] = -40
    x = torch.cat([plain_rows, small, negative])

    module.net[0].gelu = compilation.gelu
    plain = module(x)
    compilation.compile_units(nn.ModuleList([nn.Sequential(module)]), ("Sequential",))
    given = []
    noting = lambda x, largest=None: given.append(largest) or quantise(x, largest)  # noqa: E731
    monkeypatch.setattr(quantised_linear, "quantise", noting)
    found = module(x)
    assert [largest is not None for largest in given] == [False, True]
    assert torch.equal(found[:4], plain[:4])
    for rows in (slice(4, 8), slice(8, 12)):
        assert (found[rows] - plain[rows]).norm() < 0.06 * plain[rows].norm()


@pytest.mark.parametrize("layer", ["dropout", "final dropout", "exact GELU"])
def test_a_feed_forward_of_another_kind_is_left_as_it_is(layer):
    kinds = {
        "dropout": dict(activation_fn="gelu-approximate", dropout=0.5),
        "final dropout": dict(activation_fn="gelu-approximate", final_dropout=True),
        "exact GELU": dict(activation_fn="gelu"),
    }
    module = FeedForward(16, 16, **kinds[layer])
    compilation.compile_units(nn.ModuleList([nn.Sequential(module)]), ("Sequential",))
    assert type(module) is FeedForward
