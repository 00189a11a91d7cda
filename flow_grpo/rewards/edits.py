"""Whether a picture is its source after the edit that a prompt of `data.edits` asks for, and nothing else has changed.

Objects are found by rule, as in `shapes`. The score is the share of what must stay that has stayed, times whether the
edit was made: neither the source alone nor a picture without it earns anything. "accuracy" is 1 where all is right.
"""

from typing import Any

import numpy as np

from flow_grpo.data.edits import DIRECTIONS, MOVE, check_metadata
from flow_grpo.rewards.detection import Detection
from flow_grpo.rewards.shapes import scorer

RANGE = (0.0, 1.0)
NEAR = 0.08  # of the picture's longer side, between the centres of what is taken for one object
ASIDE = 0.1  # of the picture's longer side, that an object may stray from the line of its move
LEAST_MOVE = MOVE / 2
SIZES = (0.8, 1.25)  # width of an object over what it was
AREAS = {"circle": 3.142, "square": 2.0, "triangle": 1.299, "cross": 1.983}  # at a radius of 1


def _alike(seen: Detection, entry: dict[str, Any]) -> bool:
    """Whether an object is of the class, the colour and the size of `entry`."""
    area = AREAS[entry["class"]] * entry["radius"] ** 2
    same = (seen.kind, seen.color) == (entry["class"], entry["color"])
    return same and SIZES[0] <= (seen.area / area) ** 0.5 <= SIZES[1]


def _at(seen: Detection, entry: dict[str, Any]) -> bool:
    return bool(np.linalg.norm(np.subtract(seen.center, entry["center"])) < NEAR)


def _stands(detections: list[Detection], entry: dict[str, Any]) -> bool:
    """Whether `entry` is where it was."""
    return any(_alike(seen, entry) and _at(seen, entry) for seen in detections)


def _moved(detections: list[Detection], entry: dict[str, Any], direction: tuple[int, int]) -> bool:
    """Whether `entry` lies further that way."""
    for seen in detections:
        offset = np.subtract(seen.center, entry["center"])
        along, aside = offset @ np.array(direction), abs(offset @ np.array(direction[::-1]))
        if _alike(seen, entry) and along >= LEAST_MOVE and aside <= ASIDE:
            return True
    return False


def _made(detections: list[Detection], entry: dict[str, Any], edit: dict[str, Any]) -> bool:
    """Whether the edit of `entry` was made."""
    if edit["action"] == "recolor":
        return _stands(detections, entry | {"color": edit["to"]})
    if edit["action"] == "remove":
        return not any(_at(seen, entry) for seen in detections)
    return _moved(detections, entry, DIRECTIONS[edit["to"]])


def grade(detections: list[Detection], metadata: dict[str, Any]) -> tuple[float, float]:
    """(score, accuracy) of the objects of a picture. What must stay are the other objects, each as it was, and that
    there are no more objects than that."""
    objects, edit = metadata["objects"], metadata["edit"]
    others = [entry for index, entry in enumerate(objects) if index != edit["object"]]
    stayed = [_stands(detections, entry) for entry in others]
    stayed.append(len(detections) == len(objects) - (edit["action"] == "remove"))
    score = _made(detections, objects[edit["object"]], edit) * sum(stayed) / len(stayed)
    return score, float(score == 1)


def check_prompts(prompts: list[str], metadata: list[dict[str, Any]]) -> None:
    """Raises UserError for the first prompt whose metadata is no edit."""
    for prompt, data in zip(prompts, metadata, strict=True):
        check_metadata({"prompt": prompt} | data)


def load(device):
    """Returns the scorer: images [B, 3, H, W] in [0, 1] -> {"score": [B] f32, "accuracy": [B] f32}."""
    return scorer(grade)
