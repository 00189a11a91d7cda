"""Benchmark attention to masked text: torch's own ways beside FlashAttention-4. Prints JSON lines.

    python benchmarks/bench_attention.py          one GPU of 80 GiB or more, the extra flash4, no download

`layer`: one attention of 24 rows of Qwen-Image at 512 px; milliseconds, relative errors against float64, whether the
same call has the same bits again, and whether permuted rows have theirs. `step`: forward and backward of the adapters
on a quantised base (6 of 60 blocks, times 10) with config.attention off and on; whether gradients are the same again,
and a scored forward is the update's.
"""

import argparse
import json
import sys
from functools import partial

import torch
from bench_blocks import BLOCKS, SMALL, fresh, inputs, load, milliseconds
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from flow_grpo import compiled, distributed, policies, quantised
from flow_grpo.diffusers_patch.flash_attention import NAME, attend_first
from flow_grpo.diffusers_patch.qwenimage_pipeline_with_logprob import QwenImage, join_attention
from flow_grpo.diffusers_patch.size import Size

IMAGE, TEXT, HEADS, WIDTH = 1024, 48, 24, 128  # tokens, and their heads
REPEATS = 20


def dense(masked: bool, backends: list[SDPBackend], lengths: Tensor, *qkv: Tensor) -> Tensor:
    """torch's attention, with a mask or without."""
    seen = torch.arange(qkv[0].shape[1], device=lengths.device) < lengths[:, None]
    with sdpa_kernel(backends):
        heads_first = (x.transpose(1, 2) for x in qkv)
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=seen[:, None, None] if masked else None)
    return out.transpose(1, 2)


def ragged(lengths: Tensor, *qkv: Tensor) -> Tensor:
    """torch's FlashAttention-2 of two sequences a row: the tokens that are seen, and the padding."""
    num_rows, num_tokens = qkv[0].shape[:2]
    starts = torch.arange(num_rows, device=lengths.device) * num_tokens
    ends = torch.stack([starts, starts + lengths], 1).flatten()
    ends = F.pad(ends, (0, 1), value=num_rows * num_tokens).int()
    return varlen_attn(*(x.flatten(0, 1) for x in qkv), ends, ends, num_tokens, num_tokens).view_as(qkv[0])


def flash_4(lengths: Tensor, *qkv: Tensor) -> Tensor:
    """Ours."""
    return attend_first(*qkv, lengths)[0]


CUDNN = [SDPBackend.CUDNN_ATTENTION]
WAYS = {
    "cuDNN, masked": partial(dense, True, CUDNN),
    "cuDNN without the mask": partial(dense, False, CUDNN),
    "torch's FlashAttention-2": ragged,
    NAME: flash_4,
}
TINY_WAYS = {"masked": partial(dense, True, [SDPBackend.MATH]), NAME: flash_4}


def gradients(way, lengths: Tensor, qkv: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = way(lengths, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def drawn(rows: int, tiny: bool, device) -> tuple[Tensor, list[Tensor], Tensor]:
    """Lengths of rows, queries, keys and values, and a gradient that is 0 in the padding."""
    torch.manual_seed(0)
    image, text, heads = (32, 8, 2) if tiny else (IMAGE, TEXT, HEADS)
    lengths = (image + torch.randint(text // 3, text + 1, (rows,), device=device)).int()
    tensors = [torch.randn(rows, image + text, heads, WIDTH, device=device).bfloat16() for _ in range(4)]
    seen = torch.arange(image + text, device=device) < lengths[:, None]
    return lengths, tensors[:3], tensors[3] * seen[:, :, None, None]


def layer(name: str, way, rows: int, tiny: bool, device) -> dict:
    """One attention's times and errors."""
    lengths, qkv, grad = drawn(rows, tiny, device)
    repeats = 1 if tiny else REPEATS
    forward = milliseconds(lambda: way(lengths, *qkv), device, repeats)
    both = milliseconds(lambda: gradients(way, lengths, qkv, grad), device, repeats)
    lengths, qkv, grad = lengths[:4], [x[:4] for x in qkv], grad[:4]  # float64 takes 12 GiB for more
    once = gradients(way, lengths, qkv, grad)
    again = gradients(way, lengths, qkv, grad)
    order = torch.arange(3, -1, -1, device=device)
    moved = gradients(way, lengths[order], [x[order] for x in qkv], grad[order])
    exact_way = partial(dense, True, [SDPBackend.MATH])
    exact = gradients(exact_way, lengths, [x.double() for x in qkv], grad.double())
    seen = grad.any(-1, keepdim=True)  # what padding becomes is no error
    errors = [(((one - other) * seen).norm() / (other * seen).norm()).item() for one, other in zip(once, exact)]
    return dict(
        what="layer",
        way=name,
        rows=rows,
        forward_ms=forward,
        forward_and_backward_ms=both,
        relative_errors=errors,
        same_again=all(map(torch.equal, once, again)),
        same_permuted=all(torch.equal(one[order], other) for one, other in zip(once, moved)),
    )


def step(model, attention: str, base: str, rows: int, size: Size) -> dict:
    """Forward and backward of the adapters, `activation_memory` 0.5."""
    transformer, device = model.transformer, model.device
    for block in transformer.transformer_blocks:
        block.attn.processor.attention = attention
    fresh(model, 0.5)
    torch.manual_seed(0)
    model_inputs = inputs(model, rows, size, TEXT, True)
    trained = [p for p in transformer.parameters() if p.requires_grad]

    def call() -> list[Tensor]:
        out = policies.predict(model, "bf16", *model_inputs)
        return [out.detach(), *torch.autograd.grad(out.square().mean(), trained, allow_unused=True)]

    ms = milliseconds(call, device, REPEATS // 2) * BLOCKS / len(transformer.transformer_blocks)
    velocity, *first = call()
    used = [place for place, grad in enumerate(first) if grad is not None and grad.any()]  # text ends in the last block
    same = [torch.equal(first[place], again[place]) for _, *again in (call(), call()) for place in used]
    with compiled.training_graph(transformer):
        scored = policies.predict(model, "bf16", *model_inputs)
    return dict(
        what="step",
        attention=attention,
        base_precision=base,
        rows=rows,
        ms_per_row=ms / rows,
        gradients=len(same),
        same_again=sum(same),
        scored_is_updates=torch.equal(scored, velocity),
    )


def measure(tiny: bool):
    """Yields a line for each case."""
    device = distributed.init_distributed().device
    for name, way in (TINY_WAYS if tiny else WAYS).items():
        yield layer(name, way, 4 if tiny else 24, tiny, device)
    blocks, size, rows = (2, Size(64, 64), 2) if tiny else (6, Size(512, 512), 16)
    for base in ("8bit", "fp8"):
        model = load(blocks, SMALL if tiny else {}, device)
        join_attention(model.transformer)
        for name, parameter in model.transformer.named_parameters():
            if ".lora_B." in name:  # else those of A have no gradient
                nn.init.normal_(parameter, std=0.01)
        quantised.quantise_units(model.transformer, QwenImage.SHARD_UNITS, base)
        for attention in ("", NAME):
            yield step(model, attention, base, rows, size)
        del model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="see whether it runs, on any machine")
    for line in measure(parser.parse_args().tiny):
        sys.stdout.write(json.dumps(line) + "\n")
