"""Images with captions that a user gives: a folder with metadata.jsonl, as `datasets` reads folders of images.

Each line is an object with "file_name", a path from the folder, and the caption, called "prompt", "text" or "caption".
Images to be edited, for models that take them, are named by "sources".
"""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.base.prompt import Prompt, picture_size
from flow_grpo.data import image_pairs, prompts
from flow_grpo.diffusers_patch.size import Size

METADATA = "metadata.jsonl"


class CaptionedImage(NamedTuple):
    """An image, and what it shows."""

    prompt: Prompt
    path: Path


def open_folder(folder: str, setting: str) -> list[CaptionedImage]:
    """Open a folder of images. Raises UserError, which names the setting and the file, unless there is a caption for
    each of one or more pictures; reads the two ends of each picture."""
    path = Path(folder, METADATA)
    if not path.is_symlink() and not path.exists():
        raise UserError(f"{setting} {quoted(folder)} needs {METADATA}, with a file_name and a text on each line")
    images = []
    for prompt in prompts.with_absolute_sources(prompts.load_file(path)):
        name = prompt.metadata.get("file_name")
        place = f"{path}, {quoted(prompt.text)}"
        if not isinstance(name, str) or not name:
            raise UserError(f'{place}: "file_name" is {quoted(name)}; it must be the path of an image from {folder}')
        picture = Path(folder, name).absolute()
        picture_size(picture, f'{place}: "file_name"')
        images.append(CaptionedImage(prompt, picture))
    return images


def load(image: CaptionedImage, size: Size) -> Tensor:
    """Load an image upright, resized, and cropped at the center to the size's aspect, [3, height, width] float32 in
    [0, 1]. Raises UserError, which names the file, if it cannot be read any more."""
    try:
        return image_pairs.load_image(image.path, size)
    except image_pairs.Dropped as problem:
        raise UserError(f"config.train.data: {image.path} is an {problem}") from problem
