"""The signs of trouble on latents whose trouble is known, and what a run does about it."""

import math

import pytest
import torch
from ml_collections import ConfigDict
from small import lines_of, train

from flow_grpo import trouble

FIRST = dict(x0_norm=1.0, high_frequency=0.2, diversity=0.5)
LIMITS = ConfigDict(dict(x0_norm_change=1.5, high_frequency_change=2.0, diversity_change=5.0, grad_norm_spike=10.0))


def latents(num=64, seed=0):
    return torch.randn(num, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_the_norm_is_the_root_mean_square():
    assert trouble.measure(3 * latents(), torch.arange(64))[:, 0].mean() == pytest.approx(3, rel=0.02)


def test_white_noise_has_the_spectrums_own_share_and_a_grid_has_all_of_it():
    share = trouble.high_frequency_share(latents())
    high = 1 - 25 / 64  # of 8 x 8 frequencies, 5 x 5 are within a quarter cycle per pixel
    assert share.mean() == pytest.approx(high * 64 / 63, rel=0.05)  # the mean does not count
    grid = torch.ones(1, 4, 8, 8)
    grid[..., ::2] = -1
    assert trouble.high_frequency_share(grid + 5).item() == pytest.approx(1)
    smooth = torch.linspace(0, 2 * math.pi, 9)[:-1].sin().expand(1, 4, 8, 8)
    assert trouble.high_frequency_share(smooth).item() == pytest.approx(0, abs=1e-6)
    assert trouble.high_frequency_share(torch.ones(1, 4, 8, 8)).item() == 0


def test_diversity_is_within_a_group_and_zero_where_all_are_one():
    groups = torch.arange(8).repeat_interleave(8)
    same = latents(8).repeat_interleave(8, 0)
    assert trouble.measure(same, groups)[:, 2].max() == pytest.approx(0, abs=1e-6)
    assert trouble.measure(latents(), groups)[:, 2].mean() == pytest.approx((7 / 8) ** 0.5, rel=0.05)


def test_a_spike_is_over_the_median_of_what_came_before():
    assert trouble.spike([1.0, 2.0, 3.0, 8.0], num_new=1) == 4
    assert trouble.spike([1.0, 2.0], num_new=2) == 1
    assert trouble.spike([100.0] * 5 + [1.0] * 20 + [3.0, 2.0], num_new=2) == 3


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        (dict(x0_norm=1.6), "x0_norm: factor 1.6"),
        (dict(x0_norm=0.6), "x0_norm: factor 1.67"),
        (dict(high_frequency=0.5), "high_frequency: factor 2.5"),
        (dict(diversity=0.05), "diversity: factor 10"),
        (dict(grad_norm_spike=11.0), "grad_norm_spike: factor 11, over its limit 10"),
    ],
)
def test_each_limit_is_crossed_by_its_own_sign(change, sign):
    now = FIRST | dict(grad_norm_spike=1.0)
    assert trouble.crossed(now, FIRST, LIMITS) == []
    (problem,) = trouble.crossed(now | change, FIRST, LIMITS)
    assert sign in problem
    off = ConfigDict(dict.fromkeys(LIMITS, 0.0))
    assert trouble.crossed(now | change, FIRST, off) == []


NAME = "shapes_qwenimage"
HOW = dict(trouble__grad_norm_spike=1e-3, eval_freq=0, num_epochs=4)  # any gradient is a spike from the second epoch on


def test_a_run_in_trouble_says_so_and_goes_on(tmp_path, capsys):
    epochs = lines_of(train(NAME, tmp_path, **HOW), "epoch")
    assert [line["trouble/crossed"] for line in epochs] == [1, 1, 1, 1]
    assert [line["trouble/learning_rate_factor"] for line in epochs] == [1, 1, 1, 1]
    assert "trouble/grad_norm_spike: factor" in capsys.readouterr().out


def test_a_run_in_trouble_stops_with_everything_saved(tmp_path):
    folder = train(NAME, tmp_path, trouble__action="stop", save_freq=0, **HOW)
    assert len(lines_of(folder, "epoch")) == 1
    assert (folder / "checkpoints" / "epoch_000001").is_dir()
    assert (folder / "reward.png").is_file()


def test_a_learning_rate_that_was_lowered_is_still_low_after_resuming(tmp_path):
    how = HOW | dict(trouble__action="lower_learning_rate", save_freq=1)
    whole = train(NAME, tmp_path / "whole", **how)
    assert [line["trouble/learning_rate_factor"] for line in lines_of(whole, "epoch")] == [1 / 2, 1 / 4, 1 / 8, 1 / 16]
    train(NAME, tmp_path / "parts", **how | dict(num_epochs=2))
    parts = train(NAME, tmp_path / "parts", **how | dict(resume_from="latest"))
    assert lines_of(parts) == lines_of(whole)
