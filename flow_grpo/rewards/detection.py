"""The objects of a picture of `data.shapes`, found by rule. It is no reward itself (`flow_grpo.rewards.HELPERS`).

Only clean shapes count: of one colour of the palette, of one of the four outlines, whole, apart from each other and not
tiny. Anything else is an unknown object.

A picture that is no square is looked at in the middle of one, undistorted: its longer side has SIDE pixels.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor
from torch.nn.functional import interpolate

from flow_grpo.data.shapes import BACKGROUND, COLORS, SHAPES, signed_distances

SIDE = 64  # pixels; every picture is looked at with a longer side of this
SPECK_AREA = 0.002  # of the picture; less is dirt, not an object
SMALLEST_AREA = 0.014  # of the picture; the smallest shape that is ever rendered has 0.0187
COLOR_DISTANCE = 0.25  # RGB, of an object's mean; half the way between the two nearest colours is 0.31
PIXEL_DISTANCE = 0.35  # RGB, of nearly all pixels that make up that mean
TINT = 0.2  # RGB; a background further from the neutral one leaves no shape clean
PURITY = 0.9  # share of the pixels well inside an object that have its colour
OVERLAP = torch.tensor((0.89, 0.87, 0.86, 0.86))  # soft intersection over union that each of SHAPES must reach...
LEAD = 0.055  # ...and how far it must be ahead of the second best
EDGE_WIDTHS = torch.tensor((1.6, 2.8))  # pixels over which an outline may fade: antialiasing alone, or with blur
HALO = 2  # pixels around an object that its faded outline may reach
GRID = 24  # points a side at which outlines are compared
FRAME = SIDE + 2 * HALO  # pixels
AT_ONCE = {"cpu": 32, "cuda": 1024}  # pictures; what a CPU's cache holds, and what keeps a GPU busy
IN_PLANE = np.stack([np.zeros((3, 3)), np.ones((3, 3)), np.zeros((3, 3))])  # neighbours within one picture

PALETTE = torch.tensor([BACKGROUND, *COLORS.values()])


class Detection(NamedTuple):
    """One object of a picture."""

    kind: str | None  # of SHAPES; None: an unknown object, not a clean shape
    color: str | None  # of COLORS; None: an unknown object
    center: tuple[float, float]  # x and y, 0 to 1, y down, in the square around the picture
    area: float  # of the square around the picture


def _unit_outlines() -> tuple[Tensor, Tensor]:
    """Where to look, [2, GRID, GRID] (y, x), and the signed distances there, [4, GRID, GRID], of shapes of area 1."""
    fine = torch.linspace(-1, 1, 513)
    area = 4 * (signed_distances(fine[None, :], fine[:, None]) < 0).double().mean((1, 2))
    axis = (torch.arange(GRID) + 0.5) / GRID * 2 - 1
    scales = area.sqrt().float()
    distances = [signed_distances(axis[None, :] * s, axis[:, None] * s)[k] / s for k, s in enumerate(scales)]
    return torch.stack(torch.meshgrid(axis, axis, indexing="ij")), torch.stack(distances)


BRIGHTNESS = torch.outer(torch.ones(3), torch.tensor((0.299, 0.587, 0.114)))
HUE = torch.eye(3) - BRIGHTNESS
METRIC = BRIGHTNESS.T @ BRIGHTNESS + 0.1 * HUE.T @ HUE  # as JPEG smears an object's hue beyond its outline
POINTS, OUTLINES = _unit_outlines()


class Objects(NamedTuple):
    """N connected regions of B pictures; their pixels are looked at in a frame of F = SIDE + 2 * HALO pixels a side."""

    regions: Tensor  # [B, F, F] int64, 0 = background, else the number of a region, counted from 1 over all pictures
    core: Tensor  # [B, F, F] int64, the same where all four neighbours belong to the region, else 0
    picture: Tensor  # [N] int64, which picture a region lies in
    area: Tensor  # [N] f64, pixels
    center: Tensor  # [N, 2] f64, x and y of the mean pixel in picture sides
    whole: Tensor  # [N] bool, touches no side of the picture


class Box(NamedTuple):
    """Where a picture lies in its frame."""

    rows: range
    columns: range

    def within(self, margin: int) -> tuple[slice, slice]:
        """The picture and `margin` pixels around it."""
        return tuple(slice(side.start - margin, side.stop + margin) for side in self)


def _frames(images: Tensor) -> tuple[Tensor, Box]:
    """[B, 3, H, W] -> [B, 3, F, F] f32: the picture, whose longer side becomes SIDE pixels, in the middle of a square
    of background; and where it lies."""
    images, sides = images.float(), images.shape[2:]
    size = [max(1, round(SIDE * side / max(sides))) for side in sides]
    starts = [HALO + (SIDE - length) // 2 for length in size]
    box = Box(*(range(start, start + length) for start, length in zip(starts, size)))
    if list(sides) != size:
        images = interpolate(images, size, mode="area" if max(sides) > SIDE else "bilinear")
    frames = PALETTE[0].to(images.device).view(3, 1, 1).repeat(len(images), 1, FRAME, FRAME)
    frames[:, :, *box.within(0)] = images
    return frames, box


def _objects(inside: Tensor, box: Box) -> Objects:
    """Regions of the pixels [B, F, F] that are no background; pixels that touch at a corner belong together."""
    numbered, count = ndimage.label(inside.cpu().numpy(), structure=IN_PLANE)
    device = inside.device
    regions = torch.from_numpy(numbered).to(device, torch.int64)
    surrounded = inside.clone()
    for shift, side in ((1, 1), (-1, 1), (1, 2), (-1, 2)):
        surrounded &= inside.roll(shift, side)
    picture, row, column = inside.nonzero().unbind(1)
    number = regions[inside] - 1
    area = torch.bincount(number, minlength=count).double()
    sums = [torch.bincount(number, weights=axis.double(), minlength=count) for axis in (column, row)]
    whole = torch.ones(count, dtype=torch.bool, device=device)
    (top, *_, bottom), (left, *_, right) = box
    whole[number[((row == top) | (row == bottom) | (column == left) | (column == right))]] = False
    return Objects(
        regions=regions,
        core=regions * surrounded,
        picture=torch.zeros(count, dtype=torch.int64, device=device).index_put((number,), picture),
        area=area,
        center=(torch.stack(sums, 1) / area[:, None] + 0.5 - HALO) / SIDE,
        whole=whole,
    )


def _colors(frames: Tensor, objects: Objects) -> Tensor:
    """Index into PALETTE [N] of the one colour of the pixels well inside each object; 0 if there is none."""
    palette, inside = PALETTE.to(frames.device), objects.core > 0
    picture, row, column = inside.nonzero().unbind(1)
    number, pixels = objects.core[inside] - 1, frames[picture, :, row, column].double()
    num = torch.bincount(number, minlength=len(objects.area)).double()
    mean = pixels.new_zeros(len(num), 3).index_add(0, number, pixels) / num[:, None]
    distance, nearest = (mean[:, None] - palette.double()).norm(dim=-1).nan_to_num(torch.inf).min(1)
    near = (pixels - palette[nearest[number]]).norm(dim=-1) < PIXEL_DISTANCE
    pure = torch.bincount(number, weights=near.double(), minlength=len(num)) / num > PURITY
    return nearest * (pure & (distance < COLOR_DISTANCE))


def _coverage(frames: Tensor, objects: Objects, which: Tensor, colors: Tensor) -> Tensor:
    """How much of each pixel the objects `which` [M], of colours [M], cover: [M, F, F] f32 in [0, 1], NaN more than
    HALO pixels away from the object."""
    palette, picture = PALETTE.to(frames.device) - PALETTE[0].to(frames.device), objects.picture[which]
    mask = objects.regions[picture] == (which + 1)[:, None, None]
    core = objects.core[picture] == (which + 1)[:, None, None]
    towards = palette @ METRIC.to(frames.device).T
    contrast = (towards @ (frames.flatten(2) - PALETTE[0].to(frames.device)[:, None]))[picture, colors].view(mask.shape)
    full = (contrast * core).sum((1, 2), dtype=torch.float64) / core.sum((1, 2))
    for _ in range(HALO):  # a whole object is too far from the frame's sides to come back on the other one
        mask = mask | mask.roll(1, 1) | mask.roll(-1, 1) | mask.roll(1, 2) | mask.roll(-1, 2)
    coverage = (contrast / full[:, None, None].float()).clamp(0, 1)
    return torch.where(mask, coverage, torch.nan)


def _kinds(coverage: Tensor) -> Tensor:
    """Which of SHAPES each coverage [M, F, F] is, compared at equal area and centre; -1 where no outline fits well."""
    axis = torch.arange(FRAME, device=coverage.device).double()
    near, coverage = ~coverage.isnan(), coverage.nan_to_num(0.0)
    area = coverage.sum((1, 2), dtype=torch.float64)
    center = torch.stack([coverage.sum(2).double() @ axis, coverage.sum(1).double() @ axis], 1) / area[:, None]
    points = center[:, :, None, None] + POINTS.to(axis.device) * area.sqrt()[:, None, None, None]
    seen = _sampled(coverage, points) * (_within(near.any(2), points[:, 0]) & _within(near.any(1), points[:, 1]))
    scale = (area.sqrt()[:, None] / EDGE_WIDTHS.to(axis.device)).float()[:, :, None, None, None]
    wanted = (0.5 - OUTLINES.to(axis.device) * scale).clamp(0, 1)  # [M, widths, 4, GRID, GRID]
    seen = seen.float()[:, None, None]
    overlap = torch.minimum(seen, wanted).sum((3, 4)) / torch.maximum(seen, wanted).sum((3, 4))
    (best, second), order = overlap.amax(1).topk(2).values.unbind(1), overlap.amax(1).argmax(1)
    fits = (best > OVERLAP.to(axis.device)[order]) & (best - second > LEAD)
    return torch.where(fits, order, -1)


def _within(lines: Tensor, points: Tensor) -> Tensor:
    """Whether points [M, GRID, GRID] lie between the first and the last of the lines [M, F] that an object is near."""
    first, last = lines.int().argmax(1), FRAME - 1 - lines.flip(1).int().argmax(1)
    return (points >= first[:, None, None]) & (points <= last[:, None, None])


def _sampled(coverage: Tensor, points: Tensor) -> Tensor:
    """coverage [M, F, F] at points [M, 2, GRID, GRID] (y, x), linear between pixels; 0 outside of what is covered."""
    low = points.floor()
    part = (points - low).float()
    total = torch.zeros_like(part[:, 0])
    number = torch.arange(len(coverage), device=coverage.device)[:, None, None]
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        y, x = (low[:, 0] + dy).long(), (low[:, 1] + dx).long()
        inside = (y >= 0) & (y < FRAME) & (x >= 0) & (x < FRAME)
        weight = (part[:, 0] if dy else 1 - part[:, 0]) * (part[:, 1] if dx else 1 - part[:, 1])
        total += weight * inside * coverage[number, y.clamp(0, FRAME - 1), x.clamp(0, FRAME - 1)]
    return total


def detect(images: Tensor) -> list[list[Detection]]:
    """The objects of each picture [B, 3, H, W] in [0, 1]: connected regions nearer to a colour than to the background.

    Pictures are looked at AT_ONCE together, on their own device; one's objects do not depend on its neighbours.
    """
    batches = images.split(AT_ONCE.get(images.device.type, len(images)))
    return [detections for batch in batches for detections in _detect(batch)]


def _detect(images: Tensor) -> list[list[Detection]]:
    frames, box = _frames(images)
    palette = PALETTE.to(frames.device)
    distances = (palette**2).sum(1)[:, None] / 2 - palette @ frames.flatten(2)  # squared, halved, less what is common
    background = distances[:, 0] <= functools.reduce(torch.minimum, distances[:, 1:].unbind(1))  # [B, F * F]
    objects = _objects(~background.unflatten(1, (FRAME, FRAME)), box)
    near = torch.zeros(FRAME, FRAME, dtype=torch.bool, device=frames.device)
    near[box.within(HALO)] = True  # of a square, all
    background = background & near.flatten()
    mean = (frames.flatten(2) @ background.float()[:, :, None])[..., 0] / background.sum(1)[:, None]
    neutral = (mean - palette[0]).norm(dim=-1) < TINT
    area = objects.area / (len(box.rows) * len(box.columns))
    colors = _colors(frames, objects) * (neutral[objects.picture] & objects.whole & (area >= SMALLEST_AREA))
    kinds = torch.full_like(colors, -1)
    colored = colors.nonzero().flatten()
    kinds[colored] = _kinds(_coverage(frames, objects, colored, colors[colored]))
    return _detections(len(images), objects, area, kinds, colors)


def _detections(num: int, objects: Objects, area: Tensor, kinds: Tensor, colors: Tensor) -> list[list[Detection]]:
    pictures, names = [[] for _ in range(num)], list(COLORS)
    big = (area >= SPECK_AREA).nonzero().flatten()
    of_square = objects.area / SIDE**2
    columns = (column[big].tolist() for column in (objects.picture, kinds, colors, objects.center, of_square))
    for picture, kind, color, center, size in zip(*columns):
        clean = (SHAPES[kind], names[color - 1]) if kind >= 0 else (None, None)
        pictures[picture].append(Detection(*clean, tuple(center), size))
    return pictures
