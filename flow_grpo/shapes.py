"""GenEval in miniature (arXiv:2310.11513): which prompts there are, and pictures that show what a prompt asks for.

Legend: B pictures, P prompts, M = MAX_OBJECTS, R pixels a side. x runs right, y runs down, both from 0 to 1.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SHAPES = ("circle", "square", "triangle", "cross")
COLORS = {  # far apart, none a blend of two others, and darker than the background: JPEG blurs hue, not brightness
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.65, 0.15),
    "blue": (0.10, 0.20, 0.90),
    "yellow": (0.90, 0.75, 0.00),
    "purple": (0.70, 0.10, 0.80),
    "cyan": (0.05, 0.75, 0.85),
}
BACKGROUND = (0.92, 0.92, 0.92)
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}  # where the subject lies
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
MAX_OBJECTS = 4

NUMBERS = {2: "two", 3: "three", 4: "four"}
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
MEDIA = ("a photo", "a picture", "an image", "a drawing", "a painting", "a sketch", "an illustration", "a rendering")
ENDINGS = ("", " on a grey background", " on a light background", " on grey paper", " on a wall")
UNSEEN_ENDING = " on a plain background"
PROMPTS_PER_TAG = 768  # at most: position alone has 71,424
TEST_PROMPTS_PER_TAG = 48  # at most
VALIDATION_PROMPTS_PER_TAG = 32

HELD_OUT_PAIRS = ({"circle", "cross"}, {"square", "triangle"})
HELD_OUT_COUNTS = {(2, "circle"), (3, "square"), (4, "triangle"), (3, "cross")}
HELD_OUT_COLORED = {
    *(("circle", "green"), ("circle", "purple"), ("square", "red")),
    *(("square", "cyan"), ("triangle", "blue"), ("cross", "yellow")),
}
HELD_OUT_RELATIONS = {
    ("left of", "circle", "square"),
    ("left of", "cross", "triangle"),
    ("above", "square", "cross"),
    ("above", "triangle", "circle"),
}
HELD_OUT_COLOR_PAIRS = ({"red", "yellow"}, {"green", "purple"}, {"blue", "cyan"})

GAP = 0.06  # of the picture's side, between two objects; half of it between an object and the frame
RADII = ((0.14, 0.30), (0.14, 0.20), (0.13, 0.16), (0.12, 0.14))  # smallest and largest for 1, 2, 3, 4 objects
CLEAR_OFFSET = 0.25  # of the picture's side, between the centres of two objects in a relation


class Layout(NamedTuple):
    """What B pictures show."""

    kind: Tensor  # [B, M] int64, index into SHAPES
    color: Tensor  # [B, M] int64, index into COLORS
    center: Tensor  # [B, M, 2] f32, x and y
    radius: Tensor  # [B, M] f32, of the circumscribed circle, in picture sides
    present: Tensor  # [B, M] bool


class PromptTable(NamedTuple):
    """What P prompts ask for, as tensors."""

    kind: Tensor  # [P, M] int64, index into SHAPES
    color: Tensor  # [P, M] int64, index into COLORS; -1 = any
    present: Tensor  # [P, M] bool
    relation: Tensor  # [P] int64, index into RELATIONS: where object 1 lies, seen from object 0; -1 = anywhere


def signed_distances(x: Tensor, y: Tensor) -> Tensor:
    """Signed distance from a point to each shape of circumscribed radius 1, negative inside. -> [4, ...]."""
    ax, ay = x.abs(), y.abs()
    circle = torch.hypot(x, y) - 1
    square = torch.maximum(ax, ay) - 0.5**0.5
    triangle = torch.maximum(0.75**0.5 * ax - 0.5 * y, y) - 0.5
    long, short = torch.maximum(ax, ay), torch.minimum(ax, ay)
    cross = torch.maximum(long - 0.95, short - 0.3122)
    return torch.stack([circle, square, triangle, cross])


def render(layout: Layout, resolution: int = 64) -> Tensor:
    """Antialiased pictures [B, 3, R, R] f32 in [0, 1]: a pixel's coverage is its signed distance to the edge."""
    device = layout.center.device
    axis = (torch.arange(resolution, device=device) + 0.5) / resolution
    colors = torch.tensor(list(COLORS.values()), device=device)
    background = torch.tensor(BACKGROUND, device=device).view(1, 3, 1, 1)
    images = background.expand(len(layout.kind), 3, resolution, resolution)
    for m in range(layout.kind.shape[1]):
        radius = layout.radius[:, m, None, None]
        x = (axis[None, None, :] - layout.center[:, m, 0, None, None]) / radius
        y = (axis[None, :, None] - layout.center[:, m, 1, None, None]) / radius
        distances = signed_distances(x, y)
        distance = distances[layout.kind[:, m], torch.arange(len(images), device=device)]
        coverage = (0.5 - distance * radius * resolution).clamp(0, 1) * layout.present[:, m, None, None]
        images = images.lerp(colors[layout.color[:, m], :, None, None], coverage[:, None])
    return images


def _entry(kind: str, color: str | None = None, count: int = 1, position: list | None = None) -> dict:
    entry = {"class": kind, "count": count}
    return entry | ({"color": color} if color else {}) | ({"position": position} if position else {})


def _a(kind: str, color: str | None = None) -> str:
    return f"a {color} {kind}" if color else f"a {kind}"


def _metadata(tag: str, text: str, *include: dict, exclude: tuple[dict, ...] = ()) -> dict:
    return {"tag": tag, "include": list(include)} | ({"exclude": list(exclude)} if exclude else {}) | {"prompt": text}


def _contents(tag: str) -> Iterator[dict]:
    """Everything a tag can ask for; the prompt is still without its opening and ending."""
    pairs, any_colors = list(itertools.permutations(SHAPES, 2)), [(None, None)]
    two_colors = list(itertools.permutations(COLORS, 2))
    if tag in ("single_object", "colors"):
        for a, c in itertools.product(SHAPES, COLORS if tag == "colors" else [None]):
            yield _metadata(tag, _a(a, c), _entry(a, c))
    elif tag in ("two_object", "color_attr"):
        for (a, b), (c, d) in itertools.product(pairs, two_colors if tag == "color_attr" else any_colors):
            yield _metadata(tag, f"{_a(a, c)} and {_a(b, d)}", _entry(a, c), _entry(b, d))
    elif tag == "counting":
        for n, a, c in itertools.product(NUMBERS, SHAPES, (None, *COLORS)):
            text = " ".join(filter(None, (NUMBERS[n], c, PLURALS[a])))
            yield _metadata(tag, text, _entry(a, c, n), exclude=(_entry(a, None, n + 1),))
    else:
        for (a, b), relation, (c, d) in itertools.product(pairs, RELATIONS, any_colors + two_colors):
            yield _metadata(tag, f"{_a(a, c)} {relation} {_a(b, d)}", _entry(b, d), _entry(a, c, 1, [relation, 0]))


def _shuffled(items: Iterable) -> list:
    """In the order of their hashes: the same in every version of everything."""
    return sorted(items, key=lambda item: hashlib.blake2b(repr(item).encode()).digest())


def all_prompts() -> list[dict]:
    """GenEval metadata of all six tags: tag, include, exclude (counting only), prompt.

    A tag has at most PROMPTS_PER_TAG, up to half of them in GenEval's own wording, "a photo of ...". The others vary
    opening and ending, so that tags that can ask for little (4 single objects, 12 pairs) are not lost among the rest.
    """
    wordings = list(itertools.product(MEDIA, (*ENDINGS, UNSEEN_ENDING)))
    chosen = []
    for tag in TAGS:
        contents = _shuffled(_contents(tag))
        plain = list(itertools.product(contents, wordings[:1]))[: PROMPTS_PER_TAG // 2]
        varied = _shuffled(itertools.product(contents, wordings[1:]))
        chosen += plain + varied[: PROMPTS_PER_TAG - len(plain)]
    return [content | {"prompt": f"{medium} of {content['prompt']}{ending}"} for content, (medium, ending) in chosen]


def combination(metadata: dict) -> tuple:
    """What a prompt asks for, however worded: "a left of b" is "b right of a", and "a and b" is "b and a"."""
    objects = [(e["class"], e.get("color"), e["count"]) for e in metadata["include"]]
    if metadata["tag"] != "position":
        return (metadata["tag"], *sorted(objects, key=str))
    relation = metadata["include"][1]["position"][0]
    opposite = {"right of": "left of", "below": "above"}
    return ("position", opposite.get(relation, relation), *(objects if relation in opposite else objects[::-1]))


def held_out(metadata: dict) -> bool:
    """Whether no wording of this combination may be trained on. See `split`."""
    tag, *asked = combination(metadata)
    if tag == "position":
        relation, (first, _, _), (second, _, _) = asked
        return (relation, first, second) in HELD_OUT_RELATIONS
    kinds, colors, counts = zip(*asked)
    return {
        "single_object": metadata["prompt"].endswith(UNSEEN_ENDING),
        "two_object": set(kinds) in HELD_OUT_PAIRS,
        "counting": (counts[0], kinds[0]) in HELD_OUT_COUNTS,
        "colors": (kinds[0], colors[0]) in HELD_OUT_COLORED,
        "color_attr": set(colors) in HELD_OUT_COLOR_PAIRS,
    }[tag]


def split(prompts: list[dict]) -> tuple[list[dict], list[dict]]:
    """(train, test): what the test asks for in a tag, no training prompt of that tag asks for in any wording.

    Held out: two_object, 2 of 6 pairs of shapes; counting, 4 of 12 (number, shape), in all colours; colors, 6 of 24
    (shape, colour); position, 4 of 24 (relation, shape, shape), in all colours; color_attr, 3 of 15 pairs of colours,
    on all shapes. What is withheld from one tag may occur in another: "a red square" is trained in pairs, never alone.
    single_object has only four things to ask for: its test holds out an ending, not a shape, and has only 32 prompts.
    Held-out prompts beyond TEST_PROMPTS_PER_TAG are in neither list, see `validation`.
    """
    train = [p for p in prompts if not held_out(p)]
    return train, [p for tag in TAGS for p in _held_out_of(prompts, tag)[:TEST_PROMPTS_PER_TAG]]


def validation(prompts: list[dict]) -> list[dict]:
    """Held-out prompts that are not in the test, VALIDATION_PROMPTS_PER_TAG of each tag: they choose the best policy.

    They ask for combinations that the test withholds too, in other words or other colours. single_object is left out:
    the test has all of its held-out prompts, and a prompt that is trained on would choose policies that remember it.
    """
    rest = [_held_out_of(prompts, tag)[TEST_PROMPTS_PER_TAG:] for tag in TAGS]
    return [p for of_tag in rest for p in of_tag[:VALIDATION_PROMPTS_PER_TAG]]


def _held_out_of(prompts: list[dict], tag: str) -> list[dict]:
    return [p for p in prompts if p["tag"] == tag and held_out(p)]


def check_metadata(metadata: dict) -> None:
    """Raises ValueError, naming the prompt, where a clause lacks something or names what does not exist."""

    def need(condition, problem):
        if not condition:
            raise ValueError(f"metadata of prompt {metadata.get('prompt')!r}: {problem}")

    include = metadata.get("include")
    need(include, "`include` is missing or empty")
    for entry in [*include, *metadata.get("exclude", [])]:
        kind, color, count = entry.get("class"), entry.get("color"), entry.get("count")
        need(kind in SHAPES, f"unknown class {kind!r}; there are {', '.join(SHAPES)}")
        need(isinstance(count, int) and count > 0, f"the count of {kind} is {count!r}, not a positive integer")
        need(color is None or color in COLORS, f"unknown color {color!r}; there are {', '.join(COLORS)}")
    kinds = [entry["class"] for entry in include]
    need(len(set(kinds)) == len(kinds), f"`include` has a class twice: {kinds}; give it one entry with its count")
    for i, position in _positions(metadata):
        need(len(position) == 2, f"position {position!r} is not [relation, index]")
        relation, other = position
        need(relation in RELATIONS, f"unknown relation {relation!r}; there are {', '.join(RELATIONS)}")
        others = [j for j in range(len(include)) if j != i]
        need(other in others, f"include[{i}] lies {relation} include[{other}]; there are {others}")


def _positions(metadata: dict) -> list[tuple[int, list]]:
    """(index in `include`, [relation, index of the other entry]) of each entry that has a position."""
    return [(i, entry["position"]) for i, entry in enumerate(metadata["include"]) if entry.get("position")]


def _table_row(metadata: dict) -> tuple[list[int], list[int], int]:
    """(kind, color, relation) of one prompt. Raises ValueError where no picture of ours could show it."""
    check_metadata(metadata)
    names = [None, *COLORS]
    objects = [(e["class"], e.get("color")) for e in metadata["include"] for _ in range(e["count"])]
    if len(objects) > MAX_OBJECTS:
        raise ValueError(f"{metadata['prompt']!r} asks for {len(objects)} objects; a picture holds {MAX_OBJECTS}")
    relation = -1
    for subject, (name, target) in _positions(metadata):
        if (subject, target, len(objects)) != (1, 0, 2):
            raise ValueError(f"{metadata['prompt']!r}: only include[1] can be placed, against include[0], one of each")
        relation = list(RELATIONS).index(name)
    return [SHAPES.index(kind) for kind, _ in objects], [names.index(color) - 1 for _, color in objects], relation


def prompt_table(metadata: list[dict], device: torch.device | str = "cpu") -> PromptTable:
    """P prompts as tensors, for `sample_layouts`.

    Raises:
        ValueError: metadata that is malformed, or asks for more than a picture holds; the message names the prompt.
    """
    kinds, colors, relations = zip(*map(_table_row, metadata))

    def padded(rows):
        return torch.tensor([row + [-1] * (MAX_OBJECTS - len(row)) for row in rows], device=device)

    kind = padded(kinds)
    return PromptTable(kind.clamp(min=0), padded(colors), kind >= 0, torch.tensor(relations, device=device))


def _clearance(center: Tensor, radius: Tensor, present: Tensor) -> Tensor:
    """Smallest gap between two objects of an arrangement. center [B, T, M, 2], present [B, 1, M] -> [B, T]."""
    i, j = torch.triu_indices(MAX_OBJECTS, MAX_OBJECTS, offset=1, device=center.device)
    gap = (center[..., i, :] - center[..., j, :]).norm(dim=-1) - radius[..., i] - radius[..., j]
    return gap.masked_fill(~(present[..., i] & present[..., j]), 1.0).amin(-1)


def _relation_margin(center: Tensor, relation: Tensor) -> Tensor:
    """How clearly object 1 lies where the relation says, >= 0 if it does. [B, T, M, 2], [B] -> [B, T]."""
    directions = torch.tensor(list(RELATIONS.values()), device=center.device, dtype=center.dtype)[relation][:, None]
    offset = center[..., 1, :] - center[..., 0, :]
    along, aside = (offset * directions).sum(-1), (offset * directions.flip(-1)).sum(-1).abs()
    return torch.minimum(along - CLEAR_OFFSET, along - aside).masked_fill((relation < 0)[:, None], 1.0)


def sample_layouts(table: PromptTable, index: Tensor, generator: torch.Generator, tries: int = 256) -> Layout:
    """Random layouts that show prompts `index` [B] int64 and nothing else, on the generator's device.

    A colour that a prompt leaves open is drawn per object: "two circles" may differ. Of `tries` arrangements the first
    valid one is taken, or else the nearest to valid: about 1 in 50 of four objects, with a slightly smaller GAP.
    """
    device = generator.device
    kind, color, present, relation = (column.to(device)[index.to(device)] for column in table)
    any_color = torch.randint(len(COLORS), color.shape, generator=generator, device=device)
    low, high = torch.tensor(RADII, device=device)[present.sum(1) - 1].unbind(-1)

    size = (len(index), tries, MAX_OBJECTS)
    radius = torch.rand(size, generator=generator, device=device).mul((high - low)[:, None, None]) + low[:, None, None]
    edge = (radius + GAP / 2)[..., None]
    center = torch.rand((*size, 2), generator=generator, device=device) * (1 - 2 * edge) + edge
    slack = torch.minimum(_clearance(center, radius, present[:, None]) - GAP, _relation_margin(center, relation))
    best = torch.where(slack >= 0, 2.0, slack).argmax(1)  # argmax takes the first of equals

    row = torch.arange(len(index), device=device)
    return Layout(kind, torch.where(color < 0, any_color, color), center[row, best], radius[row, best], present)
