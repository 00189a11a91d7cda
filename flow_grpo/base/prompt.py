"""What an image is asked for by."""

import hashlib
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from flow_grpo.base.errors import UserError

Source = Path | Image.Image  # an image to be edited
UNREADABLE = OSError, ValueError, SyntaxError, Image.DecompressionBombError  # what Pillow raises
TURNED = range(5, 9)  # values of EXIF's orientation of pictures that lie on a side


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
        try:
            return [ImageOps.exif_transpose(_opened(source)).convert("RGB") for source in self.sources]
        except UNREADABLE as error:
            raise UserError(f"a source of {self.text!r} cannot be read: {error}") from error

    def source_sizes(self) -> list[tuple[int, int]]:
        """Width and height of each source. Raises UserError for a file that is no picture. Reads headers."""
        return [picture_size(source) if isinstance(source, Path) else source.size for source in self.sources]


def texts_of(prompts: list[Prompt]) -> list[str]:
    """The texts of B prompts."""
    return [prompt.text for prompt in prompts]


def captions_of(prompts: list[Prompt]) -> list[str]:
    """What pages call B prompts: a text, and the files of its sources, which tell prompts of one text apart."""
    files = [[source.stem for source in prompt.sources if isinstance(source, Path)] for prompt in prompts]
    return [f"{prompt.text} ({', '.join(names)})" if names else prompt.text for prompt, names in zip(prompts, files)]


def _opened(source: Source) -> Image.Image:
    return Image.open(source) if isinstance(source, Path) else source


def _source_digest(source: Source) -> bytes:
    if isinstance(source, Path):
        return hashlib.blake2b(source.read_bytes(), digest_size=16).digest()
    return hashlib.blake2b(repr((source.mode, source.size)).encode() + source.tobytes(), digest_size=16).digest()


@cache
def picture_size(path: Path) -> tuple[int, int]:
    """Width and height of a file, upright. Raises UserError for one that is no picture. Reads its header."""
    try:
        with Image.open(path) as picture:
            turned = picture.getexif().get(0x0112) in TURNED
            return picture.size[::-1] if turned else picture.size
    except UNREADABLE as error:
        raise UserError(f"{path} is no picture that can be read: {error}") from error
