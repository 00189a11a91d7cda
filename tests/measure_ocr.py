"""How well `ocr` reads renders of all 520 test prompts: `PYTHONPATH=tests python tests/measure_ocr.py 64 256 512`."""

import sys
import time

import torch
from test_ocr import TEST, of, picture

from flow_grpo.rewards import ocr


def measure(score, name: str, images: torch.Tensor) -> None:
    """Print the scores of the test prompts for these images."""
    start = time.perf_counter()
    found = score(images, *of(TEST))
    rate = len(TEST) / (time.perf_counter() - start)
    means = ", ".join(f"{key} {values.mean():.4f}" for key, values in found.items())
    sys.stdout.write(f"{name}: {means}, lowest score {found['score'].min():.2f}, {rate:.1f} images/s\n")


if __name__ == "__main__":
    scorer = ocr.load("cpu", threads=1)
    for side in map(int, sys.argv[1:]):
        renders = torch.stack([picture(prompt.metadata["target"].split(), side) for prompt in TEST])
        measure(scorer, f"{side} px", renders)
        measure(scorer, f"{side} px, another prompt's words", renders.roll(7, 0))
