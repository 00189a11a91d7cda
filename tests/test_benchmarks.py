"""What the benchmarks compute besides times."""

import json
from dataclasses import replace

import bench
import build_random_pipeline
import diffusers
import fit_table
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


def test_the_models_of_the_fit_table_are_as_large_as_the_published_ones():
    published = build_random_pipeline.PUBLISHED
    with torch.device("meta"):
        made = dict(
            qwenimage=diffusers.QwenImageTransformer2DModel(),
            sd3=diffusers.SD3Transformer2DModel(qk_norm="rms_norm", **published["sd3"]),
            flux=diffusers.FluxTransformer2DModel(guidance_embeds=True, **published["flux"]),
        )
    for name, transformer in made.items():
        size, targets = fit_table.MODELS[name], MODELS[name].LORA_TARGETS
        assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(size.parameters, rel=1e-3)
        text = 48 + 77 if name == "sd3" else 48  # CLIP's beside T5's
        assert row_flops(transformer, 1024, text) / 1e12 == pytest.approx(size.row_tflop, rel=1e-2)
        layers = [m for n, m in transformer.named_modules() if n.endswith(targets) and isinstance(m, torch.nn.Linear)]
        per_rank = sum(layer.in_features + layer.out_features for layer in layers)
        assert per_rank == pytest.approx(size.trained_per_rank, rel=1e-3)


IN_USE = {  # GiB, where the allocator kept freed memory, too, which its limit left it: quantised_h200_20261122.md
    ("train_qwenimage_pr", ",eight_bit_base", ""): 31.7,
}


def test_what_is_computed_for_the_fit_table_is_near_what_was_measured():
    rows = {row.key: row for row in fit_table.ROWS if row.key in fit_table.RECORDED}
    assert len(rows) == len(fit_table.RECORDED) == 14
    for key, row in rows.items():
        gib, images_per_s = fit_table.RECORDED[key]
        config, large = fit_table.config_for(row), replace(row, card=141)
        rel, used = 0.3 if "offload" in row.settings else 0.07, IN_USE.get(key, gib)
        assert used * (1 - rel) < fit_table.memory_gib(row.model, config) < gib * (1 + rel)
        slack = 2.2 if key[0] == "train_sd3_pr" else 1.2  # its rollout's rate is 383 TFLOP/s, the window's 168
        assert images_per_s / slack < 1 / fit_table.image_s(large, config) < images_per_s * slack, key


def test_a_measurement_takes_the_place_of_what_is_computed():
    flux = next(row for row in fit_table.ROWS if (row.card, row.script) == (48, "train_flux"))
    cell = next(cell for cell in memory_table.CELLS if (cell.card, cell.script) == (48, "train_flux"))
    figures = {"memory/peak_gib": 31.5, "images_per_s": 1.3}
    line = {"cell": cell.name, "shared": False, "outcome": "fits"} | figures
    for changed, gib, speed in (
        ({}, "31.5", "~0.48"),  # measured on a card that is 2.7 times as fast
        ({"shared": True}, "31.5", "~0.47"),
        ({"outcome": "out of memory"}, "out of memory", "~0.47"),
        ({"outcome": "cut"}, "~33", "~0.47"),
    ):
        known = fit_table.measurements([line | changed]).get(flux.key, [])
        assert fit_table.cells(flux, known)[2:4] == [gib, speed], changed
