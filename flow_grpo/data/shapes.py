"""GenEval in miniature (arXiv:2310.11513): which shapes, colours and relations a prompt may ask for.

What a validation or test prompt of dataset/shapes asks for, no training prompt of its tag asks for in any wording. Of
two_object, 2 of 6 pairs of shapes are held out; of counting, 4 of 12 (number, shape), in all colours; of colors, 6 of
24 (shape, colour); of position, 4 of 24 (relation, shape, shape), in all colours; of color_attr, 3 of 15 pairs of
colours, on all shapes; of single_object, an ending of the sentence.
"""

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted

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


def signed_distances(x: Tensor, y: Tensor) -> Tensor:
    """Signed distance from a point to each shape of circumscribed radius 1, negative inside. -> [4, ...]."""
    ax, ay = x.abs(), y.abs()
    circle = torch.hypot(x, y) - 1
    square = torch.maximum(ax, ay) - 0.5**0.5
    triangle = torch.maximum(0.75**0.5 * ax - 0.5 * y, y) - 0.5
    long, short = torch.maximum(ax, ay), torch.minimum(ax, ay)
    cross = torch.maximum(long - 0.95, short - 0.3122)
    return torch.stack([circle, square, triangle, cross])


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
