"""Nearness of an image's text to the text that its prompt quotes (text rendering, arXiv:2505.05470), in [0, 1].

    score = 1 - min(1, (d + 0.1 * max(0, m - n)) / n)

    n: characters of the target, m: characters of all text found in the image; without case, whitespace and width
    d: fewest insertions, deletions and substitutions that turn some stretch of the found text into the target

d is 0 if the target occurs as it is, and never above n. The paper counts the edits of all found text, so that one more
sign in the scene can cost everything. To count the nearest stretch alone would let an image full of words earn 1 for
any of them. So a surplus character costs a tenth of a missing one: the target twice earns 0.9, and eleven times as much
text as asked for earns nothing.

The target is "target" of the metadata, or else the text in double quotes of the prompt, several texts joined.
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
    """Return a text as it is compared: without case and whitespace, full-width letters as the usual ones."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def target_of(prompt: str, metadata: dict) -> str:
    """Return the text that an image of a prompt must show.

    Raise UserError, which names the prompt, if there is no "target" in the metadata and no quoted text in the prompt.
    """
    target = metadata.get("target", " ".join(QUOTED.findall(prompt)))
    if not isinstance(target, str) or not normalise(target):
        raise UserError(
            f"there is no text to look for in prompt {quoted(prompt)}: put the text in double quotes, "
            f'or give its metadata a "target" string (it has {quoted(metadata.get("target"))})'
        )
    return target


def check_prompts(prompts: Sequence[str], metadata: Sequence[dict]) -> None:
    """Raise UserError for the first prompt that names no text to look for."""
    for prompt, extra in zip(prompts, metadata, strict=True):
        target_of(prompt, extra)


def window_distance(text: str, target: str) -> int:
    """Return the fewest single-character edits between the target and any stretch of `text`, perhaps an empty one."""
    # Levenshtein's distance with a free start: edits[j] counts those to stretches that end before text[j].
    edits = [0] * (len(text) + 1)
    for i, wanted in enumerate(target, start=1):
        above = edits
        edits = [i]
        for j, seen in enumerate(text, start=1):
            substituted = above[j - 1] if wanted == seen else above[j - 1] + 1
            edits.append(min(substituted, above[j] + 1, edits[j - 1] + 1))
    return min(edits)


def grade(text: str, target: str) -> dict[str, float]:
    """Return "score" of an image that shows `text`, "exact" and "surplus".

    "exact" is 1.0 if the target occurs in the text as it is, else 0.0; "surplus" the characters beyond the target's
    number, per character of the target.
    """
    text = normalise(text)
    target = normalise(target)
    distance = window_distance(text, target)
    surplus = max(0, len(text) - len(target))
    score = max(0.0, 1 - (distance + SURPLUS_COST * surplus) / len(target))
    return {"score": score, "exact": float(distance == 0), "surplus": surplus / len(target)}


def reading_order(boxes: np.ndarray) -> list[int]:
    """Return the order in which boxes [N, 4 corners, (x, y)] are read: lines top to bottom, each left to right.

    A box whose middle is higher than the lower edge of a line's highest box belongs to that line.
    """
    left = boxes[..., 0].min(1)
    middle = boxes[..., 1].mean(1)
    bottom = boxes[..., 1].max(1)
    # Boxes come from top to bottom, so that each joins the last line or begins one.
    lines = []
    for i in np.argsort(middle, kind="stable").tolist():
        if lines and middle[i] < bottom[lines[-1][0]]:
            lines[-1].append(i)
        else:
            lines.append([i])
    order = []
    for line in lines:
        order += sorted(line, key=lambda box: left[box])
    return order


def load(device: torch.device | str, threads: int | None = None) -> Callable[..., dict[str, Tensor]]:
    """Return the scorer, which reads on the CPU, one image at a time, with the weights that rapidocr's package holds.

    The engine enlarges an image's short side to 736 pixels before it looks for text. Upside-down text is not turned.
    Raise UserError if the engine is not installed.

    Args:
        threads: threads of the engine; as many as torch has by default.
    """
    read_text = _reader(threads or torch.get_num_threads())

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> dict[str, Tensor]:
        """Return "score", "exact" and "surplus" of images [B, 3, H, W] in [0, 1], each [B] float32. See `grade`."""
        # All targets first: a prompt without one is refused before anything is read.
        targets = list(map(target_of, prompts, metadata))
        columns = {"score": [], "exact": [], "surplus": []}
        for pixels, target in zip(to_uint8(images), targets, strict=True):
            for key, value in grade(read_text(pixels), target).items():
                columns[key].append(value)
        return {key: torch.tensor(values) for key, values in columns.items()}

    return score


def _reader(threads: int) -> Callable[[np.ndarray], str]:
    """Return a function from RGB pixels [H, W, 3] uint8 to all text in them."""
    try:
        import onnxruntime  # noqa: F401  rapidocr imports it only at the first image
        from rapidocr import RapidOCR
        from rapidocr.utils.output import RapidOCROutput
    except ImportError as error:
        raise UserError(f"reward ocr needs rapidocr and onnxruntime ({error}): pip install 'flow_grpo[ocr]'") from error
    engine = "EngineConfig.onnxruntime"
    thread_settings = {f"{engine}.intra_op_num_threads": threads, f"{engine}.inter_op_num_threads": 1}
    ocr = RapidOCR(params={"Global.log_level": "critical", "Global.use_cls": False, **thread_settings})

    def read(pixels: np.ndarray) -> str:
        # The engine expects BGR.
        result = ocr(np.ascontiguousarray(pixels[..., ::-1]))
        assert isinstance(result, RapidOCROutput), "it is not told to find text alone"
        if not result.txts or result.boxes is None:
            return ""
        return " ".join(result.txts[i] for i in reading_order(result.boxes))

    return read
