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

BLOCKS = 60
TEXT_TOKENS = 48
# Patterns of kernels' names; what none of them matches is "other".
KINDS = {"matrix products": "nvjet|gemm|cutlass_80", "attention": "sdpa|flash|fmha|cudnn::fusion"}
TEXTS = [(TEXT_TOKENS, True), (TEXT_TOKENS, False), (16, False), (128, True)]  # tokens, and whether there is a mask
# diffusers' names of those torch has; the last one stays in use, since diffusers has no way back that leads there
ATTENTION = ["_native_efficient", "_native_flash", "_native_cudnn", "native"]
STEPS = [(8, "checkpoint", 1.0), (8, "", 1.0), (8, "", 0.5), (8, "", 0.2), (16, "", 0.2), (4, "", 1.0)]
SMALL = dict(num_attention_heads=2, attention_head_dim=16, joint_attention_dim=32, axes_dims_rope=(4, 6, 6))
LORA = Lora(rank=64, alpha=128)


def milliseconds(call, device, repeats: int = 5) -> float:
    """Return the mean of `repeats` calls after one that warms up."""
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
    """Return the share of each kind of kernel in a call's time on the GPU; {} on other devices."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        wait(device)
    spent = Counter()
    for event in recorded.key_averages():
        spent[kind_of(event.key)] += event.self_device_time_total
    total = sum(spent.values())
    return {f"share of {kind}": time / total for kind, time in spent.items()}


def kind_of(kernel: str) -> str:
    """Return the first of KINDS whose pattern is found in a kernel's name."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, kernel):
            return kind
    return "other"


def inputs(model, rows: int, size: Size, width: int, masked: bool):
    """Return the arguments of policies.predict without guidance, for rows of text with 17 tokens before the padding."""
    device = model.device
    shapes = model.row_shapes(size, width)
    text = torch.randn(rows, *shapes["text_embeds"], device=device, dtype=torch.bfloat16)
    mask = None
    if masked:
        mask = torch.arange(width, device=device).expand(rows, -1) < 17
    x = torch.randn(rows, *shapes["latents"], device=device)
    t = torch.full((rows,), 500.0, device=device)
    return x, t, Condition(text, mask=mask), 1.0, size


def fresh(model, activation_memory: float = 1.0) -> None:
    """Compile a model for what comes, whatever came before."""
    torch._dynamo.reset()
    compilation.compile_units(model.transformer, QwenImage.SHARD_UNITS, activation_memory)


def forward(model, merged, factor: int, size: Size, rows: int, width: int, masked: bool) -> dict:
    """Measure the forward of some rows without gradients."""
    fresh(model)
    device = model.device
    model_inputs = inputs(model, rows, size, width, masked)

    def call():
        with torch.no_grad(), merged():
            policies.predict(model, "bf16", *model_inputs)

    ms = milliseconds(call, device) * factor
    rate = rows * factor * flops.row_flops(model, model_inputs[2], size) / ms / 1e9
    line = {"what": "forward", "rows": rows, "text_tokens": width, "masked": masked, "ms": ms, "tflops": rate}
    return line | shares(call, device)


def step(model, factor: int, size: Size, rows: int, checkpointing: str, memory: float) -> dict:
    """Measure forward and backward of some rows, with gradients of the adapters."""
    device = model.device
    if checkpointing:
        model.transformer.enable_gradient_checkpointing()
    else:
        model.transformer.disable_gradient_checkpointing()
    fresh(model, memory)
    model_inputs = inputs(model, rows, size, TEXT_TOKENS, True)

    def call():
        policies.predict(model, "bf16", *model_inputs).square().mean().backward()

    ms = milliseconds(call, device) * factor
    gib_per_row = None
    if device.type == "cuda":
        gib_per_row = kept_gib(model, model_inputs, factor) / rows
    # A row's useful work is twice its forward's: what is computed again for the backward does not count.
    rate = 2 * rows * factor * flops.row_flops(model, model_inputs[2], size) / ms / 1e9
    line = {
        "what": "step",
        "rows": rows,
        "kept": checkpointing or memory,
        "ms": ms,
        "ms_per_row": ms / rows,
        "tflops": rate,
        "gib_per_row": gib_per_row,
    }
    return line | shares(call, device)


def kept_gib(model, model_inputs, factor: int) -> float:
    """Return the GiB that the backward keeps of each block, and once those that it needs beyond that."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = policies.predict(model, "bf16", *model_inputs)
    saved = torch.cuda.memory_allocated() - before
    out.square().mean().backward()
    beyond = torch.cuda.max_memory_allocated() - before - saved
    return (saved * factor + beyond) / 2**30


@torch.no_grad()
def decodes(sizes: dict, latent_side: int, device):
    """Yield the milliseconds of a decode of 8 images, as the decoder becomes faster."""
    vae = large_random(device)(lambda: AutoencoderKLQwenImage(**sizes), torch.float32)
    z = torch.randn(8, 16, 1, latent_side, latent_side, device=device)

    def call():
        vae.decode(z.to(vae.dtype), return_dict=False)

    def line(how: str) -> dict:
        return {"what": "decode", "images": 8, "how": how, "ms": milliseconds(call, device)}

    # Each change stays for the next ones.
    yield line("as published")
    convolve_in_2d(vae)
    yield line("2-D convolutions")
    vae.to(torch.bfloat16)
    yield line("bf16")
    vae.decoder.compile(dynamic=False)
    yield line("compiled")


def load(blocks: int, sizes: dict, device, attention: str = "") -> QwenImage:
    """Return a model of some blocks, with adapters, and nothing but its transformer."""
    build = partial(QwenImageTransformer2DModel, num_layers=blocks, **sizes)
    transformer = large_random(device)(build, torch.bfloat16)
    others = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer"))
    model = QwenImage(QwenImagePipeline(transformer=transformer, **others), device)
    attach_adapters(model, LORA)
    model.fuse(attention)
    return model


def measure(attention: str, all_blocks: bool):
    """Yield a line for each case of the published sizes."""
    device = distributed.init_distributed().device
    size = Size(512, 512)
    blocks = BLOCKS if all_blocks else 6
    model = load(blocks, {}, device, attention)
    factor = BLOCKS // blocks
    backends = [] if attention else ATTENTION
    yield from forwards(model, factor, size, 24, TEXTS, backends)
    if all_blocks:
        return
    for case in STEPS:
        yield step(model, factor, size, *case)
    # The decoder needs the memory.
    del model
    yield from decodes({}, size.height // 8, device)


def measure_tiny(attention: str, all_blocks: bool):
    """Yield a line for one case of each kind, of a tiny model."""
    device = distributed.init_distributed().device
    size = Size(32, 32)
    model = load(2, SMALL, device, attention)
    factor = BLOCKS // 2
    backends = [] if attention else ATTENTION[-1:]
    yield from forwards(model, factor, size, 4, TEXTS[:1], backends)
    if all_blocks:
        return
    yield step(model, factor, size, *STEPS[0])
    yield from decodes({"base_dim": 16}, size.height // 8, device)


def forwards(model, factor: int, size: Size, rows: int, texts: list[tuple[int, bool]], backends: list[str]):
    """Yield a line for each text, each of torch's attentions, and 8 bits."""
    merged = policies.MergedWeights(model.transformer).applied
    for width, masked in texts:
        yield forward(model, merged, factor, size, rows, width, masked)
    for backend in backends:
        model.transformer.set_attention_backend(backend)
        yield {"attention": backend} | forward(model, merged, factor, size, rows, *TEXTS[1])
    eight_bits = policies.MergedWeights(model.transformer, fp8=True).applied
    yield {"precision": "fp8"} | forward(model, eight_bits, factor, size, rows, *TEXTS[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="see whether it runs, on any machine")
    parser.add_argument("--attention", choices=BY_KEY["attention"].choices, default="", help="as config.attention")
    parser.add_argument("--all-blocks", action="store_true", help="forwards through all 60 blocks, and no steps")
    args = command_line.arguments(parser)
    cases = measure_tiny if args.tiny else measure
    for line in cases(args.attention, args.all_blocks):
        sys.stdout.write(json.dumps(line) + "\n")
