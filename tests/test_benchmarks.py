"""What the benchmarks compute besides times."""

import json

import bench
import memory_table
import pytest
import torch
import train_qwenimage_pr
from bench_completions import spearman
from flops import row_flops
from small import MODELS, config_of, loaded

from flow_grpo import batching, checks, optimization, settings, startup
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


def test_every_cell_of_the_memory_table_is_a_run_that_its_script_accepts_on_one_gpu():
    scripts = {script.algorithm: script for script in (checks.GRPO, checks.PR, checks.NFT, checks.DPO)}
    for cell in memory_table.CELLS:
        arguments = bench.parser().parse_args(memory_table.bench_arguments(cell, "full"))
        assert arguments.limit_gib < cell.card
        _, _, config = bench.setup(arguments)
        plan = batching.plan_pairs if config.algorithm == settings.DPO else batching.plan_batches
        startup.check_settings(config, scripts[config.algorithm])
        assert plan(config, 1).batches_per_epoch >= 1
        assert (
            cell.offloads
            == config.fsdp.offload_weights
            == ("torch.distributed.run" in memory_table.command_of(cell, "full"))
        )


def test_what_a_cells_process_says_is_read_as_its_outcome(tmp_path):
    figures = '{"memory/peak_gib": 15.9}\n'
    assert memory_table.outcome(0, f"a line\n{figures}", "") == {"outcome": "fits", "memory/peak_gib": 15.9}
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    lines = [
        {"cell": name, **memory_table.outcome(status, figures, stderr)}
        for name, status, stderr in (
            ("small", 0, ""),
            ("large", 1, error),
            ("broken", 1, "KeyError"),
            ("late", None, ""),
        )
    ]
    assert [line["outcome"] for line in lines] == ["fits", "out of memory", "failed", "cut"]
    (tmp_path / "out").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert memory_table.measured(tmp_path / "out") == {"small", "large"}, "the others are to be measured again"


def test_a_gpu_takes_cells_as_long_as_their_memory_fits():
    small, large = memory_table.Cell(24, "train_sd3"), memory_table.Cell(48, "train_qwenimage")
    at_work = [
        memory_table.Started(cell, gpu=0, command="", process=None, folder=None, shared=False)
        for cell in (small, large)
    ]
    assert memory_table.need_gib(small) == memory_table.LIMIT_GIB[24] + 1
    assert memory_table.need_gib(large) == memory_table.LOAD_GIB["qwenimage"] + 1, "its weights come about on the GPU"
    assert memory_table.free_gpu(small, at_work, [139.0], at_once=3) == 0
    assert memory_table.free_gpu(large, at_work, [139.0], at_once=3) is None
    assert memory_table.free_gpu(small, at_work, [139.0, 79.0], at_once=2) == 1
