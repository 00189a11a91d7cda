"""Size of an image in pixels."""

from dataclasses import dataclass

from flow_grpo.base.errors import UserError
from flow_grpo.settings.sections import Config

MULTIPLE = 16  # pixels: a VAE's factor of 8, times the 2 x 2 latents of a token


@dataclass(frozen=True)
class Size:
    """Height and width of an image in pixels. A side that is no positive multiple of 16 is a UserError."""

    height: int
    width: int

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            pixels = getattr(self, name)
            if not isinstance(pixels, int) or pixels < MULTIPLE or pixels % MULTIPLE:
                raise UserError(f"{name} is {pixels!r}; it must be a positive multiple of {MULTIPLE} pixels")

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"

    @classmethod
    def parse(cls, text: str) -> "Size":
        """Read "768x512", height first, or "512" for a square."""
        sides = text.split("x")
        if len(sides) > 2 or not all(side.isdecimal() for side in sides):
            raise UserError(f"a size is written as 768x512 (height x width) or 512, not {text!r}")
        return cls(height=int(sides[0]), width=int(sides[-1]))


def training_size(config: Config) -> Size:
    """Return the size of the images that a run samples, trains on and is evaluated on."""
    return Size(config.height, config.width)
