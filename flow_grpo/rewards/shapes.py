"""Whether a picture shows the shapes that a prompt of `flow_grpo.shapes` asks for: found by rule, graded like GenEval.

Only clean shapes count: of one colour of the palette, of one of the four outlines, whole, apart from each other and not
tiny. Anything else is an unknown object, which satisfies no clause, so that pictures between two answers earn nothing.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor
from torch.nn.functional import interpolate

from flow_grpo.shapes import BACKGROUND, COLORS, RELATIONS, SHAPES, check_metadata, signed_distances

RANGE = (0.0, 1.0)
SIDE = 64  # pixels; every picture is looked at in this size
SPECK_AREA = 0.002  # of the picture; less is dirt, not an object
SMALLEST_AREA = 0.014  # of the picture; the smallest shape that is ever rendered has 0.0187
COLOR_DISTANCE = 0.25  # RGB, of an object's mean; half the way between the two nearest colours is 0.31
PIXEL_DISTANCE = 0.35  # RGB, of nearly all pixels that make up that mean
TINT = 0.2  # RGB; a background further from the neutral one leaves no shape clean
PURITY = 0.9  # share of the pixels well inside an object that have its colour
OVERLAP = np.array((0.89, 0.87, 0.86, 0.86))  # soft intersection over union that each of SHAPES must reach...
LEAD = 0.055  # ...and how far it must be ahead of the second best
OFFSET = 0.05  # of the picture's side; centres nearer than this are neither left nor right of each other
EDGE_WIDTHS = np.array((1.6, 2.8))  # pixels over which an outline may fade: antialiasing alone, or with blur
HALO = 2  # pixels around an object that its faded outline may reach
GRID = 24  # points a side at which outlines are compared

PALETTE = np.array([BACKGROUND, *COLORS.values()], dtype=np.float32)


class Detection(NamedTuple):
    """One object of a picture."""

    kind: str | None  # of SHAPES; None: an unknown object, not a clean shape
    color: str | None  # of COLORS; None: an unknown object
    center: tuple[float, float]  # x and y, 0 to 1, y down
    area: float  # of the picture


def _brightness_metric(hue_weight: float = 0.1) -> np.ndarray:
    """Quadratic form [3, 3] in which brightness outweighs hue, as JPEG smears an object's hue beyond its outline."""
    brightness = np.outer(np.ones(3), (0.299, 0.587, 0.114))
    hue = np.eye(3) - brightness
    return (brightness.T @ brightness + hue_weight * hue.T @ hue).astype(np.float32)


def _unit_outlines() -> tuple[np.ndarray, np.ndarray]:
    """Where to look, [2, GRID, GRID] (y, x), and the signed distances there, [4, GRID, GRID], of shapes of area 1."""
    fine = torch.linspace(-1, 1, 513)
    area = 4 * (signed_distances(fine[None, :], fine[:, None]) < 0).double().mean((1, 2))
    axis = (torch.arange(GRID) + 0.5) / GRID * 2 - 1
    scales = area.sqrt().float()
    distances = [signed_distances(axis[None, :] * s, axis[:, None] * s)[k] / s for k, s in enumerate(scales)]
    return np.stack(np.meshgrid(axis, axis, indexing="ij")), torch.stack(distances).numpy()


METRIC = _brightness_metric()
POINTS, OUTLINES = _unit_outlines()


def _color_of(core: np.ndarray) -> int:
    """Index into PALETTE of the one colour of the pixels [N, 3] well inside an object; 0 if there is none."""
    if len(core) == 0:
        return 0
    distances = np.linalg.norm(PALETTE - core.mean(0), axis=1)
    nearest = int(distances.argmin())
    pure = (np.linalg.norm(core - PALETTE[nearest], axis=1) < PIXEL_DISTANCE).mean() > PURITY
    return nearest if distances[nearest] < COLOR_DISTANCE and pure else 0


def _kind_of(coverage: np.ndarray) -> str | None:
    """Which of SHAPES a coverage [h, w] is, compared at equal area and centre; None if no outline fits well."""
    area = coverage.sum()
    rows, columns = np.arange(coverage.shape[0]), np.arange(coverage.shape[1])
    center = np.array([coverage.sum(1) @ rows, coverage.sum(0) @ columns]) / area
    seen = ndimage.map_coordinates(coverage, center[:, None, None] + POINTS * np.sqrt(area), order=1)
    wanted = np.clip(
        0.5 - OUTLINES * (np.sqrt(area) / EDGE_WIDTHS)[:, None, None, None], 0, 1
    )  # [widths, 4, GRID, GRID]
    overlap = (np.minimum(seen, wanted).sum((2, 3)) / np.maximum(seen, wanted).sum((2, 3))).max(0)
    second, best = np.argsort(overlap)[-2:]
    return SHAPES[best] if overlap[best] > OVERLAP[best] and overlap[best] - overlap[second] > LEAD else None


def _identify(pixels: np.ndarray, mask: np.ndarray) -> tuple[str | None, str | None]:
    """(kind, color) of the object `mask`, in a crop HALO pixels wider; (None, None) if it is not a clean shape."""
    core = ndimage.binary_erosion(mask)
    color = _color_of(pixels[core])
    if color == 0:
        return None, None
    contrast = (pixels - PALETTE[0]) @ (METRIC @ (PALETTE[color] - PALETTE[0]))
    coverage = np.clip(contrast / contrast[core].mean(), 0, 1)
    kind = _kind_of(coverage * ndimage.binary_dilation(mask, iterations=HALO))
    return (kind, list(COLORS)[color - 1]) if kind else (None, None)


def _pixels(image: Tensor) -> np.ndarray:
    """[3, R, R] of any R -> [SIDE, SIDE, 3] and HALO pixels of background around it."""
    if image.ndim != 3 or image.shape[0] != 3 or image.shape[1] != image.shape[2]:
        raise ValueError(f"shapes are looked for in square pictures [3, R, R], not {list(image.shape)}")
    image = image.cpu().float()[None]
    how = {"mode": "area"} if image.shape[-1] >= SIDE else {"mode": "bilinear"}
    pixels = np.empty((SIDE + 2 * HALO, SIDE + 2 * HALO, 3), dtype=np.float32)
    pixels[:] = PALETTE[0]
    pixels[HALO:-HALO, HALO:-HALO] = interpolate(image, (SIDE, SIDE), **how)[0].permute(1, 2, 0).numpy()
    return pixels


def detect(image: Tensor) -> list[Detection]:
    """The objects of a picture [3, R, R] in [0, 1]: connected regions nearer to a colour than to the background."""
    pixels = _pixels(image)
    labels = ((PALETTE**2).sum(1) / 2 - pixels @ PALETTE.T).argmin(-1)  # nearest colour
    regions, _ = ndimage.label(labels > 0, structure=np.ones((3, 3)))
    neutral = np.linalg.norm(pixels[labels == 0].mean(0) - PALETTE[0]) < TINT
    found = []
    for i, (rows, columns) in enumerate(ndimage.find_objects(regions), start=1):
        crop = slice(rows.start - HALO, rows.stop + HALO), slice(columns.start - HALO, columns.stop + HALO)
        mask = regions[crop] == i
        area = float(mask.sum()) / SIDE**2
        if area < SPECK_AREA:
            continue
        whole = min(rows.start, columns.start) > HALO and max(rows.stop, columns.stop) < SIDE + HALO
        clean = neutral and whole and area >= SMALLEST_AREA
        kind, color = _identify(pixels[crop], mask) if clean else (None, None)
        y, x = (pixel.mean() + 0.5 - 2 * HALO for pixel in np.nonzero(mask))  # the crop's margin, and the picture's
        center = float(columns.start + x) / SIDE, float(rows.start + y) / SIDE
        found.append(Detection(kind, color, center, area))
    return found


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
    while the picture has none of a class that the prompt includes. Objects that no clause names cost nothing.

    Raises:
        ValueError: metadata that is malformed; the message names the prompt.
    """
    check_metadata(metadata)
    include, credits = metadata["include"], []
    for entry in include:
        found = len(_matching(detections, {"class": entry["class"]}))
        matching = _matching(detections, entry)
        credits.append(max(0.0, 1 - abs(entry["count"] - found) / entry["count"]))
        if entry.get("color"):
            credits.append(float(len(matching) == entry["count"]))
        if entry.get("position"):
            relation, other = entry["position"]
            credits.append(float(_holds(relation, matching, _matching(detections, include[other]))))
    for entry in metadata.get("exclude", []):
        fewest = int(any(entry["class"] == wanted["class"] for wanted in include))
        credits.append(float(fewest <= len(_matching(detections, entry)) < entry["count"]))
    return sum(credits) / len(credits), float(min(credits) == 1)


def load(device):
    """Returns the scorer: images [B, 3, R, R] in [0, 1] -> {"score": dense [B] f32, "accuracy": strict [B] f32}."""

    def score(images, prompts, metadata):
        if metadata is None:
            raise ValueError("the shapes reward needs GenEval metadata for each image: prompts from *_metadata.jsonl")
        grades = [grade(detect(image), asked) for image, asked in zip(images.cpu(), metadata, strict=True)]
        dense, strict = torch.tensor(grades, device=device).view(-1, 2).unbind(1)
        return {"score": dense, "accuracy": strict}

    return score
