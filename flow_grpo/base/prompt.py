"""What an image is asked for by."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from flow_grpo.base import pictures
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted

Read = TypeVar("Read")
Source = Path | Image.Image  # an image to be edited


@dataclass(frozen=True)
class Prompt:
    """One prompt, from the data set to the loss. Two with the same text and other metadata are two."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)  # what rewards need besides the text
    sources: tuple[Source, ...] = field(default=(), hash=False)  # what the text is to change, for models that edit

    @cached_property
    def digest(self) -> str:
        """Of everything that a model is conditioned on: the text, and the sources."""
        digest = hashlib.blake2b(self.text.encode(), digest_size=16)
        for source in self.sources:
            digest.update(_source_digest(source))
        return digest.hexdigest()

    def pictures(self) -> list[Image.Image]:
        """The sources, upright, RGB. Raises UserError for one that cannot be read."""
        return [_read(pictures.upright, source, f"a source of {quoted(self.text)}") for source in self.sources]

    def source_sizes(self) -> list[tuple[int, int]]:
        """Width and height of each source. Raises UserError for a file that is no picture. Reads headers."""
        place = f"a source of {quoted(self.text)}"
        return [picture_size(source, place) if isinstance(source, Path) else source.size for source in self.sources]


def texts_of(prompts: list[Prompt]) -> list[str]:
    """The texts of B prompts."""
    return [prompt.text for prompt in prompts]


def captions_of(prompts: list[Prompt]) -> list[str]:
    """What pages call B prompts: a text, and the files of its sources, which tell prompts of one text apart."""
    files = [[source.stem for source in prompt.sources if isinstance(source, Path)] for prompt in prompts]
    return [f"{prompt.text} ({', '.join(names)})" if names else prompt.text for prompt, names in zip(prompts, files)]


def _source_digest(source: Source) -> bytes:
    if isinstance(source, Path):
        return hashlib.blake2b(source.read_bytes(), digest_size=16).digest()
    return hashlib.blake2b(repr((source.mode, source.size)).encode() + source.tobytes(), digest_size=16).digest()


def picture_size(path: Path, place: str) -> tuple[int, int]:
    """Width and height of a file, upright. Raises UserError, which names `place`, for one that is no picture, or was
    cut short. Reads the two ends of the file."""
    return _read(pictures.size_of, path, place)


def _read(read: Callable[[Source], Read], source: Source, place: str) -> Read:
    """Return what `read` makes of a source. Raises UserError where it is no picture."""
    name = f" {source}" if isinstance(source, Path) else ""
    try:
        return read(source)
    except pictures.Unreadable as error:
        raise UserError(f"{place}:{name} {error}") from error
