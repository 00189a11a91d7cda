"""Dropout of an adapter's inputs, and adapters of layers that the config names: in runs and in their files."""

import json
import shutil

import pytest
import torch
from diffusers import QwenImagePipeline
from recorded import assert_same
from small import lines_of, train
from torch import nn

from flow_grpo.base import rng
from flow_grpo.weights import dropout, lora_files
from flow_grpo.weights.dropout import RowDropout

TARGETS = "attn.to_q", "img_in"  # in the blocks, and before them


def streams(*rows):
    return [rng.generator(0, "test", row) for row in rows]


def test_what_a_row_loses_follows_from_its_stream_alone_and_nothing_is_lost_without_gradients():
    x, layer = torch.ones(6, 50, 64), RowDropout(0.25)
    dropout.seed(layer, streams(0, 1, 2))
    whole = layer(x)
    assert torch.equal(whole[:3], whole[3:])  # both parts of a forward
    assert whole.unique().tolist() == [0, pytest.approx(4 / 3)]
    assert (whole == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert not torch.equal(whole[0], whole[1])
    dropout.seed(layer, streams(1))
    assert torch.equal(layer(x[:1])[0], whole[1])
    with torch.no_grad():
        assert layer(x) is x


def test_layers_lose_other_numbers_and_a_backward_that_computes_again_the_same_ones():
    layers = nn.Sequential(RowDropout(0.5), RowDropout(0.5))
    dropout.seed(layers, streams(0))
    x = torch.ones(1, 400, requires_grad=True)
    assert (layers(x) == 0).float().mean().item() == pytest.approx(0.75, abs=0.08)
    again = torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=False)
    again.sum().backward()
    assert torch.equal(x.grad[0] == 0, again[0] == 0)


@pytest.mark.parametrize("name", ["shapes_qwenimage_nft", "shapes_qwenimage_dpo,online"])
def test_a_resumed_run_drops_what_an_unbroken_one_drops_and_its_file_drops_nothing(name, shallow, tmp_path):
    how = shallow | dict(lora__targets=TARGETS, num_epochs=2, save_freq=1, keep_checkpoints=2, eval_freq=0)
    how |= dict(train__learning_rate=1e-2, fsdp__activation_checkpointing=1.0, preferences__min_margin=0.0)
    plain, whole = (train(name, tmp_path / str(p), **how, lora__dropout=p) for p in (0.0, 0.3))
    assert lines_of(plain, "update")[-1]["loss"] != lines_of(whole, "update")[-1]["loss"]
    copy = shutil.copytree(whole, tmp_path / "copy" / whole.name)
    shutil.rmtree(copy / "checkpoints" / "epoch_000002")
    assert_same(train(name, tmp_path / "copy", **how, lora__dropout=0.3, resume_from="latest"), whole, epoch=2)
    pipeline = QwenImagePipeline.from_pretrained(how["model"])
    pipeline.load_lora_weights(str(whole))
    assert not any(isinstance(layer, nn.Dropout) and layer.p for layer in pipeline.transformer.modules())
    adapted = {f"transformer_blocks.{block}.attn.to_q" for block in range(2)} | {"img_in"}
    assert {*lora_files.read(whole).layers} == adapted
    assert {*json.loads((whole / "adapter_config.json").read_text())["target_modules"]} == adapted
    card = (whole / "README.md").read_text()
    assert all(word in card for word in ("lora.dropout", "0.3", "lora.targets", *TARGETS))
