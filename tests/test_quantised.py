"""Layers of 8 and 4 bits in a transformer: which are stored, what trains on them, and who may ask for them."""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import evaluate
import prepare_preferences
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from small import FEW, MODELS, config_of, exported, lines_of, loaded, train
from torch import nn
from two_ranks import launch

from flow_grpo.base import distributed, folders
from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch import registry
from flow_grpo.kernels.quantised_linear import QuantisedLinear
from flow_grpo.weights import load_weights, policies, quantisation, quantised_cache, safetensors_reader
from flow_grpo.weights.quantisation import KINDS, quantised_layers

PLAIN = {"jpeg_compressibility": 1.0}  # no two images score alike
FOR_A_RUN = dict(FEW, num_epochs=1, eval_freq=0, reward_fn__shapes=0.0, reward_fn__jpeg_compressibility=1.0)


def on_meta(model, precision):
    """The transformer with an adapter and quantised layers, without numbers, as a run has it before it loads."""
    transformer = type(model.transformer).from_config(model.transformer.config).to("meta")
    policies.attach(transformer, config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    quantisation.quantise_units(transformer, model.SHARD_UNITS, precision)
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
    model = loaded(name)
    folder, cache = tmp_path / "weights", tmp_path / "cache" / "this"
    model.transformer.save_pretrained(folder)
    empty, again = on_meta(model, precision), on_meta(model, precision)
    quantisation.quantise_units(model.transformer.requires_grad_(False), model.SHARD_UNITS, precision)
    units = [unit for unit in model.transformer.modules() if type(unit).__name__ in model.SHARD_UNITS]
    assert nn.Linear not in {type(module) for unit in units for module in unit.modules()}

    safetensors_reader.read(empty.to_empty(device="cpu"), folder, copy_to)
    expected = {f"{key.replace('.base_layer', '')}": layer for key, layer in quantised_layers(empty).items()}
    for key, layer in quantised_layers(model.transformer).items():
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(layer.buffers(), expected[key].buffers()))

    assert not quantised_cache.on_all_ranks(cache)
    quantised_cache.keep(empty, cache)
    quantised_cache.keep(empty, cache)  # where another run was faster
    assert quantised_cache.on_all_ranks(cache)
    quantised_cache.fill(again, cache, torch.device("cpu"))
    assert_same_layers(empty, again)
    read = []
    safetensors_reader.read(again, folder, lambda target, rows: read.append(target))
    assert read
    assert not any(isinstance(target, QuantisedLinear) for target in read)
    assert [path.name for path in cache.parent.iterdir()] == ["this"]


def test_a_cache_is_named_by_content_alone(tmp_path):
    """Not by place, size or age of the model's files."""
    names = set()
    kinds = ("a", 1, "fp8_weights"), ("a", 1, "nf4"), ("a", 2, "fp8_weights"), ("b", 1, "fp8_weights")
    for place, value, precision in kinds:
        (tmp_path / place).mkdir(exist_ok=True)
        save_file({"weight": torch.full((4,), value)}, tmp_path / place / "model.safetensors")
        os.utime(tmp_path / place / "model.safetensors", (1, 1))
        names.add(quantised_cache.folder_of(str(tmp_path), tmp_path / place, precision, torch.device("cpu")))
    assert len(names) == 3


def kept(folder, adapter=True):
    """A cache of the tiny model's layers of 4 bits; its only file of weights."""
    model = loaded("qwenimage")
    model.transformer.requires_grad_(False)
    if adapter:
        policies.attach(model.transformer, config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    quantisation.quantise_units(model.transformer, model.SHARD_UNITS, "nf4")
    quantised_cache.keep(model.transformer, folder / "cache")
    (file,) = (folder / "cache").glob(quantised_cache.FILES)
    return model, file


def test_a_cache_is_the_same_with_and_without_an_adapter(tmp_path):
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    _, file = kept(tmp_path / "with")
    model, other = kept(tmp_path / "without", adapter=False)
    assert file.read_bytes() == other.read_bytes()
    filled = on_meta(model, "nf4")
    quantised_cache.fill(filled, other.parent, torch.device("cpu"))
    assert all(layer.filled for layer in quantised_layers(filled).values())


def test_a_damaged_cache_is_refused(tmp_path):
    _, file = kept(tmp_path)
    content = file.read_bytes()
    for damaged in (content[:1000], content[:-1] + bytes([content[-1] ^ 1]), content[:-4096] + bytes(4096)):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=str(file.parent)):
            quantised_cache.on_all_ranks(file.parent)


def test_what_a_killed_writer_left_goes_an_hour_later(tmp_path):
    _, file = kept(tmp_path)
    for age in (0, 10**6):
        scratch = folders.scratch_beside(file.parent)
        scratch.mkdir()
        (scratch / "weights.safetensors").touch()
        for path in (scratch / "weights.safetensors", scratch):
            os.utime(path, (time.time() - age,) * 2)
    assert quantised_cache.on_all_ranks(file.parent)
    (left,) = tmp_path.glob("cache.*")
    assert time.time() - left.stat().st_mtime < 1000


def test_ranks_that_see_different_caches_read_them_together_or_not_at_all(tmp_path):
    """Two machines, each with its own copy of the model: with one cache, with a cache each, and with one lost."""
    launch(__file__, tmp_path, timeout_s=120)


def start_on_two_machines(folder):
    """What the test above runs on each of two ranks."""
    os.environ["LOCAL_RANK"] = "0"
    rank = distributed.init_distributed().rank
    shutil.copytree(registry.tiny_folder("qwenimage"), folder / f"model{rank}")
    own = folder / f"machine{rank}"
    for cache, was_there in ((folder / "shared", False), (folder / "shared", True), (own, False), (own, True)):
        assert filled_from(cache, folder / f"model{rank}") == [was_there] * 2
    if rank == 1:
        shutil.rmtree(own)
    assert filled_from(own, folder / f"model{rank}") == [False] * 2
    assert filled_from(own, folder / f"model{rank}") == [True] * 2
    distributed.close()
    (folder / "done").touch()


def filled_from(cache, model):
    """Whether each rank's quantised layers came from the cache."""
    config = config_of("shapes_qwenimage", base_precision="fp8_weights", cache_dir=str(cache), model=str(model))
    loaded_model = MODELS["qwenimage"].load(config.model, torch.device("cpu"), alone=True)
    policies.attach(loaded_model.transformer, config.lora, loaded_model.LORA_TARGETS)
    load_weights.fill(config, loaded_model)
    layers = quantised_layers(loaded_model.transformer).values()
    return distributed.gather_objects([all(layer.filled for layer in layers)])


@pytest.mark.parametrize("name", ["shapes_qwenimage_pr", "shapes_qwenimage_dpo,online"])
def test_a_run_on_a_quantised_base_is_a_policy_of_its_own(name, shallow, tmp_path):
    """Its first update finds the rollout's log-probs, bit for bit, and its adapter learns."""
    how = FOR_A_RUN | dict(base_precision="nf4", lora__rank=32, sample__rollout_weights="exact")
    how |= dict(model=shallow["model"], sample__batch_size=8)  # whose 128 tokens make products of 8 bits
    folder = train(name, tmp_path, **how)
    first = lines_of(folder, "update")[0]
    assert first["grad_norm"] > 0
    assert first.get("parity/log_prob_abs_diff_max", 0) == 0
    assert exported(folder).stat().st_size > 0


def test_pairs_are_drawn_on_the_base_that_is_trained_on(tmp_path):
    """Frozen, in the run's precision, and kept in its cache."""
    config = config_of("shapes_qwenimage_dpo", base_precision="nf4", precision="bf16", cache_dir=str(tmp_path))
    transformer = prepare_preferences.load(config, MODELS["qwenimage"], torch.device("cpu")).transformer
    assert quantisation.precision_of(transformer) == "nf4"
    assert {(p.dtype, p.requires_grad) for p in transformer.parameters()} == {(torch.bfloat16, False)}
    assert list(tmp_path.glob("*/*.safetensors"))


@torch.no_grad()
def test_a_merged_copy_without_an_adapter_is_the_base_bit_for_bit(tmp_path):
    model = loaded("qwenimage")
    policies.attach(model.transformer, config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    quantisation.quantise_units(model.transformer, model.SHARD_UNITS, "fp8_weights")
    layers = [module for module in model.transformer.modules() if hasattr(module, "lora_B")]
    stored = [layer.base_layer for layer in layers]
    for layer in layers:
        nn.init.zeros_(layer.lora_B["default"].weight)
    with policies.MergedWeights(model.transformer, fp8=True).applied():
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
    model = loaded(name)
    how = dict(base_precision="fp8_weights", sample__rollout_weights="merged_fp8" if merges else "fp8")
    config = config_of("shapes_qwenimage", **how)
    policies.attach(model.transformer, config.lora, model.LORA_TARGETS)
    quantisation.quantise_units(model.transformer, model.SHARD_UNITS, "fp8_weights")
    with policies.fast_forwards(config, model.transformer)():
        layers = quantised_layers(model.transformer)
        assert layers
        assert all(layer.rounds_x for layer in layers.values())
    assert not any(layer.rounds_x for layer in quantised_layers(model.transformer).values())


def test_pairs_are_drawn_with_fast_products_where_these_are_asked_for():
    def latents(weights):
        how = dict(base_precision="fp8_weights", sample__rollout_weights=weights, sample__batch_size=8)
        config = config_of("shapes_qwenimage_dpo", **how, sample__num_images_per_prompt=8, reward_fn=PLAIN)
        make = prepare_preferences.from_rollouts(config, MODELS["qwenimage"], torch.device("cpu"))
        return make.make(load_prompts(config.dataset, "train")[:1], 0)[0]["winner_latents"]

    assert 0 < (latents("fp8") - latents("exact")).abs().mean() < 0.1


def test_it_goes_on_and_is_evaluated_on_the_base_that_it_was_trained_on(shallow, tmp_path):
    """Bit for bit; its LoRA file names the base, and scores otherwise on the full one."""
    how = dict(FEW, base_precision="nf4", lora__rank=32, cache_dir=str(tmp_path / "cache"), save_freq=1)
    how |= dict(eval__rewards=("jpeg_compressibility",), eval__batch_size=4, eval_freq=2, train__learning_rate=1e-2)
    how |= dict(model=shallow["model"], reward_fn__shapes=0.0, reward_fn__jpeg_compressibility=1.0)
    unbroken = train("shapes_qwenimage_nft", tmp_path / "unbroken", **how)
    train("shapes_qwenimage_nft", tmp_path / "broken", **how | dict(num_epochs=1))
    folder = train("shapes_qwenimage_nft", tmp_path / "broken", **how, resume_from="latest")
    assert lines_of(folder)[-1] == lines_of(unbroken)[-1]
    assert exported(folder).read_bytes() == exported(unbroken).read_bytes()
    with safe_open(exported(folder), framework="pt") as file:
        assert file.metadata()["base_precision"] == "nf4"

    def scores(name, *words):
        evaluate.main(evaluate.parser().parse_args([*words, "--weights", "last", "--out", str(tmp_path / name)]))
        return [row["all"] for row in json.loads((tmp_path / name / "scores.json").read_text())["rows"]]

    own, again = scores("own", str(folder), str(folder))  # the second adapter of one base
    assert own == again
    (full,) = scores("full", str(folder), "--set", "base_precision=''")
    test = [line for line in lines_of(folder, "test") if "test/avg" in line][-1]
    mine, plain = (row["jpeg_compressibility"]["mean"] for row in (own, full))
    assert mine == test["test/jpeg_compressibility"] != plain


@pytest.mark.parametrize(
    ("base", "weights", "others"),
    [("", "merged_fp8", "merged"), ("fp8_weights", "fp8", "exact"), ("fp8_weights", "merged_fp8", "exact")],
)
def test_scored_forwards_stay_exact_and_images_change_a_little(base, weights, others, shallow, tmp_path):
    how = FOR_A_RUN | dict(model=shallow["model"], base_precision=base, lora__rank=32, sample__batch_size=8)
    fast, plain = (
        train("shapes_qwenimage_pr", tmp_path / value, **how, sample__rollout_weights=value)
        for value in (weights, others)
    )
    assert lines_of(fast, "update")[0]["parity/log_prob_abs_diff_max"] == 0
    rewards = [lines_of(folder, "epoch")[0]["reward/avg"] for folder in (fast, plain)]
    assert rewards[0] != rewards[1]
    assert rewards[0] == pytest.approx(rewards[1], rel=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(sample__rollout_weights="merged_fp8"), "'merged_fp8': NVIDIA A100 has no products of 8-bit floats"),
        (dict(base_precision="fp8_weights", compile=True), "'fp8_weights': NVIDIA A100 compiles no layers of 8-bit"),
    ],
)
def test_a_gpu_without_products_of_8_bits_is_named(settings, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    config = config_of("shapes_qwenimage", **settings)
    quantisation.check_device(config, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        quantisation.check_device(config, SimpleNamespace(type="cuda"))
    quantisation.check_device(config_of("shapes_qwenimage", base_precision="fp8_weights"), SimpleNamespace(type="cuda"))


if __name__ == "__main__":
    start_on_two_machines(Path(sys.argv[1]))
