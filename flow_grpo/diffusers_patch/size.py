"""How large an image is."""

from dataclasses import dataclass

from flow_grpo.base.errors import UserError

MULTIPLE = 16  # pixels: a VAE's factor of 8, times the 2 x 2 latents of a token


@dataclass(frozen=True)
class Size:
    """Of an image, in pixels. A side that is no positive multiple of 16 is a UserError."""

    height: int
    width: int

    def __post_init__(self):
        for name in ("height", "width"):
            pixels = getattr(self, name)
            if not isinstance(pixels, int) or pixels < MULTIPLE or pixels % MULTIPLE:
                raise UserError(f"{name} is {pixels!r}; it must be a positive multiple of {MULTIPLE} pixels")

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"

    @classmethod
    def parse(cls, text: str) -> "Size":
        """From "768x512", height first, or "512" for a square."""
        height, *others = text.split("x")
        width = others[0] if others else height
        if not (height.isdecimal() and width.isdecimal() and len(others) < 2):
            raise UserError(f"a size is written as 768x512 (height x width) or 512, not {text!r}")
        return cls(int(height), int(width))


def training_size(config) -> Size:
    """Of the images that a run samples, trains on and is evaluated on."""
    return Size(config.height, config.width)
