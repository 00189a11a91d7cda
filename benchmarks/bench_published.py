"""Seconds that the published per-step loop (TempFlow-GRPO's for Qwen-Image) needs for a prompt, as one JSON line.

    python benchmarks/bench_published.py          one GPU of 80 GiB or more, random weights, no download

Per prompt it makes 10 eager forwards of 2 rows (a trunk and its guidance), 45 of 12 rows (6 branches and theirs), 10
float32 decodes of 6 images, and 9 forwards and backwards of 2 rows with activation checkpointing: 512 px, 48 text
tokens, float32 adapters of rank 64 under autocast. Their times are added up. `benchmarks/bench.py --published`
does it before it measures ours.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo.command_line import terminal
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.settings import config_files
from flow_grpo.weights import policies

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from random_model import attach_adapters, random_model

NUM_STEPS = 10
NUM_BRANCHES = 6
NUM_TEXT_TOKENS = 48
SIZE = Size(512, 512)


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Return the median of `repeats` calls after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def load(device: torch.device) -> FlowModel:
    """Return Qwen-Image with random weights, adapters and activation checkpointing, without its text encoder."""
    model = random_model("qwenimage").load("", device)
    model.pipeline.text_encoder = None
    model.transformer.enable_gradient_checkpointing()
    attach_adapters(model, config_files.load("config/grpo.py:pickscore_qwenimage_pr").lora)
    return model


def forward(model: FlowModel, num_rows: int) -> Tensor:
    """Return the velocity of random latents, [num_rows, N, C]."""
    shapes = model.row_shapes(SIZE, NUM_TEXT_TOKENS)
    text = torch.randn(num_rows, *shapes["text_embeds"], device=model.device, dtype=torch.bfloat16)
    x = torch.randn(num_rows, *shapes["latents"], device=model.device)
    t = torch.full((num_rows,), 500.0, device=model.device)
    return policies.predict(model, "bf16", x, t, Condition(text), 1.0, SIZE)


@torch.no_grad()
def measure() -> dict[str, float]:
    """Return the seconds of each unit, and of a prompt."""
    model = load(torch.device("cuda"))

    def train_step():
        with torch.enable_grad():
            forward(model, 2).square().mean().backward()

    shapes = model.row_shapes(SIZE, NUM_TEXT_TOKENS)
    latents = torch.randn(NUM_BRANCHES, *shapes["latents"], device=model.device)
    # A trunk and its guidance are two rows, the branches of a step and theirs two each.
    trunk_s = seconds(lambda: forward(model, 2))
    branches_s = seconds(lambda: forward(model, 2 * NUM_BRANCHES))
    train_s = seconds(train_step)
    decode_s = seconds(lambda: model.decode(latents, SIZE))

    # Branches that leave at step i take the steps after it: 9 + 8 + ... + 1 of them.
    num_completion_steps = NUM_STEPS * (NUM_STEPS - 1) // 2
    rollout_s = NUM_STEPS * (trunk_s + decode_s) + num_completion_steps * branches_s
    update_s = (NUM_STEPS - 1) * train_s
    return {
        "forward_2_rows_s": trunk_s,
        "forward_12_rows_s": branches_s,
        "train_2_rows_s": train_s,
        "decode_6_s": decode_s,
        "rollout_s": rollout_s,
        "update_s": update_s,
        "prompt_s": rollout_s + update_s,
    }


if __name__ == "__main__":
    terminal.protect()
    print(json.dumps({f"published/{name}": value for name, value in measure().items()}))
