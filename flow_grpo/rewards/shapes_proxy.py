"""Guess of the score of `shapes` by a small network: a learned reward, which has a gradient and can be hacked.

It learned the rule's dense score on renders and on images of the tiny model (tools/build_shapes_proxy.py). What it has
not seen it judges wrongly, as any reward model does; `shapes` beside it, in `eval.rewards`, says what is true.
"""

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from flow_grpo.base.locations import PACKAGE
from flow_grpo.data.shapes import BACKGROUND, COLORS, RELATIONS, SHAPES, positions
from flow_grpo.rewards.shapes import check_prompts

__all__ = ["RANGE", "check_prompts", "load", "load_differentiable"]

RANGE = (0.0, 1.0)
WEIGHTS = PACKAGE / "assets" / "shapes_proxy.safetensors"
SIDE = 64  # pixels of every picture's longer side, after it was resized
MOST = 5  # objects of a kind up to which numbers are told apart
NUM_CELLS = 8  # a side
WIDTH = 64  # channels of a cell
HIDDEN = 64  # features of a clause
BATCH_SIZE = 64  # images per forward of the scorer
# What a prompt asks of one kind of object: how many to include, whether of a colour, whether in a place, fewer than how
# many; then the colours that count, the kind that it is placed against, where, and the colours of what is excluded.
PARTS = (MOST, 1, 1, MOST, len(COLORS), len(SHAPES), 2, len(COLORS))
NUM_FLAGS = sum(PARTS[:4])
NUM_SEEN = 6


class Network(nn.Module):
    """Network from a picture, and what a prompt asks for, to the logit of its score. All parts are smooth.

    A picture becomes maps of where each kind of object in each colour may be. Of these it is the sums and centres that
    count, judged kind by kind, by the same layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(3, 32, 8, stride=4, padding=2),
            nn.GELU(),
            nn.Conv2d(32, WIDTH, 3, padding=1),
            nn.GroupNorm(8, WIDTH),
            nn.GELU(),
            nn.AvgPool2d(2),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.GroupNorm(8, WIDTH),
            nn.GELU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.GroupNorm(8, WIDTH),
            nn.GELU(),
            nn.Conv2d(WIDTH, len(SHAPES) * len(COLORS), 1),
        )
        self.read = nn.Sequential(
            nn.Linear(NUM_SEEN + NUM_FLAGS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU()
        )
        self.judge = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1))

    def maps(self, images: Tensor) -> Tensor:
        """Return the logits of where objects are, [B, 4, 6, 8, 8], in images [B, 3, SIDE, SIDE] in [0, 1]."""
        # Nearly all cells are empty, from the first step on.
        logits = self.look(2 * images - 1) - 5
        return logits.unflatten(1, (len(SHAPES), len(COLORS)))

    def logits(self, maps: Tensor, wanted: Tensor) -> Tensor:
        """Return [B] from maps [B, 4, 6, 8, 8] and `wanted` [B, 4, F], as from `features_of`."""
        flags, colors, targets, direction, excluded = wanted.split([NUM_FLAGS, *PARTS[4:]], 2)
        shares = maps.sigmoid()
        axis = torch.linspace(-1, 1, NUM_CELLS, device=maps.device)
        # Of each kind and colour, [B, 4, 6]: how many, and the sums of their places.
        counts = shares.sum((3, 4))
        x = (shares * axis).sum((3, 4))
        y = (shares * axis[:, None]).sum((3, 4))

        # Of each kind, [B, 4]: those of a colour that counts.
        matching = (counts * colors).sum(2)
        places = torch.stack([(x * colors).sum(2), (y * colors).sum(2)], 2)
        # The centre of nothing is the middle.
        centers = places / (matching[:, :, None] + 0.1)
        offset = centers - targets @ centers
        seen = [
            counts.sum(2),
            matching,
            (offset * direction).sum(2),
            (offset.square().sum(2) + 1e-4).sqrt(),
            (targets @ matching[:, :, None])[:, :, 0],
            (counts * excluded).sum(2),
        ]
        clauses = self.read(torch.cat([torch.stack(seen, 2), flags], 2))
        asked = (flags.sum(2, keepdim=True) > 0).float()
        return self.judge((clauses * asked).sum(1) / asked.sum(1))[:, 0]


def features_of(metadata: dict[str, Any]) -> Tensor:
    """Return what a prompt's metadata ask for, [4, sum(PARTS)] float32, a row for each kind of object."""
    rows = torch.zeros(len(SHAPES), sum(PARTS))
    included, has_color, has_place, fewer, colors, targets, direction, excluded = rows.split(PARTS, 1)
    kinds = [SHAPES.index(clause["class"]) for clause in metadata["include"]]
    for kind, clause in zip(kinds, metadata["include"], strict=True):
        included[kind, min(clause["count"], MOST) - 1] = 1
        has_color[kind] = bool(clause.get("color"))
        colors[kind] = _chosen(clause)
    for index, (relation, other) in positions(metadata):
        has_place[kinds[index]] = 1
        targets[kinds[index], kinds[other]] = 1
        direction[kinds[index]] = torch.tensor(RELATIONS[relation])
    for clause in metadata.get("exclude", []):
        kind = SHAPES.index(clause["class"])
        fewer[kind, min(clause["count"], MOST) - 1] = 1
        excluded[kind] = _chosen(clause)
    return rows


def _chosen(clause: dict[str, Any]) -> Tensor:
    """Return which colours a clause means, [6] of 0 and 1: all of them if it names none."""
    return torch.tensor([float(clause.get("color") in (None, name)) for name in COLORS])


def resized(images: Tensor) -> Tensor:
    """Return images [B, 3, H, W] in the middle of squares of background, [B, 3, SIDE, SIDE] float32.

    The longer side becomes SIDE pixels.
    """
    images = images.float()
    height, width = images.shape[2:]
    longest = max(height, width)
    size = (max(1, round(SIDE * height / longest)), max(1, round(SIDE * width / longest)))
    if (height, width) != size:
        images = interpolate(images, size, mode="bilinear", antialias=True)
    rows = SIDE - size[0]
    columns = SIDE - size[1]
    background = torch.tensor(BACKGROUND, device=images.device).view(3, 1, 1)
    margins = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
    return pad(images - background, margins) + background


def load_network(device: torch.device | str) -> Network:
    """Return the network with the shipped weights, frozen, on `device`."""
    network = Network()
    network.load_state_dict(load_file(WEIGHTS))
    return network.to(device).requires_grad_(False).eval()


def load_differentiable(device: torch.device | str) -> Callable[..., Tensor]:
    """Return (images [B, 3, H, W] in [0, 1], prompts, metadata) -> scores [B] float32 in (0, 1), with a graph."""
    network = load_network(device)

    def score_pixels(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        wanted = torch.stack([features_of(data) for data in metadata]).to(device)
        maps = network.maps(resized(images.to(device)))
        return network.logits(maps, wanted).sigmoid()

    return score_pixels


def load(device: torch.device | str) -> Callable[..., dict[str, Tensor]]:
    """Return images [B, 3, H, W] in [0, 1] -> {"score": [B] f32}."""
    score_pixels = load_differentiable(device)

    def score(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> dict[str, Tensor]:
        scores = []
        for start in range(0, len(images), BATCH_SIZE):
            rows = slice(start, start + BATCH_SIZE)
            scores.append(score_pixels(images[rows], prompts[rows], metadata[rows]))
        return {"score": torch.cat(scores)}

    return score
