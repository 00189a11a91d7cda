"""Accuracy of the shapes that a prompt of `data.shapes` asks for, found by rule and graded as GenEval does.

An unknown object, which is no clean shape (`detection`), satisfies no clause, so that pictures between two answers earn
nothing.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flow_grpo.data.shapes import COLORS, RELATIONS, check_metadata
from flow_grpo.rewards.detection import Detection, detect

RANGE = (0.0, 1.0)
OFFSET = 0.05  # of the picture's side; centres nearer than this are neither left nor right of each other


def _matching(detections: list[Detection], entry: dict[str, Any]) -> list[Detection]:
    """Return the objects of an entry's class, and of its colour if it names one."""
    of_class = [detection for detection in detections if detection.kind == entry["class"]]
    if not entry.get("color"):
        return of_class
    return [detection for detection in of_class if detection.color == entry["color"]]


def _holds(relation: str, subjects: list[Detection], targets: list[Detection]) -> bool:
    """Return whether all subjects lie in a relation's direction from all targets.

    Centres must be at least OFFSET apart along the direction, and within 60 degrees of it.
    """
    direction = np.array(RELATIONS[relation])
    for subject in subjects:
        for target in targets:
            offset = np.subtract(subject.center, target.center)
            if offset @ direction < max(OFFSET, np.linalg.norm(offset) / 2):
                return False
    return bool(subjects and targets)


def grade(detections: list[Detection], metadata: dict[str, Any]) -> tuple[float, float]:
    """Return (dense, strict): the mean credit of clauses, and 1.0 if all are full else 0.0 (after arXiv:2310.11513).

    A count earns max(0, 1 - |wanted - found| / wanted), a colour 1 if exactly `count` of the class have it, and a
    position 1 if it holds between all objects of the two entries. An exclude clause earns 1 below its count, but 0
    while the picture has none of a class that the prompt includes. Objects that no clause names cost nothing. Raise
    UserError, which names the prompt, if the metadata are malformed.
    """
    check_metadata(metadata)
    include = metadata["include"]
    clause_credits = []
    for entry in include:
        num_drawn = len(_matching(detections, {"class": entry["class"]}))
        matching = _matching(detections, entry)
        clause_credits.append(max(0.0, 1 - abs(entry["count"] - num_drawn) / entry["count"]))
        if entry.get("color"):
            clause_credits.append(float(len(matching) == entry["count"]))
        if entry.get("position"):
            relation, other = entry["position"]
            clause_credits.append(float(_holds(relation, matching, _matching(detections, include[other]))))
    for entry in metadata.get("exclude", []):
        # A prompt that asks for a class is not met by a picture without one.
        is_included = any(entry["class"] == wanted["class"] for wanted in include)
        fewest = 1 if is_included else 0
        clause_credits.append(float(fewest <= len(_matching(detections, entry)) < entry["count"]))
    return sum(clause_credits) / len(clause_credits), float(min(clause_credits) == 1)


def labels(images: Tensor, metadata: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Label the first object that each prompt names by what the prompt leaves open, for the variety of its images.

    Returns "color", an index into COLORS, "position", the ninth of the picture's square in which the centre lies, and
    "size", the width in twentieths of the square; [B] int64 each. -1 = no such object, or the prompt names the colour.
    """
    color_names = list(COLORS)
    colors = torch.full((len(metadata),), -1)
    positions = colors.clone()
    sizes = colors.clone()
    for row, (detections, data) in enumerate(zip(detect(images), metadata, strict=True)):
        entry = data["include"][0]
        matching = _matching(detections, entry)
        if not matching:
            continue
        first = matching[0]
        x, y = first.center
        if not entry.get("color"):
            assert first.color is not None, "an object of a known class has a colour"
            colors[row] = color_names.index(first.color)
        positions[row] = 3 * int(3 * y) + int(3 * x)
        sizes[row] = int(20 * first.area**0.5)
    return {"color": colors, "position": positions, "size": sizes}


def check_prompts(prompts: list[str], metadata: list[dict[str, Any]]) -> None:
    """Raise UserError for the first prompt without GenEval metadata that names shapes."""
    for prompt, data in zip(prompts, metadata, strict=True):
        check_metadata({"prompt": prompt} | data)


def load(device: torch.device | str) -> Callable[..., dict[str, Tensor]]:
    """Return images [B, 3, H, W] in [0, 1] -> {"score": dense [B] f32, "accuracy": strict [B] f32}."""
    return make_scorer(grade)


def make_scorer(
    grade: Callable[[list[Detection], dict[str, Any]], tuple[float, float]],
) -> Callable[..., dict[str, Tensor]]:
    """Return the scorer of a grade: (detections, metadata) -> (score, accuracy)."""

    def score(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> dict[str, Tensor]:
        grades = [grade(detections, data) for detections, data in zip(detect(images), metadata, strict=True)]
        scores, accuracies = torch.tensor(grades).view(-1, 2).unbind(1)
        return {"score": scores, "accuracy": accuracies}

    return score
