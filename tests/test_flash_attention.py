"""FlashAttention-4 as an operation: the numbers and gradients of masked attention."""

import math
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch
from small import config_of

from flow_grpo.diffusers_patch import model_classes
from flow_grpo.kernels import flash_attention
from flow_grpo.kernels.flash_attention import NAME, attend_first, attend_first_backward
from flow_grpo.run import startup

ROWS, TOKENS, HEADS, WIDTH = 3, 70, 2, 128
LENGTHS = [70, 41, 66]


def drawn(dtype=torch.float32, device="cpu", times=1):
    """Queries, keys, values, and a gradient of what they make; `times` as many tokens."""
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(ROWS, times * TOKENS, HEADS, WIDTH, generator=draw) for _ in range(4)]
    *tokens, of_result = [tensor.to(device, dtype) for tensor in tensors]
    return tokens, of_result, times * torch.tensor(LENGTHS, dtype=torch.int32, device=device)


def expected(query, key, value, lengths):
    """In float64."""
    query, key, value = (x.double() for x in (query, key, value))
    rows = []
    for row, length in enumerate(lengths.tolist()):
        scores = torch.einsum("lhd,mhd->hlm", query[row], key[row, :length]) / math.sqrt(WIDTH)
        rows.append(torch.einsum("hlm,mhd->lhd", scores.softmax(-1), value[row, :length]))
    return torch.stack(rows)


def gradients(function, tokens, of_result, lengths):
    tokens = [x.clone().requires_grad_() for x in tokens]
    out = function(*tokens, lengths)
    out.backward(of_result.to(out.dtype))
    return out.detach(), *(x.grad for x in tokens)


def attended(*inputs):
    return attend_first(*inputs)[0]


def test_values_and_gradients_are_those_of_masked_attention():
    tokens, of_result, lengths = drawn()
    ours = gradients(attended, tokens, of_result, lengths)
    exact = gradients(expected, tokens, of_result, lengths)
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)
    behind = torch.arange(TOKENS) >= lengths[:, None]
    assert all(not grad[behind].any() for grad in ours[2:])  # of keys and values
    checks = "test_schema", "test_autograd_registration", "test_faketensor"  # the others ask for a gradient of the sums
    torch.library.opcheck(attend_first, ([x.requires_grad_() for x in tokens] + [lengths]), test_utils=checks)
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
    served, gpu = capability[0] in (9, 10, 11), SimpleNamespace(type="cuda")
    with nullcontext() if served else pytest.raises(ValueError, match=r"'flash_4', which runs on .* not on Some Card"):
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
    tokens, of_result, lengths = drawn(torch.bfloat16, "cuda")
    ours = gradients(attended, tokens, of_result, lengths)
    exact = gradients(expected, [x.double() for x in tokens], of_result, lengths)
    for one, other in zip(ours, exact, strict=True):
        assert (one.double() - other).norm() < 5e-3 * other.norm()
    behind = torch.arange(TOKENS, device="cuda") >= lengths[:, None]
    assert all(not grad[behind].any() for grad in ours[2:])
    for inputs in ((tokens, of_result, lengths), drawn(torch.bfloat16, "cuda", times=50)):  # one block of keys; many
        first, *others = [gradients(attended, *inputs) for _ in range(4)]
        assert all(torch.equal(one, other) for again in others for one, other in zip(again, first, strict=True))
    last = gradients(attended, [x[1:] for x in tokens], of_result[1:], lengths[1:])
    assert all(torch.equal(one, other[1:]) for one, other in zip(last, ours, strict=True))
    out, sums = attend_first(*tokens, lengths)
    on_cpu = attend_first_backward(*(x.cpu() for x in (of_result, *tokens, lengths, out, sums)))
    for one, other in zip(ours[1:], on_cpu, strict=True):  # the same sums, in the same form
        assert (one.cpu().double() - other.double()).norm() < 5e-3 * other.double().norm()
