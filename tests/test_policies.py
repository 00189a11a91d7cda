"""The policies that share a transformer: each is what it was when one comes back to it."""

import copy
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from ml_collections import ConfigDict
from peft.tuners.tuners_utils import BaseTunerLayer

from flow_grpo import exports, fsdp_utils, policies
from flow_grpo.diffusers_patch.qwenimage_pipeline_with_logprob import QwenImage

TINY = Path(__file__).parents[1] / "flow_grpo" / "assets" / "tiny_qwenimage"


def lora(rank=4, alpha=8, path=""):
    return ConfigDict(dict(rank=rank, alpha=alpha, path=str(path)))


def pipeline_with(adapter, seed=0):
    """The tiny pipeline as a run trains it."""
    pipeline = QwenImagePipeline.from_pretrained(TINY)
    policies.attach(pipeline.transformer, adapter, QwenImage.LORA_TARGETS)
    init = policies.adapter_init(adapter, seed) if adapter.rank else None
    how = dict(units=QwenImage.SHARD_UNITS, device=torch.device("cpu"), precision="fp32", weights=None, init=init)
    fsdp_utils.prepare(pipeline.transformer, None, **how)
    return pipeline


@torch.no_grad()
def velocity(transformer):
    x, text = torch.randn(2, 2, 16, 64, generator=torch.Generator().manual_seed(0))
    how = dict(encoder_hidden_states=text, encoder_hidden_states_mask=None, img_shapes=[[(1, 4, 4)]] * 2)
    return transformer(x, timestep=torch.tensor([0.9, 0.3]), return_dict=False, **how)[0]


@torch.no_grad()
def move(transformer):
    """As training would, but all at once."""
    stream = torch.Generator().manual_seed(1)
    for weight in fsdp_utils.trainable_parameters(transformer).values():
        weight += 0.02 * torch.randn(weight.shape, generator=stream)


def flags(transformer):
    return {name: p.requires_grad for name, p in transformer.named_parameters()}


@pytest.fixture(scope="module")
def base():
    return velocity(QwenImagePipeline.from_pretrained(TINY).transformer)


def test_a_fresh_adapter_is_the_base_and_alone_is_trained(base):
    transformer = pipeline_with(lora()).transformer
    assert torch.equal(velocity(transformer), base)
    assert all(trained == ("lora_" in name) for name, trained in flags(transformer).items())


def test_rank_0_trains_everything_and_adds_nothing(base):
    transformer = pipeline_with(lora(rank=0)).transformer
    assert all(flags(transformer).values())
    assert not any("lora_" in name for name in flags(transformer))
    assert torch.equal(velocity(transformer), base)


def test_adapters_off_is_the_base_and_leaves_everything_as_it_was(base):
    transformer = pipeline_with(lora()).transformer
    move(transformer)
    before, trained = velocity(transformer), flags(transformer)
    assert (before - base).abs().max() > 0.01
    with policies.adapters_off(transformer):
        assert torch.equal(velocity(transformer), base)
        assert flags(transformer) == trained
    assert torch.equal(velocity(transformer), before)
    assert flags(transformer) == trained


@pytest.mark.parametrize(("precision", "bound", "atol"), [("", 1e-5, 1e-4), ("fp8", 0.05, 0.3)])
def test_merged_is_the_policy_but_for_rounding_and_leaves_every_bit_as_it_was(precision, bound, atol, base):
    transformer = pipeline_with(lora()).transformer
    move(transformer)
    before, weights, trained = velocity(transformer), copy.deepcopy(transformer.state_dict()), flags(transformer)
    inside = policies.merged(transformer, precision)
    for _ in range(2):
        with inside():
            fast = velocity(transformer)
        torch.testing.assert_close(fast, before, rtol=0, atol=atol)
        assert 0 < (fast - before).norm() < bound * before.norm()
        assert torch.equal(velocity(transformer), before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in transformer.state_dict().items())
    assert flags(transformer) == trained


@torch.no_grad()
def test_weights_of_bf16_have_an_adapter_merged_that_is_smaller_than_their_steps():
    """The nearest numbers have 6 % of an adapter of 1e-4 of the weights."""
    transformer = pipeline_with(lora()).transformer.to(torch.bfloat16)
    move(transformer)
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.scaling["default"] *= 1e-4 * layer.weight.norm().item() / layer.get_delta_weight("default").norm().item()
    weights = [layer.weight.clone() for layer in layers]
    kept = total = nearest = 0.0
    with policies.merged(transformer)():
        for layer, weight in zip(layers, weights, strict=True):
            change, moved = layer.get_delta_weight("default").float(), layer.base_layer.weight - weight
            assert layer.base_layer.weight.dtype == torch.bfloat16
            kept, total = kept + (moved * change).sum(), total + change.square().sum()
            nearest += (((weight + change).bfloat16() - weight) * change).sum()
    assert kept / total == pytest.approx(1, abs=0.1)
    assert nearest / total < 0.2


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full weights"])
def test_the_reference_is_the_first_policy_and_the_present_one_returns(rank, base):
    transformer = pipeline_with(lora(rank)).transformer
    reference = policies.Reference(transformer).applied
    move(transformer)
    present = velocity(transformer)
    assert not torch.equal(present, base)
    for _ in range(2):
        with reference():
            assert torch.equal(velocity(transformer), base)
        assert torch.equal(velocity(transformer), present)


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full weights"])
def test_an_exception_inside_the_reference_brings_the_present_policy_back(rank, base):
    transformer = pipeline_with(lora(rank)).transformer
    reference = policies.Reference(transformer).applied
    move(transformer)
    present = velocity(transformer)
    with pytest.raises(KeyboardInterrupt), reference():
        raise KeyboardInterrupt
    assert torch.equal(velocity(transformer), present)
    with reference():
        assert torch.equal(velocity(transformer), base)


def test_a_moving_reference_is_the_policy_of_the_last_interval_and_guided_only_at_first(base):
    transformer = pipeline_with(lora(4)).transformer
    reference = policies.Reference(transformer, interval=2, guidance_scale=3.0)
    seen = []
    for step in range(1, 5):
        move(transformer)
        seen.append(velocity(transformer))
        reference.follow(step)
        with reference.applied():
            assert torch.equal(velocity(transformer), base if step < 2 else seen[1] if step < 4 else seen[3])
        assert torch.equal(velocity(transformer), seen[-1])
        assert reference.guidance_at(step, 1.5) == (3.0 if step < 2 else 1.5)


def test_an_adapters_first_weights_follow_from_seed_and_name():
    init, shape = policies.adapter_init(lora(), seed=0), torch.Size((4, 32))
    a, b = (f"transformer_blocks.0.attn.to_q.lora_{part}.default.weight" for part in "AB")
    first = init(a, shape)
    init("something else", shape)
    assert torch.equal(init(a, shape), first)
    assert not torch.equal(init(a.replace("to_q", "to_k"), shape), first)
    assert not torch.equal(policies.adapter_init(lora(), seed=1)(a, shape), first)
    assert torch.equal(init(b, shape), torch.zeros(shape))
    assert first.std().item() == pytest.approx(1 / 4, rel=0.3)


def test_a_saved_adapter_is_where_the_next_run_starts(tmp_path):
    first = pipeline_with(lora())
    move(first.transformer)
    exports.save_lora(first, tmp_path)
    adapter = lora(path=tmp_path)
    policies.check_lora(adapter)
    second = pipeline_with(adapter, seed=1)
    weights, again = (fsdp_utils.trainable_parameters(p.transformer) for p in (first, second))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert torch.equal(velocity(first.transformer), velocity(second.transformer))
    with pytest.raises(ValueError, match=r"has rank 4 and alpha 8; set lora\.rank and lora\.alpha"):
        policies.check_lora(lora(rank=8, path=tmp_path))
    with pytest.raises(ValueError, match=r"has rank 4 and alpha 8; set lora\.rank and lora\.alpha"):
        policies.check_lora(lora(alpha=4, path=tmp_path))


def test_what_a_lora_setting_can_get_wrong(tmp_path):
    policies.check_lora(lora())
    policies.check_lora(lora(rank=0))
    with pytest.raises(ValueError, match=r"lora\.path: .*pytorch_lora_weights\.safetensors does not exist"):
        policies.check_lora(lora(path=tmp_path))
    with pytest.raises(ValueError, match=r"lora\.rank is 0 with lora\.path 'somewhere'"):
        policies.check_lora(lora(rank=0, path="somewhere"))
    with pytest.raises(ValueError, match=r"lora\.rank is -1"):
        policies.check_lora(lora(rank=-1))
