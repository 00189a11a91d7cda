"""Train the network of the reward `shapes_proxy` to guess the dense score of the rule `shapes`.

    python tools/build_shapes_proxy.py --out runs/shapes_proxy.safetensors

It learns from renders and from images of the tiny Qwen-Image, each asked for several prompts: its own, others of the
same kind, which it often meets in part, and any. One JSON line says how far the guesses are from the rule on images of
held-out prompts. The same seed, machine and number of threads give the same weights.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from build_tiny_qwenimage import RESOLUTION
from diffusers import DiffusionPipeline
from draw_shapes import pictures, shapes_prompts
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from flow_grpo.base import folders, locations, rng
from flow_grpo.command_line import command_line
from flow_grpo.data.shapes import COLORS, SHAPES
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.sample_with_logprob import pipeline_with_logprob
from flow_grpo.rewards.detection import Detection, detect
from flow_grpo.rewards.shapes import grade
from flow_grpo.rewards.shapes_proxy import NUM_CELLS, Network, features_of

BATCH = 32  # images per step, each with QUESTIONS prompts
QUESTIONS = 8
NUM_OWN = 3  # of these, the prompt that the picture was drawn for, which counts most
LR = 6e-3
MAP_WEIGHT = 0.3  # of the error of the maps, which teach the network to look
SAMPLED_TOGETHER = 64
STEPS = (4, 6, 10)  # denoising steps of the model's images
GUIDANCE = (1.0, 3.0)
SDE_WINDOW = range(2)  # of every second batch, as in rollouts
STRICT = 0.9  # a guess above it says that all clauses are met


class Pictures(NamedTuple):
    """N pictures, what the rule sees in them, and the prompts that they were drawn for."""

    images: Tensor  # [N, 3, R, R] in [0, 1]
    detections: list[list[Detection]]
    prompts: list[dict]  # metadata


def drawn_prompts(prompts: list[dict], count: int, generator: torch.Generator) -> list[dict]:
    """Return `count` of the prompts; every kind is as frequent as another."""
    of_tag: dict[str, list[dict]] = {}
    for prompt in prompts:
        of_tag.setdefault(prompt["tag"], []).append(prompt)
    groups = list(of_tag.values())
    drawn = []
    for number in range(count):
        group = groups[number % len(groups)]
        drawn.append(group[int(torch.randint(len(group), (), generator=generator))])
    return drawn


def renders(prompts: list[dict], count: int, generator: torch.Generator) -> Pictures:
    """Return rendered pictures. In every third one another picture shines through, so that its shapes are unclean."""
    drawn = drawn_prompts(prompts, count, generator)
    images = pictures(drawn, generator)
    strength = torch.rand(len(images), generator=generator) * 0.5
    strength[torch.rand(len(images), generator=generator) > 1 / 3] = 0
    images = images.lerp(images.roll(1, 0), strength[:, None, None, None])
    return Pictures(images, detect(images), drawn)


def samples(pipe: DiffusionPipeline, prompts: list[dict], count: int, seed: int, split: str) -> Pictures:
    """Return images of the tiny model: few and many steps, with and without guidance and noise."""
    generator = rng.generator(seed, "prompts of samples", split)
    drawn = drawn_prompts(prompts, count, generator)
    images = []
    settings = itertools.cycle(itertools.product(STEPS, GUIDANCE, (range(0), SDE_WINDOW)))
    for start in range(0, count, SAMPLED_TOGETHER):
        num_steps, guidance, window = next(settings)
        texts = [prompt["prompt"] for prompt in drawn[start : start + SAMPLED_TOGETHER]]
        sampled = pipeline_with_logprob(
            pipe,
            texts,
            generator,
            window=window,
            noise_level=0.7 if window else 0.0,
            num_steps=num_steps,
            height=RESOLUTION,
            width=RESOLUTION,
            guidance_scale=guidance,
            vae_batch_size=SAMPLED_TOGETHER,
        )
        images.append(sampled.images)
    images = torch.cat(images)
    return Pictures(images, detect(images), drawn)


def asked(prompt: dict, by_tag: dict[str, list[dict]], generator: torch.Generator) -> list[dict]:
    """Return QUESTIONS prompts that a picture of `prompt` is judged by: NUM_OWN times its own, any one, and others of
    its kind."""
    tags = list(by_tag)
    any_tag = tags[int(torch.randint(len(tags), (), generator=generator))]
    questions = [prompt] * NUM_OWN
    num_of_kind = QUESTIONS - NUM_OWN - 1
    for tag in [any_tag, *[prompt["tag"]] * num_of_kind]:
        number = int(torch.randint(len(by_tag[tag]), (), generator=generator))
        questions.append(by_tag[tag][number])
    return questions


class Examples(NamedTuple):
    """B pictures, each asked for QUESTIONS prompts."""

    images: Tensor  # [B, 3, R, R] in [0, 1]
    maps: Tensor  # [B, 4, 6, 8, 8], 1 in the cell of the centre of each object
    wanted: Tensor  # [B * QUESTIONS, 4, F], as from `features_of`
    scores: Tensor  # [B * QUESTIONS], the rule's


def map_of(detections: list[Detection]) -> Tensor:
    """Return the cells in which the centres of known objects lie, [4, 6, 8, 8], by kind and colour."""
    cells = torch.zeros(len(SHAPES), len(COLORS), NUM_CELLS, NUM_CELLS)
    for detection in detections:
        if detection.kind is not None:
            kind = SHAPES.index(detection.kind)
            color = list(COLORS).index(detection.color)
            x, y = detection.center
            column = min(int(NUM_CELLS * x), NUM_CELLS - 1)
            row = min(int(NUM_CELLS * y), NUM_CELLS - 1)
            cells[kind, color, row, column] = 1
    return cells


def batches(rendered: Pictures, sampled: Pictures, prompts: list[dict], generator: torch.Generator):
    """Yield Examples endlessly: three samples for each render, which are harder to judge. Half of them are mirrored."""
    sources = [rendered, sampled, sampled, sampled]
    by_tag: dict[str, list[dict]] = {}
    for prompt in prompts:
        by_tag.setdefault(prompt["tag"], []).append(prompt)
    features = {prompt["prompt"]: features_of(prompt) for prompt in prompts}
    while True:
        images = []
        maps = []
        wanted = []
        scores = []
        for number in range(BATCH):
            pictures = sources[number % len(sources)]
            row = int(torch.randint(len(pictures.images), (), generator=generator))
            image = pictures.images[row]
            detections = pictures.detections[row]
            if torch.rand((), generator=generator) < 0.5:
                image, detections = mirrored(image, detections)
            images.append(image)
            maps.append(map_of(detections))
            for question in asked(pictures.prompts[row], by_tag, generator):
                wanted.append(features[question["prompt"]])
                scores.append(grade(detections, question)[0])
        yield Examples(torch.stack(images), torch.stack(maps), torch.stack(wanted), torch.tensor(scores))


def mirrored(image: Tensor, detections: list[Detection]) -> tuple[Tensor, list[Detection]]:
    """Return an image [3, R, R] and what the rule sees in it with left and right exchanged."""
    there = []
    for detection in detections:
        x, y = detection.center
        there.append(detection._replace(center=(1 - x, y)))
    return image.flip(2), there


def train(network: Network, data: Iterator[Examples], num_steps: int) -> None:
    """Fit the network to the rule's scores, and its maps to what the rule sees; the learning rate falls to zero."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=num_steps, pct_start=0.1)
    for examples in itertools.islice(data, num_steps):
        maps = network.maps(examples.images)
        logits = network.logits(maps.repeat_interleave(QUESTIONS, 0), examples.wanted)
        loss = binary_cross_entropy_with_logits(logits, examples.scores)
        # Nearly all cells are empty: the sum of a picture's cells, not their mean.
        of_maps = binary_cross_entropy_with_logits(maps, examples.maps, reduction="sum") / BATCH
        optimizer.zero_grad()
        (loss + MAP_WEIGHT * of_maps).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def figures(network: Network, pictures: Pictures) -> dict[str, float]:
    """Return how far the network's scores of pictures and their own prompts are from the rule's.

    The mean absolute error, the correlation, and the share of pictures of which both say the same: all clauses are met.
    """
    wanted = torch.stack([features_of(prompt) for prompt in pictures.prompts])
    guesses = network.logits(network.maps(pictures.images), wanted).sigmoid()
    grades = [grade(*row) for row in zip(pictures.detections, pictures.prompts)]
    scores, strict = torch.tensor(grades).unbind(1)
    error = (guesses - scores).abs().mean()
    correlation = torch.corrcoef(torch.stack([guesses, scores]))[0, 1]
    says_the_same = (guesses > STRICT) == (strict == 1)
    return {
        "pictures": len(scores),
        "score": round(scores.mean().item(), 3),
        "error": round(error.item(), 3),
        "correlation": round(correlation.item(), 3),
        "strict": round(says_the_same.float().mean().item(), 3),
    }


def saved_precision(network: Network) -> dict[str, Tensor]:
    """Round a network's weights to float16, half the size, so that what is measured is what is saved. Return them."""
    weights = {name: weight.half() for name, weight in network.state_dict().items()}
    network.load_state_dict(weights)
    return weights


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--renders", type=int, default=8192, help="pictures to learn from")
    parser.add_argument("--samples", type=int, default=4096, help="images of the tiny model to learn from")
    parser.add_argument("--steps", type=int, default=3000, help="updates of the network")
    parser.add_argument("--held_out", type=int, default=768, help="pictures of either kind that are measured")
    return parser


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    start_s = time.monotonic()
    train_prompts = shapes_prompts("train")
    test_prompts = shapes_prompts("test")
    folders.ensure_folder(args.out.parent, "--out")
    pipe = DiffusionPipeline.from_pretrained(locations.resolve(registry.tiny_folder("qwenimage")))
    pipe.set_progress_bar_config(disable=True)
    rendered = renders(train_prompts, args.renders, rng.generator(args.seed, "renders", "train"))
    sampled = samples(pipe, train_prompts, args.samples, args.seed, "train")
    held_out = {
        "renders": renders(test_prompts, args.held_out, rng.generator(args.seed, "renders", "test")),
        "samples": samples(pipe, test_prompts, args.held_out, args.seed, "test"),
    }
    with torch.random.fork_rng():
        torch.manual_seed(args.seed)
        network = Network()
    train(network, batches(rendered, sampled, train_prompts, rng.generator(args.seed, "batches")), args.steps)
    save_file(saved_precision(network), args.out)
    for kind, measured in held_out.items():
        print(json.dumps({"held out": kind} | figures(network, measured)))
    print(json.dumps({"seconds": round(time.monotonic() - start_s)}))


if __name__ == "__main__":
    args = command_line.arguments(parser())
    with command_line.sentences():
        main(args)
