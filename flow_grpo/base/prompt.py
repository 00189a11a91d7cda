"""Prompts, which ask for an image by a text, and for an edit by the images to be edited as well."""

import hashlib
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from flow_grpo.base import pictures
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, quoted

Result = TypeVar("Result")
Source = Path | Image.Image  # an image to be edited

INVISIBLE = ("Cc", "Cf", "Zs", "Zl", "Zp")  # categories of characters


@dataclass(frozen=True)
class Prompt:
    """One prompt, from the data set to the loss. Prompts with the same text and other metadata are different ones."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)  # what rewards need besides the text
    sources: tuple[Source, ...] = field(default=(), hash=False)  # images that the text is to change, if the model edits

    @cached_property
    def digest(self) -> str:
        """Digest of everything that a model is conditioned on: the text and the sources."""
        digest = hashlib.blake2b(self.text.encode(), digest_size=16)
        for source in self.sources:
            digest.update(_source_digest(source))
        return digest.hexdigest()

    def pictures(self) -> list[Image.Image]:
        """Return the sources, upright, RGB. Raise UserError for one that cannot be read."""
        place = f"a source of {quoted(self.text)}"
        return [_read_source(pictures.upright, source, place) for source in self.sources]

    def source_sizes(self) -> list[tuple[int, int]]:
        """Return width and height of each source. Raise UserError for a file that is no picture. Reads headers."""
        place = f"a source of {quoted(self.text)}"
        sizes = []
        for source in self.sources:
            if isinstance(source, Path):
                sizes.append(picture_size(source, place))
            else:
                sizes.append(source.size)
        return sizes


def texts_of(prompts: list[Prompt]) -> list[str]:
    """Return the texts of B prompts."""
    return [prompt.text for prompt in prompts]


def captions_of(prompts: list[Prompt]) -> list[str]:
    """Return what pages call B prompts: the text, and the names of source files, which tell equal texts apart."""
    captions = []
    for prompt in prompts:
        caption = prompt.text
        names = [source.stem for source in prompt.sources if isinstance(source, Path)]
        if names:
            caption += f" ({', '.join(names)})"
        captions.append(caption)
    return captions


def _source_digest(source: Source) -> bytes:
    """Return a digest of a file's bytes, or of the mode, size and pixels of an opened image."""
    if isinstance(source, Path):
        content = source.read_bytes()
    else:
        content = repr((source.mode, source.size)).encode() + source.tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


def picture_size(path: Path, place: str) -> tuple[int, int]:
    """Return width and height of a file, upright. Reads the two ends of the file.

    Raise UserError, which names `place`, if it is no picture or was cut short.
    """
    return _read_source(pictures.upright_size, path, place)


def _read_source(read: Callable[[Any], Result], source: Source, place: str) -> Result:
    """Return what `read` makes of a source. Raise UserError, which names `place`, if it is no picture."""
    name = f" {in_one_line(source, 300)}" if isinstance(source, Path) else ""
    try:
        return read(source)
    except pictures.Unreadable as error:
        raise UserError(f"{place}:{name} {error}") from error


def is_blank(text: str) -> bool:
    """Return whether a text shows nothing: no letter, or only such as have no width."""
    return all(unicodedata.category(letter) in INVISIBLE for letter in text.strip())
