"""Products of 8-bit floats: what they compute, where they stand in for the policy, and who may ask for them."""

from types import SimpleNamespace

import pytest
import torch
from small import lines_of, train

from flow_grpo.float8 import Float8Linear, check_device, quantise


def reference(x, weight, bias):
    return x.double() @ weight.double().T + bias.double()


def test_numbers_that_8_bits_hold_are_multiplied_exactly():
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.tensor([7.0, -3.5, 1.75, 0.0])[torch.randint(4, (n, 32), generator=draw)] for n in (6, 48))
    x[:, 0], weight[:, 0], bias = 7.0, -7.0, torch.arange(48.0)
    layer = Float8Linear(weight, bias, torch.float32)
    assert torch.equal(layer(x.view(2, 3, 32)).view(6, 48), reference(x, weight, bias).bfloat16().float())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_an_error_is_that_of_4_bits(scale):
    """Each factor is off by at most 2^-4 of itself, or for small ones by 2^-10 / 448 of its row's largest."""
    draw = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 256, generator=draw) * torch.rand(n, 1, generator=draw) for n in (12, 64))
    x, bias = x * scale, torch.zeros(64)
    found, exact = Float8Linear(weight, bias, torch.float32)(x), reference(x, weight, bias)
    step = [v.abs().double() * 2**-4 + v.abs().amax(1, keepdim=True) * 2**-10 / 448 for v in (x, weight)]
    bound = step[0] @ weight.abs().double().T + x.abs().double() @ step[1].T + step[0] @ step[1].T
    assert ((found - exact).abs() <= bound + exact.abs() * 2**-8).all()
    assert 0.02 < (found - exact).norm() / exact.norm() < 0.05


def test_a_row_of_zeros_stays_one():
    rows, scale = quantise(torch.zeros(1, 16))
    assert not (rows.float() * scale).any()


def test_scored_forwards_stay_exact_and_images_change_a_little(tmp_path):
    def run(precision):
        how = dict(reward_fn__shapes=0.0, reward_fn__jpeg_compressibility=1.0, num_epochs=1, eval_freq=0)
        how |= dict(sample__merge_adapter=True, sample__merged_precision=precision)
        return train("shapes_qwenimage_pr", tmp_path / (precision or "plain"), **how)

    fast, plain = run("fp8"), run("")
    assert lines_of(fast, "update")[0]["parity/log_prob_abs_diff_max"] == 0
    rewards = [lines_of(folder, "epoch")[0]["reward/avg"] for folder in (fast, plain)]
    assert rewards[0] != rewards[1]
    assert rewards[0] == pytest.approx(rewards[1], rel=0.02)


def test_a_gpu_without_them_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    check_device(torch.device("cpu"))
    with pytest.raises(ValueError, match="NVIDIA A100 has no products of 8-bit floats"):
        check_device(SimpleNamespace(type="cuda"))
