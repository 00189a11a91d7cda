"""Benchmark compiled Qwen-Image blocks and the VAE decode. Runs 6 of 60 blocks and scales time and memory by 10. Prints
JSON lines.

    python benchmarks/bench_blocks.py          one GPU of 40 GiB or more, random weights, no download
    python benchmarks/bench_blocks.py --all-blocks          forwards alone; 100 GiB

`forward`: 24 rows of 512 px without gradients, adapters merged, as branches take them, also of 8 bits and, where
nothing is masked, with each of torch's attentions; milliseconds, and the kinds of kernels they went to. `step`: the
same of forward and backward of adapters at some rows, by what is kept for the backward (`checkpoint`: block inputs
alone; else the share `activation_memory`). `decode`: 8 images.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import flops
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from torch.profiler import ProfilerActivity, profile

from flow_grpo.base import distributed
from flow_grpo.command_line import command_line
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.kernels import compilation
from flow_grpo.kernels.single_frame_vae import convolve_in_2d
from flow_grpo.settings.sections import Lora
from flow_grpo.settings.table import BY_KEY
from flow_grpo.weights import policies

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from build_random_pipeline import large_random
from random_model import attach_adapters

BLOCKS, TEXT_TOKENS = 60, 48
KINDS = (("matrix products", "nvjet|gemm|cutlass_80"), ("attention", "sdpa|flash|fmha|cudnn::fusion"), ("other", ""))
TEXTS = [(TEXT_TOKENS, True), (TEXT_TOKENS, False), (16, False), (128, True)]  # tokens, and whether there is a mask
# diffusers' names of those torch has; the last one stays in use, since diffusers has no way back that leads there
ATTENTION = ["_native_efficient", "_native_flash", "_native_cudnn", "native"]
STEPS = [(8, "checkpoint", 1.0), (8, "", 1.0), (8, "", 0.5), (8, "", 0.2), (16, "", 0.2), (4, "", 1.0)]
SMALL = dict(num_attention_heads=2, attention_head_dim=16, joint_attention_dim=32, axes_dims_rope=(4, 6, 6))
LORA = Lora(rank=64, alpha=128)


def milliseconds(call, device, repeats: int = 5) -> float:
    """Mean of `repeats` calls after one that warms up."""
    call()
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return (time.perf_counter() - start) / repeats * 1e3


def wait(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shares(call, device) -> dict[str, float]:
    """Of a call's time on the GPU, by kind of kernel."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        wait(device)
    spent = Counter()
    for event in recorded.key_averages():
        spent[next(kind for kind, pattern in KINDS if re.search(pattern, event.key))] += event.self_device_time_total
    return {f"share of {kind}": time / sum(spent.values()) for kind, time in spent.items()}


def inputs(model, rows: int, size: Size, width: int, masked: bool):
    """What policies.predict takes for some rows, of whose text 17 tokens are no padding; without guidance."""
    device, shapes = model.device, model.row_shapes(size, width)
    text = torch.randn(rows, *shapes["text_embeds"], device=device, dtype=torch.bfloat16)
    mask = torch.arange(width, device=device).expand(rows, -1) < 17 if masked else None
    x, t = torch.randn(rows, *shapes["latents"], device=device), torch.full((rows,), 500.0, device=device)
    return x, t, Condition(text, mask=mask), 1.0, size


def fresh(model, activation_memory: float = 1.0) -> None:
    """Compiled for what comes, whatever came before."""
    torch._dynamo.reset()
    compilation.compile_units(model.transformer, QwenImage.SHARD_UNITS, activation_memory)


def forward(model, merged, factor: int, size: Size, rows: int, width: int, masked: bool) -> dict:
    """Of rows without gradients."""
    fresh(model)
    device, model_inputs = model.device, inputs(model, rows, size, width, masked)

    def call():
        with torch.no_grad(), merged():
            policies.predict(model, "bf16", *model_inputs)

    ms = milliseconds(call, device) * factor
    rate = rows * factor * flops.row_flops(model, model_inputs[2], size) / ms / 1e9
    what = dict(what="forward", rows=rows, text_tokens=width, masked=masked, ms=ms, tflops=rate)
    return what | shares(call, device)


def step(model, factor: int, size: Size, rows: int, checkpointing: str, memory: float) -> dict:
    """Of rows, with gradients of the adapters; a row's useful work is twice its forward's."""
    transformer, device = model.transformer, model.device
    (transformer.enable_gradient_checkpointing if checkpointing else transformer.disable_gradient_checkpointing)()
    fresh(model, memory)
    model_inputs = inputs(model, rows, size, TEXT_TOKENS, True)

    def call():
        policies.predict(model, "bf16", *model_inputs).square().mean().backward()

    ms = milliseconds(call, device) * factor
    gib = kept_gib(model, model_inputs, factor) / rows if device.type == "cuda" else None
    rate = 2 * rows * factor * flops.row_flops(model, model_inputs[2], size) / ms / 1e9
    what = dict(what="step", rows=rows, kept=checkpointing or memory, ms=ms, ms_per_row=ms / rows)
    return what | dict(tflops=rate, gib_per_row=gib) | shares(call, device)


def kept_gib(model, model_inputs, factor: int) -> float:
    """What the backward keeps of each block, and once what it needs beyond that."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = policies.predict(model, "bf16", *model_inputs)
    saved = torch.cuda.memory_allocated() - before
    out.square().mean().backward()
    return (saved * factor + torch.cuda.max_memory_allocated() - before - saved) / 2**30


@torch.no_grad()
def decodes(sizes: dict, latent_side: int, device):
    """Milliseconds of a decode of 8 images, as the decoder becomes faster."""
    vae = large_random(device)(lambda: AutoencoderKLQwenImage(**sizes), torch.float32)
    z = torch.randn(8, 16, 1, latent_side, latent_side, device=device)

    def call():
        vae.decode(z.to(vae.dtype), return_dict=False)

    for variant, change in {
        "as published": lambda: None,
        "2-D convolutions": lambda: convolve_in_2d(vae),
        "bf16": lambda: vae.to(torch.bfloat16),
        "compiled": lambda: vae.decoder.compile(dynamic=False),
    }.items():
        change()
        yield dict(what="decode", images=8, how=variant, ms=milliseconds(call, device))


def load(blocks: int, sizes: dict, device, attention: str = "") -> QwenImage:
    """A model of some blocks, with adapters, and nothing but its transformer."""
    transformer = large_random(device)(partial(QwenImageTransformer2DModel, num_layers=blocks, **sizes), torch.bfloat16)
    others = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer"))
    model = QwenImage(QwenImagePipeline(transformer=transformer, **others), device)
    attach_adapters(model, LORA)
    model.fuse(attention)
    return model


def measure(tiny: bool, attention: str, all_blocks: bool):
    """Yields a line for each case; the tiny model has one of each."""
    device = distributed.init_distributed().device
    blocks, size, rows = (2, Size(32, 32), 4) if tiny else (BLOCKS if all_blocks else 6, Size(512, 512), 24)
    few = slice(1 if tiny else None)
    model, factor = load(blocks, SMALL if tiny else {}, device, attention), BLOCKS // blocks
    merged = policies.MergedWeights(model.transformer).applied
    for width, masked in TEXTS[few]:
        yield forward(model, merged, factor, size, rows, width, masked)
    for backend in [] if attention else ATTENTION[-1:] if tiny else ATTENTION:
        model.transformer.set_attention_backend(backend)
        yield dict(attention=backend) | forward(model, merged, factor, size, rows, *TEXTS[1])
    eight_bits = policies.MergedWeights(model.transformer, fp8=True).applied
    yield dict(precision="fp8") | forward(model, eight_bits, factor, size, rows, *TEXTS[0])
    for case in [] if all_blocks else STEPS[few]:
        yield step(model, factor, size, *case)
    del model, merged, eight_bits
    yield from [] if all_blocks else decodes(dict(base_dim=16) if tiny else {}, size.height // 8, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="see whether it runs, on any machine")
    parser.add_argument("--attention", choices=BY_KEY["attention"].choices, default="", help="as config.attention")
    parser.add_argument("--all-blocks", action="store_true", help="forwards through all 60 blocks, and no steps")
    args = command_line.arguments(parser)
    for line in measure(args.tiny, args.attention, args.all_blocks):
        sys.stdout.write(json.dumps(line) + "\n")
