"""Size of an image or a video."""

from dataclasses import dataclass

from flow_grpo.base.errors import UserError
from flow_grpo.settings.sections import Config

MULTIPLE = 16  # pixels: a VAE's factor of 8, times the 2 x 2 latents of a token


@dataclass(frozen=True)
class Size:
    """Height and width in pixels, and frames. A side that is no positive multiple of 16 is a UserError, and so are less
    than one frame."""

    height: int
    width: int
    frames: int = 1  # 1 = an image

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            pixels = getattr(self, name)
            if not isinstance(pixels, int) or pixels < MULTIPLE or pixels % MULTIPLE:
                raise UserError(f"{name} is {pixels!r}; it must be a positive multiple of {MULTIPLE} pixels")
        if not isinstance(self.frames, int) or self.frames < 1:
            raise UserError(f"frames is {self.frames!r}; it must be a positive whole number, 1 for images")

    def __str__(self) -> str:
        sides = f"{self.height}x{self.width}"
        return sides if self.frames == 1 else f"{sides}x{self.frames}"

    def num_together(self, num_frames: int) -> int:
        """Return how many images or videos have at most `num_frames` frames together; at least one."""
        return max(num_frames // self.frames, 1)

    @classmethod
    def parse(cls, text: str) -> "Size":
        """Read "768x512", height first, "512" for a square, or "240x416x33" with the frames of a video."""
        numbers = text.split("x")
        if len(numbers) > 3 or not all(number.isdecimal() for number in numbers):
            raise UserError(
                f"a size is written as 768x512 (height x width), 512, or with frames 240x416x33, not {text!r}"
            )
        values = [int(number) for number in numbers]
        if len(values) == 1:
            return cls(height=values[0], width=values[0])
        return cls(*values)


def training_size(config: Config) -> Size:
    """Return the size of the images or videos that a run samples, trains on and is evaluated on."""
    return Size(config.height, config.width, config.frames)
