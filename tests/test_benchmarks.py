"""What the benchmarks compute besides times."""

import bench
import pytest
import torch
import train_qwenimage_pr
from bench_completions import spearman
from flops import row_flops
from small import MODELS, config_of, loaded

from flow_grpo import optimization
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.prompts import load_prompts


def test_rank_correlation_with_and_without_ties():
    a = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 2.0], [5.0, 5.0, 5.0], [3.0, 2.0, 1.0]])
    b = torch.tensor([[1.0, 3.0, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    found = spearman(a, b)
    torch.testing.assert_close(found[[0, 1, 3]], torch.tensor([0.5, 0.75**0.5, -1.0]).double())
    assert found[2].isnan()


def test_both_epochs_draw_one_prompt(tmp_path):
    """So that the measured one meets no width of text for the first time."""
    given = [prompt.text for prompt in load_prompts("dataset/shapes", "train")]
    (only,) = load_prompts(bench.one_prompt("dataset/shapes", tmp_path / "prompts"), "train")
    assert only.text in given
    assert len(only.text) == max(map(len, given)) > min(map(len, given))
    assert "include" in only.metadata


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_the_work_of_an_epoch_is_counted_by_phase(guidance, tmp_path, monkeypatch):
    """2 trained steps of 4; a branch that leaves at step k takes 3 - k more; an update's row counts twice."""
    how = dict(sample__guidance_scale=guidance, sample__engine="full", sample__completion_batch_size=1)
    how |= dict(sample__num_images_per_prompt=2, sample__num_branches=2)
    config = config_of("shapes_qwenimage_pr", tmp_path, **how)
    config.sample.flash_ratio, config.sample.merge_adapter, branches = 0.0, False, config.sample.num_branches
    monkeypatch.setattr(train_qwenimage_pr, "update", train_qwenimage_pr.update)  # to be put back
    monkeypatch.setattr(optimization, "optimizer_step", optimization.optimizer_step)
    figures = bench.epoch_figures("train_qwenimage_pr", config, MODELS["qwenimage"])
    assert figures["first_update_s"] > 0
    assert config.dataset.endswith("/prompts"), "bench.one_prompt's"
    model = loaded("qwenimage", tmp_path)
    tokens = model.num_tokens(training_size(config))
    row = row_flops(model.transformer, tokens, config.text_tokens)
    if guidance > 1:
        row += row_flops(model.transformer, tokens, model.encode([" "]).negative.num_tokens)
    trunks = config.sample.num_prompts_per_epoch * config.sample.num_images_per_prompt
    rollout = figures["rollout_tflops"] * figures["time/rollout_s"] * 1e12
    update = figures["update_tflops"] * figures["time/update_s"] * 1e12
    assert rollout == pytest.approx(trunks * (2 + branches * (3 + 2)) * row, rel=1e-3)
    assert update == pytest.approx(2 * trunks * 2 * row, rel=1e-3)
