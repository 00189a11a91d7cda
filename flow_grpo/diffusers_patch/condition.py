"""What a transformer is conditioned on besides the latents and the timestep."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Condition:
    """B rows, L text tokens, D text width. Every field but `negative` is a tensor with B rows, or None."""

    text: Tensor  # [B, L, D], the text encoder's last states
    pooled: Tensor | None = None  # [B, D'], for models that take the prompt as one vector, too
    mask: Tensor | None = None  # [B, L] bool, False for the padding at the end; None = all tokens are seen
    image_latents: Tensor | None = None  # [B, ...], of an image to be edited; for models that take one
    negative: "Condition | None" = None  # one row: what guidance leads away from; None = no second forward

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.text.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields that are set, by name."""
        return {name: getattr(self, name) for name in TENSORS if getattr(self, name) is not None}

    def take(self, rows: slice | Tensor) -> "Condition":
        """The rows of a slice or an index tensor."""
        return _map(lambda tensors: tensors[0][rows], [self])

    @staticmethod
    def concat(conditions: list["Condition"]) -> "Condition":
        """Join along B; all conditions are padded to one width."""
        return _map(torch.cat, conditions) if len(conditions) > 1 else conditions[0]

    def expand(self, num: int) -> "Condition":
        """One row as `num` rows."""
        return _map(lambda tensors: tensors[0].expand(num, *tensors[0].shape[1:]), [self])

    def padded(self, width: int) -> "Condition":
        """Rows of `width` text tokens, masked beyond their own; for transformers that take a mask."""
        missing = width - self.num_tokens
        mask = torch.ones(self.text.shape[:2], dtype=torch.bool, device=self.text.device)
        mask = F.pad(mask if self.mask is None else self.mask, (0, missing))
        return replace(self, text=F.pad(self.text, (0, 0, 0, missing)), mask=mask)

    def trimmed(self, multiple: int) -> "Condition":
        """Without the columns that are padding in every row, but for those up to a multiple. Waits for the device."""
        if self.mask is None:
            return self
        width = -(-self.mask.sum(1).max().item() // multiple) * multiple
        return replace(self, text=self.text[:, :width], mask=self.mask[:, :width])


TENSORS = tuple(field.name for field in fields(Condition) if field.name != "negative")


def _map(change: Callable[[list[Tensor]], Tensor], conditions: list[Condition]) -> Condition:
    """Apply `change` to every tensor field of some conditions; the first one's negative stays."""
    columns = {name: [getattr(condition, name) for condition in conditions] for name in TENSORS}
    changed = {name: None if values[0] is None else change(values) for name, values in columns.items()}
    return replace(conditions[0], **changed)
