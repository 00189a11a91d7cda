"""A mix of requests of 20, 30 and 50 steps, walked in slots and batch by batch; one JSON line.

    python scripts/bench_slots.py --size tiny
    python scripts/bench_slots.py --size full --model sd3          one GPU, random weights, no download

Requests come in random order. In batches, the next 8 are taken together and those of equal steps share their forwards;
in slots, 8 rows share each forward, whatever step they are at. Both make the same latents. A short run warms up.
"""

import argparse
import json
import sys
import time
from functools import partial

import torch
from bench import MODELS, TINY, full_model

from flow_grpo import fsdp_utils, rng
from flow_grpo.diffusers_patch.stepwise_with_logprob import Request, Slots, joined, walk

STEPS, NUM_SLOTS = (20, 30, 50), 8
PROMPT = "a photo of a red circle"


def in_slots(velocity, make_request, steps: list[int]) -> tuple[torch.Tensor, Slots]:
    """Final latents in the order of the requests, and how the slots were used."""
    slots = Slots(NUM_SLOTS, NUM_SLOTS)
    return in_order(walk(velocity, (make_request(n, num) for n, num in enumerate(steps)), slots)), slots


def in_batches(velocity, make_request, steps: list[int]) -> torch.Tensor:
    """The same, 8 requests at a time, those of equal steps together."""
    finished = []
    for first in range(0, len(steps), NUM_SLOTS):
        numbers = range(first, min(first + NUM_SLOTS, len(steps)))
        for num in sorted({steps[n] for n in numbers}):
            some = [n for n in numbers if steps[n] == num]
            finished += walk(velocity, (make_request(n, num) for n in some), Slots(len(some), len(some)))
    return in_order(finished)


def in_order(finished) -> torch.Tensor:
    """Final latents of requests that were named by their numbers."""
    return joined(sorted(finished, key=lambda request: request.name))[0]


def timed(function, *args, steps: list[int]):
    """What it returns, and its seconds after a call with three requests."""
    function(*args, list(STEPS))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = function(*args, steps)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - start


@torch.no_grad()
def main(args) -> None:
    device = fsdp_utils.init_distributed().device
    model, folder, resolution = MODELS["qwenimage"], TINY, 64
    if args.size == "full":
        model, folder, resolution = full_model(args.model), "", 512
        pipeline = model.load_pipeline(folder, device)
    else:
        pipeline = model.PIPELINE.from_pretrained(folder)
    torch.backends.cuda.enable_cudnn_sdp(model.CUDNN_ATTENTION)
    embeds = model.encode_prompts(pipeline, [PROMPT], width=48, guided=False)
    schedules = {num: model.schedule(pipeline, num, resolution, device) for num in STEPS}
    order = torch.randperm(args.requests, generator=rng.generator(0, "order")).tolist()
    steps = [STEPS[n % len(STEPS)] for n in order]

    def make_request(n: int, num_steps: int) -> Request:
        latents = model.initial_latents(pipeline, [rng.generator(0, "noise", n)], resolution, device)
        return Request(n, embeds, latents, schedules[num_steps], guidance_scale=1.0)

    velocity = partial(model.predict_velocity, pipeline.transformer)
    (slotted, slots), slots_s = timed(in_slots, velocity, make_request, steps=steps)
    batched, batches_s = timed(in_batches, velocity, make_request, steps=steps)
    found = dict(
        size=args.size,
        model=args.model,
        requests=args.requests,
        device=str(device),
        slots_s=slots_s,
        batches_s=batches_s,
    )
    found |= dict(ratio=batches_s / slots_s, slot_use=slots.use, forwards=slots.ticks)
    sys.stdout.write(json.dumps(found | {"largest_difference": (slotted - batched).abs().max().item()}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["tiny", "full"], default="tiny")
    parser.add_argument("--model", choices=["sd3", "qwenimage"], default="qwenimage", help="of the full size")
    parser.add_argument("--requests", type=int, default=48)
    main(parser.parse_args())
