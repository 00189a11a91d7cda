"""Larger images: rows of forwards by their tokens, and clip ranges by the numbers that log-ratios are means over."""

import itertools
import math

import pytest
import torch
from refused import refusal
from small import CHECKS, lines_of, loaded, size_of, train
from test_config import config_of, runs_of

from config import grpo, nft
from flow_grpo.algorithms import losses
from flow_grpo.algorithms.batch_plan import plan_batches
from flow_grpo.algorithms.flow_matching import velocity_error
from flow_grpo.command_line import checks
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob
from flow_grpo.settings import table

NUM_ROWS = 4000
CHANGE = 1e-3  # of each velocity, in root mean squares


def log_ratios(num_elements, kind):
    """Log-ratios [NUM_ROWS] of rows of noise whose velocities have changed by CHANGE."""
    stream = torch.Generator().manual_seed(num_elements)
    x, velocity, noise, change = (torch.randn(NUM_ROWS, 1, num_elements, generator=stream) for _ in range(4))
    changed = velocity + CHANGE * change
    if kind == "error":
        # A loss of finished images: what is left of the velocity's error is noise, too.
        return velocity_error(velocity, x, noise) - velocity_error(changed, x, noise)
    scheduler = loaded("qwenimage").schedule(10, size_of("qwenimage"))
    timesteps = scheduler.timesteps[3].repeat(NUM_ROWS)
    old = sde_step_with_logprob(scheduler, velocity, timesteps, x, noise_level=0.7, noise=noise)
    new = sde_step_with_logprob(scheduler, changed, timesteps, x, noise_level=0.7, prev_sample=old.prev_sample)
    if kind == "guard":
        return losses.guard_log_ratio(
            new.log_prob, old.log_prob, new.prev_sample_mean, old.prev_sample_mean, new.transition_std
        )
    kl = losses.gaussian_kl(new.prev_sample_mean, old.prev_sample_mean, new.transition_std)
    log_ratio = new.log_prob - old.log_prob
    # Of rows of a KL k for each of N numbers: the mean -k whatever N is, and the variance 2 k / N.
    k = kl.mean().item()
    spread = math.sqrt(2 * k / num_elements)
    assert log_ratio.mean().item() == pytest.approx(-k, abs=4 * spread / math.sqrt(NUM_ROWS))
    assert log_ratio.std().item() == pytest.approx(spread, rel=0.06)
    return log_ratio


@pytest.mark.parametrize("kind", ["log-prob", "guard", "error"])
def test_the_spread_of_a_mean_log_ratio_falls_as_one_over_the_root_of_its_numbers(kind):
    few = log_ratios(256, kind).std().item()
    many = log_ratios(1024, kind).std().item()
    assert few / many == pytest.approx(2, rel=0.06)


SIDES = {"px1024": 1024, "px1328": 1328}
PUBLISHED = [run for run in (*runs_of("grpo"), *runs_of("nft")) if not run.startswith("shapes")]
VARIANTS = ("", ",large_gpu", ",large_gpu,mixgrpo", ",large_gpu,guard", ",large_gpu,fdfo", ",endpoint")
VARIANTS += (",large_gpu,awm", ",large_gpu,dgpo", ",large_gpu,crd", ",distill", ",large_gpu,distill")
OF_WINDOWS = ("mixgrpo", "fdfo", "endpoint")  # not of branches


def bases():
    """Every published run, with the variants that its file and its script have."""
    for run, variant in itertools.product(PUBLISHED, VARIANTS):
        names = set(variant.strip(",").split(",")) - {"", "large_gpu"}
        file = nft if run.endswith("_nft") else grpo
        is_known = names <= {each.__name__ for each in file.VARIANTS}
        if is_known and not (run.endswith("_pr") and names & set(OF_WINDOWS)):
            yield run + variant


def test_larger_images_take_no_more_tokens_a_forward_and_plan_on_as_many_gpus():
    for name, side in itertools.product(bases(), SIDES):
        before = config_of(name)
        after = config_of(f"{name},{side}")
        assert (after.height, after.width) == (SIDES[side],) * 2
        growth = after.height * after.width / (before.height * before.width)
        for key in ("sample.completion_batch_size", "eval.batch_size", "vae_batch_size"):
            rows = table.value_of(before, key)
            # 0 = sample.batch_size.
            expected = max(int(rows / growth), 1) if rows else 0
            assert table.value_of(after, key) == expected, (name, key)
        for num_gpus in (1, 2, 4, 8, 16):
            if not refusal(plan_batches, table.typed(before), num_gpus):
                assert refusal(plan_batches, table.typed(after), num_gpus) == "", (name, side, num_gpus)
        script = CHECKS[after.algorithm]
        assert refusal(checks.check, after, script) == refusal(checks.check, before, script), (name, side)


ROWS = [  # a run, and its rows and its clip range at 512, 1024 and 1328 pixels
    ("pickscore_qwenimage,large_gpu", (8, 2, 1), (1e-4, 5e-5, 3.9e-5)),
    # An odd number of steps of an odd number of images does not divide into two updates.
    ("pickscore_qwenimage_pr", (4, 2, 2), (1e-4, 5e-5, 3.9e-5)),
    ("pickscore_sd3", (12, 2, 2), (1e-4, 5e-5, 3.9e-5)),
    ("pickscore_sd3_fast", (12, 2, 2), (1e-5, 5e-6, 3.9e-6)),
    ("pickscore_qwenimage,guard", (8, 2, 1), (4e-6, 2e-6, 1.5e-6)),
    # Its bound is a KL per number of a latent, and its clip range the unused default.
    ("pickscore_qwenimage,dppo", (8, 2, 1), (1e-4, 1e-4, 1e-4)),
    ("pickscore_qwenimage_nft,large_gpu", (8, 2, 2), (1e-4, 1e-4, 1e-4)),
    # Noise in all steps, nine an image; its loss clips nothing.
    ("pickscore_qwenimage,distill", (8, 2, 2), (1e-4, 1e-4, 1e-4)),
    # A forward holds whole groups, of 16 images or, of FDFO, of two.
    ("pickscore_qwenimage_nft,large_gpu,dgpo", (16, 16, 16), (1e-2, 5e-3, 3.9e-3)),
    ("pickscore_qwenimage,large_gpu,fdfo", (8, 2, 2), (0.03, 0.015, 0.012)),
]


@pytest.mark.parametrize(("name", "rows", "clip_ranges"), ROWS)
def test_rows_and_clip_ranges_of_each_size(name, rows, clip_ranges):
    sizes = ("", ",px1024", ",px1328")
    configs = [config_of(name + size) for size in sizes]
    assert tuple(config.sample.batch_size for config in configs) == rows
    assert tuple(config.train.clip_range for config in configs) == clip_ranges
    assert (configs[0].height, configs[0].width) == (512, 512), "what 512 pixels were, they are"


def test_a_smoke_run_of_a_shipped_model_has_its_own_size():
    for name in ("shapes_qwenimage,px1024,smoke", "pickscore_qwenimage,px1328,smoke"):
        config = config_of(name)
        assert (config.height, config.width) == (64, 64)


def test_a_smoke_run_of_larger_images_trains(tmp_path):
    folder = train("shapes_qwenimage,px1024", tmp_path, num_epochs=1, eval_freq=0)
    (epoch,) = lines_of(folder, "epoch")
    assert epoch["images"] == 8
