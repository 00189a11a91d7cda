"""Draw pictures of what a prompt of the shapes task asks for: what the tiny model learned from, and tests grade.

    python tools/draw_shapes.py FOLDER --number 1024

writes pictures of training prompts, all categories alike, with their captions, as train.data takes them.

Legend: B pictures, P prompts, M = MAX_OBJECTS, R pixels a side. x runs right, y runs down, both from 0 to 1.
"""

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import to_pictures
from flow_grpo.command_line import command_line
from flow_grpo.data.captioned_images import METADATA
from flow_grpo.data.prompts import load_prompts
from flow_grpo.data.shapes import BACKGROUND, COLORS, RELATIONS, SHAPES, check_metadata, positions, signed_distances
from flow_grpo.rewards import shapes as shapes_reward

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
MAX_OBJECTS = 4
GAP = 0.06  # of the picture's side, between two objects; half of it between an object and the frame
RADII = ((0.14, 0.30), (0.14, 0.20), (0.13, 0.16), (0.12, 0.14))  # smallest and largest for 1, 2, 3, 4 objects
CLEAR_OFFSET = 0.25  # of the picture's side, between the centres of two objects in a relation


class Layout(NamedTuple):
    """The objects of B pictures."""

    kind: Tensor  # [B, M] int64, index into SHAPES
    color: Tensor  # [B, M] int64, index into COLORS
    center: Tensor  # [B, M, 2] f32, x and y
    radius: Tensor  # [B, M] f32, of the circumscribed circle, in picture sides
    present: Tensor  # [B, M] bool


class PromptTable(NamedTuple):
    """The objects that P prompts ask for, as tensors."""

    kind: Tensor  # [P, M] int64, index into SHAPES
    color: Tensor  # [P, M] int64, index into COLORS; -1 = any
    present: Tensor  # [P, M] bool
    relation: Tensor  # [P] int64, index into RELATIONS: where object 1 lies, seen from object 0; -1 = anywhere


def pictures(metadata: list[dict], generator: torch.Generator) -> Tensor:
    """Return a random picture of each of P prompts, [P, 3, 64, 64] in [0, 1]."""
    table = prompt_table(metadata, generator.device)
    return render(sample_layouts(table, torch.arange(len(metadata)), generator))


def render(layout: Layout, resolution: int = 64) -> Tensor:
    """Return antialiased pictures [B, 3, R, R] f32 in [0, 1]: a pixel's coverage is its signed distance to the edge."""
    device = layout.center.device
    axis = (torch.arange(resolution, device=device) + 0.5) / resolution
    colors = torch.tensor(list(COLORS.values()), device=device)
    background = torch.tensor(BACKGROUND, device=device).view(1, 3, 1, 1)
    images = background.expand(len(layout.kind), 3, resolution, resolution)
    rows = torch.arange(len(images), device=device)
    for m in range(layout.kind.shape[1]):
        # Pixels seen from the object's centre, in its radii.
        radius = layout.radius[:, m, None, None]
        x = (axis[None, None, :] - layout.center[:, m, 0, None, None]) / radius
        y = (axis[None, :, None] - layout.center[:, m, 1, None, None]) / radius
        distances_of_kinds = signed_distances(x, y)
        distance = distances_of_kinds[layout.kind[:, m], rows]
        distance_in_pixels = distance * radius * resolution
        coverage = (0.5 - distance_in_pixels).clamp(0, 1) * layout.present[:, m, None, None]
        color = colors[layout.color[:, m], :, None, None]
        images = images.lerp(color, coverage[:, None])
    return images


def _table_row(metadata: dict) -> tuple[list[int], list[int], int]:
    """Return (kind, color, relation) of one prompt. Raises ValueError where no picture of ours could show it."""
    check_metadata(metadata)
    kinds = []
    colors = []
    for item in metadata["include"]:
        color = item.get("color")
        kinds += [SHAPES.index(item["class"])] * item["count"]
        colors += [-1 if color is None else list(COLORS).index(color)] * item["count"]
    num_objects = len(kinds)
    if num_objects > MAX_OBJECTS:
        raise ValueError(f"{metadata['prompt']!r} asks for {num_objects} objects; a picture holds {MAX_OBJECTS}")
    relation = -1
    for subject, (name, target) in positions(metadata):
        if (subject, target, num_objects) != (1, 0, 2):
            raise ValueError(f"{metadata['prompt']!r}: only include[1] can be placed, against include[0], one of each")
        relation = list(RELATIONS).index(name)
    return kinds, colors, relation


def prompt_table(metadata: list[dict], device: torch.device | str = "cpu") -> PromptTable:
    """Return P prompts as tensors, for `sample_layouts`.

    Raises ValueError: metadata that is malformed, or asks for more than a picture holds; the message names the prompt.
    """
    kinds, colors, relations = zip(*map(_table_row, metadata))

    def padded(rows):
        return torch.tensor([row + [-1] * (MAX_OBJECTS - len(row)) for row in rows], device=device)

    kind = padded(kinds)
    return PromptTable(kind.clamp(min=0), padded(colors), kind >= 0, torch.tensor(relations, device=device))


def _clearance(center: Tensor, radius: Tensor, present: Tensor) -> Tensor:
    """Return the smallest gap between two objects of an arrangement. center [B, T, M, 2], present [B, 1, M] -> [B, T].

    An object that is not there is in nobody's way.
    """
    # The two objects of each pair.
    i, j = torch.triu_indices(MAX_OBJECTS, MAX_OBJECTS, offset=1, device=center.device)
    distance = (center[..., i, :] - center[..., j, :]).norm(dim=-1)
    gap = distance - radius[..., i] - radius[..., j]
    are_present = present[..., i] & present[..., j]
    return gap.masked_fill(~are_present, 1.0).amin(-1)


def _relation_margin(center: Tensor, relation: Tensor) -> Tensor:
    """Return how clearly object 1 lies where the relation says, >= 0 if it does. [B, T, M, 2], [B] -> [B, T]."""
    directions = torch.tensor(list(RELATIONS.values()), device=center.device, dtype=center.dtype)
    direction = directions[relation][:, None]
    offset = center[..., 1, :] - center[..., 0, :]
    along = (offset * direction).sum(-1)
    aside = (offset * direction.flip(-1)).sum(-1).abs()
    margin = torch.minimum(along - CLEAR_OFFSET, along - aside)
    is_anywhere = (relation < 0)[:, None]
    return margin.masked_fill(is_anywhere, 1.0)


def sample_layouts(table: PromptTable, index: Tensor, generator: torch.Generator, tries: int = 256) -> Layout:
    """Draw layouts that show prompts `index` [B] int64 and nothing else, on the generator's device.

    A colour that a prompt leaves open is drawn per object: "two circles" may differ. Of `tries` arrangements the first
    valid one is taken, or else the nearest to valid: about 1 in 50 of four objects, with a slightly smaller GAP.
    """
    device = generator.device
    kind, color, present, relation = (column.to(device)[index.to(device)] for column in table)
    any_color = torch.randint(len(COLORS), color.shape, generator=generator, device=device)
    low, high = torch.tensor(RADII, device=device)[present.sum(1) - 1].unbind(-1)

    size = (len(index), tries, MAX_OBJECTS)
    low = low[:, None, None]
    high = high[:, None, None]
    radius = torch.rand(size, generator=generator, device=device) * (high - low) + low
    edge = (radius + GAP / 2)[..., None]
    center = torch.rand((*size, 2), generator=generator, device=device) * (1 - 2 * edge) + edge
    clearance = _clearance(center, radius, present[:, None]) - GAP
    slack = torch.minimum(clearance, _relation_margin(center, relation))
    # All valid arrangements are equal, and argmax takes the first of equals.
    best = torch.where(slack >= 0, 2.0, slack).argmax(1)

    row = torch.arange(len(index), device=device)
    return Layout(kind, torch.where(color < 0, any_color, color), center[row, best], radius[row, best], present)


def shapes_prompts(split: str) -> list[dict]:
    """Return the metadata of a split's prompts."""
    return [prompt.metadata for prompt in load_prompts("dataset/shapes", split)]


def balanced(prompts: list[dict], count: int) -> list[dict]:
    """Return about `count` prompts, equally many of each tag; a tag with fewer repeats its own."""
    per_tag = math.ceil(count / len(TAGS))
    chosen = []
    for tag in TAGS:
        of_tag = [prompt for prompt in prompts if prompt["tag"] == tag]
        chosen += [of_tag[i % len(of_tag)] for i in range(per_tag)]
    return chosen


def rendered(prompts: list[dict], batch: int, generator: torch.Generator):
    """Yield (index into `prompts` [B], images [B, 3, 64, 64] in [-1, 1]) endlessly, all tags equally often."""
    device = generator.device
    table = prompt_table(prompts, device)
    count = Counter(prompt["tag"] for prompt in prompts)
    weights = torch.tensor([1 / count[prompt["tag"]] for prompt in prompts], device=device)
    while True:
        index = torch.multinomial(weights, batch, replacement=True, generator=generator)
        yield index, render(sample_layouts(table, index, generator)) * 2 - 1


def accuracy(images: Tensor, prompts: list[dict]) -> dict:
    """Return the strict accuracy of images in [0, 1]: {"all": mean over tags, tag: ...}."""
    score = shapes_reward.load(images.device)
    texts = [prompt["prompt"] for prompt in prompts]
    scores = score(images, texts, prompts)["accuracy"].float().tolist()
    means = {}
    for tag in TAGS:
        of_tag = [value for value, prompt in zip(scores, prompts) if prompt["tag"] == tag]
        if of_tag:
            means[tag] = round(sum(of_tag) / len(of_tag), 4)
    return {"all": round(sum(means.values()) / len(means), 4)} | means


def write(folder: Path, number: int, seed: int) -> None:
    """Write at least `number` pictures of training prompts, and their captions."""
    folders.ensure_folder(folder, "FOLDER")
    prompts = balanced(shapes_prompts("train"), number)
    images = pictures(prompts, torch.Generator().manual_seed(seed))
    lines = []
    for index, (prompt, picture) in enumerate(zip(prompts, to_pictures(images))):
        name = f"{index:06d}.png"
        picture.save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": prompt["prompt"]}) + "\n")
    (folder / METADATA).write_text("".join(lines))


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for no picture."""
    if args.number < 1:
        raise UserError(f"--number is {args.number}; it must be 1 or more")


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--number", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = command_line.arguments(parser, check_flags)
    with command_line.sentences():
        write(args.folder, args.number, args.seed)
