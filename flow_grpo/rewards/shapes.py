"""Whether a picture shows the shapes that a prompt of `data.shapes` asks for: found by rule, graded like GenEval.

An unknown object, which is no clean shape (`detection`), satisfies no clause, so that pictures between two answers earn
nothing.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from flow_grpo.data.shapes import COLORS, RELATIONS, check_metadata
from flow_grpo.rewards.detection import Detection, detect

RANGE = (0.0, 1.0)
OFFSET = 0.05  # of the picture's side; centres nearer than this are neither left nor right of each other


def _matching(detections: list[Detection], entry: dict) -> list[Detection]:
    return [d for d in detections if d.kind == entry["class"] and entry.get("color") in (None, d.color)]


def _holds(relation: str, subjects: list[Detection], targets: list[Detection]) -> bool:
    """Whether all subjects lie there, by their centres: at least OFFSET along the direction and within 60 degrees."""
    direction = np.array(RELATIONS[relation])
    for subject in subjects:
        for target in targets:
            offset = np.subtract(subject.center, target.center)
            if offset @ direction < max(OFFSET, np.linalg.norm(offset) / 2):
                return False
    return bool(subjects and targets)


def grade(detections: list[Detection], metadata: dict) -> tuple[float, float]:
    """(dense, strict): the mean credit of the clauses, and 1.0 if all are full else 0.0 (after arXiv:2310.11513).

    A count earns max(0, 1 - |wanted - found| / wanted), a colour 1 if exactly `count` of the class have it, and a
    position 1 if it holds between all objects of the two entries. An exclude clause earns 1 below its count, but 0
    while the picture has none of a class that the prompt includes. Objects that no clause names cost nothing. Raises
    UserError, which names the prompt: metadata that is malformed.
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
        fewest = int(any(entry["class"] == wanted["class"] for wanted in include))
        clause_credits.append(float(fewest <= len(_matching(detections, entry)) < entry["count"]))
    return sum(clause_credits) / len(clause_credits), float(min(clause_credits) == 1)


def labels(images: Tensor, metadata: list[dict]) -> dict[str, Tensor]:
    """What a prompt leaves open of the first object that it names: its colour, the ninth of the square around the
    picture in which its centre lies, and its width in twentieths. -1 = it is not there, or the prompt says it."""
    entries = [data["include"][0] for data in metadata]
    found = [_matching(seen, entry)[:1] for seen, entry in zip(detect(images), entries, strict=True)]
    rows = torch.full((len(found), 3), -1)
    for row, entry, detections in zip(rows, entries, found):
        for _, color, (x, y), area in detections:
            of_color = -1 if entry.get("color") else [*COLORS].index(color)
            row[:] = torch.tensor([of_color, 3 * int(3 * y) + int(3 * x), int(20 * area**0.5)])
    return dict(zip(("color", "position", "size"), rows.unbind(1)))


def check_prompts(prompts: list[str], metadata: list[dict]) -> None:
    """Raises UserError for the first prompt without GenEval metadata that names shapes."""
    for prompt, data in zip(prompts, metadata, strict=True):
        check_metadata({"prompt": prompt} | data)


def load(device):
    """Returns the scorer: images [B, 3, H, W] in [0, 1] -> {"score": dense [B] f32, "accuracy": strict [B] f32}."""
    return scorer(grade)


def scorer(grade: Callable[[list[Detection], dict], tuple[float, float]]) -> Callable:
    """The scorer of a `grade` of (detections, metadata) -> (score, accuracy)."""

    def score(images, prompts, metadata):
        grades = [grade(seen, data) for seen, data in zip(detect(images), metadata, strict=True)]
        dense, strict = torch.tensor(grades).view(-1, 2).unbind(1)
        return {"score": dense, "accuracy": strict}

    return score
