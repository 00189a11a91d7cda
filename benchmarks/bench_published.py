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
from pathlib import Path

import torch

from flow_grpo.command_line import terminal
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.settings import config_files
from flow_grpo.weights import policies

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from random_model import attach_adapters, random_model

STEPS, BRANCHES, SIZE = 10, 6, Size(512, 512)


def seconds(call, repeats: int = 3) -> float:
    """Median of `repeats` calls after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def load(device: torch.device):
    model = random_model("qwenimage").load("", device)
    model.pipeline.text_encoder = None
    model.transformer.enable_gradient_checkpointing()
    attach_adapters(model, config_files.load("config/grpo.py:pickscore_qwenimage_pr").lora)
    return model


@torch.no_grad()
def measure() -> dict[str, float]:
    """Seconds of each unit, and of a prompt."""
    device = torch.device("cuda")
    model = load(device)
    shapes = model.row_shapes(SIZE, 48)

    def forward(rows: int):
        condition = Condition(torch.randn(rows, *shapes["text_embeds"], device=device, dtype=torch.bfloat16))
        x, t = torch.randn(rows, *shapes["latents"], device=device), torch.full((rows,), 500.0, device=device)
        return policies.predict(model, "bf16", x, t, condition, 1.0, SIZE)

    def train():
        with torch.enable_grad():
            forward(2).square().mean().backward()

    latents = torch.randn(BRANCHES, *shapes["latents"], device=device)
    trunk, branches, step = seconds(lambda: forward(2)), seconds(lambda: forward(2 * BRANCHES)), seconds(train)
    decode = seconds(lambda: model.decode(latents, SIZE))
    rollout = STEPS * (trunk + decode) + STEPS * (STEPS - 1) // 2 * branches
    units = dict(forward_2_rows_s=trunk, forward_12_rows_s=branches, train_2_rows_s=step, decode_6_s=decode)
    return units | dict(rollout_s=rollout, update_s=(STEPS - 1) * step, prompt_s=rollout + (STEPS - 1) * step)


if __name__ == "__main__":
    terminal.protect()
    print(json.dumps({f"published/{name}": value for name, value in measure().items()}))
