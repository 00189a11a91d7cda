"""A mix of requests of 20, 30 and 50 steps, walked in slots and batch by batch; one JSON line per size.

    python benchmarks/bench_slots.py --size tiny
    python benchmarks/bench_slots.py --size full --model sd3          one GPU, random weights, no download

Requests come in random order. In batches, the next 8 are taken together and those of equal steps share their forwards;
in slots, 8 rows share each forward, whatever step they are at. Forwards of batches have as many rows as there are, or
all the 8 that slots have (`filled`), which one compiled graph needs, and without which a row's last bits depend on who
came with it. All make the same latents. A forward of each shape warms up.
"""

import argparse
import json
import sys
import time

import torch
from bench import TINY, random_model

from flow_grpo import distributed, rng
from flow_grpo.diffusers_patch import models
from flow_grpo.diffusers_patch.denoise_with_logprob import Request, Slots, joined, walk
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.size import Size

STEPS, WARM_UP, NUM_SLOTS = (20, 30, 50), 2, 8
PROMPT = "a photo of a red circle"


def in_slots(velocity, make_request, steps: list[int]) -> tuple[torch.Tensor, Slots]:
    """Final latents in the order of the requests, and how the slots were used."""
    slots = Slots(NUM_SLOTS, NUM_SLOTS)
    return in_order(walk(velocity, (make_request(n, num) for n, num in enumerate(steps)), slots)), slots


def in_batches(velocity, make_request, steps: list[int], filled: bool) -> torch.Tensor:
    """The same, 8 requests at a time, those of equal steps together."""
    finished = []
    for first in range(0, len(steps), NUM_SLOTS):
        numbers = range(first, min(first + NUM_SLOTS, len(steps)))
        for num in sorted({steps[n] for n in numbers}):
            same_steps = [n for n in numbers if steps[n] == num]
            size = NUM_SLOTS if filled else len(same_steps)
            finished += walk(velocity, (make_request(n, num) for n in same_steps), Slots(size, size))
    return in_order(finished)


def in_order(finished) -> torch.Tensor:
    """Final latents of requests that were named by their numbers."""
    return joined(sorted(finished, key=lambda request: request.name))[0]


def timed(function, *args):
    """What it returns, and its seconds."""
    start = time.perf_counter()
    result = function(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def measure(model, size: Size, num_requests: int) -> dict:
    """Seconds of each way, and how far their latents differ."""
    condition = model.encode([PROMPT], width=48, guided=False)
    schedules = {num: model.schedule(num, size) for num in (WARM_UP, *STEPS)}
    order = torch.randperm(num_requests, generator=rng.generator(0, "order")).tolist()
    steps = [STEPS[n % len(STEPS)] for n in order]

    def make_request(n: int, num_steps: int) -> Request:
        latents, params = model.noise(size, [rng.generator(0, "noise", n)]), SamplingParams(num_steps, 1.0)
        return Request(n, condition, latents, size, schedules[num_steps], params)

    velocity = model.velocity
    for rows in range(1, NUM_SLOTS + 1):
        in_batches(velocity, make_request, [WARM_UP] * rows, False)
    (slotted, slots), slots_s = timed(in_slots, velocity, make_request, steps)
    batched, batches_s = timed(in_batches, velocity, make_request, steps, False)
    _, filled_s = timed(in_batches, velocity, make_request, steps, True)
    figures = dict(size=str(size), requests=num_requests, slots_s=slots_s, batches_s=batches_s, filled_s=filled_s)
    figures |= dict(
        ratio=batches_s / slots_s, ratio_filled=filled_s / slots_s, slot_use=slots.use, forwards=slots.num_forwards
    )
    return figures | {"largest_difference": (slotted - batched).abs().max().item()}


@torch.no_grad()
def main(args) -> None:
    device = distributed.init_distributed().device
    if args.size == "full":
        model = random_model(args.model).load("", device)
    else:
        family = models.model_class(TINY)
        model = family(family.PIPELINE.from_pretrained(TINY), torch.device("cpu"))
    torch.backends.cuda.enable_cudnn_sdp(model.CUDNN_ATTENTION)
    what = dict(weights=args.size, model=args.model, device=str(device))
    for size in args.sizes or [Size.parse("512" if args.size == "full" else "64")]:
        sys.stdout.write(json.dumps(what | measure(model, size, args.requests)) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["tiny", "full"], default="tiny")
    parser.add_argument("--model", choices=["sd3", "qwenimage"], default="qwenimage", help="of the full size")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--sizes", type=Size.parse, nargs="*", help="such as 768x512; 512, and 64 of the tiny model")
    main(parser.parse_args())
