"""GenEval in miniature (arXiv:2310.11513): which shapes, colours and relations a prompt may ask for.

What a validation or test prompt of dataset/shapes asks for, no training prompt of its tag asks for in any wording. Of
two_object, 2 of 6 pairs of shapes are held out; of counting, 4 of 12 (number, shape), in all colours; of colors, 6 of
24 (shape, colour); of position, 4 of 24 (relation, shape, shape), in all colours; of color_attr, 3 of 15 pairs of
colours, on all shapes; of single_object, an ending of the sentence.
"""

from typing import Any

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted

SHAPES = ("circle", "square", "triangle", "cross")
# Far apart, none a blend of two others, and darker than the background: JPEG blurs hue, not brightness.
COLORS = {
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
    from_middle_x = x.abs()
    from_middle_y = y.abs()
    longer = torch.maximum(from_middle_x, from_middle_y)
    shorter = torch.minimum(from_middle_x, from_middle_y)

    circle = torch.hypot(x, y) - 1
    square = longer - 0.5**0.5
    # Two sides meet above, at (0, -1); the third lies below, at y = 1/2.
    triangle = torch.maximum(0.75**0.5 * from_middle_x - 0.5 * y, y) - 0.5
    # Arms of half length 0.95 and half width 0.3122: their corners lie on the circle.
    cross = torch.maximum(longer - 0.95, shorter - 0.3122)
    return torch.stack([circle, square, triangle, cross])


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raise UserError, naming the prompt, where a clause lacks something or names what does not exist."""
    problem = _problem_of_clauses(metadata) or _problem_of_positions(metadata)
    if problem:
        raise UserError(f"metadata of prompt {quoted(metadata.get('prompt'))}: {problem}")


def _problem_of_clauses(metadata: dict[str, Any]) -> str:
    """Return what is wrong with `include` or `exclude`, "" for nothing."""
    include = metadata.get("include")
    exclude = metadata.get("exclude", [])
    if not include:
        return "`include` is missing or empty"
    for clauses in (include, exclude):
        if not isinstance(clauses, list):
            return f"{quoted(clauses)} is no list of clauses"
    for clause in include + exclude:
        problem = _problem_of_clause(clause)
        if problem:
            return problem
    kinds = [clause["class"] for clause in include]
    if len(set(kinds)) < len(kinds):
        return f"`include` has a class twice: {kinds}; give it one entry with its count"
    return ""


def _problem_of_clause(clause: Any) -> str:
    """Return what is wrong with an entry of `include` or `exclude`, "" for nothing."""
    if not isinstance(clause, dict):
        return f"the clause {quoted(clause)} is no object"
    count = clause.get("count")
    problem = problem_of_look(clause)
    # True is an int, too.
    if not problem and (type(count) is not int or count <= 0):
        return f"the count of {clause['class']} is {quoted(count)}, not a positive integer"
    return problem


def problem_of_look(entry: dict[str, Any]) -> str:
    """Return what is wrong with the class or the color of an entry, which may have none; "" for nothing."""
    kind = entry.get("class")
    color = entry.get("color")
    if kind not in SHAPES:
        return f"unknown class {quoted(kind)}; there are {', '.join(SHAPES)}"
    # A tuple: a color that is a list, say, cannot be looked up in a dict.
    if color not in (None, *COLORS):
        return f"unknown color {quoted(color)}; there are {', '.join(COLORS)}"
    return ""


def _problem_of_positions(metadata: dict[str, Any]) -> str:
    """Return what is wrong with the positions of `include`, whose clauses are right, "" for nothing."""
    for index, position in positions(metadata):
        if not isinstance(position, list) or len(position) != 2:
            return f"position {quoted(position)} is not [relation, index]"
        relation, other = position
        if relation not in tuple(RELATIONS):
            return f"unknown relation {quoted(relation)}; there are {', '.join(RELATIONS)}"
        allowed = list(range(len(metadata["include"])))
        allowed.remove(index)
        if type(other) is not int or other not in allowed:
            return f"include[{index}] lies {relation} include[{other}]; there are {allowed}"
    return ""


def positions(metadata: dict[str, Any]) -> list[tuple[int, list]]:
    """(index in `include`, [relation, index of the other entry]) of each entry that has a position."""
    placed = []
    for index, clause in enumerate(metadata["include"]):
        if clause.get("position"):
            placed.append((index, clause["position"]))
    return placed
