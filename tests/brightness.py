"""`brightness.py SCRIPT ARGUMENT ...` runs a script with a reward that rounding changes little, for any images."""

import runpy
import sys

from flow_grpo import rewards


def brightness(images, prompts, metadata):
    return images.mean((1, 2, 3))


if __name__ == "__main__":
    rewards.register("brightness", brightness)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
