"""Detection of the objects in a picture of `data.shapes`, by rule.

Only clean shapes are known objects: of one colour of the palette, of one of the four outlines, whole, apart from each
other and not tiny. Anything else is an unknown object.

A picture that is no square is put into the middle of one, undistorted: its longer side has SIDE pixels. This is no
reward itself (`flow_grpo.rewards.HELPERS`).
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor
from torch.nn.functional import interpolate

from flow_grpo.data.shapes import BACKGROUND, COLORS, SHAPES, signed_distances

SIDE = 64  # pixels of every picture's longer side, after it was resized
SPECK_AREA = 0.002  # of the picture; less is dirt, not an object
SMALLEST_AREA = 0.014  # of the picture; the smallest shape that is ever rendered has 0.0187
COLOR_DISTANCE = 0.25  # RGB, of an object's mean; half the way between the two nearest colours is 0.31
PIXEL_DISTANCE = 0.35  # RGB, of nearly all pixels that make up that mean
TINT = 0.2  # RGB; a background further from the neutral one leaves no shape clean
PURITY = 0.9  # share of the pixels well inside an object that have its colour
OVERLAP = torch.tensor((0.89, 0.87, 0.86, 0.86))  # soft intersection over union that each of SHAPES must reach
LEAD = 0.055  # of the best shape's soft intersection over union over the second best's
EDGE_WIDTHS = torch.tensor((1.6, 2.8))  # pixels over which an outline may fade: antialiasing alone, or with blur
HALO = 2  # pixels around an object that its faded outline may reach
GRID = 24  # points a side at which outlines are compared
FRAME = SIDE + 2 * HALO  # pixels
AT_ONCE = {"cpu": 32, "cuda": 1024}  # pictures that a CPU's cache holds, and that keep a GPU busy
IN_PLANE = np.stack([np.zeros((3, 3)), np.ones((3, 3)), np.zeros((3, 3))])  # neighbours within one picture

PALETTE = torch.tensor([BACKGROUND, *COLORS.values()])


class Detection(NamedTuple):
    """One object of a picture."""

    kind: str | None  # of SHAPES; None for an unknown object
    color: str | None  # of COLORS; None for an unknown object
    center: tuple[float, float]  # x and y, 0 to 1, y down, in the square around the picture
    area: float  # of the square around the picture


def _unit_outlines() -> tuple[Tensor, Tensor]:
    """Return grid points [2, GRID, GRID] (y, x) and the signed distances there of shapes of area 1, [4, GRID, GRID]."""
    # The area of each shape of radius 1, as a share of the square from -1 to 1, whose area is 4.
    fine = torch.linspace(-1, 1, 513)
    area = 4 * (signed_distances(fine[None, :], fine[:, None]) < 0).double().mean((1, 2))
    axis = (torch.arange(GRID) + 0.5) / GRID * 2 - 1
    distances = []
    for number, scale in enumerate(area.sqrt().float()):
        of_all_shapes = signed_distances(axis[None, :] * scale, axis[:, None] * scale)
        distances.append(of_all_shapes[number] / scale)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))
    return points, torch.stack(distances)


# Distances of colours count hue less than brightness, since JPEG smears an object's hue beyond its outline.
BRIGHTNESS = torch.outer(torch.ones(3), torch.tensor((0.299, 0.587, 0.114)))
HUE = torch.eye(3) - BRIGHTNESS
METRIC = BRIGHTNESS.T @ BRIGHTNESS + 0.1 * HUE.T @ HUE
POINTS, OUTLINES = _unit_outlines()


class Objects(NamedTuple):
    """N connected regions of B pictures, each in a frame of F = SIDE + 2 * HALO pixels a side."""

    regions: Tensor  # [B, F, F] int64, 0 = background, else the number of a region, counted from 1 over all pictures
    core: Tensor  # [B, F, F] int64, the same for pixels whose four neighbours belong to the region, else 0
    picture: Tensor  # [N] int64, number of the picture that a region lies in
    area: Tensor  # [N] f64, pixels
    center: Tensor  # [N, 2] f64, x and y of the mean pixel in picture sides
    whole: Tensor  # [N] bool, touches no side of the picture


class Box(NamedTuple):
    """Place of a picture in its frame."""

    rows: range
    columns: range

    def within(self, margin: int) -> tuple[slice, slice]:
        """Return the rows and columns of the picture and of `margin` pixels around it."""
        rows = slice(self.rows.start - margin, self.rows.stop + margin)
        columns = slice(self.columns.start - margin, self.columns.stop + margin)
        return rows, columns


def _frames(images: Tensor) -> tuple[Tensor, Box]:
    """Return pictures [B, 3, H, W] in the middle of squares of background, [B, 3, F, F] f32, and their place there.

    The longer side becomes SIDE pixels.
    """
    images = images.float()
    sides = images.shape[2:]
    longest = max(sides)
    size = [max(1, round(SIDE * side / longest)) for side in sides]
    box = Box(*map(_centred, size))
    if list(sides) != size:
        images = interpolate(images, size, mode="area" if longest > SIDE else "bilinear")
    frames = PALETTE[0].to(images.device).view(3, 1, 1).repeat(len(images), 1, FRAME, FRAME)
    frames[:, :, *box.within(0)] = images
    return frames, box


def _centred(length: int) -> range:
    """Return the pixels of a picture's side, of at most SIDE pixels, in the middle of its frame."""
    start = HALO + (SIDE - length) // 2
    return range(start, start + length)


def _objects(inside: Tensor, box: Box) -> Objects:
    """Return the regions of pixels that are no background, `inside` [B, F, F]; pixels join at corners, too."""
    # Its source, which has no types, returns the count alone where it is given an array to fill.
    labelled: Any = ndimage.label(inside.cpu().numpy(), structure=IN_PLANE)
    numbered, count = labelled
    device = inside.device
    regions = torch.from_numpy(numbered).to(device, torch.int64)
    # A pixel is in the core if its four neighbours are no background.
    surrounded = inside.clone()
    for shift, side in ((1, 1), (-1, 1), (1, 2), (-1, 2)):
        surrounded &= inside.roll(shift, side)

    # Per pixel of a region: its picture, row and column, and the number of its region from 0.
    picture, row, column = inside.nonzero().unbind(1)
    number = regions[inside] - 1
    area = torch.bincount(number, minlength=count).double()
    sums = [torch.bincount(number, weights=axis.double(), minlength=count) for axis in (column, row)]
    at_top_or_bottom = (row == box.rows[0]) | (row == box.rows[-1])
    at_a_side = at_top_or_bottom | (column == box.columns[0]) | (column == box.columns[-1])
    whole = torch.ones(count, dtype=torch.bool, device=device)
    whole[number[at_a_side]] = False
    return Objects(
        regions=regions,
        core=regions * surrounded,
        picture=torch.zeros(count, dtype=torch.int64, device=device).index_put((number,), picture),
        area=area,
        center=(torch.stack(sums, 1) / area[:, None] + 0.5 - HALO) / SIDE,
        whole=whole,
    )


def _colors(frames: Tensor, objects: Objects) -> Tensor:
    """Return the colour of the pixels well inside each object, an index into PALETTE [N]; 0 if they have not one."""
    palette = PALETTE.to(frames.device)
    inside = objects.core > 0

    # Per pixel well inside an object: the number of its region from 0, and its colour.
    picture, row, column = inside.nonzero().unbind(1)
    number = objects.core[inside] - 1
    pixels = frames[picture, :, row, column].double()
    num_pixels = torch.bincount(number, minlength=len(objects.area)).double()
    mean = pixels.new_zeros(len(num_pixels), 3).index_add(0, number, pixels) / num_pixels[:, None]
    # An object without such pixels has a mean of NaN.
    distance, nearest = (mean[:, None] - palette.double()).norm(dim=-1).nan_to_num(torch.inf).min(1)
    near = (pixels - palette[nearest[number]]).norm(dim=-1) < PIXEL_DISTANCE
    pure = torch.bincount(number, weights=near.double(), minlength=len(num_pixels)) / num_pixels > PURITY
    return nearest * (pure & (distance < COLOR_DISTANCE))


def _coverage(frames: Tensor, objects: Objects, which: Tensor, colors: Tensor) -> Tensor:
    """Return how much of each pixel the objects numbered `which` [M], of colours [M], cover.

    [M, F, F] f32 in [0, 1], NaN more than HALO pixels away from the object.
    """
    background = PALETTE[0].to(frames.device)
    palette = PALETTE.to(frames.device) - background
    picture = objects.picture[which]
    region = (which + 1)[:, None, None]
    mask = objects.regions[picture] == region
    core = objects.core[picture] == region

    # How far each pixel's colour lies from the background's towards the object's, against the mean well inside of it.
    towards = palette @ METRIC.to(frames.device).T
    contrast = (towards @ (frames.flatten(2) - background[:, None]))[picture, colors].view(mask.shape)
    full = (contrast * core).sum((1, 2), dtype=torch.float64) / core.sum((1, 2))

    # A whole object is too far from the frame's sides to come back on the other one.
    for _ in range(HALO):
        mask = mask | mask.roll(1, 1) | mask.roll(-1, 1) | mask.roll(1, 2) | mask.roll(-1, 2)
    coverage = (contrast / full[:, None, None].float()).clamp(0, 1)
    return torch.where(mask, coverage, torch.nan)


def _kinds(coverage: Tensor) -> Tensor:
    """Return the index in SHAPES of the outline that fits each of M objects best, [M] int64; -1 if none fits well.

    The shapes are laid over an object with its area and its centre, and compared by soft intersection over union.

    Args:
        coverage: [M, F, F], as from `_coverage`: NaN where a pixel is too far from the object to count.
    """
    axis = torch.arange(FRAME, device=coverage.device).double()
    near = ~coverage.isnan()
    coverage = coverage.nan_to_num(0.0)
    area = coverage.sum((1, 2), dtype=torch.float64)
    center = torch.stack([coverage.sum(2).double() @ axis, coverage.sum(1).double() @ axis], 1) / area[:, None]

    # [M, 2, GRID, GRID] pixels (y, x): POINTS belong to shapes of area 1, so they are scaled by the root of the area.
    points = center[:, :, None, None] + POINTS.to(axis.device) * area.sqrt()[:, None, None, None]
    is_near = _within(near.any(2), points[:, 0]) & _within(near.any(1), points[:, 1])
    seen = (_sampled(coverage, points) * is_near).float()[:, None, None]
    # An outline's distance in pixels, over the width at which it fades, is how much of a point the shape covers.
    scale = (area.sqrt()[:, None] / EDGE_WIDTHS.to(axis.device)).float()[:, :, None, None, None]
    wanted = (0.5 - OUTLINES.to(axis.device) * scale).clamp(0, 1)  # [M, widths, 4, GRID, GRID]

    # Soft intersection over union [M, 4] with each shape, at the better of the edge widths.
    overlap = (torch.minimum(seen, wanted).sum((3, 4)) / torch.maximum(seen, wanted).sum((3, 4))).amax(1)
    best, second = overlap.topk(2).values.unbind(1)
    kind = overlap.argmax(1)
    fits = (best > OVERLAP.to(axis.device)[kind]) & (best - second > LEAD)
    return torch.where(fits, kind, -1)


def _within(lines: Tensor, points: Tensor) -> Tensor:
    """Return whether points [M, GRID, GRID] lie between the first and the last of the lines [M, F] near an object."""
    first = lines.int().argmax(1)
    last = FRAME - 1 - lines.flip(1).int().argmax(1)
    return (points >= first[:, None, None]) & (points <= last[:, None, None])


def _sampled(coverage: Tensor, points: Tensor) -> Tensor:
    """Return coverage [M, F, F] at points [M, 2, GRID, GRID] (y, x), linear between pixels and 0 outside the frame."""
    low = points.floor()
    part_y, part_x = (points - low).float().unbind(1)
    total = torch.zeros_like(part_y)
    number = torch.arange(len(coverage), device=coverage.device)[:, None, None]
    # The four pixels around each point.
    for dy, weight_y in ((0, 1 - part_y), (1, part_y)):
        for dx, weight_x in ((0, 1 - part_x), (1, part_x)):
            y = (low[:, 0] + dy).long()
            x = (low[:, 1] + dx).long()
            inside = (y >= 0) & (y < FRAME) & (x >= 0) & (x < FRAME)
            weight = weight_y * weight_x
            total += weight * inside * coverage[number, y.clamp(0, FRAME - 1), x.clamp(0, FRAME - 1)]
    return total


def detect(images: Tensor) -> list[list[Detection]]:
    """Return the objects of each picture [B, 3, H, W] in [0, 1]: regions nearer to a colour than to the background.

    AT_ONCE pictures are computed together, on their own device; one's objects do not depend on its neighbours.
    """
    detections = []
    for batch in images.split(AT_ONCE.get(images.device.type, len(images))):
        detections += _detect(batch)
    return detections


def _detect(images: Tensor) -> list[list[Detection]]:
    """Return the objects of each picture of a batch."""
    frames, box = _frames(images)
    palette = PALETTE.to(frames.device)
    # Half the squared distance to each colour, less half the pixel's squared length, which all colours share.
    distances = (palette**2).sum(1)[:, None] / 2 - palette @ frames.flatten(2)
    background = distances[:, 0] <= functools.reduce(torch.minimum, distances[:, 1:].unbind(1))  # [B, F * F]
    objects = _objects(~background.unflatten(1, (FRAME, FRAME)), box)

    # A picture whose own background is tinted has no clean shape.
    near = torch.zeros(FRAME, FRAME, dtype=torch.bool, device=frames.device)
    near[box.within(HALO)] = True
    background = background & near.flatten()
    mean = (frames.flatten(2) @ background.float()[:, :, None])[..., 0] / background.sum(1)[:, None]
    neutral = (mean - palette[0]).norm(dim=-1) < TINT

    area = objects.area / (len(box.rows) * len(box.columns))
    colors = _colors(frames, objects) * (neutral[objects.picture] & objects.whole & (area >= SMALLEST_AREA))
    kinds = torch.full_like(colors, -1)
    colored = colors.nonzero().flatten()
    kinds[colored] = _kinds(_coverage(frames, objects, colored, colors[colored]))
    return _detections(len(images), objects, area, kinds, colors)


def _detections(
    num_pictures: int, objects: Objects, area: Tensor, kinds: Tensor, colors: Tensor
) -> list[list[Detection]]:
    """Return the objects of each picture that are no specks; `area` [N] is a share of the picture."""
    color_names = list(COLORS)
    detections = [[] for _ in range(num_pictures)]
    big = (area >= SPECK_AREA).nonzero().flatten()
    area_in_square = objects.area / SIDE**2
    columns = (objects.picture, kinds, colors, objects.center, area_in_square)
    for picture, kind, color, center, size in zip(*(column[big].tolist() for column in columns)):
        # Colours are indices into PALETTE, which begins with the background.
        name, color_name = (SHAPES[kind], color_names[color - 1]) if kind >= 0 else (None, None)
        detections[picture].append(Detection(name, color_name, tuple(center), size))
    return detections
