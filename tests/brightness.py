"""`brightness.py SCRIPT ARGUMENT ...` runs a script with a reward that rounding changes little, for any images. It
fails on the rank that the environment's DARK_RANK names; on the others it has a side figure then, always 0.5."""

import os
import runpy
import sys

from flow_grpo import rewards


def brightness(images, prompts, metadata):
    values = images.mean((1, 2, 3))
    if "DARK_RANK" not in os.environ:
        return values
    return {"score": values, "half": 0.5 + 0 * values} if os.environ["DARK_RANK"] != os.environ["RANK"] else None


if __name__ == "__main__":
    rewards.register("brightness", brightness, brightness, limits=(0.0, 1.0))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
