"""Accuracy of an edit that a prompt of `data.edits` asks for: it was made, and nothing else has changed.

Objects are found by rule, as in `shapes`. The score is the share of what must stay that has stayed if the edit was
made, else 0: neither the source alone nor a picture without it earns anything. "accuracy" is 1 if all is right.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flow_grpo.data.edits import DIRECTIONS, MOVE, check_metadata
from flow_grpo.rewards.detection import Detection
from flow_grpo.rewards.shapes import make_scorer

RANGE = (0.0, 1.0)
NEAR = 0.08  # of the picture's longer side; centres nearer than this are those of one object
ASIDE = 0.1  # of the picture's longer side; an object may stray as far from the line of its move
LEAST_MOVE = MOVE / 2
SIZES = (0.8, 1.25)  # width of an object over its width in the source
AREAS = {"circle": 3.142, "square": 2.0, "triangle": 1.299, "cross": 1.983}  # at a radius of 1


def _is_alike(detection: Detection, entry: dict[str, Any]) -> bool:
    """Return whether an object has the class, the colour and the size of `entry`."""
    if (detection.kind, detection.color) != (entry["class"], entry["color"]):
        return False
    area = AREAS[entry["class"]] * entry["radius"] ** 2
    return SIZES[0] <= (detection.area / area) ** 0.5 <= SIZES[1]


def _is_at(detection: Detection, entry: dict[str, Any]) -> bool:
    """Return whether an object is at the place of `entry`."""
    return bool(np.linalg.norm(np.subtract(detection.center, entry["center"])) < NEAR)


def _is_there(detections: list[Detection], entry: dict[str, Any]) -> bool:
    """Return whether a picture has `entry` at its place."""
    return any(_is_alike(detection, entry) and _is_at(detection, entry) for detection in detections)


def _has_moved(detections: list[Detection], entry: dict[str, Any], direction: tuple[int, int]) -> bool:
    """Return whether a picture has `entry` further in a direction, along an axis."""
    for detection in detections:
        offset = np.subtract(detection.center, entry["center"])
        along = offset @ np.array(direction)
        aside = abs(offset @ np.array(direction[::-1]))
        if _is_alike(detection, entry) and along >= LEAST_MOVE and aside <= ASIDE:
            return True
    return False


def _is_made(detections: list[Detection], entry: dict[str, Any], edit: dict[str, Any]) -> bool:
    """Return whether the edit of `entry` was made."""
    if edit["action"] == "recolor":
        return _is_there(detections, entry | {"color": edit["to"]})
    if edit["action"] == "remove":
        return not any(_is_at(detection, entry) for detection in detections)
    return _has_moved(detections, entry, DIRECTIONS[edit["to"]])


def grade(detections: list[Detection], metadata: dict[str, Any]) -> tuple[float, float]:
    """Return (score, accuracy) of the objects of a picture.

    The other objects must stay as they were, and there must be no further ones.
    """
    # A copy, from which the edited object is taken out.
    objects = list(metadata["objects"])
    edit = metadata["edit"]
    edited = objects.pop(edit["object"])
    stayed = [_is_there(detections, entry) for entry in objects]
    num_expected = len(objects)
    if edit["action"] != "remove":
        num_expected += 1
    stayed.append(len(detections) == num_expected)
    if not _is_made(detections, edited, edit):
        return 0.0, 0.0
    score = sum(stayed) / len(stayed)
    return score, float(score == 1)


def check_prompts(prompts: list[str], metadata: list[dict[str, Any]]) -> None:
    """Raise UserError for the first prompt whose metadata is no edit."""
    for prompt, data in zip(prompts, metadata, strict=True):
        check_metadata({"prompt": prompt} | data)


def load(device: torch.device | str) -> Callable[..., dict[str, Tensor]]:
    """Return images [B, 3, H, W] in [0, 1] -> {"score": [B] f32, "accuracy": [B] f32}."""
    return make_scorer(grade)
