"""FlashAttention-4 as an operation: the numbers and gradients of masked attention."""

import math
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch
from small import config_of

from flow_grpo.diffusers_patch import model_classes
from flow_grpo.kernels import flash_attention
from flow_grpo.kernels.flash_attention import NAME, attend_first, attend_first_backward
from flow_grpo.run import startup

ROWS = 3
TOKENS = 70
HEADS = 2
WIDTH = 128
LENGTHS = [70, 41, 66]


def drawn(dtype=torch.float32, device="cpu", times=1):
    """[Queries, keys, values], a gradient of the result, and lengths; `times` as many tokens."""
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, ROWS, times * TOKENS, HEADS, WIDTH, generator=generator).to(device, dtype)
    query, key, value, grad = tensors
    lengths = times * torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    return [query, key, value], grad, lengths


def expected(query, key, value, lengths):
    """In float64."""
    rows = []
    for row, length in enumerate(lengths.tolist()):
        seen_keys = key[row, :length].double()
        seen_values = value[row, :length].double()
        scores = torch.einsum("lhd,mhd->hlm", query[row].double(), seen_keys) / math.sqrt(WIDTH)
        rows.append(torch.einsum("hlm,mhd->lhd", scores.softmax(-1), seen_values))
    return torch.stack(rows)


def gradients(function, tokens, grad, lengths):
    """The result, and the gradients of queries, keys and values from that of the result."""
    query, key, value = (x.clone().requires_grad_() for x in tokens)
    out = function(query, key, value, lengths)
    out.backward(grad.to(out.dtype))
    return out.detach(), query.grad, key.grad, value.grad


def rows_of(tensors, rows):
    return [tensor[rows] for tensor in tensors]


def assert_nothing_behind(results, lengths):
    """Keys and values behind a row's length have no gradient."""
    behind = torch.arange(TOKENS, device=lengths.device) >= lengths[:, None]
    _, _, key_grad, value_grad = results
    assert not key_grad[behind].any()
    assert not value_grad[behind].any()


def attended(*inputs):
    return attend_first(*inputs)[0]


def test_values_and_gradients_are_those_of_masked_attention():
    tokens, grad, lengths = drawn()
    ours = gradients(attended, tokens, grad, lengths)
    exact = gradients(expected, tokens, grad, lengths)
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)
    assert_nothing_behind(ours, lengths)

    # The other checks ask for a gradient of the sums.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for x in tokens:
        x.requires_grad_()
    torch.library.opcheck(attend_first, (*tokens, lengths), test_utils=checks)
    out, sums = attend_first(*tokens, lengths)
    with pytest.raises(AssertionError, match="sums"):
        (out.sum() + sums.sum()).backward()


@pytest.mark.parametrize("compiles", [False, True])
def test_a_run_gives_it_to_every_block(compiles, monkeypatch):
    """On a CPU, where the operation needs no package."""
    monkeypatch.setattr(flash_attention, "usable", lambda attention: attention)
    config = config_of("shapes_qwenimage", precision="bf16", attention=NAME, lora__rank=4, compile=compiles)
    family = model_classes.of_folder(config.model)
    model = family.load(config.model, torch.device("cpu"), alone=True)
    startup.lay_out(config, model, None)
    assert all(block.attn.processor.attention == NAME for block in model.transformer.transformer_blocks)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (11, 0), (12, 0)])
def test_other_gpus_are_refused(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpu = SimpleNamespace(type="cuda")
    if capability[0] in (9, 10, 11):
        flash_attention.check_device(NAME, gpu)
    else:
        with pytest.raises(ValueError, match=r"'flash_4', which runs on .* not on Some Card"):
            flash_attention.check_device(NAME, gpu)
    with pytest.raises(ValueError, match="not on this machine without a GPU"):
        flash_attention.check_device(NAME, torch.device("cpu"))
    flash_attention.check_device("", gpu)


@pytest.mark.parametrize("package", [None, ModuleType("flash_attn.cute.interface")], ids=["missing", "another release"])
def test_a_package_that_cannot_be_used_is_a_warning_and_torchs_attention(package, monkeypatch):
    def load():
        return package or import_module("no_such_package")

    monkeypatch.setattr(flash_attention, "_kernels", load)
    with pytest.warns(UserWarning, match=r"is not used, .*(no_such_package|_flash_attn_fwd)"):
        assert flash_attention.usable(NAME) == ""


def test_the_compiler_knows_what_it_costs():
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counted:
        attended(*drawn()[0], drawn()[2])
    assert counted.get_total_flops() == 2 * 2 * ROWS * HEADS * TOKENS**2 * WIDTH  # two products


def test_the_kernels_agree():
    """To a rounding of bf16; the same bits again, and for each row by itself."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("takes a GPU with FlashAttention-4's kernels")
    pytest.importorskip("flash_attn.cute", reason="takes the extra flash4")
    tokens, grad, lengths = drawn(torch.bfloat16, "cuda")
    ours = gradients(attended, tokens, grad, lengths)
    exact = gradients(expected, [x.double() for x in tokens], grad, lengths)
    for one, other in zip(ours, exact, strict=True):
        assert (one.double() - other).norm() < 5e-3 * other.norm()
    assert_nothing_behind(ours, lengths)

    # The same bits again, with one block of keys and with many, and for rows without the first.
    for inputs in ((tokens, grad, lengths), drawn(torch.bfloat16, "cuda", times=50)):
        first = gradients(attended, *inputs)
        for _ in range(3):
            for one, other in zip(gradients(attended, *inputs), first, strict=True):
                assert torch.equal(one, other)
    last = gradients(attended, rows_of(tokens, slice(1, None)), grad[1:], lengths[1:])
    for one, other in zip(last, ours, strict=True):
        assert torch.equal(one, other[1:])
    out, sums = attend_first(*tokens, lengths)
    on_cpu = attend_first_backward(*(x.cpu() for x in (grad, *tokens, lengths, out, sums)))
    for one, other in zip(ours[1:], on_cpu, strict=True):  # the same sums, in the same form
        assert (one.cpu().double() - other.double()).norm() < 5e-3 * other.double().norm()
