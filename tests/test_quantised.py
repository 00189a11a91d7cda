"""Layers of 8 and 4 bits in a transformer: which are stored, what trains on them, and who may ask for them."""

import json
from types import SimpleNamespace

import evaluate
import prepare_preferences
import pytest
import torch
from safetensors import safe_open
from small import FEW, MODELS, config_of, exported, lines_of, loaded, train
from torch import nn

from flow_grpo.data.prompts import load_prompts
from flow_grpo.evaluation import policies_to_compare
from flow_grpo.kernels.quantised_linear import QuantisedLinear
from flow_grpo.weights import policies, quantisation, safetensors_reader
from flow_grpo.weights.quantisation import KINDS, quantised_layers
from flow_grpo.weights.safetensors_reader import StoredWeights

PLAIN = {"jpeg_compressibility": 1.0}  # no two images score alike
FOR_A_RUN = dict(FEW, num_epochs=1, eval_freq=0, reward_fn__shapes=0.0, reward_fn__jpeg_compressibility=1.0)


def copy_to(target, rows):
    (target.store if isinstance(target, QuantisedLinear) else target.copy_)(rows[:])


def numbers_of(transformer):
    """Numbers of the quantised layers, whether or not they have adapters."""
    numbers = {}
    for name, layer in quantised_layers(transformer).items():
        for key, tensor in layer.named_buffers():
            numbers[f"{name.removesuffix('.base_layer')}.{key}"] = tensor.view(torch.uint8)
    return numbers


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", KINDS)
def test_every_frozen_layer_of_a_unit_is_quantised_and_filled_from_stored_weights(name, precision, tmp_path):
    """The same numbers as quantising what is loaded; before it loads, a run has layers without numbers."""
    model = loaded(name)
    model.transformer.save_pretrained(tmp_path)
    empty = type(model.transformer).from_config(model.transformer.config).to("meta")
    policies.attach(empty.requires_grad_(False), config_of("shapes_qwenimage").lora, model.LORA_TARGETS)
    for transformer in (empty, model.transformer.requires_grad_(False)):
        quantisation.quantise_units(transformer, model.SHARD_UNITS, precision)
    for unit in model.transformer.modules():
        if type(unit).__name__ in model.SHARD_UNITS:
            assert nn.Linear not in map(type, unit.modules())
    safetensors_reader.fill_transformer(empty.to_empty(device="cpu"), StoredWeights(tmp_path), copy_to)
    expected = numbers_of(model.transformer)
    assert expected
    torch.testing.assert_close(numbers_of(empty), expected, rtol=0, atol=0)


def test_pairs_are_drawn_on_the_base_that_is_trained_on():
    """Frozen, in the run's precision."""
    config = config_of("shapes_qwenimage_dpo", base_precision="nf4", precision="bf16")
    candidate = policies_to_compare.Candidate(config.model, "base", config, None, None)
    transformer = policies_to_compare.load_candidate(candidate, MODELS["qwenimage"], torch.device("cpu")).transformer
    assert quantisation.precision_of(transformer) == "nf4"
    assert {(p.dtype, p.requires_grad) for p in transformer.parameters()} == {(torch.bfloat16, False)}


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
    with policies.fast_forwards(config.sample.rollout_weights, model.transformer)():
        layers = quantised_layers(model.transformer)
        assert layers
        assert all(layer.rounds_x for layer in layers.values())
    assert not any(layer.rounds_x for layer in quantised_layers(model.transformer).values())


def test_pairs_are_drawn_with_fast_products_where_these_are_asked_for():
    def latents(weights):
        how = dict(base_precision="fp8_weights", sample__rollout_weights=weights, sample__batch_size=8)
        config = config_of("shapes_qwenimage_dpo", **how, sample__num_images_per_prompt=8, reward_fn=PLAIN)
        rows = load_prompts(config.dataset, "train")[:1]
        maker = prepare_preferences.FromRollouts(config, MODELS["qwenimage"], torch.device("cpu"), rows[0])
        return maker.make(rows, 0).pairs[0]["winner_latents"]

    assert 0 < (latents("fp8") - latents("exact")).abs().mean() < 0.1


@pytest.mark.slow
def test_it_goes_on_and_is_evaluated_on_the_base_that_it_was_trained_on(shallow, tmp_path):
    """Bit for bit; its LoRA file names the base, and scores otherwise on the full one."""
    how = dict(FEW, base_precision="nf4", lora__rank=32, save_freq=1)
    how |= dict(eval__rewards=("jpeg_compressibility",), eval__batch_size=4, eval_freq=1, train__learning_rate=1e-2)
    how |= dict(eval__num_prompts=2, eval__num_steps=2)
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
    assert own["jpeg_compressibility"]["mean"] == test["test/jpeg_compressibility"]
    assert full["jpeg_compressibility"]["mean"] != test["test/jpeg_compressibility"]


@pytest.mark.parametrize(
    ("plain", "others"),
    [  # of base_precision and sample.rollout_weights, and how far rewards may lie apart
        pytest.param(("", "merged"), [("", "merged_fp8", 0.02), ("nf4", "exact", 0.1)], marks=pytest.mark.slow),
        (("fp8_weights", "exact"), [("fp8_weights", "fp8", 0.02), ("fp8_weights", "merged_fp8", 0.02)]),
    ],
)
def test_scored_forwards_stay_exact_and_images_change_a_little(plain, others, shallow, tmp_path):
    """An adapter learns on any base."""

    def reward(base, weights):
        how = dict(model=shallow["model"], base_precision=base, sample__rollout_weights=weights, lora__rank=32)
        how |= dict(sample__batch_size=8, train__beta=0.01)
        folder = train("shapes_qwenimage_pr", tmp_path / f"{base} {weights}", **FOR_A_RUN | how)
        first = lines_of(folder, "update")[0]
        assert first["parity/log_prob_abs_diff_max"] == first["kl_reference"] == 0 < first["grad_norm"]
        return lines_of(folder, "epoch")[0]["reward/avg"]

    expected = reward(*plain)
    for base, weights, room in others:
        found = reward(base, weights)
        assert found != expected
        assert found == pytest.approx(expected, rel=room)


def test_rounded_gradients_leave_the_rollout_and_the_first_ratio_as_they_are(shallow, tmp_path):
    """Gradients of all adapters together differ by a few hundredths."""

    def lines(precision):
        how = dict(model=shallow["model"], base_precision="fp8_weights", lora__rank=32, sample__batch_size=8)
        how["train__grad_input_precision"] = precision
        folder = train("shapes_qwenimage", tmp_path / f"run{precision}", **FOR_A_RUN | how)
        return lines_of(folder, "epoch")[0], lines_of(folder, "update")[0]

    exact_epoch, exact_update = lines("")
    epoch, update = lines("fp8")
    assert update["parity/log_prob_abs_diff_max"] == 0
    assert epoch["reward/avg"] == exact_epoch["reward/avg"]
    assert update["grad_norm"] != exact_update["grad_norm"]
    assert update["grad_norm"] == pytest.approx(exact_update["grad_norm"], rel=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(base_precision="fp8_weights", train__grad_input_precision="fp8"),
            "config.train.grad_input_precision is 'fp8': NVIDIA A100 has no products of 8-bit floats",
        ),
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
