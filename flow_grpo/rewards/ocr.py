"""How nearly an image shows the text that its prompt quotes (Flow-GRPO's text rendering, arXiv:2505.05470), in [0, 1].

Legend: n characters of the target, m of all text found in the image; both without case, whitespace and character width.

    score = 1 - min(1, (d + 0.1 * max(0, m - n)) / n)
    d     = fewest insertions, deletions and substitutions that turn some stretch of the found text into the target

d is 0 where the target occurs as it is, and never above n. The paper counts the edits of all found text, so that one
more sign in the scene can cost everything. To count the nearest stretch alone would let an image full of words earn 1
for any of them. So a surplus character costs a tenth of a missing one: the target twice earns 0.9, and eleven times
as much text as asked for earns nothing.

The target is "target" of the metadata, or else what the prompt has in double quotes, joined if that is several texts.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.base.pixels import to_uint8

RANGE = (0.0, 1.0)
SURPLUS_COST = 0.1  # of a character beyond the target's number, in edits
QUOTED = re.compile(r'["“”„«»]([^"“”„«»]+)["“”„«»]')


def normalise(text: str) -> str:
    """What is compared: without case and whitespace, and full-width letters as the usual ones."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def target_of(prompt: str, metadata: dict) -> str:
    """The text that an image of this prompt must show. Raises UserError: neither a "target" in the metadata nor quoted
    text in the prompt; names the prompt."""
    target = metadata.get("target", " ".join(QUOTED.findall(prompt)))
    if not isinstance(target, str) or not normalise(target):
        raise UserError(
            f"there is no text to look for in prompt {quoted(prompt)}: put the text in double quotes, "
            f'or give its metadata a "target" string (it has {quoted(metadata.get("target"))})'
        )
    return target


def check_prompts(prompts: Sequence[str], metadata: Sequence[dict]) -> None:
    """Raises UserError for the first prompt that names no text to look for."""
    for prompt, extra in zip(prompts, metadata, strict=True):
        target_of(prompt, extra)


def window_distance(text: str, target: str) -> int:
    """Fewest single-character edits between the target and the nearest stretch of `text`, perhaps an empty one."""
    edits = [0] * (len(text) + 1)  # per place of `text` at which the stretch may end
    for i, wanted in enumerate(target, start=1):
        above, edits = edits, [i]
        for j, seen in enumerate(text, start=1):
            edits.append(min(above[j - 1] + (wanted != seen), above[j] + 1, edits[j - 1] + 1))
    return min(edits)


def grade(text: str, target: str) -> dict[str, float]:
    """The score of an image that shows `text`; "exact", 1.0 if the target occurs in the text as it is, else 0.0; and
    "surplus", characters beyond the target's number, per character of the target."""
    text, target = normalise(text), normalise(target)
    distance, surplus = window_distance(text, target), max(0, len(text) - len(target))
    score = max(0.0, 1 - (distance + SURPLUS_COST * surplus) / len(target))
    return {"score": score, "exact": float(distance == 0), "surplus": surplus / len(target)}


def reading_order(boxes: np.ndarray) -> list[int]:
    """Order in which boxes [N, 4 corners, (x, y)] are read: lines top to bottom, each left to right.

    A box whose middle is higher than the lower edge of a line's highest box belongs to that line.
    """
    left, middle, bottom = boxes[..., 0].min(1), boxes[..., 1].mean(1), boxes[..., 1].max(1)
    lines = []
    for i in np.argsort(middle, kind="stable").tolist():
        if lines and middle[i] < bottom[lines[-1][0]]:
            lines[-1].append(i)
        else:
            lines.append([i])
    return [i for line in lines for i in sorted(line, key=lambda i: left[i])]


def load(device: torch.device | str, threads: int | None = None) -> Callable[..., dict[str, Tensor]]:
    """The scorer. It reads on the CPU, one image at a time, with the weights that come in the package of rapidocr.

    The engine enlarges an image's short side to 736 pixels before it looks for text. Upside-down text is not turned.
    Raises UserError: the engine is not installed.

    Args:
        threads: of the engine; torch's number by default.
    """
    read = _reader(threads or torch.get_num_threads())

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> dict[str, Tensor]:
        """Images [B, 3, H, W] in [0, 1] -> {"score", "exact", "surplus"}, each [B] float32. See `grade`."""
        targets = [target_of(p, m) for p, m in zip(prompts, metadata, strict=True)]
        pixels = to_uint8(images)
        grades = [grade(read(picture), target) for picture, target in zip(pixels, targets, strict=True)]
        return {key: torch.tensor([g[key] for g in grades]) for key in ("score", "exact", "surplus")}

    return score


def _reader(threads: int) -> Callable[[np.ndarray], str]:
    """A function from RGB pixels [H, W, 3] uint8 to all text in them."""
    try:
        import onnxruntime  # noqa: F401  rapidocr asks for it only at the first image
        from rapidocr import RapidOCR
    except ImportError as error:
        raise UserError(f"reward ocr needs rapidocr and onnxruntime ({error}): pip install 'flow_grpo[ocr]'") from error
    engine = "EngineConfig.onnxruntime"
    thread_settings = {f"{engine}.intra_op_num_threads": threads, f"{engine}.inter_op_num_threads": 1}
    ocr = RapidOCR(params={"Global.log_level": "critical", "Global.use_cls": False, **thread_settings})

    def read(pixels: np.ndarray) -> str:
        result = ocr(np.ascontiguousarray(pixels[..., ::-1]))  # the engine expects BGR
        return " ".join(result.txts[i] for i in reading_order(result.boxes)) if result.txts else ""

    return read
