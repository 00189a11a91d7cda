"""GenEval in miniature (arXiv:2310.11513): which prompts there are, and what they ask for."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import quoted

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


def signed_distances(x: Tensor, y: Tensor) -> Tensor:
    """Signed distance from a point to each shape of circumscribed radius 1, negative inside. -> [4, ...]."""
    ax, ay = x.abs(), y.abs()
    circle = torch.hypot(x, y) - 1
    square = torch.maximum(ax, ay) - 0.5**0.5
    triangle = torch.maximum(0.75**0.5 * ax - 0.5 * y, y) - 0.5
    long, short = torch.maximum(ax, ay), torch.minimum(ax, ay)
    cross = torch.maximum(long - 0.95, short - 0.3122)
    return torch.stack([circle, square, triangle, cross])


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
    tag, *details = combination(metadata)
    if tag == "position":
        relation, (first, _, _), (second, _, _) = details
        return (relation, first, second) in HELD_OUT_RELATIONS
    kinds, colors, counts = zip(*details)
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
    """Raises UserError, naming the prompt, where a clause lacks something or names what does not exist."""

    def need(condition, problem, *values):  # quoted only where needed: thousands of prompts are checked at every start
        if not condition:
            problem = problem.format(*map(quoted, values)) if values else problem
            raise UserError(f"metadata of prompt {quoted(metadata.get('prompt'))}: {problem}")

    include, exclude = metadata.get("include"), metadata.get("exclude", [])
    need(include, "`include` is missing or empty")
    for clauses in (include, exclude):
        need(isinstance(clauses, list), "{} is no list of clauses", clauses)
    for entry in [*include, *exclude]:
        need(isinstance(entry, dict), "the clause {} is no object", entry)
        kind, color, count = entry.get("class"), entry.get("color"), entry.get("count")
        need(kind in SHAPES, f"unknown class {{}}; there are {', '.join(SHAPES)}", kind)
        need(type(count) is int and count > 0, f"the count of {kind} is {{}}, not a positive integer", count)
        need(color in (None, *COLORS), f"unknown color {{}}; there are {', '.join(COLORS)}", color)
    kinds = [entry["class"] for entry in include]
    need(len(set(kinds)) == len(kinds), f"`include` has a class twice: {kinds}; give it one entry with its count")
    for i, position in positions(metadata):
        need(isinstance(position, list) and len(position) == 2, "position {} is not [relation, index]", position)
        relation, other = position
        need(relation in [*RELATIONS], f"unknown relation {{}}; there are {', '.join(RELATIONS)}", relation)
        others = [j for j in range(len(include)) if j != i]
        need(
            type(other) is int and other in others, f"include[{i}] lies {relation} include[{other}]; there are {others}"
        )


def positions(metadata: dict) -> list[tuple[int, list]]:
    """(index in `include`, [relation, index of the other entry]) of each entry that has a position."""
    return [(i, entry["position"]) for i, entry in enumerate(metadata["include"]) if entry.get("position")]
