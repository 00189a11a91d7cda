"""Edits in miniature: what a picture of shapes shows, and what an instruction is to change of it.

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
    """Raises UserError, naming the prompt, where an object or the edit lacks something or names what does not exist."""
    objects, edit = metadata.get("objects"), metadata.get("edit")
    whole = isinstance(objects, list) and isinstance(edit, dict)
    if not whole or not all(_is_object(entry) for entry in objects):
        problem = "needs `objects`, each with class, color, center [x, y] and radius, and `edit`"
    elif len({entry["class"] for entry in objects}) < len(objects):
        problem = "two `objects` are of one class"
    elif edit.get("object") not in range(len(objects)):
        problem = f"`edit.object` is {quoted(edit.get('object'))}, not the index of an object"
    elif edit.get("to") not in VALUES.get(edit.get("action"), ()):
        problem = f"the edit {quoted(edit)} is none; there are {VALUES}"
    else:
        return
    raise UserError(f"metadata of prompt {quoted(metadata.get('prompt'))}: {problem}")


def _is_object(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.get("class") not in SHAPES or entry.get("color") not in COLORS:
        return False
    center, radius = entry.get("center"), entry.get("radius")
    numbers = [*center, radius] if isinstance(center, list) and len(center) == 2 else [None]
    return all(isinstance(number, int | float) and 0 < number < 1 for number in numbers)
