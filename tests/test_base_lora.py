"""lora.base: a LoRA that becomes a part of the frozen weights, whatever program wrote it."""

import json
from dataclasses import replace

import evaluate
import pytest
import torch
from diffusers import QwenImagePipeline
from refused import assert_refused
from safetensors.torch import load_file, save_file
from small import config_of, lines_of, move, train
from test_policies import ALONE, TINY, lora, pipeline_with, velocity
from train_qwenimage import main

import flow_grpo
from flow_grpo.checkpoints import exports
from flow_grpo.diffusers_patch.models.flux import Flux
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage
from flow_grpo.evaluation import policies_to_compare
from flow_grpo.settings.sections import Config, Lora
from flow_grpo.weights import base_lora, fsdp_utils, load_weights, lora_files, policies

WINDOW = "shapes_qwenimage"
ONE = dict(num_epochs=1, eval_freq=0)


@pytest.fixture(scope="module")
def trained():
    """A pipeline with an adapter that is not 0, and alpha other than its rank."""
    pipeline = pipeline_with(lora(rank=4, alpha=8))
    move(fsdp_utils.trainable_parameters(pipeline.transformer).values())
    return pipeline


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("few_steps")
    exports.save_lora(trained, path)
    return path


def model_with(base, rank=0, **more):
    """The tiny model as a run loads it."""
    settings = Lora(rank=rank, base=str(base), **more)
    family = QwenImage.load(str(TINY), torch.device("cpu"))
    policies.attach(family.transformer, settings, QwenImage.LORA_TARGETS)
    load_weights.fill_model(Config(model=str(TINY), lora=settings), family)
    return family.transformer


def in_kohyas_names(folder, path):
    """Write a LoRA as the programs do that few-step models come from: alpha beside each layer, down and up."""
    tensors = {}
    for name, weight in load_file(folder / lora_files.FILE).items():
        layer, part, _ = name.removeprefix("transformer.").rsplit(".", 2)
        tensors[f"{layer}.{'lora_down' if part == 'lora_A' else 'lora_up'}.weight"] = weight
        # The export's scale is in B, so that alpha is the rank. Here it is twice that, and B half.
        if part == "lora_B":
            tensors[f"{layer}.lora_up.weight"] = weight / 2
            tensors[f"{layer}.alpha"] = torch.tensor(8.0)
    save_file(tensors, path)
    return path


def test_the_base_computes_what_the_lora_does_on_it(trained, folder, tmp_path):
    expected = velocity(trained.transformer)
    original = velocity(QwenImagePipeline.from_pretrained(TINY, **ALONE).transformer)
    assert (expected - original).abs().max() > 0.01
    for base in (folder, folder / lora_files.FILE, in_kohyas_names(folder, tmp_path / "lightning.safetensors")):
        for rank in (0, 4):
            torch.testing.assert_close(velocity(model_with(base, rank)), expected, rtol=1e-4, atol=1e-5)


def test_alpha_in_the_header_counts(trained, folder, tmp_path):
    """As in files whose scale is not in B."""
    tensors = load_file(folder / lora_files.FILE)
    halved = {name: weight / 2 if ".lora_B." in name else weight for name, weight in tensors.items()}
    header = {lora_files.METADATA: json.dumps({"transformer.r": 4, "transformer.lora_alpha": 8})}
    save_file(halved, tmp_path / "older.safetensors", metadata=header)
    found = velocity(model_with(tmp_path / "older.safetensors"))
    torch.testing.assert_close(found, velocity(trained.transformer), rtol=1e-4, atol=1e-5)


def test_a_rank_reads_the_changed_rows_that_it_holds(folder):
    changes = base_lora.read(folder, QwenImage)
    name, change = next(iter(changes.items()))
    stored = dict(QwenImagePipeline.from_pretrained(TINY, **ALONE).transformer.named_parameters())[name].detach()
    whole = change.added_to(stored)[:]
    assert not torch.equal(whole, stored)
    torch.testing.assert_close(change.added_to(stored)[3:7], whole[3:7])


def test_weights_that_a_run_has_stored_have_the_lora_already(trained, folder, tmp_path):
    model_with(folder).save_pretrained(tmp_path / "transformer")
    model = QwenImage.load(str(TINY), torch.device("cpu"))
    config = Config(model=str(TINY), lora=Lora(rank=0, base=str(folder)))
    load_weights.fill_model(config, model, weights=tmp_path / "transformer")
    found = velocity(model.transformer)
    torch.testing.assert_close(found, velocity(trained.transformer), rtol=1e-4, atol=1e-5)


def test_diffusers_fuses_the_same(folder):
    pipeline = QwenImagePipeline.from_pretrained(TINY, **ALONE)
    pipeline.load_lora_weights(folder)
    pipeline.fuse_lora()
    fused = dict(pipeline.transformer.named_parameters())
    for name, weight in model_with(folder).named_parameters():
        layer, _, kind = name.rpartition(".")
        theirs = fused.get(f"{layer}.base_layer.{kind}", fused.get(name))
        torch.testing.assert_close(weight.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.fixture
def few_step_base(folder, tmp_path):
    """The LoRA of the two blocks that the shallow model has."""
    base = tmp_path / "of_two_blocks"
    base.mkdir()
    tensors = load_file(folder / lora_files.FILE)
    kept = {name: weight for name, weight in tensors.items() if int(name.split(".")[2]) < 2}
    save_file(kept, base / lora_files.FILE)
    return base


def test_a_run_on_a_few_step_base_trains_an_adapter_of_it(shallow, tmp_path, few_step_base):
    """The adapter begins at 0, the reference is the base with the LoRA, and the card says what to load first."""
    settings = shallow | ONE | dict(lora__base=str(few_step_base), lora__rank=4, train__beta=0.1)
    run = train(WINDOW, tmp_path, **settings)
    plain = train(WINDOW, tmp_path / "plain", **shallow | ONE | dict(lora__rank=4, train__beta=0.1))
    first = lines_of(run, "update")[0]
    assert first["kl_reference"] == 0
    assert first["ratio_mean"] == 1
    assert lines_of(run, "epoch")[0]["reward/avg"] != lines_of(plain, "epoch")[0]["reward/avg"]
    card = (run / "README.md").read_text()
    assert 'pipeline.load_lora_weights("of_two_blocks")\npipeline.fuse_lora()' in card
    assert json.loads((run / "inputs.json").read_text())["lora_base"].keys() == {lora_files.FILE}


def test_a_run_and_its_base_are_evaluated_with_the_lora_that_the_run_added(shallow, tmp_path, few_step_base):
    run = train(WINDOW, tmp_path / "runs", **shallow | ONE | dict(lora__base=str(few_step_base), lora__rank=4))
    layer = "transformer_blocks.0.attn.to_q"
    own = QwenImagePipeline.from_pretrained(shallow["model"]).transformer.get_submodule(layer).weight
    change = base_lora.read(few_step_base, QwenImage)[f"{layer}.weight"]
    expected = own.detach() + change.up @ change.down
    after = flow_grpo.load_run(run, "last", "cpu").model.transformer.get_submodule(layer).base_layer.weight
    before = flow_grpo.load_run(run, "base", "cpu").model.transformer.get_submodule(layer).weight
    for weight in (after, before):
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-6)

    # Each policy of scripts/evaluate.py has the settings of the first run.
    config = policies_to_compare.run_config(run)
    its_base = policies_to_compare.find_candidate(shallow["model"], config, "best")
    assert its_base.config.lora.base == str(few_step_base)
    assert its_base.weights == "base with of_two_blocks"
    other = policies_to_compare.find_candidate(str(TINY), config, "best")
    assert other.config.lora.base == ""
    assert other.weights == "base"

    # --model is the base of a policy that is a LoRA alone.
    flags = [str(run), "--weights", "last", "--model", str(TINY)]
    _, common = evaluate.configured(evaluate.parser().parse_args(flags))
    assert (common.model, common.lora.base) == (str(TINY), "")


def test_a_lora_that_was_trained_on_another_base_is_named(shallow, tmp_path, few_step_base, capsys):
    settings = shallow | ONE | dict(lora__rank=4)
    with_best = settings | dict(eval_freq=1, eval__num_prompts=1)
    run = train(WINDOW, tmp_path / "runs", **with_best, lora__base=str(few_step_base))
    said = f"{run} was trained with lora.base {few_step_base}, this run is without lora.base"
    assert said not in capsys.readouterr().out
    train(WINDOW, tmp_path / "on", **settings, lora__path=str(run))
    assert said in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train(WINDOW, tmp_path / "planned", **settings, lora__path=str(run), dry_run=1)
    assert said in capsys.readouterr().out
    best = Lora(path=str(run / "best"))
    assert base_lora.other_bases(best, ()).startswith(f"{run / 'best'} was trained with lora.base")
    assert base_lora.other_bases(replace(best, base=str(few_step_base)), (str(run),)) == ""
    assert base_lora.other_bases(Lora(path=str(few_step_base)), ()) == ""
    # The same file by other paths.
    for base in (f"{few_step_base}/", lora_files.find_file(few_step_base)):
        assert base_lora.other_bases(replace(best, base=str(base)), ()) == ""
    assert base_lora.other_bases(replace(best, base=str(tmp_path)), ()).endswith("that it was trained on")


def one_layer(path, layer, **more):
    """Write a LoRA of a layer of 64 numbers, with tensors beside it."""
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"{layer}.lora_A.weight": torch.randn(2, 64, generator=draw),
        f"{layer}.lora_B.weight": torch.randn(64, 2, generator=draw),
    }
    for name, tensor in more.items():
        tensors[f"{layer}.{name}"] = tensor
    save_file(tensors, path)
    return tensors


def test_alphas_that_fluxs_pipeline_leaves_to_its_caller_count(tmp_path):
    file = tmp_path / "base.safetensors"
    layer = "transformer_blocks.0.attn.to_q"
    tensors = one_layer(file, f"transformer.{layer}", alpha=torch.tensor(8.0))
    change = base_lora.read(file, Flux)[f"{layer}.weight"]
    up = tensors[f"transformer.{layer}.lora_B.weight"]
    down = tensors[f"transformer.{layer}.lora_A.weight"]
    torch.testing.assert_close(change.up @ change.down, 8 / 2 * up @ down)


def test_a_lora_that_diffusers_reads_in_part_or_without_its_scales_is_refused(tmp_path):
    layer = "transformer_blocks.0.attn.to_q"
    tensors = one_layer(tmp_path / "unknown_names.safetensors", layer)
    for part, name in (("lora_A", "lora_down"), ("lora_B", "lora_up")):
        tensors[f"{layer}.{name}.weight"] = tensors.pop(f"{layer}.{part}.weight")
    save_file(tensors, tmp_path / "unknown_names.safetensors")
    tensors = {}
    for name in ("lora_unet_double_blocks_0_img_attn_proj", "unknown"):
        tensors |= {f"{name}.lora_down.weight": torch.ones(2, 64), f"{name}.lora_up.weight": torch.ones(64, 2)}
    save_file(tensors, tmp_path / "half_known.safetensors")
    one_layer(tmp_path / "dora.safetensors", f"transformer.{layer}", dora_scale=torch.ones(64))
    tensors = one_layer(tmp_path / "half.safetensors", f"transformer.{layer}", alpha=torch.tensor(8.0))
    del tensors[f"transformer.{layer}.lora_B.weight"]
    save_file(tensors, tmp_path / "half.safetensors")
    tensors = one_layer(tmp_path / "alphas.safetensors", f"transformer.{layer}", alpha=torch.tensor(8.0))
    for part in ("A", "B"):
        tensors[f"transformer.{layer}2.lora_{part}.weight"] = tensors[f"transformer.{layer}.lora_{part}.weight"].clone()
    save_file(tensors, tmp_path / "alphas.safetensors")
    rows = []
    for name, words in {
        "unknown_names": ["diffusers reads 0 of its 1 layer"],
        "half_known": ["diffusers reads 1 of its 2 layers"],
        "dora": ["is a DoRA"],
        "half": ["is not whole", "has no lora_B"],
        "alphas": ["an alpha for some layers", f"{layer}2"],
    }.items():
        rows.append((name, lambda name=name: base_lora.read(tmp_path / f"{name}.safetensors", Flux), words))
    assert_refused(rows)


def test_what_is_no_lora_of_the_model_is_refused_before_anything_is_made(folder, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({"some.weight": torch.ones(2)}, other)
    wide = tmp_path / "wide.safetensors"
    tensors = load_file(folder / lora_files.FILE)
    save_file({name: torch.cat([weight, weight]) for name, weight in tensors.items()}, wide)
    infinite = tmp_path / "infinite.safetensors"
    save_file({name: weight * torch.inf for name, weight in tensors.items()}, infinite)

    def start(base):
        return lambda: main(config_of(WINDOW, tmp_path / "runs", lora__base=str(base)))

    rows = [
        ("absent", start(tmp_path / "nothing"), ["config.lora.base", "does not exist"]),
        ("other", start(other), ["config.lora.base", "no part of a LoRA"]),
        ("wide", start(wide), ["config.lora.base"]),
        ("infinite", start(infinite), ["config.lora.base", "cannot be used"]),
    ]
    assert_refused(rows)
    assert not (tmp_path / "runs").exists()
