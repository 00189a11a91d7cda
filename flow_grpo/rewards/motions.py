"""Accuracy of the motions that a prompt of `data.motions` asks for, found frame by frame by rule.

An object counts where a frame has exactly one of its class and colour, and earns nothing unless it also moves as asked:
a still picture of the right objects has the score 0, but for those that shall stand still.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flow_grpo.data.motions import DIRECTIONS, WAYS, check_metadata
from flow_grpo.rewards.detection import Detection, detect

RANGE = (0.0, 1.0)
STILL = 0.04  # of the picture's side; an object that stands still stays within this distance of its first place
BACKWARD = 0.02  # of the picture's side that a step may lead back; more is no steady motion
TOO_FAR = 0.15  # of the picture's side beyond the longest way at which nothing of the credit is left

Place = np.ndarray | None  # [2] x and y of an object's centre in a frame; None = it is not there, or not alone


def places_of(frames: list[list[Detection]], entry: dict[str, Any]) -> list[Place]:
    """Return where the one object of an entry is in each frame."""
    places: list[Place] = []
    for detections in frames:
        matching = [detection for detection in detections if detection.kind == entry["class"]]
        if entry.get("color"):
            matching = [detection for detection in matching if detection.color == entry["color"]]
        places.append(np.array(matching[0].center) if len(matching) == 1 else None)
    return places


def _credit_of_standing(places: list[np.ndarray]) -> float:
    """Return 1 for an object that stays where it was first, and less the further it goes, down to 0."""
    distance = max(float(np.linalg.norm(place - places[0])) for place in places)
    return 1 - min(max(distance - STILL, 0.0) / TOO_FAR, 1.0)


def _credit_of_leg(places: list[np.ndarray], direction: str, way: tuple[float, float]) -> float:
    """Return the credit of a straight motion through places: the share of the shortest way that it has gone, less for
    more than the longest, times the share of its steps that lead on. 0 for another direction than within 45 degrees."""
    unit = np.array(DIRECTIONS[direction])
    offset = places[-1] - places[0]
    along = float(offset @ unit)
    # No way at all is no motion: a video of one frame has no step to judge.
    if along <= 0 or along < np.linalg.norm(offset) * 0.5**0.5:
        return 0.0
    shortest, longest = way
    credit = min(along / shortest, 1.0)
    credit *= 1 - min(max(along - longest, 0.0) / TOO_FAR, 1.0)
    steps = np.diff(np.stack(places), axis=0) @ unit
    return credit * float(np.mean(steps >= -BACKWARD))


def _credit(places: list[Place], entry: dict[str, Any]) -> float:
    """Return the credit of an object's motion, 0 to 1, where it is in the first and the last frame of each part."""
    moves = entry["moves"]
    num_legs = max(len(moves), 1)
    ends = np.linspace(0, len(places) - 1, num_legs + 1).round().astype(int)
    if any(places[end] is None for end in ends):
        return 0.0
    if not moves:
        return _credit_of_standing(_seen(places))
    shortest, longest = WAYS[entry.get("speed")]
    total = 0.0
    for leg, move in enumerate(moves):
        # The middle frame belongs to both halves.
        part = _seen(places[ends[leg] : ends[leg + 1] + 1])
        total += _credit_of_leg(part, move, (shortest / num_legs, longest))
    return total / num_legs


def _seen(places: list[Place]) -> list[np.ndarray]:
    """Return the places of the frames in which an object is."""
    return [place for place in places if place is not None]


def grade(frames: list[list[Detection]], metadata: dict[str, Any]) -> tuple[float, float]:
    """Return (score, accuracy) of a video: the mean over objects of the share of frames that have it times the credit
    of its motion; and 1.0 if all of these are full, else 0.0. Raise UserError for malformed metadata."""
    check_metadata(metadata)
    scores = []
    for entry in metadata["objects"]:
        places = places_of(frames, entry)
        share = sum(place is not None for place in places) / len(places)
        scores.append(share * _credit(places, entry))
    return sum(scores) / len(scores), float(min(scores) == 1)


def check_prompts(prompts: list[str], metadata: list[dict[str, Any]]) -> None:
    """Raise UserError for the first prompt without metadata of motions."""
    for prompt, data in zip(prompts, metadata, strict=True):
        check_metadata({"prompt": prompt} | data)


def load(device: torch.device | str) -> Callable[..., dict[str, Tensor]]:
    """Return videos [B, f, 3, H, W] in [0, 1] -> {"score": [B] f32, "accuracy": [B] f32}."""

    def score(videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> dict[str, Tensor]:
        num_frames = videos.shape[1]
        detections = detect(videos.flatten(0, 1))
        grades = []
        for number, data in enumerate(metadata):
            frames = detections[number * num_frames : (number + 1) * num_frames]
            grades.append(grade(frames, data))
        scores, accuracies = torch.tensor(grades).view(-1, 2).unbind(1)
        return {"score": scores, "accuracy": accuracies}

    return score
