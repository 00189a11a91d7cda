"""An exported LoRA is the policy that was trained, whoever reads it, and whoever trains it further."""

import json
import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import convert_lora
import pytest
import torch
from diffusers import QwenImagePipeline
from peft import PeftModel
from refused import assert_refused
from safetensors import safe_open
from safetensors.torch import load_file
from small import change_json, lines_of, move, train
from test_policies import ALONE, TINY, by_evaluate, lora, pipeline_with, velocity

from flow_grpo.checkpoints import exports
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage
from flow_grpo.settings.sections import Config
from flow_grpo.weights import fsdp_utils, load_weights, lora_files, policies

TRAINED = lora(rank=4, alpha=8)


def fresh():
    """The base that a reader puts the LoRA on."""
    return QwenImagePipeline.from_pretrained(TINY, **ALONE)


@pytest.fixture(scope="module")
def base():
    return velocity(fresh().transformer)


@pytest.fixture(scope="module")
def pipeline():
    """A policy after some training."""
    trained = pipeline_with(TRAINED)
    move(fsdp_utils.trainable_parameters(trained.transformer).values())
    return trained


@pytest.fixture(scope="module")
def policy(pipeline):
    return velocity(pipeline.transformer)


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("export")
    exports.save_lora(pipeline, path)
    return path


@pytest.fixture(scope="module")
def rounded(pipeline, tmp_path_factory):
    """The export in bfloat16."""
    path = tmp_path_factory.mktemp("rounded")
    exports.save_lora(pipeline, path, "bfloat16")
    return path


def by_diffusers(folder):
    pipeline = fresh()
    pipeline.load_lora_weights(folder)
    return pipeline.transformer


def by_diffusers_without_the_header(folder):
    """As releases did that knew of none."""
    pipeline = fresh()
    pipeline.load_lora_weights(load_file(folder / lora_files.FILE))
    return pipeline.transformer


def by_sums_of_tensors(folder):
    """As ComfyUI does with a file that has no tensor called alpha: W + B A."""
    transformer = fresh().transformer
    tensors = load_file(folder / lora_files.FILE)
    for name, b in tensors.items():
        if name.endswith(".lora_B.weight"):
            layer = name.removeprefix("transformer.").removesuffix(".lora_B.weight")
            a = tensors[name.replace("lora_B", "lora_A")]
            transformer.get_submodule(layer).weight.data += b.float() @ a.float()
    return transformer


def by_peft(folder):
    with tempfile.TemporaryDirectory() as scratch:
        converted = Path(scratch, "peft")
        convert_lora.write_for_peft(folder, converted)
        return PeftModel.from_pretrained(fresh().transformer, str(converted))


READERS = by_evaluate, by_diffusers, by_diffusers_without_the_header, by_sums_of_tensors, by_peft


@pytest.mark.parametrize("read", READERS)
def test_whoever_reads_an_exported_lora_has_the_policy(read, folder, policy, base):
    assert (policy - base).abs().max() > 0.01
    assert torch.allclose(velocity(read(folder)), policy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("read", READERS)
def test_an_export_in_bfloat16_is_the_policy_within_its_rounding(read, rounded, folder, policy, base):
    weights = load_file(rounded / lora_files.FILE)
    for name, weight in load_file(folder / lora_files.FILE).items():
        assert torch.equal(weights[name], weight.bfloat16()), name
    difference = velocity(read(rounded)) - policy
    assert 0 < difference.norm() < 2**-8 * (policy - base).norm()


@torch.no_grad()
def images(transformer):
    """Images [3, 3, H, W] in [0, 1], as diffusers' own pipeline draws them with this transformer."""
    pipeline = QwenImagePipeline.from_pretrained(TINY, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)
    prompts = ["a photo of a red circle", "two green squares", "a blue cross above a yellow triangle"]
    noise = torch.Generator().manual_seed(0)
    how = dict(height=64, width=64, num_inference_steps=10, true_cfg_scale=1.0, output_type="pt")
    return pipeline(prompts, generator=noise, **how).images


@pytest.fixture(scope="module")
def drawn(pipeline):
    """Images of the policy, and of the base."""
    return images(pipeline.transformer), images(fresh().transformer)


@pytest.mark.parametrize("read", READERS)
def test_whoever_reads_an_exported_lora_draws_the_policys_images(read, folder, rounded, drawn):
    expected, of_base = drawn
    change = (of_base - expected).abs().max().item()
    assert change > 0.1
    exact = (images(read(folder)) - expected).abs().max().item()
    in_bfloat16 = (images(read(rounded)) - expected).abs().max().item()
    # RESULTS.md has the table: pytest tests/test_lora_readers.py -k draws -o log_cli=true -o log_cli_level=INFO
    row = read.__name__, exact, in_bfloat16, change
    logging.getLogger(__name__).info("%s: %.1e, bfloat16 %.1e, base %.2f", *row)
    assert exact < 1e-4
    assert 0 < in_bfloat16 < change / 10


def test_a_hidden_file_of_macos_beside_a_lora_is_passed_over(folder, tmp_path):
    shutil.copy(folder / lora_files.FILE, tmp_path / "mine.safetensors")
    (tmp_path / "._mine.safetensors").write_bytes(b"\0\5\x16\7")
    assert lora_files.read_adapter(tmp_path) == lora_files.read_adapter(folder)


def test_the_header_says_that_alpha_is_the_rank(folder):
    with safe_open(folder / lora_files.FILE, "pt") as file:
        settings = json.loads(file.metadata()[lora_files.METADATA])
    assert (settings["transformer.r"], settings["transformer.lora_alpha"]) == (4, 4)


def test_the_scale_in_b_costs_no_bit_where_it_is_a_power_of_two(folder, pipeline, policy):
    stored = load_file(folder / lora_files.FILE)
    for name, weight in fsdp_utils.trainable_parameters(pipeline.transformer).items():
        scale = 2 if "lora_B" in name else 1
        in_file = stored[f"transformer.{name.replace('.default.', '.')}"]
        assert torch.equal(in_file, scale * weight), name
    assert torch.equal(velocity(by_evaluate(folder)), policy)


def of_an_earlier_version(pipeline, folder, alpha=TRAINED.alpha):
    """A file as diffusers writes it of a run's adapter, whose alpha is in the header alone."""
    layers = {}
    for name, weight in fsdp_utils.trainable_parameters(pipeline.transformer).items():
        layers[name.replace(".default.", ".")] = weight.detach().clone()
    settings = {"r": TRAINED.rank, "lora_alpha": alpha, "target_modules": list(QwenImage.LORA_TARGETS)}
    pipeline.save_lora_weights(folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=settings)
    return folder


def by_a_run(folder, alpha, rank=4):
    """The transformer of a run of this alpha that starts from a LoRA."""
    config = Config(lora=lora(rank, alpha, folder))
    load_weights.check_model(config.model, config.lora, QwenImage)
    model = QwenImage.load(config.model, torch.device("cpu"))
    policies.attach(model.transformer, config.lora, model.LORA_TARGETS)
    load_weights.fill_model(config, model)
    return model.transformer


@pytest.mark.parametrize("alpha", [2, 4, 8, 6])
def test_a_run_starts_from_the_policy_of_a_file_whatever_the_two_alphas(alpha, folder, pipeline, policy, tmp_path):
    for path in (folder, of_an_earlier_version(pipeline, tmp_path)):
        found = velocity(by_a_run(path, alpha))
        if alpha == 6:
            assert torch.allclose(found, policy, rtol=0, atol=1e-5)
        else:
            assert torch.equal(found, policy)


def test_a_file_of_an_earlier_version_is_trained_further_and_evaluated_bit_for_bit(pipeline, policy, tmp_path):
    path = of_an_earlier_version(pipeline, tmp_path)
    assert lora_files.read_adapter(path).alpha == 8
    trained = fsdp_utils.trainable_parameters(pipeline.transformer)
    for name, weight in fsdp_utils.trainable_parameters(by_a_run(path, 8)).items():
        assert torch.equal(weight, trained[name]), name
    assert torch.equal(velocity(by_evaluate(path)), policy)


def test_the_alpha_of_a_file_may_be_a_fraction_though_a_runs_is_a_whole_number(pipeline, tmp_path):
    path = of_an_earlier_version(pipeline, tmp_path, alpha=6.5)
    expected = velocity(by_diffusers(path))
    for transformer in (by_evaluate(path), by_a_run(path, 8), by_peft(path)):
        assert torch.allclose(velocity(transformer), expected, rtol=0, atol=1e-5)


def test_a_run_takes_its_own_export_back_bit_for_bit(folder, pipeline):
    """As it does with best/ at its end."""
    trained = fsdp_utils.trainable_parameters(pipeline.transformer)
    for name, weight in fsdp_utils.trainable_parameters(by_a_run(folder, TRAINED.alpha)).items():
        assert torch.equal(weight, trained[name]), name


def test_an_alpha_that_is_no_power_of_two_times_the_rank_costs_only_rounding(tmp_path):
    odd = pipeline_with(replace(TRAINED, alpha=7))
    move(fsdp_utils.trainable_parameters(odd.transformer).values())
    exports.save_lora(odd, tmp_path)
    for transformer in (by_sums_of_tensors(tmp_path), by_a_run(tmp_path, 7), by_a_run(tmp_path, 4)):
        assert torch.allclose(velocity(transformer), velocity(odd.transformer), rtol=0, atol=1e-5)


def test_a_lora_for_peft_keeps_its_dtype_and_is_read_here_too(rounded, policy, base, tmp_path):
    converted = tmp_path / "new" / "peft"
    convert_lora.write_for_peft(rounded, converted)
    assert {weight.dtype for weight in load_file(converted / lora_files.PEFT_FILE).values()} == {torch.bfloat16}
    assert lora_files.read_adapter(converted) == lora_files.read_adapter(rounded)
    assert torch.equal(velocity(by_evaluate(converted)), velocity(by_evaluate(rounded)))
    args = convert_lora.parser().parse_args(["any", "--out", str(converted)])
    rows = [("there", lambda: convert_lora.check_flags(args), [converted, "is there already"])]
    rows.append(("no LoRA", lambda: convert_lora.write_for_peft(TINY, tmp_path / "other"), [TINY]))
    (tmp_path / "file").touch()
    in_file = tmp_path / "file" / "lora"
    rows.append(("in a file", lambda: convert_lora.write_for_peft(rounded, in_file), ["--out", "is no folder"]))
    assert_refused(rows)
    assert not (tmp_path / "other").exists()


def test_a_lora_for_peft_names_the_one_that_it_was_trained_on(recorded, tmp_path, capsys):
    run = shutil.copytree(recorded("nft").folder, tmp_path / "run")
    convert_lora.write_for_peft(run / "best", tmp_path / "plain")
    assert "lora.base" not in capsys.readouterr().out
    settings = json.loads((run / "config.json").read_text())["lora"]
    change_json(run / "config.json", lora=settings | {"base": "loras/lightning"})
    for number, name in enumerate(("", "best", "best/pytorch_lora_weights.safetensors")):
        convert_lora.write_for_peft(run / name, tmp_path / str(number))
        assert "trained with lora.base loras/lightning: add that LoRA" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_exports_bfloat16_writes_nothing_else_as_lora_files_and_resumes_bit_for_bit(shallow, tmp_path):
    how = shallow | dict(num_epochs=2, eval_freq=1, save_freq=1, train__ema_interval=1)
    float32 = train("shapes_qwenimage", tmp_path / "float32", **how)
    how |= dict(lora__export_dtype="bfloat16")
    train("shapes_qwenimage", tmp_path / "resumed", **how | dict(num_epochs=1))
    resumed = train("shapes_qwenimage", tmp_path / "resumed", **how, resume_from="latest")
    assert lines_of(resumed, "update") == lines_of(float32, "update")
    for place in (".", "best", "checkpoints/epoch_000002"):
        expected = load_file(float32 / place / lora_files.FILE)
        found = load_file(resumed / place / lora_files.FILE)
        assert any(weight.any() for name, weight in expected.items() if "lora_B" in name)
        for name, weight in expected.items():
            assert torch.equal(found[name], weight.bfloat16()), (place, name)
    adapter = lora_files.check_adapter(resumed)
    assert (adapter.rank, adapter.alpha) == (4, 4)
