"""Draw videos of moving shapes, and write the data set of their prompts: what a tiny video model learns from.

    python tools/draw_motions.py dataset/motions

Legend: B videos, f frames, P prompts, M = 2 objects at most, L = 2 legs of a motion. x runs right, y runs down.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from draw_shapes import GAP, Layout, render
from torch import Tensor

from flow_grpo.base import folders, rng
from flow_grpo.command_line import command_line
from flow_grpo.data.motions import DIRECTIONS, MOST_MOVES, check_metadata
from flow_grpo.data.shapes import COLORS, SHAPES

MAX_OBJECTS = 2
RADII = ((0.13, 0.18), (0.12, 0.14))  # smallest and largest for 1 and 2 objects; what is smaller is dirt to the reward
# Shortest and longest way of a straight motion, and of each leg of a turn: clear of the limits of the reward.
LENGTHS = {None: (0.22, 0.46), "slowly": (0.16, 0.24), "fast": (0.42, 0.54)}
TURN = (0.20, 0.32)

PHRASES = {"right": "to the right", "left": "to the left", "up": "up", "down": "down"}
COLOR_NAMES = (None, *COLORS)  # None = the prompt leaves it open
WORDINGS = ("{}", "a video in which {}", "an animation in which {}")
ACROSS = {"right": ("up", "down"), "left": ("up", "down"), "up": ("left", "right"), "down": ("left", "right")}
# What only validation and test prompts ask for: a key for each tag, see `held_out_key`.
HELD_OUT = {
    "direction": {("circle", "left"), ("square", "up"), ("triangle", "right"), ("cross", "down")},
    "speed": {("slowly", "left"), ("fast", "up")},
    "turn": {("right", "up"), ("down", "left")},
    "two_object": {("left", "left"), ("up", "right"), ("right", "down"), ("down", "up")},
    "stand_still": {("circle", "cross"), ("square", "triangle")},
}
SPLITS = {"train": 400, "validation": 32, "test": 48}  # most prompts of a tag


class MotionTable(NamedTuple):
    """The objects that P prompts ask for, and their motions, as tensors."""

    kind: Tensor  # [P, M] int64, index into SHAPES
    color: Tensor  # [P, M] int64, index into COLORS; -1 = any
    present: Tensor  # [P, M] bool
    legs: Tensor  # [P, M, L, 2] f32, unit vectors; 0 = none
    shortest: Tensor  # [P, M] f32, of each leg, in picture sides
    longest: Tensor  # [P, M] f32


def entry(kind: str, color: str | None, moves: tuple[str, ...], speed: str | None = None) -> dict[str, Any]:
    """Return an object of a prompt's metadata."""
    fields: dict[str, Any] = {"class": kind}
    if color:
        fields["color"] = color
    fields["moves"] = list(moves)
    if speed:
        fields["speed"] = speed
    return fields


def clause(item: dict[str, Any]) -> str:
    """Return what an object does, in words."""
    name = f"a {item['class']}"
    if "color" in item:
        name = f"a {item['color']} {item['class']}"
    if not item["moves"]:
        return f"{name} stands still"
    ways = ", then ".join(PHRASES[move] for move in item["moves"])
    if "speed" in item:
        return f"{name} moves {item['speed']} {ways}"
    return f"{name} moves {ways}"


def one_object(tag: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the object of each prompt of a tag, in all colours and in none."""
    for kind, color, move in itertools.product(SHAPES, COLOR_NAMES, DIRECTIONS):
        if tag == "direction":
            yield [entry(kind, color, (move,))]
        elif tag == "speed":
            yield [entry(kind, color, (move,), "slowly")]
            yield [entry(kind, color, (move,), "fast")]
        else:
            for then in ACROSS[move]:
                yield [entry(kind, color, (move, then))]


def two_objects(tag: str, generator: torch.Generator) -> Iterator[list[dict[str, Any]]]:
    """Yield the objects of prompts of a tag, all pairs of shapes alike, with colours that are drawn, or none."""
    # The second object stands still where the tag says so.
    second_moves: list[tuple[str, ...]] = [()]
    if tag == "two_object":
        second_moves = [(move,) for move in DIRECTIONS]
    # Each pair and first move have equally many prompts, whatever the second does.
    num_colorings = 8 // len(second_moves)
    pairs = itertools.permutations(SHAPES, 2)
    for (first_kind, second_kind), first_move, second_move in itertools.product(pairs, DIRECTIONS, second_moves):
        for _ in range(num_colorings):
            first_color, second_color = torch.randint(len(COLOR_NAMES), (2,), generator=generator).tolist()
            first = entry(first_kind, COLOR_NAMES[first_color], (first_move,))
            second = entry(second_kind, COLOR_NAMES[second_color], second_move)
            yield [first, second]


def held_out_key(tag: str, objects: list[dict[str, Any]]) -> tuple:
    """Return what decides whether training may ask for a prompt's objects."""
    first = objects[0]
    if tag == "direction":
        return first["class"], first["moves"][0]
    if tag == "speed":
        return first["speed"], first["moves"][0]
    if tag == "turn":
        return tuple(first["moves"])
    if tag == "two_object":
        return first["moves"][0], objects[1]["moves"][0]
    return tuple(sorted(item["class"] for item in objects))


def prompts() -> dict[str, list[dict[str, Any]]]:
    """Return the metadata of each split's prompts; none is in two splits."""
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for tag, held_out in HELD_OUT.items():
        generator = rng.generator(0, "motions", tag)
        seen: dict[str, dict[str, Any]] = {}
        of_tag = one_object(tag) if tag in ("direction", "speed", "turn") else two_objects(tag, generator)
        for objects in of_tag:
            for wording in WORDINGS:
                text = wording.format(" and ".join(map(clause, objects)))
                seen[text] = {"tag": tag, "prompt": text, "objects": objects}
        rows = list(seen.values())
        trained = []
        evaluated = []
        for number in torch.randperm(len(rows), generator=generator).tolist():
            row = rows[number]
            if held_out_key(tag, row["objects"]) in held_out:
                evaluated.append(row)
            else:
                trained.append(row)
        num_validation = SPLITS["validation"]
        splits["train"] += trained[: SPLITS["train"]]
        splits["validation"] += evaluated[:num_validation]
        splits["test"] += evaluated[num_validation : num_validation + SPLITS["test"]]
    return splits


def motion_table(metadata: list[dict[str, Any]], device: torch.device | str = "cpu") -> MotionTable:
    """Return P prompts as tensors, for `sample_paths`. Raises UserError for malformed metadata."""
    size = (len(metadata), MAX_OBJECTS)
    kind, color = torch.zeros(2, *size, dtype=torch.int64)
    present = torch.zeros(size, dtype=torch.bool)
    legs = torch.zeros(*size, MOST_MOVES, 2)
    shortest, longest = torch.zeros(2, *size)
    for row, data in enumerate(metadata):
        check_metadata(data)
        for place, item in enumerate(data["objects"]):
            kind[row, place] = SHAPES.index(item["class"])
            color[row, place] = list(COLORS).index(item["color"]) if "color" in item else -1
            present[row, place] = True
            for leg, move in enumerate(item["moves"]):
                legs[row, place, leg] = torch.tensor(DIRECTIONS[move])
            length = TURN if len(item["moves"]) > 1 else LENGTHS[item.get("speed")]
            shortest[row, place], longest[row, place] = length
    columns = (kind, color, present, legs, shortest, longest)
    return MotionTable(*(column.to(device) for column in columns))


def uniform(low: Tensor, high: Tensor, generator: torch.Generator) -> Tensor:
    """Draw numbers between `low` and `high`, elementwise."""
    return low + torch.rand(low.shape, generator=generator, device=low.device) * (high - low)


def unit_paths(legs: Tensor, num_frames: int) -> Tensor:
    """Return where objects are in each frame, from where they began, if each leg is 1 long: [B, M, f, 2] of legs
    [B, M, L, 2]. Each leg takes its share of the time, a single one all of it."""
    times = torch.linspace(0, 1, num_frames, device=legs.device)
    halves = torch.stack([(2 * times).clamp(max=1), (2 * times - 1).clamp(min=0)], 1)  # [f, L]
    whole = torch.stack([times, torch.zeros_like(times)], 1)
    turns = (legs[:, :, 1] != 0).any(-1)[..., None, None]  # [B, M, 1, 1]
    done = torch.where(turns, halves, whole)  # [B, M, f, L], share of each leg
    return torch.einsum("bmfl,bmlc->bmfc", done, legs)


def sample_paths(
    table: MotionTable, index: Tensor, num_frames: int, generator: torch.Generator, tries: int = 64
) -> Layout:
    """Draw the objects of videos of prompts `index` [B] int64 in each frame, as a layout of B f pictures, those of a
    video neighbours. Colours that a prompt leaves open are drawn. Of `tries` arrangements the first is taken in which
    objects never come near each other, or else the one in which they stay furthest apart."""
    device = generator.device
    kind, color, present, legs, shortest, longest = (column.to(device)[index.to(device)] for column in table)
    num = len(index)
    any_color = torch.randint(len(COLORS), color.shape, generator=generator, device=device)

    size = (num, tries, MAX_OBJECTS)
    low, high = torch.tensor(RADII, device=device)[present.sum(1) - 1].unbind(-1)
    radius = uniform(low[:, None, None].expand(size), high[:, None, None].expand(size), generator)
    length = uniform(shortest[:, None].expand(size), longest[:, None].expand(size), generator)
    moved = unit_paths(legs, num_frames)[:, None] * length[..., None, None]  # [B, tries, M, f, 2]

    # Objects stay in the picture all the time.
    edge = (radius + GAP / 2)[..., None]
    start = uniform(edge - moved.amin(3), 1 - edge - moved.amax(3), generator)
    center = start[..., None, :] + moved
    apart = (center[:, :, 0] - center[:, :, 1]).norm(dim=-1).amin(-1) - radius.sum(-1)
    apart = apart.masked_fill(~present.all(1)[:, None], 1.0)
    best = torch.where(apart >= GAP, 2.0, apart).argmax(1)  # argmax takes the first of equals

    row = torch.arange(num, device=device)
    chosen = center[row, best].transpose(1, 2)  # [B, f, M, 2]

    def in_each_frame(column: Tensor) -> Tensor:
        return column.repeat_interleave(num_frames, 0)

    return Layout(
        in_each_frame(kind),
        in_each_frame(torch.where(color < 0, any_color, color)),
        chosen.flatten(0, 1),
        in_each_frame(radius[row, best]),
        in_each_frame(present),
    )


def videos(metadata: list[dict[str, Any]], num_frames: int, generator: torch.Generator) -> Tensor:
    """Return a random video of each of P prompts, [P, f, 3, 64, 64] in [0, 1]."""
    table = motion_table(metadata, generator.device)
    layout = sample_paths(table, torch.arange(len(metadata)), num_frames, generator)
    return render(layout).unflatten(0, (len(metadata), num_frames))


def write(folder: Path) -> None:
    """Write the data set, a file of prompts for each split."""
    folders.ensure_folder(folder, "FOLDER")
    for split, rows in prompts().items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{split}_metadata.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("folder", type=Path)
    args = command_line.arguments(parser)
    with command_line.sentences():
        write(args.folder)
