"""Videos of moving shapes: which objects, directions and speeds a prompt may ask for.

A prompt of dataset/motions has "objects" in its metadata, each with the "class" of `data.shapes`, a "color" unless the
prompt leaves it open, and "moves": no direction for an object that stands still, one, or two, of which the second is
that of the video's second half. One with a single direction may have a "speed". Objects of a prompt differ in class.

What a validation or test prompt asks for, no training prompt of its tag asks for in any wording. Of direction, 4 of 16
(shape, direction) are held out; of speed, 2 of 8 (speed, direction); of turn, 2 of 8 (direction, direction); of
two_object, 4 of 16 (direction, direction); of stand_still, 2 of 6 pairs of shapes.
"""

from typing import Any

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.data.shapes import problem_of_look

DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}  # y runs down
# Shortest and longest way of an object from the first frame to the last, in sides of the picture.
WAYS = {None: (0.12, 1.0), "slowly": (0.12, 0.30), "fast": (0.36, 1.0)}
MOST_MOVES = 2


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raise UserError, naming the prompt, where an object lacks something or has what does not exist."""
    objects = metadata.get("objects")
    problem = "needs `objects`, each with class and moves"
    if isinstance(objects, list) and objects:
        problem = _problem_of_objects(objects)
    if problem:
        raise UserError(f"metadata of prompt {quoted(metadata.get('prompt'))}: {problem}")


def _problem_of_objects(objects: list[Any]) -> str:
    """Return what is wrong with the first object that is wrong, "" for nothing."""
    for entry in objects:
        problem = _problem_of_object(entry)
        if problem:
            return problem
    # The reward tells objects apart by their class.
    if len({entry["class"] for entry in objects}) < len(objects):
        return "two `objects` are of one class"
    return ""


def _problem_of_object(entry: Any) -> str:
    """Return what is wrong with an entry of `objects`, "" for nothing."""
    if not isinstance(entry, dict):
        return f"the object {quoted(entry)} is no object of JSON"
    problem = problem_of_look(entry)
    return problem or _problem_of_moves(entry["class"], entry.get("moves"), entry.get("speed"))


def _problem_of_moves(kind: str, moves: Any, speed: Any) -> str:
    """Return what is wrong with the moves and the speed of an object of class `kind`, "" for nothing."""
    if not isinstance(moves, list) or len(moves) > MOST_MOVES:
        return f"`moves` of {kind} is {quoted(moves)}, not a list of at most {MOST_MOVES} directions"
    for move in moves:
        if move not in tuple(DIRECTIONS):
            return f"unknown direction {quoted(move)}; there are {', '.join(DIRECTIONS)}"
    if speed not in tuple(WAYS):
        return f"unknown speed {quoted(speed)}; there are slowly and fast"
    if speed and len(moves) != 1:
        return f"`speed` of {kind} takes one direction in `moves`"
    return ""
