"""Layers of 8 and 4 bits a weight: what they compute, what trains on them, and who may ask for them."""

import json
import os
from types import SimpleNamespace

import evaluate
import prepare_preferences
import pytest
import torch
from diffusers.models.attention import FeedForward
from peft import LoraConfig, inject_adapter_in_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import FEW, MODELS, config_of, exported, lines_of, loaded, train
from torch import nn

from flow_grpo import compiled, frozen_linear, policies, quantised, quantised_files, stored_weights
from flow_grpo.frozen_linear import (
    NF4_LEVELS,
    EightBitLinear,
    Float8Linear,
    NF4Linear,
    QuantisedLinear,
    quantise,
    unpacked,
)
from flow_grpo.prompts import load_prompts
from flow_grpo.quantised import KINDS, quantised_layers

PLAIN = {"jpeg_compressibility": 1.0}  # no two images score alike
FOR_A_RUN = dict(FEW, num_epochs=1, eval_freq=0, reward_fn__shapes=0.0, reward_fn__jpeg_compressibility=1.0)


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


@pytest.mark.parametrize(
    ("kind", "tokens"), [(Float8Linear, 101), (Float8Linear, 5), (EightBitLinear, 101), (NF4Linear, 5)]
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
def test_the_gradient_is_that_of_the_stored_weight(kind, tokens, compiled):
    """To rounding where W is unpacked; products of 8 bits round the result's gradient, and of few rows are bfloat16."""
    layer, x, grad = layer_of(kind, draw(64, 128), draw(64)), draw(2, tokens, 128, seed=1), draw(2, tokens, 64, seed=2)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    call(x.requires_grad_()).backward(grad)
    weight = (layer(torch.eye(128)) - layer.bias).T  # as it is stored: in full for one vector per image
    error = (x.grad - grad @ weight).norm() / (grad @ weight).norm()
    assert error < (0.04 if tokens == 101 else 0.003 if kind is Float8Linear else 1e-6)
    assert all(p.grad is None for p in layer.parameters())


def test_layers_of_8_bits_round_x_in_the_context_alone():
    weight, x = draw(64, 128), draw(1, 200, 128, seed=1)
    stored, rounding = (nn.ModuleList([layer_of(kind, weight)]) for kind in (EightBitLinear, Float8Linear))
    before = stored[0](x)
    with quantised.products_of_8_bits(stored), quantised.products_of_8_bits(rounding):
        assert torch.equal(stored[0](x), rounding[0](x))
    assert torch.equal(stored[0](x), before)
    assert (rounding[0](x) - before).norm() > 0.01 * before.norm()


def test_a_small_step_of_x_moves_the_result_by_itself_unless_x_is_rounded():
    """Why ratios of two near policies are noisier on "fp8": numbers jump to the next level, or stay."""
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


def on_meta(model, precision):
    """The transformer with an adapter and quantised layers, without numbers, as a run has it before it loads."""
    transformer = type(model.transformer).from_config(model.transformer.config).to("meta")
    policies.attach(transformer, config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    quantised.quantise_units(transformer, model.SHARD_UNITS, precision)
    return transformer


def copy_to(target, rows):
    (target.store if isinstance(target, QuantisedLinear) else target.copy_)(rows[:])


def assert_same_layers(transformer, other):
    expected, found = quantised_layers(transformer), quantised_layers(other)
    assert expected.keys() == found.keys() != set()
    for name, layer in expected.items():
        for (key, tensor), (_, filled) in zip(layer.named_buffers(), found[name].named_buffers(), strict=True):
            assert torch.equal(tensor.view(torch.uint8), filled.view(torch.uint8)), (name, key)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", KINDS)
def test_every_frozen_layer_of_a_unit_is_quantised_and_filled_from_stored_weights_and_from_a_cache(
    name, precision, tmp_path
):
    """The same numbers as quantising what is loaded; with a cache no layer is read that is in it."""
    model = loaded(name, tmp_path)
    folder, cache = tmp_path / "weights", tmp_path / "cache" / "this"
    model.transformer.save_pretrained(folder)
    empty, again = on_meta(model, precision), on_meta(model, precision)
    quantised.quantise_units(model.transformer.requires_grad_(False), model.SHARD_UNITS, precision)
    units = [unit for unit in model.transformer.modules() if type(unit).__name__ in model.SHARD_UNITS]
    assert nn.Linear not in {type(module) for unit in units for module in unit.modules()}

    stored_weights.read(empty.to_empty(device="cpu"), folder, copy_to)
    expected = {f"{key.replace('.base_layer', '')}": layer for key, layer in quantised_layers(empty).items()}
    for key, layer in quantised_layers(model.transformer).items():
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(layer.buffers(), expected[key].buffers()))

    assert not quantised_files.fill(again, cache, torch.device("cpu"))
    quantised_files.keep(empty, cache)
    quantised_files.keep(empty, cache)  # where another run was faster
    assert quantised_files.fill(again, cache, torch.device("cpu"))
    assert_same_layers(empty, again)
    read = []
    stored_weights.read(again, folder, lambda target, rows: read.append(target))
    assert read
    assert not any(isinstance(target, QuantisedLinear) for target in read)
    assert [path.name for path in cache.parent.iterdir()] == ["this"]


def test_weights_that_take_the_place_of_others_are_not_read_from_their_cache(tmp_path):
    """Though they are as large, and named alike."""
    file = tmp_path / "model.safetensors"
    folders = set()
    for time, precision in ((1, "fp8"), (1, "4bit"), (2, "fp8")):
        save_file({"weight": torch.ones(4)}, file)
        os.utime(file, (time, time))
        folders.add(quantised_files.folder_of("cache", tmp_path, precision))
    assert len(folders) == 3


def test_a_damaged_cache_is_named(tmp_path):
    model = loaded("qwenimage", tmp_path)
    policies.attach(model.transformer, config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    quantised.quantise_units(model.transformer, model.SHARD_UNITS, "4bit")
    quantised_files.keep(model.transformer, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob(quantised_files.FILES)
    whole = load_file(file)
    save_file(dict(list(whole.items())[1:]), file)
    with pytest.raises(ValueError, match=r"cache lacks weights of this model; delete it"):
        quantised_files.fill(on_meta(model, "4bit"), tmp_path / "cache", torch.device("cpu"))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"safetensors is damaged .* delete"):
        quantised_files.fill(on_meta(model, "4bit"), tmp_path / "cache", torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("shapes_qwenimage", "fp8"),
        ("shapes_qwenimage_pr", "4bit"),
        ("shapes_qwenimage_pr", "8bit"),
        ("shapes_qwenimage_nft", "fp8"),
        ("shapes_qwenimage_dpo,online", "4bit"),
    ],
)
def test_a_run_on_a_quantised_base_is_a_policy_of_its_own(name, precision, tmp_path):
    """Its first update finds the rollout's log-probs, bit for bit, and its adapter learns."""
    how = FOR_A_RUN | dict(base_precision=precision, lora__rank=32, sample__merge_adapter=False)
    how |= dict(sample__batch_size=8)  # whose 128 tokens make products of 8 bits
    folder = train(name, tmp_path, **how)
    first = lines_of(folder, "update")[0]
    assert first["grad_norm"] > 0
    assert first.get("parity/log_prob_abs_diff_max", 0) == 0
    assert exported(folder).stat().st_size > 0


def test_pairs_are_drawn_on_the_base_that_is_trained_on(tmp_path):
    """Frozen, in the run's precision, and kept in its cache."""
    config = config_of("shapes_qwenimage_dpo", base_precision="4bit", precision="bf16", weights_cache=str(tmp_path))
    transformer = prepare_preferences.load(config, MODELS["qwenimage"], torch.device("cpu")).transformer
    assert quantised.precision_of(transformer) == "4bit"
    assert {(p.dtype, p.requires_grad) for p in transformer.parameters()} == {(torch.bfloat16, False)}
    assert list(tmp_path.glob("*/*.safetensors"))


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
    copy = quantised.merged_copy(base, change)
    moved = unpacked(copy.rows, copy.scale, torch.float32) - weight
    assert (moved * change).sum() / change.square().sum() == pytest.approx(1, abs=0.06)
    assert (moved - change).norm() < 0.04 * (weight.norm() + change.norm())
    again = quantised.merged_copy(base, change)
    assert torch.equal(again.rows.float(), copy.rows.float())
    assert torch.equal(again.scale, copy.scale)
    nearest = unpacked(*quantise(weight + change), torch.float32) - weight
    assert size > 1e-3 or (nearest * change).sum() < 0.1 * change.square().sum()


def test_a_row_just_beyond_a_power_of_two_stays_within_8_bits(monkeypatch):
    """16 + 2^-19 times 448; log2 of the first is rounded to 4. What 8 bits do not hold is NaN in torch 2.11."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))  # every number that can goes up
    base = layer_of(EightBitLinear, torch.eye(16) * 448)
    copy = quantised.merged_copy(base, torch.eye(16) * (15 * 448 + 2**-11))
    assert torch.equal(unpacked(copy.rows, copy.scale, torch.float32), torch.eye(16) * 16 * 448)


@pytest.mark.parametrize("times", [1, 1 + 2**-23, 2, 2 + 2**-22, 1e30])
def test_no_row_of_a_merged_copy_outgrows_8_bits(times, monkeypatch):
    """Scales grow by powers of two, so that what 8 bits hold stays."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))  # every number that can goes up
    base = layer_of(EightBitLinear, draw(16, 32))
    base.rows[3] = 0
    weight = unpacked(base.rows, base.scale, torch.float32)
    copy = quantised.merged_copy(base, weight * (times - 1))
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
    copies = [quantised.merged_copy(linear, factor * change) for factor in (0, 1)]
    without, moved = (unpacked(copy.rows, copy.scale, torch.float32) for copy in copies)
    assert ((moved - without) * change).sum() / change.square().sum() == pytest.approx(1, abs=0.15)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["8bit", "fp8"])
def test_a_merged_copy_without_an_adapter_is_the_base_bit_for_bit(precision, tmp_path):
    model = loaded("qwenimage", tmp_path)
    policies.attach(model.transformer, config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    quantised.quantise_units(model.transformer, model.SHARD_UNITS, precision)
    layers = [module for module in model.transformer.modules() if hasattr(module, "lora_B")]
    stored = [layer.base_layer for layer in layers]
    for layer in layers:
        nn.init.zeros_(layer.lora_B["default"].weight)
    with policies.merged(model.transformer, "fp8")():
        for layer, base in zip(layers, stored, strict=True):
            assert layer.base_layer is not base
            assert torch.equal(layer.base_layer.rows.float(), base.rows.float())
            assert torch.equal(layer.base_layer.scale, base.scale)
    assert layers
    assert [layer.base_layer for layer in layers] == stored


@pytest.mark.parametrize("adapted", [False, True])
def test_a_row_of_gelu_is_divided_by_its_largest_which_is_known_before(adapted, monkeypatch):
    """Results and gradients keep their bits; in rows of small numbers, and of negative ones, errors are no larger."""
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

    def run(forward):
        leaf = x.clone().requires_grad_()
        out = forward(leaf)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaf)

    module.net[0].gelu = compiled.gelu
    plain = run(module)
    compiled.compile_units(nn.ModuleList([nn.Sequential(module)]), ("Sequential",))
    given = []
    noting = lambda x, largest=None: given.append(largest) or quantise(x, largest)  # noqa: E731
    monkeypatch.setattr(frozen_linear, "quantise", noting)
    found = run(module)
    assert [largest is not None for largest in given] == [False, True, False, False]  # the last two in the backward
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one[:4], other[:4])
        for rows in (slice(4, 8), slice(8, 12)):
            assert (one[rows] - other[rows]).norm() < 0.06 * other[rows].norm()


@pytest.mark.parametrize("layer", ["dropout", "final dropout", "exact GELU"])
def test_a_feed_forward_of_another_kind_is_left_as_it_is(layer):
    kinds = {
        "dropout": dict(activation_fn="gelu-approximate", dropout=0.5),
        "final dropout": dict(activation_fn="gelu-approximate", final_dropout=True),
        "exact GELU": dict(activation_fn="gelu"),
    }
    module = FeedForward(16, 16, **kinds[layer])
    compiled.compile_units(nn.ModuleList([nn.Sequential(module)]), ("Sequential",))
    assert type(module) is FeedForward


@torch.no_grad()
@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_no_layer_of_a_base_of_8_bits_keeps_exact_products_where_fast_ones_are_asked_for(name, merges, tmp_path):
    """But those that see one vector per image, whose x has two dimensions."""
    model = loaded(name, tmp_path)
    how = dict(base_precision="8bit", sample__fast_precision="fp8", sample__merge_adapter=merges)
    config = config_of("shapes_qwenimage", **how)
    policies.attach(model.transformer, config.lora, model.LORA_TARGETS)
    quantised.quantise_units(model.transformer, model.SHARD_UNITS, "8bit")
    with policies.fast_forwards(config, model.transformer)():
        layers = quantised_layers(model.transformer)
        assert layers
        assert all(layer.rounds_x for layer in layers.values())
    assert not any(layer.rounds_x for layer in quantised_layers(model.transformer).values())


def test_pairs_are_drawn_with_fast_products_where_these_are_asked_for():
    def latents(precision):
        how = dict(base_precision="8bit", lora__path="", sample__fast_precision=precision, sample__batch_size=8)
        config = config_of("shapes_qwenimage_dpo", **how, sample__num_images_per_prompt=8, reward_fn=PLAIN)
        make = prepare_preferences.from_rollouts(config, MODELS["qwenimage"], torch.device("cpu"))
        return make(load_prompts(config.dataset, "train")[:1], 0)[0]["winner_latents"]

    assert 0 < (latents("fp8") - latents("")).abs().mean() < 0.1


def test_it_goes_on_and_is_evaluated_on_the_base_that_it_was_trained_on(tmp_path):
    """Bit for bit; its LoRA file names the base, and scores otherwise on the full one."""
    how = dict(FEW, base_precision="4bit", lora__rank=32, weights_cache=str(tmp_path / "cache"), save_freq=1)
    how |= dict(eval__rewards=("jpeg_compressibility",), eval__batch_size=4, eval_freq=2, train__learning_rate=1e-2)
    unbroken = train("shapes_qwenimage_nft", tmp_path / "unbroken", **how)
    train("shapes_qwenimage_nft", tmp_path / "broken", **how | dict(num_epochs=1))
    folder = train("shapes_qwenimage_nft", tmp_path / "broken", **how, resume_from="latest")
    assert lines_of(folder)[-1] == lines_of(unbroken)[-1]
    assert exported(folder).read_bytes() == exported(unbroken).read_bytes()
    with safe_open(exported(folder), framework="pt") as file:
        assert file.metadata()["base_precision"] == "4bit"

    def scores(name, *words):
        evaluate.main(evaluate.parser().parse_args([*words, "--weights", "last", "--out", str(tmp_path / name)]))
        return [row["all"] for row in json.loads((tmp_path / name / "scores.json").read_text())["rows"]]

    own, again = scores("own", str(folder), str(folder))  # the second adapter of one base
    assert own == again
    (full,) = scores("full", str(folder), "--set", "base_precision=''")
    test = [line for line in lines_of(folder, "test") if "test/avg" in line][-1]
    assert (
        own["jpeg_compressibility"]["mean"] == test["test/jpeg_compressibility"] != full["jpeg_compressibility"]["mean"]
    )


@pytest.mark.parametrize(
    ("base", "merged"), [("", True), ("8bit", False), ("8bit", True)], ids=["merged", "stored", "merged with stored"]
)
def test_scored_forwards_stay_exact_and_images_change_a_little(base, merged, tmp_path):
    def run(precision):
        how = FOR_A_RUN | dict(base_precision=base, lora__rank=32, sample__batch_size=8)
        how |= dict(sample__merge_adapter=merged and not (base and not precision), sample__fast_precision=precision)
        return train("shapes_qwenimage_pr", tmp_path / (precision or "plain"), **how)

    fast, plain = run("fp8"), run("")
    assert lines_of(fast, "update")[0]["parity/log_prob_abs_diff_max"] == 0
    rewards = [lines_of(folder, "epoch")[0]["reward/avg"] for folder in (fast, plain)]
    assert rewards[0] != rewards[1]
    assert rewards[0] == pytest.approx(rewards[1], rel=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(base_precision="fp8"), "base_precision is 'fp8': NVIDIA A100 has no products of 8-bit floats"),
        (dict(sample__fast_precision="fp8"), "fast_precision is 'fp8': NVIDIA A100 has no products of 8-bit floats"),
        (
            dict(base_precision="8bit", compile=True),
            r"'8bit': NVIDIA A100 compiles no layers \(config.compile\) of 8-bit",
        ),
    ],
)
def test_a_gpu_without_products_of_8_bits_is_named(settings, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    config = config_of("shapes_qwenimage", **settings)
    quantised.check_device(config, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        quantised.check_device(config, SimpleNamespace(type="cuda"))
    quantised.check_device(config_of("shapes_qwenimage", base_precision="8bit"), SimpleNamespace(type="cuda"))
