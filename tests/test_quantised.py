"""Layers of 8 and 4 bits in a transformer: which are stored, what trains on them, and who may ask for them."""

import json
import os
from types import SimpleNamespace

import evaluate
import prepare_preferences
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import FEW, MODELS, config_of, exported, lines_of, loaded, train
from torch import nn

from flow_grpo import policies, quantised, quantised_files, stored_weights
from flow_grpo.frozen_linear import QuantisedLinear
from flow_grpo.prompts import load_prompts
from flow_grpo.quantised import KINDS, quantised_layers

PLAIN = {"jpeg_compressibility": 1.0}  # no two images score alike
FOR_A_RUN = dict(FEW, num_epochs=1, eval_freq=0, reward_fn__shapes=0.0, reward_fn__jpeg_compressibility=1.0)


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
