"""Write the prompts of the `shapes` task: GenEval metadata, one JSON object a line.

python tools/make_shapes_dataset.py --out dataset/shapes
"""

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from flow_grpo.data.shapes import COLORS, RELATIONS, SHAPES, TAGS

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


def main(out: Path):
    out.mkdir(parents=True, exist_ok=True)
    train, test = split(all_prompts())
    for name, prompts in (("train", train), ("validation", validation(all_prompts())), ("test", test)):
        (out / f"{name}_metadata.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dataset/shapes"))
    main(parser.parse_args().out)
