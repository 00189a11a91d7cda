"""What the benchmarks compute besides times."""

import re

import bench
import pytest
import random_model
from flops import row_flops
from small import CHECKS, MODELS, as_prompts, config_of, loaded, plan

from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.run import optimization
from flow_grpo.settings import checks

LATER = "train_flux2_klein", "train_flux2_klein_9b_pr", "train_flux2_klein_nft", "train_qwenimage_21_pr"


def test_both_epochs_draw_one_prompt(tmp_path):
    """So that the measured one meets no width of text for the first time."""
    given = [prompt.text for prompt in load_prompts("dataset/shapes", "train")]
    (only,) = load_prompts(bench.one_prompt("dataset/shapes", tmp_path / "prompts"), "train")
    assert only.text in given
    assert len(only.text) == max(map(len, given)) > min(map(len, given))
    assert "include" in only.metadata


def test_the_work_of_an_epoch_is_counted_by_phase(tmp_path, monkeypatch):
    """2 trained steps of 4, guided; a branch that leaves at step k takes 3 - k more; an update's row counts twice."""
    how = dict(sample__guidance_scale=4.0, sample__completion_batch_size=1, sample__num_prompts_per_epoch=2)
    how |= dict(sample__num_images_per_prompt=2, sample__num_branches=2)
    config = config_of("shapes_qwenimage_pr", tmp_path, **how)
    config.sample.flash_ratio, config.sample.rollout_weights, branches = 0.0, "exact", config.sample.num_branches
    monkeypatch.setattr(optimization, "move_weights", optimization.move_weights)  # to be put back
    figures = bench.epoch_metrics("train_qwenimage_pr", config, MODELS["qwenimage"])
    assert figures["first_update_s"] > 0
    assert config.dataset.endswith("/prompts"), "bench.one_prompt's"
    model = loaded("qwenimage")
    condition, size = model.encode(as_prompts(["a"]), width=config.text_tokens), training_size(config)
    row = row_flops(model, condition, size) + row_flops(model, condition.negative, size)
    trunks = config.sample.num_prompts_per_epoch * config.sample.num_images_per_prompt
    rollout = figures["rollout_tflops"] * figures["time/rollout_s"] * 1e12
    update = figures["update_tflops"] * figures["time/update_s"] * 1e12
    assert rollout == pytest.approx(trunks * (2 + branches * (3 + 2)) * row, rel=1e-3)
    assert update == pytest.approx(2 * trunks * 2 * row, rel=1e-3)


@pytest.mark.parametrize("script", ["train_qwenimage", "train_flux_pr", "train_sd3_nft", "train_sd3_dpo", *LATER])
def test_a_full_size_benchmark_is_a_run_that_its_script_accepts_on_one_gpu(script):
    """Its weights are random, and none is made here."""
    name, family, config = bench.setup(bench.parser().parse_args(["--script", script, "--size", "full"]))
    checks.check(config, CHECKS[config.algorithm])
    assert plan(config).batches_per_epoch >= 1
    assert name == re.sub("flux2_klein(_9b)?|qwenimage_21|flux|sd3", "qwenimage", script)
    with random_model.registered(family, "Random"):
        assert model_classes.of_folder(config.model) is family
