"""Conditions of a transformer's velocity: all that it takes besides the latents and the timestep."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SOURCES = ("source_1", "source_2", "source_3")  # fields of a Condition


class ConditionShapes(NamedTuple):
    """Shapes of a condition's rows. Only conditions of equal shapes can be joined."""

    tensors: tuple[tuple[str, torch.Size], ...]  # name and shape of each field that is there
    negative: "ConditionShapes | None"


@dataclass(frozen=True)
class Condition:
    """B rows, L text tokens, D text width. Every field but `negative` is a tensor with B rows, or None."""

    text_embeds: Tensor  # [B, L, D], the text encoder's last states
    pooled: Tensor | None = None  # [B, D'], for models that take the prompt as one vector, too
    mask: Tensor | None = None  # [B, L] bool, False for the padding at the end; None = all tokens are seen
    source_1: Tensor | None = None  # [B, c, h, w], latents of the first image to be edited; for models that take one
    source_2: Tensor | None = None
    source_3: Tensor | None = None
    negative: "Condition | None" = None  # B rows of its own shapes: what guidance leads away from

    @property
    def num_tokens(self) -> int:
        """Number L of text tokens, padding included."""
        return self.text_embeds.shape[1]

    @cached_property
    def shapes(self) -> ConditionShapes:
        """Shapes of a row's fields, the negative's included."""
        own_shapes = tuple((name, tensor.shape[1:]) for name, tensor in self.tensors().items())
        negative_shapes = None if self.negative is None else self.negative.shapes
        return ConditionShapes(own_shapes, negative_shapes)

    @property
    def sources(self) -> list[Tensor]:
        """Latents of the images to be edited, [B, c, h, w] each."""
        return [tensor for name, tensor in self.tensors().items() if name in SOURCES]

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are there, by name, without the negative."""
        present = {}
        for name in TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                present[name] = tensor
        return present

    def equals(self, other: "Condition") -> bool:
        """Compare all numbers but the negatives'. Waits for the device."""
        tensors = self.tensors()
        other_tensors = other.tensors()
        if tensors.keys() != other_tensors.keys():
            return False
        return all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items())

    def take(self, rows: slice | Tensor) -> "Condition":
        """Select rows by a slice or by indices."""
        return _join([self], lambda tensors: tensors[0][rows])

    @staticmethod
    def concat(conditions: list["Condition"]) -> "Condition":
        """Join along B; all conditions have the same shapes."""
        if len(conditions) == 1:
            return conditions[0]
        return _join(conditions, torch.cat)

    @staticmethod
    def stack(rows: list["Condition"], width: int | None = None) -> "Condition":
        """Join rows of different lengths: padded to `width` tokens, or where the lengths differ to the longest."""
        lengths = [row.num_tokens for row in rows]
        if width:
            rows = [row.padded(width) for row in rows]
        elif min(lengths) < max(lengths):
            rows = [row.padded(max(lengths)) for row in rows]
        return Condition.concat(rows)

    def padded(self, width: int) -> "Condition":
        """Pad the text to `width` tokens, masked beyond the rows' own; for transformers that take a mask."""
        missing = width - self.num_tokens
        mask = self.mask
        if mask is None:
            mask = torch.ones(self.text_embeds.shape[:2], dtype=torch.bool, device=self.text_embeds.device)
        return replace(
            self,
            text_embeds=F.pad(self.text_embeds, (0, 0, 0, missing)),
            mask=F.pad(mask, (0, missing)),
        )

    def trimmed(self, multiple: int) -> "Condition":
        """Drop the columns that are padding in every row, but for those up to a multiple. Waits for the device."""
        negative = None if self.negative is None else self.negative.trimmed(multiple)
        if self.mask is None:
            return replace(self, negative=negative)
        longest = int(self.mask.sum(1).max())
        width = math.ceil(longest / multiple) * multiple
        return replace(self.cut(width), negative=negative)

    def cut(self, width: int) -> "Condition":
        """Drop the columns of text from `width` on, which are padding in every row; not those of the negative."""
        if self.mask is None:
            return self
        return replace(self, text_embeds=self.text_embeds[:, :width], mask=self.mask[:, :width])

    def with_negative_rows(self) -> "Condition":
        """Return 2 B rows: these, then the negative's. Texts of two widths are padded to the longer one's, masked."""
        assert self.negative is not None, "the caller sees to it"
        positive = replace(self, negative=None)
        negative = self.negative
        if positive.shapes != negative.shapes:
            width = max(positive.num_tokens, negative.num_tokens)
            positive = positive.padded(width)
            negative = negative.padded(width)
        return Condition.concat([positive, negative])

    def dense(self) -> "Condition":
        """Drop the negative and give the rows memory of their own, so that strides depend on nothing else."""
        return _join([replace(self, negative=None)], lambda tensors: tensors[0].contiguous())


TENSORS = tuple(field.name for field in fields(Condition) if field.name != "negative")


def _join(conditions: Sequence[Condition], join: Callable[[list[Tensor]], Tensor]) -> Condition:
    """Make one condition of several: each field by `join`, and likewise the negative, if all of them have one."""
    joined = {}
    for name in conditions[0].tensors():
        joined[name] = join([getattr(condition, name) for condition in conditions])

    negatives = [condition.negative for condition in conditions if condition.negative is not None]
    negative = None
    if len(negatives) == len(conditions):
        negative = _join(negatives, join)
    return Condition(**joined, negative=negative)
