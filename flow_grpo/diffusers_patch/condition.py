"""What a transformer is conditioned on besides the latents and the timestep."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

SOURCES = ("source_1", "source_2", "source_3")  # fields


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
        """L."""
        return self.text_embeds.shape[1]

    @cached_property
    def shapes(self) -> tuple:
        """Of a row's fields, the negative's included. Only conditions of the same shapes can be joined."""
        own = tuple((name, tensor.shape[1:]) for name, tensor in self.tensors().items())
        return own, self.negative and self.negative.shapes

    @property
    def sources(self) -> list[Tensor]:
        """Latents of the images to be edited, [B, c, h, w] each."""
        return [tensor for name, tensor in self.tensors().items() if name in SOURCES]

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in TENSORS if getattr(self, name) is not None}

    def equals(self, other: "Condition") -> bool:
        """Whether all numbers are the same, but for the negatives'. Waits for the device."""
        ours, theirs = self.tensors(), other.tensors()
        return ours.keys() == theirs.keys() and all(torch.equal(part, theirs[name]) for name, part in ours.items())

    def take(self, rows: slice | Tensor) -> "Condition":
        return _map(lambda tensors: tensors[0][rows], [self])

    @staticmethod
    def concat(conditions: list["Condition"]) -> "Condition":
        """Join along B; all conditions have the same shapes."""
        return _map(torch.cat, conditions) if len(conditions) > 1 else conditions[0]

    @staticmethod
    def stack(rows: list["Condition"], width: int | None = None) -> "Condition":
        """Join rows of different lengths: padded to `width` tokens, or where the lengths differ to the longest."""
        longest = max(row.num_tokens for row in rows)
        if width or any(row.num_tokens < longest for row in rows):
            rows = [row.padded(width or longest) for row in rows]
        return Condition.concat(rows)

    def padded(self, width: int) -> "Condition":
        """Rows of `width` text tokens, masked beyond their own; for transformers that take a mask."""
        missing = width - self.num_tokens
        mask = torch.ones(self.text_embeds.shape[:2], dtype=torch.bool, device=self.text_embeds.device)
        mask = F.pad(mask if self.mask is None else self.mask, (0, missing))
        return replace(self, text_embeds=F.pad(self.text_embeds, (0, 0, 0, missing)), mask=mask)

    def trimmed(self, multiple: int) -> "Condition":
        """Without the columns that are padding in every row, but for those up to a multiple. Waits for the device."""
        negative = self.negative and self.negative.trimmed(multiple)
        if self.mask is None:
            return self if negative is self.negative else replace(self, negative=negative)
        width = -(-self.mask.sum(1).max().item() // multiple) * multiple
        return replace(self, text_embeds=self.text_embeds[:, :width], mask=self.mask[:, :width], negative=negative)

    def dense(self) -> "Condition":
        """Without the negative, and with memory for each row, so that a forward's strides depend on nothing else."""
        return _map(lambda tensors: tensors[0].contiguous(), [replace(self, negative=None)])


TENSORS = tuple(field.name for field in fields(Condition) if field.name != "negative")


def _map(change: Callable[[list[Tensor]], Tensor], conditions: list[Condition]) -> Condition:
    """Apply `change` to every tensor field of some conditions, and of their negatives where all have one."""
    columns = {name: [getattr(condition, name) for condition in conditions] for name in TENSORS}
    changed = {name: None if values[0] is None else change(values) for name, values in columns.items()}
    negatives = [condition.negative for condition in conditions if condition.negative is not None]
    whole = len(negatives) == len(conditions)
    return Condition(**changed, negative=_map(change, negatives) if whole else None)
