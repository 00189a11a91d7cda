"""What an image is asked for by."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One prompt, from the data set to the loss. Two with the same text and other metadata are two."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)  # what rewards need besides the text

    @cached_property
    def digest(self) -> str:
        """Of everything that a model is conditioned on, which is the text."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).hexdigest()


def texts_of(prompts: list[Prompt]) -> list[str]:
    """The texts of B prompts."""
    return [prompt.text for prompt in prompts]
