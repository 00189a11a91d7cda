"""Edits in miniature: the objects of a picture of shapes, and the change that an instruction asks for.

A prompt of dataset/edits has a picture as its source. Its metadata has the picture's "objects" and the "edit":
{"object": 0, "action": "recolor", "to": "blue"}, without "to" for "remove", and with a direction for "move". Objects of
a picture differ in class; centres and radii are in sides of the square around it. Validation and test prompts are about
pictures of their own.
"""

from typing import Any

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.data.shapes import COLORS, SHAPES

DIRECTIONS = {"to the left": (-1, 0), "to the right": (1, 0), "up": (0, -1), "down": (0, 1)}
VALUES = {"recolor": tuple(COLORS), "remove": (None,), "move": tuple(DIRECTIONS)}  # of "to", by action
MOVE = 0.25  # of the picture's longer side; how far an object of the training pictures is moved


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raise UserError, naming the prompt, where an object or the edit lacks something or names what does not exist."""
    objects = metadata.get("objects")
    edit = metadata.get("edit")
    problem = "needs `objects`, each with class, color, center [x, y] and radius, and `edit`"
    if isinstance(objects, list) and isinstance(edit, dict) and all(map(_is_object, objects)):
        problem = _problem_of_edit(objects, edit)
    if problem:
        raise UserError(f"metadata of prompt {quoted(metadata.get('prompt'))}: {problem}")


def _problem_of_edit(objects: list[dict[str, Any]], edit: dict[str, Any]) -> str:
    """Return what is wrong with these objects or with the edit of one of them; "" if nothing is."""
    action = edit.get("action")
    # JSON may hold a list here, which is unhashable: looking it up would raise TypeError.
    values = VALUES.get(action, ()) if isinstance(action, str) else ()
    # The instruction and the reward tell objects apart by their class.
    if len({entry["class"] for entry in objects}) < len(objects):
        return "two `objects` are of one class"
    # 1.0 and True are in a range, too.
    index = edit.get("object")
    if type(index) is not int or index not in range(len(objects)):
        return f"`edit.object` is {quoted(index)}, not the index of an object"
    if edit.get("to") not in values:
        return f"the edit {quoted(edit)} is none; there are {VALUES}"
    return ""


def _is_object(entry: Any) -> bool:
    """Return whether a value of JSON describes an object: a known class and colour, center [x, y] and radius, the
    numbers strictly between 0 and 1."""
    if not isinstance(entry, dict):
        return False
    # Compared with the members of tuples: looking up a list in the dict COLORS would raise TypeError.
    if entry.get("class") not in SHAPES or entry.get("color") not in tuple(COLORS):
        return False
    center = entry.get("center")
    if not isinstance(center, list) or len(center) != 2:
        return False
    numbers = (*center, entry.get("radius"))
    return all(isinstance(number, float) and 0 < number < 1 for number in numbers)
