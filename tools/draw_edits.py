"""Draw pictures of shapes, edits of them, and what they become: what the tiny editing model learns from, and its data.

    python tools/draw_edits.py dataset/edits

Legend: B pictures, M = MAX_OBJECTS, V = 11 edits of an object: a colour, removal, or a direction.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from draw_shapes import GAP, MAX_OBJECTS, Layout, PromptTable, render, sample_layouts
from torch import Tensor

from flow_grpo.base import folders, rng
from flow_grpo.base.pixels import to_pictures
from flow_grpo.command_line import command_line
from flow_grpo.data.edits import DIRECTIONS, MOVE, VALUES
from flow_grpo.data.shapes import COLORS, SHAPES

WORDINGS = {
    "recolor": ("make the {object} {to}", "change the {object} to {to}"),
    "remove": ("remove the {object}", "delete the {object}"),
    "move": ("move the {object} {to}", "shift the {object} {to}"),
}
SPLITS = {"train": (176, 960), "validation": (16, 64), "test": (64, 128)}  # pictures, prompts


def all_edits() -> list[tuple[str, str | None]]:
    """Return all V edits: each action with each colour or direction that it can have."""
    edits = []
    for action, values in VALUES.items():
        edits += [(action, to) for to in values]
    return edits


def object_names() -> list[str]:
    """Return each class without a colour and with each colour, in the order of `text_index`."""
    names = []
    for kind in SHAPES:
        names.append(kind)
        names += [f"{color} {kind}" for color in COLORS]
    return names


EDITS = all_edits()
ACTION = torch.tensor([list(VALUES).index(action) for action, _ in EDITS])  # [V] int64
NAMES = object_names()


class Edits(NamedTuple):
    """An edit for each of B pictures."""

    object: Tensor  # [B] int64, below M
    edit: Tensor  # [B] int64, below V
    named: Tensor  # [B] int64, 1 where the instruction says the object's colour
    wording: Tensor  # [B] int64, below 2


def texts() -> list[str]:
    """Return all instructions, in the order of `text_index`."""
    instructions = []
    for wording in range(2):
        for name in NAMES:
            for action, to in EDITS:
                instructions.append(WORDINGS[action][wording].format(object=name, to=to))
    return instructions


def text_index(layout: Layout, edits: Edits) -> Tensor:
    """Return the number in `texts` of each picture's instruction, [B] int64."""
    row = torch.arange(len(edits.object), device=edits.object.device)
    kind = layout.kind[row, edits.object]
    color = layout.color[row, edits.object]
    name = kind * (len(COLORS) + 1) + (color + 1) * edits.named
    return (edits.wording * len(NAMES) + name) * len(EDITS) + edits.edit


def sample_sources(num: int, generator: torch.Generator) -> Layout:
    """Draw pictures of two or three objects of different classes."""
    device = generator.device
    kind = torch.rand(num, MAX_OBJECTS, generator=generator, device=device).argsort(1)
    count = torch.randint(2, 4, (num, 1), generator=generator, device=device)
    present = torch.arange(MAX_OBJECTS, device=device) < count
    # Any colour, and no relation.
    any_color = torch.full_like(kind, -1)
    anywhere = any_color[:, 0]
    table = PromptTable(kind, any_color, present, anywhere)
    return sample_layouts(table, torch.arange(num, device=device), generator)


def possible(layout: Layout) -> Tensor:
    """Return which edits each object can take, [B, M, V] bool: a colour that it has not, and ways that are free."""
    recolor = layout.color[..., None] != torch.arange(len(COLORS), device=layout.kind.device)
    remove = torch.ones_like(recolor[..., :1])
    # In the order of EDITS.
    able = torch.cat([recolor, remove, _free_ways(layout)], 2)
    return able & layout.present[..., None]


def _free_ways(layout: Layout) -> Tensor:
    """Return in which directions each object can move, [B, M, 4] bool: it stays in the picture, and clear of others."""
    device = layout.kind.device
    directions = torch.tensor([*DIRECTIONS.values()], device=device)
    moved = layout.center[:, :, None] + MOVE * directions  # [B, M, 4, 2]
    edge = (layout.radius + GAP / 2)[..., None, None]
    is_inside = ((moved >= edge) & (moved <= 1 - edge)).all(-1)

    # Between an object that has moved and where each object is now, [B, M, 4, M].
    gap = (moved[:, :, :, None] - layout.center[:, None, None]).norm(dim=-1)
    gap = gap - layout.radius[:, :, None, None] - layout.radius[:, None, None]
    is_itself = torch.eye(MAX_OBJECTS, dtype=torch.bool, device=device)[:, None]
    is_in_the_way = layout.present[:, None, None] & ~is_itself & (gap < GAP)
    return is_inside & ~is_in_the_way.any(-1)


def sample_edits(layout: Layout, generator: torch.Generator) -> Edits:
    """Draw actions equally often, where they are possible, of any object."""
    device = generator.device
    num = len(layout.kind)
    action = torch.randint(len(VALUES), (num, 1, 1), generator=generator, device=device)
    able = possible(layout)
    wanted = able & (ACTION.to(device) == action)
    # Where no object can take the action, any edit is taken.
    has_wanted = wanted.flatten(1).any(1)[:, None, None]
    able = torch.where(has_wanted, wanted, able)
    chosen = torch.multinomial(able.flatten(1).float(), 1, generator=generator)[:, 0]
    named, wording = torch.randint(2, (2, num), generator=generator, device=device)
    return Edits(chosen // len(EDITS), chosen % len(EDITS), named, wording)


def apply(layout: Layout, edits: Edits) -> Layout:
    """Return what the pictures become."""
    device = layout.kind.device
    row = torch.arange(len(layout.kind), device=device)

    # Colours come first among the edits, then removal, then the directions.
    color = layout.color.clone()
    recolor = edits.edit < len(COLORS)
    color[row[recolor], edits.object[recolor]] = edits.edit[recolor]

    present = layout.present.clone()
    remove = edits.edit == len(COLORS)
    present[row[remove], edits.object[remove]] = False

    center = layout.center.clone()
    move = edits.edit > len(COLORS)
    way = torch.tensor([*DIRECTIONS.values()], device=device)[edits.edit[move] - len(COLORS) - 1]
    center[row[move], edits.object[move]] += MOVE * way
    return layout._replace(color=color, center=center, present=present)


def metadata_of(layout: Layout, edits: Edits, sources: list[str]) -> list[dict]:
    """Return the metadata of B prompts, as the data set has them."""
    rows = []
    instructions = texts()
    for number, text in enumerate(text_index(layout, edits).tolist()):
        action, to = EDITS[edits.edit[number]]
        edit = {"object": edits.object[number].item(), "action": action}
        if to:
            edit["to"] = to
        rows.append(
            {
                "tag": action,
                "prompt": instructions[text],
                "sources": [sources[number]],
                "objects": objects_of(layout, number),
                "edit": edit,
            }
        )
    return rows


def objects_of(layout: Layout, number: int) -> list[dict]:
    """Return the objects of one picture, as the data set has them."""
    names = list(COLORS)
    columns = [column[number].tolist() for column in layout]
    objects = []
    for kind, color, center, radius, present in zip(*columns):
        if present:
            x, y = center
            objects.append(
                {
                    "class": SHAPES[kind],
                    "color": names[color],
                    "center": [round(x, 3), round(y, 3)],
                    "radius": round(radius, 3),
                }
            )
    return objects


def write(folder: Path) -> None:
    """Write the data set: a file of prompts for each split, and the pictures, which prompts share."""
    folders.ensure_folder(folder, "FOLDER")
    (folder / "sources").mkdir(exist_ok=True)
    for split, (num_pictures, num_prompts) in SPLITS.items():
        generator = rng.generator(0, "edits", split)
        layout = sample_sources(num_pictures, generator)
        names = [f"sources/{split}_{number:03d}.png" for number in range(num_pictures)]
        for name, picture in zip(names, to_pictures(render(layout))):
            picture.save(folder / name, optimize=True)
        which = torch.arange(num_prompts) % num_pictures
        layout = Layout(*(column[which] for column in layout))
        sources = [names[number] for number in which]
        rows = metadata_of(layout, sample_edits(layout, generator), sources)
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{split}_metadata.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("folder", type=Path)
    args = command_line.arguments(parser)
    with command_line.sentences():
        write(args.folder)
