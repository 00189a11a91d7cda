"""Cheap completions of branches against exact ones: seconds, and how alike the rewards rank; a JSON line for each.

    python benchmarks/bench_completions.py --config config/grpo.py:shapes_qwenimage_pr --config.lora.path=FOLDER
    python benchmarks/bench_completions.py --config config/grpo.py:shapes_qwenimage_pr,fp8_base

All ways draw the same trunks and the same branches, which then take fewer forwards (sample.flash_ratio, flash_solver),
or merged weights (sample.merge_adapter), also of 8 bits (sample.fast_precision), to the image. For comparison, all of
it in bf16. On a quantised base, whose merged copies have 8 bits, the way "full base" compares it with the images of the
full base from the same noise. What training reads from the rewards is their order within a group, the branches of one
step: `within_groups` is the mean of Spearman's rank correlation over groups whose rewards differ in both; `all_images`
is that of all rewards together.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo import checks, command_line, startup

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import train_qwenimage_pr

EXACT = dict(flash_ratio=0.0, merge_adapter=False, fast_precision="")
MERGED = EXACT | dict(merge_adapter=True)
RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
CHEAP = [MERGED, MERGED | dict(fast_precision="fp8")] + [
    MERGED | dict(flash_ratio=ratio, flash_solver=solver, fast_precision=precision)
    for solver, precision, ratios in (("dpm", "", RATIOS), ("extrapolate", "", RATIOS), ("extrapolate", "fp8", (0.7,)))
    for ratio in ratios
]
QUANTISED = [EXACT | dict(flash_ratio=ratio, flash_solver="extrapolate") for ratio in (0.9, 0.8, 0.7)]
FAST = [way | dict(fast_precision="fp8") for way in (EXACT, *QUANTISED)]
MERGED_FAST = [way | dict(merge_adapter=True) for way in FAST]
WAYS = {"": CHEAP, "8bit": QUANTISED + FAST + MERGED_FAST, "fp8": QUANTISED + MERGED_FAST}


def ranks(values: Tensor) -> Tensor:
    """Of each value along the last dimension, from 0; equal values share the mean of their ranks."""
    below = (values[..., None, :] < values[..., :, None]).double().sum(-1)
    equal = (values[..., None, :] == values[..., :, None]).double().sum(-1)
    return below + (equal - 1) / 2


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation along the last dimension; NaN where all values of one are equal."""
    a, b = (ranks(x) - ranks(x).mean(-1, keepdim=True) for x in (a, b))
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()


def rewards_of(run, precision: str, way: dict) -> tuple[Tensor, float]:
    """[trunks, K, J] in the order of the trunks, and the seconds that drawing them took."""
    run.config.precision = precision
    run.config.sample.update(way)
    run.board.seconds.clear()
    batches = [scored for _, scored in train_qwenimage_pr.rollout(run, 0)]
    order = torch.tensor([image for batch in batches for image in batch.images]).argsort()
    return torch.cat([batch.scores.result()["avg"] for batch in batches])[order], run.board.seconds["rollout"]


def agreement(rewards: Tensor, exact: Tensor) -> dict[str, float]:
    """Of two ways' rewards of the same branches."""
    within = spearman(rewards, exact)
    figures = dict(within_groups=within.nanmean().item(), groups=int(within.isfinite().sum()), images=rewards.numel())
    figures |= dict(all_images=spearman(rewards.flatten(), exact.flatten()).item())
    return figures | dict(mean_reward=rewards.mean().item(), exact_mean_reward=exact.mean().item())


def of_full_base(config) -> Tensor:
    """The rewards of exact completions without quantised layers."""
    config = copy.deepcopy(config)
    config.base_precision = ""
    run = startup.start(config, checks.PR)
    rewards, _ = rewards_of(run, config.precision, EXACT)
    run.pool.close()
    run.board.finish()
    return rewards


def main(config) -> None:
    config.eval_freq = config.save_freq = 0
    ways = [(config.precision, way) for way in WAYS.get(config.base_precision, QUANTISED)]
    ways += [] if config.base_precision else [("bf16", MERGED)]
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = folder
        full = of_full_base(config) if config.base_precision else None
        run = startup.start(config, checks.PR)
        rewards_of(run, config.precision, EXACT)  # warms up
        exact, exact_s = rewards_of(run, config.precision, EXACT)
        if full is not None:
            write(dict(way="full base", base_precision=config.base_precision) | agreement(full, exact))
        for precision, way in ways:
            rewards, cheap_s = rewards_of(run, precision, way)
            figures = dict(seconds=cheap_s, exact_s=exact_s) | agreement(rewards, exact)
            write(dict(precision=precision, base_precision=config.base_precision) | way | figures)
        run.pool.close()
        run.board.finish()


def write(line: dict) -> None:
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    command_line.run(main, "config/grpo.py:shapes_qwenimage_pr")
