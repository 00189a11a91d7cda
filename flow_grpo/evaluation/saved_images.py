"""Images of an evaluation as files of their full size, with a table of their prompts, noises and scores: for other
metrics, and for people to judge."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flow_grpo.base import folders
from flow_grpo.base.pixels import motion, to_pictures
from flow_grpo.base.prompt import Prompt

# What Pillow writes a file of each format with.
OPTIONS: dict[str, dict[str, Any]] = {
    "png": {},
    "jpg": {"quality": 95, "subsampling": 0},
    "webp": {"quality": 95},
}
TABLE = "images.csv"


class SavedImages:
    """Folder of images, into which each rank writes what it draws.

    What cannot be written ends no run: `problem` says why, and nothing more is written.

    Args:
        prompts: all P of the evaluation.
        numbers: of the prompts whose images are written.
        file_type: a name of OPTIONS.
    """

    def __init__(self, folder: Path, prompts: Sequence[Prompt], numbers: Sequence[int], file_type: str):
        self.folder = folder
        self.prompts = prompts
        self.numbers = set(numbers)
        self.file_type = file_type
        self.problem = ""

    def name(self, number: int, seed: int) -> str:
        """Return the name of the file of a prompt's image."""
        return f"{number:05d}_{seed}.{self.file_type}"

    def write(self, rows: Sequence[tuple[int, int]], images: Tensor) -> None:
        """Write a batch's images, as far as they are wanted.

        Args:
            rows: (seed, number of the prompt) of each image.
            images: [b, 3, H, W] in [0, 1], or videos [b, f, 3, H, W], which are written as animations.
        """
        wanted = [row for row, (_, number) in enumerate(rows) if number in self.numbers]
        if not wanted or self.problem:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for row in wanted:
                seed, number = rows[row]
                frames = to_pictures(images[row].reshape(-1, *images.shape[-3:]))
                options = OPTIONS[self.file_type] | motion(frames)
                frames[0].save(self.folder / self.name(number, seed), **options)
        except OSError as error:
            self.problem = f"images of the evaluation could not be written to {self.folder}: {error}"

    def write_table(self, seeds: Sequence[int], values: dict[str, Tensor]) -> None:
        """Write what each file shows, once all ranks have drawn: TABLE in the folder.

        Args:
            seeds: S, in the order of the scores.
            values: name -> [S, P] scores.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["file", "number", "seed", "prompt", *values])
        for number in sorted(self.numbers):
            for place, seed in enumerate(seeds):
                scores = [f"{column[place, number].item():.6g}" for column in values.values()]
                writer.writerow([self.name(number, seed), number, seed, self.prompts[number].text, *scores])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            folders.write_text(self.folder / TABLE, text.getvalue())
        except OSError as error:
            self.problem = f"{self.folder / TABLE} could not be written: {error}"
